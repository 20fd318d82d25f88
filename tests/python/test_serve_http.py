"""kdtree-run serve as HTTP: endpoints, methods, keys, origins, limits, and what slow or broken clients get."""

import gzip
import json
import re
import socket
import subprocess
import time

import pytest
from conftest import RUN, clean_environment
from serve_support import (KEYED, OPEN, Daemon, assert_error, completion, events, http_bytes, open_stream, receive_all,
                           receive_until_done, status_of)


@pytest.fixture(scope="module")
def daemon():
  with Daemon("--header-timeout", 1, "--body-timeout", 1.5, "--max-body-bytes", 100_000) as started:
    yield started


# ------------------------------------------------------------------------------------------------ endpoints

def test_the_engine_is_up(daemon):
  assert daemon.get("/health") == (200, {"status": "ok"})
  assert daemon.get("/ready") == (200, {"status": "ready"})
  status, version = daemon.get("/version")
  assert status == 200 and re.fullmatch(r"\d+\.\d+\.\d+", version["version"])


def test_models(daemon):
  status, models = daemon.get("/v1/models")
  assert status == 200 and models["object"] == "list"
  name = models["data"][0]["id"]
  assert daemon.get(f"/v1/models/{name}")[1]["id"] == name
  assert daemon.get("/v1/models/" + "".join(f"%{ord(c):02X}" for c in name))[1]["id"] == name
  assert_error(daemon.get("/v1/models/another"), 404, "model_not_found")
  answer = daemon.get("/v1/models/%zz")
  assert_error(answer, 404, "model_not_found")
  assert name in answer[1]["error"]["message"]


def test_names_may_be_given():
  with Daemon("--served-model-name", "org/model,alias") as daemon:
    assert [each["id"] for each in daemon.get("/v1/models")[1]["data"]] == ["org/model", "alias"]
    assert daemon.get("/v1/models/org%2Fmodel")[0] == daemon.get("/v1/models/org/model")[0] == 200
    assert daemon.post("/v1/completions", completion(model="alias"))[1]["model"] == "alias"
    assert_error(daemon.post("/v1/completions", completion(model="other")), 404, "model_not_found")
    assert 'model_name="org/model"' in daemon.request("GET", "/metrics")[2].decode()


def test_completion_and_stream_agree(daemon):
  asked = completion(max_tokens=20, ignore_eos=True)
  status, whole = daemon.post("/v1/completions", asked)
  assert status == 200
  status, headers, body = daemon.request("POST", "/v1/completions", asked | {"stream": True})
  payloads = events(body)
  assert status == 200 and payloads[-1] == "[DONE]"
  assert "".join(json.loads(each)["choices"][0]["text"] for each in payloads[:-1]) == whole["choices"][0]["text"]
  assert headers["Content-Type"].startswith("text/event-stream")
  assert headers["X-Accel-Buffering"] == "no" and headers["Cache-Control"] == "no-cache"
  daemon.until_idle()


def test_a_stream_to_http_1_0_ends_with_its_connection(daemon):
  request = http_bytes("/v1/completions", completion(stream=True)).replace(b"HTTP/1.1", b"HTTP/1.0")
  data = daemon.raw(request)
  assert b"chunked" not in data and data.endswith(b"data: [DONE]\n\n")


def test_text_and_tokens(daemon):
  status, tokens = daemon.post("/tokenize", {"prompt": "def add"})
  assert status == 200 and tokens["count"] == len(tokens["tokens"]) > 0
  assert daemon.post("/detokenize", {"tokens": tokens["tokens"]})[0] == 200


def test_a_long_body_is_read_aside(daemon):
  text = "x = 1\n" * 10_000
  status, tokens = daemon.post("/tokenize", {"prompt": text})
  assert status == 200 and tokens["count"] > 1000
  status, body = daemon.post("/v1/completions", completion(text))
  assert status == 400 and body["error"]["code"] == "context_length_exceeded"


def test_reset_prefix_cache(daemon):
  status, body = daemon.post("/reset_prefix_cache", {})
  assert status == 200 and body["pages"] >= 0
  assert daemon.request("POST", "/reset_prefix_cache")[0] == 200


def test_abort_by_id(daemon):
  assert_error(daemon.post("/v1/abort", {"id": "cmpl-none"}), 404, "response_not_found")
  for body in ({}, {"id": 3}):
    assert_error(daemon.post("/v1/abort", body), 400, "invalid_value")
  with open_stream(daemon, first=b'"id"') as client:
    client.settimeout(20)
    identity = re.search(rb'"id": ?"([^"]+)"', client.recv(65536)).group(1).decode()
    assert daemon.post("/v1/abort", {"id": identity}) == (200, {"id": identity, "aborted": True})
    data = receive_until_done(client)
  assert json.loads(events(data)[-2])["error"]["code"] == "request_aborted"
  daemon.until_idle()


