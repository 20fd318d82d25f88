"""Clients that leave, stall or die at each phase of a request: what they held is given back, and nobody notices."""

import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request

import pytest
from conftest import RUN, clean_environment
from serve_support import Daemon, completion, events, http_bytes, long_stream, open_stream, receive_all

# Long enough to be caught in prefill: in chunks of 16 it takes a hundred rounds.
LONG_PROMPT = "def f(x):\n    return x + 1\n\n" * 60


@pytest.fixture(scope="module")
def daemon():
  with Daemon("--write-timeout", 1, "--prefill-chunk", 16, "--no-prefix-cache") as started:
    yield started


@pytest.fixture(scope="module")
def narrow():
  """One stream at a time, so that others wait."""
  with Daemon("--max-streams", 1, "--max-waiting", 2) as started:
    yield started


@pytest.fixture(autouse=True)
def all_is_given_back(request):
  yield
  for name in ("daemon", "narrow"):
    if name in request.fixturenames:
      started = request.getfixturevalue(name)
      started.until_idle()
      status, body = started.post("/v1/completions", completion())
      assert status == 200 and body["choices"][0]["text"]


def leave_politely(client):
  client.close()


def leave_with_reset(client):
  client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
  client.close()


def leave_half_open(client):
  client.shutdown(socket.SHUT_WR)


LEAVE = [leave_politely, leave_with_reset, leave_half_open]


@pytest.mark.parametrize("leave", LEAVE)
@pytest.mark.parametrize("stream", [True, False])
def test_leaving_while_decoding(daemon, leave, stream):
  client = daemon.connect()
  client.sendall(http_bytes("/v1/completions", long_stream(stream=stream)))
  daemon.until_running(1)
  leave(client)
  daemon.until_idle()


@pytest.mark.parametrize("leave", LEAVE)
def test_leaving_in_prefill(daemon, leave):
  client = daemon.connect()
  client.sendall(http_bytes("/v1/completions", long_stream(prompt=LONG_PROMPT, max_tokens=2)))
  daemon.until_running(1)
  leave(client)
  daemon.until_idle()


@pytest.mark.parametrize("stream", [True, False])
def test_leaving_while_queued(narrow, stream):
  first = open_stream(narrow)
  waiting = narrow.connect()
  waiting.sendall(http_bytes("/v1/completions", long_stream(stream=stream)))
  narrow.until_running(1, 1)
  waiting.close()
  narrow.until_running(1, 0)
  first.close()


def test_leaving_at_once(daemon):
  for _ in range(20):
    client = daemon.connect()
    client.sendall(http_bytes("/v1/completions", long_stream()))
    client.close()
  daemon.until_idle()


def test_leaving_within_a_body(daemon):
  client = daemon.connect()
  client.sendall(http_bytes("/v1/completions", long_stream())[:-10])
  time.sleep(0.1)
  client.close()


def test_leaving_with_another_request_sent_ahead(daemon):
  client = daemon.connect()
  client.sendall(http_bytes("/v1/completions", long_stream()) + http_bytes("/v1/completions", completion()))
  daemon.until_running(1)
  client.close()
  daemon.until_idle()


@pytest.mark.parametrize("leave", LEAVE)
def test_leaving_while_refusals_wait_to_be_written(daemon, leave):
  """Refused requests sent ahead, and nothing read: an answer waits in a full socket when the client leaves."""
  refused = http_bytes("/v1/completions", {"prompt": "x", "temperature": "y" * 300})
  client = daemon.connect(receive_buffer=2048)
  client.setblocking(False)
  end = time.monotonic() + 0.7
  while time.monotonic() < end:
    try:
      client.send(refused * 50)
    except BlockingIOError:
      time.sleep(0.02)
  leave(client)
  time.sleep(0.3)
  client.close()


def test_leaving_with_many_choices(daemon):
  client = open_stream(daemon, long_stream(n=4, prompt=["a = 1\n", "b = 2\n"]))
  daemon.until_running(8)
  client.close()
  daemon.until_idle()


def test_a_client_killed_mid_stream(daemon):
  program = ("import sys, http.client\n"
             f"c = http.client.HTTPConnection('127.0.0.1', {daemon.port})\n"
             f"c.request('POST', '/v1/completions', sys.argv[1], {{'Content-Type': 'application/json'}})\n"
             "r = c.getresponse()\n"
             "while True: r.read1(); print('.', flush=True)\n")
  client = subprocess.Popen([sys.executable, "-c", program, json.dumps(long_stream())], stdout=subprocess.PIPE)
  assert client.stdout.read(1) == b"."
  client.send_signal(signal.SIGKILL)
  client.wait()
  daemon.until_idle()


