"""A daemon on a free port for the tests of `kdtree-run serve`, and clients that behave well or badly."""

from __future__ import annotations

import http.client
import json
import re
import signal
import socket
import subprocess
import threading
import time

from conftest import RUN, clean_environment

READY = re.compile(r"Serving .* on http://([^\s\"]+):(\d+)")
SERIES = re.compile(r'^(kdtree:\w+)(\{.*\})? (\S+)$')
LONG = 3000  # tokens: more than any of these tests waits for

OPEN = ["/health", "/ready", "/version", "/metrics"]
KEYED = [("GET", "/v1/models"), ("GET", "/openapi.json"), ("POST", "/v1/chat/completions"), ("POST", "/v1/completions"),
         ("POST", "/tokenize"), ("POST", "/detokenize"), ("POST", "/v1/abort"), ("POST", "/reset_prefix_cache")]


class Daemon:
  """`kdtree-run serve` with these flags, ready. Leave the `with` block and it must have ended with exit code 0."""

  def __init__(self, *flags, env=None, command=("serve", "--port", "0"), check=True):
    self.lines, self.check = [], check
    self.process = subprocess.Popen([RUN, *command, *map(str, flags)], stdin=subprocess.DEVNULL,
                                    stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
                                    env=clean_environment() | (env or {}))
    self.port, ready = None, threading.Event()

    def read():
      for line in self.process.stderr:
        self.lines.append(line.rstrip("\n"))
        found = READY.search(line)
        if found:
          self.host, self.port = found.group(1).strip("[]"), int(found.group(2))
          ready.set()
      ready.set()

    self.reader = threading.Thread(target=read, daemon=True)
    self.reader.start()
    ready.wait(120)
    assert self.port, "\n".join(self.lines)

  def __enter__(self):
    return self

  def __exit__(self, kind, *_):
    if self.process.poll() is None:
      code = self.stop()
      assert kind or not self.check or code == 0, (code, self.lines[-5:])

  def send(self, number):
    self.process.send_signal(number)

  def stop(self, number=signal.SIGTERM):
    """Sends the signal and gives the exit code."""
    if self.process.poll() is None:
      self.send(number)
    try:
      return self.wait()
    except subprocess.TimeoutExpired:
      self.process.kill()
      raise

  def wait(self, timeout=60):
    code = self.process.wait(timeout)
    self.reader.join(5)
    return code

  def log(self):
    return "\n".join(self.lines)

  # ---- clients

  def connect(self, timeout=60, receive_buffer=None):
    client = socket.socket(socket.AF_INET6 if ":" in self.host else socket.AF_INET)
    if receive_buffer:
      client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    client.settimeout(timeout)
    client.connect((self.host, self.port))
    return client

  def request(self, method, path, body=None, headers=None, timeout=120):
    """(status, headers, bytes); a body that is no string or bytes goes as JSON."""
    connection = http.client.HTTPConnection(self.host, self.port, timeout=timeout)
    headers = dict(headers or {})
    if body is not None and not isinstance(body, (str, bytes)):
      body = json.dumps(body)
      headers.setdefault("Content-Type", "application/json")
    try:
      connection.request(method, path, body, headers)
      response = connection.getresponse()
      return response.status, response.headers, response.read()
    finally:
      connection.close()

  def get(self, path, **options):
    status, _, body = self.request("GET", path, **options)
    return status, json.loads(body)

  def post(self, path, body, **options):
    status, _, body = self.request("POST", path, body, **options)
    return status, json.loads(body)

  def raw(self, data, timeout=30):
    """Sends these bytes and gives all that comes back until the daemon closes the connection, or stops sending."""
    with self.connect(timeout) as client:
      client.sendall(data)
      return receive_all(client)

  # ---- metrics

  def metrics(self):
    """{series with the label model_name taken out: value}."""
    status, _, page = self.request("GET", "/metrics")
    assert status == 200
    out = {}
    for line in page.decode().splitlines():
      found = SERIES.match(line)
      if found:
        labels = re.sub(r'model_name="[^"]*",?', "", found.group(2) or "").replace(",}", "}").replace("{}", "")
        out[found.group(1) + labels] = float(found.group(3))
    return out

  def until(self, condition, timeout=30):
    """The first metrics for which the condition holds."""
    end = time.monotonic() + timeout
    while True:
      metrics = self.metrics()
      if condition(metrics):
        return metrics
      assert time.monotonic() < end, {name: metrics[name] for name in metrics if "num_req" in name or "kv_" in name}
      time.sleep(0.02)

  def until_running(self, running, waiting=0):
    return self.until(lambda m: m["kdtree:num_requests_running"] == running
                      and m["kdtree:num_requests_waiting"] == waiting)

  def until_idle(self):
    """Nothing runs or waits, and no stream holds a page."""
    return self.until(lambda m: m["kdtree:num_requests_running"] == m["kdtree:num_requests_waiting"] == 0
                      and m.get("kdtree:kv_cache_usage_perc", 0) == 0 and m["kdtree:http_requests_in_progress"] == 0)


def assert_error(answer, status, code):
  assert answer[0] == status, answer
  error = json.loads(answer[-1])["error"] if isinstance(answer[-1], bytes) else answer[-1]["error"]
  assert set(error) >= {"message", "type", "param", "code"}
  assert error["code"] == code and error["message"]


def status_of(data):
  return int(data.split(b" ", 2)[1]) if data else None


def receive_all(client):
  data = b""
  try:
    while chunk := client.recv(65536):
      data += chunk
  except (socket.timeout, ConnectionError):
    pass
  return data


def receive_until_done(client):
  """The rest of a stream; the connection stays open."""
  data = b""
  while b"data: [DONE]\n\n" not in data:
    more = client.recv(65536)
    assert more, data[-1000:]
    data += more
  return data


def http_bytes(path, body, *fields, method="POST"):
  """A request as bytes."""
  data = body if isinstance(body, bytes) else json.dumps(body).encode()
  head = [f"{method} {path} HTTP/1.1", "Host: daemon", "Content-Type: application/json",
          f"Content-Length: {len(data)}", *fields]
  return "\r\n".join(head).encode() + b"\r\n\r\n" + data


def completion(prompt="def add(a, b):\n", **settings):
  return {"prompt": prompt, "temperature": 0, "max_tokens": 8} | settings


def long_stream(**settings):
  return completion(max_tokens=LONG, ignore_eos=True, stream=True) | settings


def open_stream(daemon, body=None, first=b"data: ", receive_buffer=None):
  """A socket on which a stream has begun; `first`: what has to have come."""
  client = daemon.connect(receive_buffer=receive_buffer)
  client.sendall(http_bytes("/v1/completions", body or long_stream()))
  data = b""
  while first not in data:
    more = client.recv(1 if receive_buffer else 65536)
    assert more, data
    data += more
  return client


def events(data):
  """The payloads of a stream's events, [DONE] included; chunk sizes are taken out."""
  text = data.decode()
  return re.findall(r"^data: (.*)$", text, re.MULTILINE)