def test_the_openapi_document_knows_every_route(daemon):
  status, document = daemon.get("/openapi.json")
  assert status == 200 and document["openapi"].startswith("3.")
  for method, path in [*KEYED, *(("GET", path) for path in OPEN)]:
    if path != "/openapi.json":
      assert method.lower() in document["paths"][path], path


# ------------------------------------------------------------------------------------------------ methods and paths

def test_unknown_paths_and_methods(daemon):
  answer = daemon.request("GET", "/v2/models")
  assert_error(answer, 404, "not_found")
  assert b"'/v2/models'" in answer[2] and b"/openapi.json" in answer[2]
  assert_error(daemon.request("GET", "/v1/models/"), 404, "not_found")
  answer = daemon.request("GET", "/v1/completions")
  assert_error(answer, 405, "method_not_allowed")
  assert answer[1]["Allow"] == "POST, OPTIONS"
  for method in ("POST", "PUT", "DELETE", "PATCH", "TRACE"):
    assert_error(daemon.request(method, "/health"), 405, "method_not_allowed")
  assert_error(daemon.request("POST", "/v1/models", {"a": 1}), 405, "method_not_allowed")


def test_head_and_options(daemon):
  for path in ["/health", "/v1/models", "/metrics"]:
    _, headers, body = daemon.request("HEAD", path)
    assert body == b"" and int(headers["Content-Length"]) > 0
  assert daemon.request("HEAD", "/nothing")[0] == 404
  status, headers, _ = daemon.request("OPTIONS", "/v1/chat/completions")
  assert status == 204 and headers["Allow"] == "POST, OPTIONS"
  assert status_of(daemon.raw(b"OPTIONS * HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")) == 204


def test_a_query_and_an_absolute_target_are_understood(daemon):
  assert daemon.request("GET", "/health?probe=1")[0] == 200
  assert status_of(daemon.raw(b"GET http://daemon/health HTTP/1.1\r\nHost: daemon\r\nConnection: close\r\n\r\n")) == 200


def test_request_ids(daemon):
  assert daemon.request("GET", "/health", headers={"X-Request-Id": "mine-1"})[1]["X-Request-Id"] == "mine-1"
  first, second = (daemon.request("GET", "/health")[1]["X-Request-Id"] for _ in range(2))
  assert first != second
  assert len(daemon.request("GET", "/health", headers={"X-Request-Id": "x" * 1000})[1]["X-Request-Id"]) < 100


@pytest.mark.parametrize("request_bytes", [b"GET /health HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n",
                                           b"GET /health HTTP/1.0\r\nHost: a\r\n\r\n"])
def test_a_connection_that_is_to_be_closed_is_closed_at_once(daemon, request_bytes):
  with daemon.connect(timeout=5) as client:
    client.sendall(request_bytes)
    while client.recv(65536):   # a time-out is an error here
      pass


def test_a_connection_serves_many_requests(daemon):
  with daemon.connect() as client:
    for _ in range(3):
      client.sendall(http_bytes("/v1/completions", completion()))
      data = client.recv(65536)
      assert status_of(data) == 200 and b"Connection: close" not in data
    client.sendall(http_bytes("/health", b"", method="GET") * 5)  # sent ahead
    time.sleep(0.3)
    assert client.recv(65536).count(b"HTTP/1.1 200") == 5


# ------------------------------------------------------------------------------------------------ who may

def test_pages_of_other_sites_are_kept_out(daemon):
  for fields in ({"Content-Type": "text/plain"}, {"Content-Type": "application/x-www-form-urlencoded"},
                 {"Origin": "https://evil.example"}):
    answer = daemon.request("POST", "/v1/completions", json.dumps(completion()), fields)
    assert_error(answer, 415, "unsupported_media_type")
  status, headers, _ = daemon.request("POST", "/v1/completions", completion(), {"Origin": "https://evil.example"})
  assert status == 200 and not [name for name in headers if name.lower().startswith("access-control")]
  status, headers, _ = daemon.request("OPTIONS", "/v1/completions", headers={"Origin": "https://evil.example"})
  assert not [name for name in headers if name.lower().startswith("access-control")]
  assert daemon.request("POST", "/v1/completions", json.dumps(completion()))[0] == 200