def test_a_client_that_does_not_read_is_given_up_and_slows_nobody(daemon):
  # Eight choices with log-probabilities fill the socket's buffers soon.
  stuck = open_stream(daemon, long_stream(n=8, logprobs=5), receive_buffer=4096)
  alone = None
  for _ in range(3):
    begin = time.monotonic()
    assert daemon.post("/v1/completions", completion(max_tokens=30, ignore_eos=True))[0] == 200
    alone = time.monotonic() - begin
  assert alone < 20
  daemon.until(lambda m: m["kdtree:num_requests_running"] == 0, timeout=60)
  stuck.close()
  assert " 499 " in daemon.log()


def test_a_slow_reader_gets_everything(daemon):
  body = long_stream(max_tokens=400, logprobs=2)
  with open_stream(daemon, body, receive_buffer=4096) as client:
    data = b""
    while b"[DONE]" not in data:
      more = client.recv(8192)
      assert more
      data += more
      time.sleep(0.002)
  daemon.until_idle()


def test_streams_side_by_side_are_whole(daemon):
  body = completion(max_tokens=40, ignore_eos=True, stream=True)
  wanted = events(daemon.request("POST", "/v1/completions", body)[2])
  texts = []

  def run():
    texts.append(events(daemon.request("POST", "/v1/completions", body)[2]))

  threads = [threading.Thread(target=run) for _ in range(12)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()

  def text(payloads):
    assert payloads[-1] == "[DONE]"
    return "".join(json.loads(each)["choices"][0]["text"] for each in payloads[:-1])

  assert {text(each) for each in texts} == {text(wanted)} and len(texts) == 12


def test_a_full_queue_is_429(narrow):
  running = open_stream(narrow)
  waiting = [narrow.connect() for _ in range(2)]
  for client in waiting:
    client.sendall(http_bytes("/v1/completions", long_stream()))
  narrow.until_running(1, 2)
  status, headers, body = narrow.request("POST", "/v1/completions", completion())
  assert status == 429 and int(headers["Retry-After"]) >= 1
  assert json.loads(body)["error"]["type"] == "rate_limit_error"
  assert narrow.get("/ready")[0] == 503 and narrow.get("/health")[0] == 200
  # A request of several choices is refused whole.
  for client in waiting:
    client.close()
  narrow.until_running(1, 0)
  assert narrow.request("POST", "/v1/completions", completion(n=3))[0] == 429
  narrow.until(lambda _: narrow.get("/ready")[0] == 200)
  running.close()


def test_a_request_timeout_ends_what_runs_and_what_waits():
  with Daemon("--request-timeout", 1, "--max-streams", 1) as daemon:
    with daemon.connect() as running, daemon.connect() as waiting:
      running.sendall(http_bytes("/v1/completions", long_stream(), "Connection: close"))
      daemon.until_running(1)
      waiting.sendall(http_bytes("/v1/completions", long_stream(stream=False), "Connection: close"))
      data = receive_all(running)
      assert events(data)[-1] == "[DONE]" and "error" in json.loads(events(data)[-2])
      assert b"HTTP/1.1 408" in receive_all(waiting)
    daemon.until_idle()


def test_client_text_cannot_forge_log_lines(daemon):
  daemon.raw(b"GET /\x1b[31mred%0aINFO HTTP/1.1\r\nHost: a\r\nX-Request-Id: a\x7fb\r\nConnection: close\r\n\r\n")
  daemon.request("POST", "/v1/completions", completion(model="x\n2099-01-01 forged\x1b[0m"))
  assert not [line for line in daemon.lines if line.startswith("2099")] and "\x1b" not in daemon.log()


def test_a_log_that_nobody_reads_costs_lines_not_answers():
  with socket.create_server(("127.0.0.1", 0)) as probe:
    port = probe.getsockname()[1]
  read, write = os.pipe()
  process = subprocess.Popen([RUN, "serve", "--port", str(port)], stderr=write, env=clean_environment())
  os.close(write)
  try:
    url = f"http://127.0.0.1:{port}/"
    for _ in range(600):
      try:
        urllib.request.urlopen(url + "health", timeout=10)
        break
      except OSError:
        time.sleep(0.1)
    for i in range(1500):  # 150 kB of log; a pipe holds 64
      with pytest.raises(urllib.error.HTTPError):
        urllib.request.urlopen(url + "nothing-of-this-name-is-here", timeout=10)
    os.set_blocking(read, False)
    assert len(os.read(read, 1 << 20)) < 100_000
    with pytest.raises(urllib.error.HTTPError):
      urllib.request.urlopen(url + "nothing", timeout=10)
    assert re.search(rb"\d+ log lines were lost", os.read(read, 1 << 20))
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 0
  finally:
    process.kill()
    os.close(read)