def test_a_site_that_names_this_machine_as_its_own_is_kept_out(daemon):
  def post(host, origin):
    with daemon.connect() as client:
      body = json.dumps(completion()).encode()
      client.sendall(f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nOrigin: {origin}\r\nConnection: close\r\n"
                     f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
      return receive_all(client)

  for host in ("Evil.example", "127.evil.example"):
    answer = post(f"{host}:{daemon.port}", f"http://{host.lower()}:{daemon.port}")
    assert answer.startswith(b"HTTP/1.1 403") and b"forbidden_origin" in answer
  for host in ("localhost", "127.0.0.1", "[::1]"):
    assert post(f"{host}:{daemon.port}", f"http://{host}:{daemon.port}").startswith(b"HTTP/1.1 200"), host
  with Daemon("--allow-origin", "http://own.example") as allowed:
    daemon = allowed
    assert post("own.example", "http://own.example").startswith(b"HTTP/1.1 200")


def test_allowed_pages_may():
  with Daemon("--allow-origin", "https://chat.example,http://localhost:3000") as daemon:
    origin = {"Origin": "https://chat.example"}
    headers = daemon.request("OPTIONS", "/v1/completions", headers=origin | {
      "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"})[1]
    assert headers["Access-Control-Allow-Origin"] == "https://chat.example"
    assert "POST" in headers["Access-Control-Allow-Methods"]
    assert headers["Access-Control-Allow-Headers"] == "authorization,content-type"
    for stream in (False, True):
      headers = daemon.request("POST", "/v1/completions", completion(stream=stream), origin)[1]
      assert headers["Access-Control-Allow-Origin"] == "https://chat.example" and headers["Vary"] == "Origin"
    headers = daemon.request("GET", "/health", headers={"Origin": "https://evil.example"})[1]
    assert "Access-Control-Allow-Origin" not in headers


# ------------------------------------------------------------------------------------------------ limits

def test_a_large_header_is_refused(daemon):
  data = daemon.raw(b"GET /health HTTP/1.1\r\nHost: a\r\nX: " + b"x" * 17_000 + b"\r\n\r\n")
  assert status_of(data) == 431
  data = daemon.raw(b"GET /" + b"x" * 20_000 + b" HTTP/1.1\r\nHost: a\r\n\r\n")
  assert status_of(data) == 431
  assert daemon.request("GET", "/health", headers={"X": "x" * 12_000})[0] == 200


def test_a_large_body_is_refused_before_it_comes(daemon):
  assert_error(daemon.request("POST", "/v1/completions", completion("x" * 200_000)), 413, "request_too_large")
  data = daemon.raw(b"POST /tokenize HTTP/1.1\r\nHost: a\r\nContent-Length: 99999999999999\r\n\r\n", timeout=5)
  assert status_of(data) == 413
  chunk = b"8000\r\n" + b"x" * 0x8000 + b"\r\n"
  data = daemon.raw(b"POST /tokenize HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n" + chunk * 5)
  assert status_of(data) == 413


def test_a_chunked_body_is_read(daemon):
  body = json.dumps(completion()).encode()
  chunks = b"".join(b"%x\r\n%s\r\n" % (1, body[i:i + 1]) for i in range(len(body))) + b"0\r\n\r\n"
  head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
  data = daemon.raw(head + chunks)
  assert status_of(data) == 200


def test_expect_continue_is_answered(daemon):
  body = json.dumps(completion()).encode()
  with daemon.connect() as client:
    client.sendall(http_bytes("/v1/completions", body, "Expect: 100-continue")[:-len(body)])
    assert client.recv(65536) == b"HTTP/1.1 100 Continue\r\n\r\n"
    client.sendall(body)
    assert status_of(client.recv(65536)) == 200
    client.sendall(http_bytes("/nothing", body, "Expect: 100-continue")[:-len(body)])
    assert status_of(client.recv(65536)) == 404


def test_other_expectations_and_codings_are_refused(daemon):
  body = json.dumps(completion()).encode()
  for expected, status in (("tea", 417), ("100-continue, tea", 417), ("100-Continue", 100)):
    data = daemon.raw(http_bytes("/v1/completions", body, f"Expect: {expected}", "Connection: close"))
    assert status_of(data) == status, data
  old = http_bytes("/v1/completions", body, "Expect: tea").replace(b"HTTP/1.1", b"HTTP/1.0")
  assert status_of(daemon.raw(old)) == 200   # HTTP/1.0 has no expectations
  answer = daemon.request("POST", "/v1/completions", gzip.compress(body),
                          {"Content-Type": "application/json", "Content-Encoding": "gzip"})
  assert_error(answer, 415, "unsupported_media_type")
  assert b"'gzip'" in answer[2] and answer[1]["Accept-Encoding"] == "identity"
  plain = {"Content-Type": "application/json", "Content-Encoding": "Identity"}
  assert daemon.request("POST", "/v1/completions", body, plain)[0] == 200


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"prompt": "\xff"}',
                                  b'{"prompt": "a", "prompt": "b"}', b'{"prompt": ' + b"[" * 5000 + b"]" * 5000 + b"}",
                                  b"[" * 90_000, b'{"prompt": 1e999}', b"\0" * 100])
def test_malformed_bodies(daemon, body):
  for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/v1/abort"):
    status, _, answer = daemon.request("POST", path, body, {"Content-Type": "application/json"})
    assert status == 400 and json.loads(answer)["error"]["message"], (path, answer)


@pytest.mark.parametrize("data, status", [
    (b"\r\n\r\n\r\nnonsense\r\n\r\n", 400),
    (b"GET  /health HTTP/1.1\r\n\r\n", 400),
    (b"GET health HTTP/1.1\r\nHost: a\r\n\r\n", 400),
    (b"GET /health HTTP/9.1\r\nHost: a\r\n\r\n", 505),
    (b"GET /health HTTP/1.1\r\nbad header\r\n\r\n", 400),
    (b"POST /tokenize HTTP/1.1\r\nContent-Length: -5\r\n\r\n", 400),
    (b"POST /tokenize HTTP/1.1\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n", 400),
    (b"POST /tokenize HTTP/1.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
    (b"POST /tokenize HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", 400),
    (b"POST /tokenize HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 400),
    (b"GET /health HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: xchunked\r\n\r\n", 400),
    (b"GET /health HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: identity\r\n\r\n", 400),
    (b"POST /tokenize HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
    (b"GET /health HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400),
    (b"GET /health HTTP/1.1\r\n\r\n", 400),
    (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),   # TLS
])
def test_what_is_not_http_is_refused(daemon, data, status):
  assert status_of(daemon.raw(data, timeout=5)) == status


@pytest.mark.parametrize("data", [b"GET /health HTTP/1.1\r\nHost:",
                                  b"POST /tokenize HTTP/1.1\r\nHost: a\r\nContent-Length: 50\r\n\r\n{"])
def test_slow_requests_are_ended(daemon, data):
  with daemon.connect() as client:
    begin = time.monotonic()
    client.sendall(data)
    try:
      for _ in range(40):  # a byte now and then does not help
        time.sleep(0.1)
        client.sendall(b" ")
        client.setblocking(False)
        try:
          if client.recv(1, socket.MSG_PEEK):
            break
        except BlockingIOError:
          pass
        client.settimeout(20)
    except ConnectionError:
      pass
    client.settimeout(20)
    assert status_of(receive_all(client)) in (408, None)
    assert time.monotonic() - begin < 8


def test_a_client_that_says_nothing_is_closed(daemon):
  with daemon.connect(timeout=10) as client:
    assert client.recv(1) == b""


def test_too_many_connections():
  with Daemon("--max-connections", 3) as daemon:
    clients = [daemon.connect() for _ in range(3)]
    daemon_full = daemon.raw(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
    assert status_of(daemon_full) == 503 and b"Retry-After" in daemon_full
    for client in clients:
      client.close()
    for _ in range(100):
      try:
        if daemon.request("GET", "/health")[0] == 200:
          break
      except ConnectionError:
        pass
      time.sleep(0.05)
    assert daemon.metrics()["kdtree:http_connections_refused_total"] >= 1


# ------------------------------------------------------------------------------------------------ start

def test_a_port_in_use_is_named(daemon):
  begin = time.monotonic()
  done = subprocess.run([RUN, "serve", "--port", str(daemon.port)], capture_output=True, text=True,
                        env=clean_environment(), timeout=60)
  assert done.returncode == 1 and f"--port: {daemon.port}: expected a free port" in done.stderr
  assert "kdtree-run serve --port" in done.stderr
  assert time.monotonic() - begin < 5


@pytest.mark.parametrize("flags, word", [(["--host", "not a host"], "--host"), (["--host", "192.0.2.1"], "--host"),
                                         (["--port", "65536"], "--port"), (["--max-streams", "65"], "--max-streams"),
                                         (["--kv-tokens", "1"], "--kv-tokens: 1:"),
                                         (["--kv-tokens", str(2**40)], "the memory that is free")])
def test_bad_settings_are_named(flags, word):
  done = subprocess.run([RUN, "serve", "--port", "0", *flags], capture_output=True, text=True, env=clean_environment(),
                        timeout=120)
  assert done.returncode in (1, 2) and word in done.stderr and "expected" in done.stderr, done.stderr


def test_serve_is_the_default_command():
  with Daemon(command=(), env={"KDTREE_PORT": "0"}) as daemon:
    assert daemon.host == "127.0.0.1" and daemon.get("/health")[0] == 200


def test_help_gives_every_flag_a_default_and_a_variable():
  text = subprocess.run([RUN, "serve", "--help"], capture_output=True, text=True, env=clean_environment()).stdout
  flags = re.split(r"\n  (?=-)", text)[2:]
  assert len(flags) > 20
  for flag in flags:
    variable = "KDTREE_" + flag.split()[0].removeprefix("--").replace("-", "_").upper()
    assert re.search(r"\[default: [^\]]+\]\s+\[env: " + variable + r"\]", flag), flag
