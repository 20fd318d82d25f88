"""How the daemon ends: signals under load, the timeout, the second signal, a failed engine."""

import json
import os
import re
import signal
import subprocess
import threading
import time

import pytest
from conftest import ROOT, RUN, clean_environment
from serve_support import (Daemon, completion, events, http_bytes, long_stream, open_stream, receive_all,
                           receive_until_done)


def finished(data):
  return events(data)[-1] == "[DONE]"


def last_error(data):
  return json.loads(events(data)[-2]).get("error")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_idle_daemon_stops_at_once(number):
  with Daemon() as daemon:
    idle = daemon.connect()
    begin = time.monotonic()
    assert daemon.stop(number) == 0
    assert time.monotonic() - begin < 2
    assert idle.recv(1) == b""


def test_a_log_line_that_is_due_does_not_hold_up_the_end():
  for _ in range(4):
    with Daemon("--log-interval", "0.00001") as daemon:
      daemon.post("/v1/completions", completion(max_tokens=2))
      assert daemon.stop() == 0


def test_streams_finish_under_sigterm():
  with Daemon("--max-streams", 4) as daemon:
    body = long_stream(max_tokens=300)
    clients = [open_stream(daemon, body) for _ in range(4)]
    for _ in range(2):  # queued
      clients.append(daemon.connect())
      clients[-1].sendall(http_bytes("/v1/completions", body | {"stream": False}))
    daemon.until_running(4, 2)
    kept = daemon.connect()
    kept.sendall(http_bytes("/ready", b"", method="GET"))
    assert kept.recv(4096).startswith(b"HTTP/1.1 200")
    daemon.send(signal.SIGTERM)
    time.sleep(0.2)
    # A connection that was open learns that the daemon drains; nothing new is taken.
    kept.sendall(http_bytes("/ready", b"", method="GET"))
    answer = kept.recv(4096)
    assert answer.startswith(b"HTTP/1.1 503") and b"Connection: close" in answer
    with pytest.raises(ConnectionError):
      daemon.request("GET", "/health")
    for client in clients[:4]:
      data = receive_all(client)
      assert finished(data) and not last_error(data)
    for client in clients[4:]:
      assert json.loads(receive_all(client).split(b"\r\n\r\n", 1)[1])["choices"][0]["finish_reason"] == "length"
    assert daemon.wait() == 0


def test_a_new_request_while_draining_is_503():
  with Daemon() as daemon:
    stream = open_stream(daemon, long_stream(max_tokens=400))
    kept = daemon.connect()
    kept.sendall(http_bytes("/health", b"", method="GET"))
    kept.recv(4096)
    daemon.send(signal.SIGTERM)
    time.sleep(0.2)
    kept.sendall(http_bytes("/v1/completions", completion()))
    answer = receive_all(kept)
    assert answer.startswith(b"HTTP/1.1 503") and b"Retry-After" in answer
    assert finished(receive_all(stream))
    assert daemon.wait() == 0


@pytest.mark.parametrize("timeout", [0, 0.5])
def test_streams_that_do_not_finish_end_with_an_error(timeout):
  with Daemon("--shutdown-timeout", timeout) as daemon:
    stream = open_stream(daemon)
    whole = daemon.connect()
    whole.sendall(http_bytes("/v1/completions", long_stream(stream=False)))
    daemon.until_running(2)
    begin = time.monotonic()
    daemon.send(signal.SIGTERM)
    data = receive_all(stream)
    assert finished(data) and last_error(data)["code"] == "shutting_down"
    answer = receive_all(whole)
    assert answer.startswith(b"HTTP/1.1 503") and b"shutting_down" in answer
    assert daemon.wait() == 0
    assert time.monotonic() - begin < timeout + 5


def test_a_client_that_does_not_read_does_not_hold_up_the_end():
  with Daemon("--shutdown-timeout", 0.2) as daemon:
    stuck = open_stream(daemon, long_stream(n=8, logprobs=5), receive_buffer=4096)
    time.sleep(0.5)
    begin = time.monotonic()
    assert daemon.stop() == 0
    assert time.monotonic() - begin < 15
    stuck.close()


@pytest.mark.parametrize("first, second", [(signal.SIGTERM, signal.SIGTERM), (signal.SIGINT, signal.SIGINT),
                                           (signal.SIGTERM, signal.SIGINT)])
def test_a_second_signal_stops_at_once(first, second):
  with Daemon(check=False) as daemon:
    stream = open_stream(daemon)
    daemon.send(first)
    time.sleep(0.2)
    begin = time.monotonic()
    daemon.send(second)
    assert daemon.wait() == 130
    assert time.monotonic() - begin < 2
    stream.close()


def test_two_signals_at_once_are_one():
  with Daemon() as daemon:
    stream = open_stream(daemon)
    daemon.send(signal.SIGSTOP)   # both arrive before it looks
    daemon.send(signal.SIGTERM)
    daemon.send(signal.SIGINT)
    daemon.send(signal.SIGCONT)
    time.sleep(0.3)
    assert daemon.process.poll() is None
    stream.close()
    assert daemon.wait() == 0


@pytest.mark.parametrize("again, code", [(False, 0), (True, 130)])
def test_a_round_that_runs_is_waited_for_but_not_for_long(again, code):
  with Daemon("--shutdown-timeout", 0.1, "--prefill-chunk", 4096, check=False) as daemon:
    prompt = {"prompt": "x = [" + "1, 2, 3, " * 400, "max_tokens": 1}
    client = daemon.connect()
    client.sendall(http_bytes("/v1/completions", prompt))
    time.sleep(0.3)
    begin = time.monotonic()
    daemon.send(signal.SIGTERM)
    time.sleep(0.2)
    if again and daemon.process.poll() is None:
      daemon.send(signal.SIGTERM)
    ended = daemon.wait()
    assert ended == code or (again and ended == 0), daemon.lines[-3:]
    assert time.monotonic() - begin < 15
    client.close()


def test_a_signal_under_a_storm_of_requests():
  with Daemon("--shutdown-timeout", 5) as daemon:
    stopping = threading.Event()
    odd = []

    def storm():
      while not stopping.is_set():
        try:
          asked = completion(max_tokens=20, stream=True)
          status, _, body = daemon.request("POST", "/v1/completions", asked, timeout=20)
          if status not in (200, 503) or (status == 200 and not finished(body)):
            odd.append((status, body))
        except (ConnectionError, OSError):
          pass
        except Exception as error:  # an answer cut short
          odd.append(error)

    threads = [threading.Thread(target=storm) for _ in range(8)]
    for thread in threads:
      thread.start()
    time.sleep(1)
    daemon.send(signal.SIGTERM)
    code = daemon.wait()
    stopping.set()
    for thread in threads:
      thread.join()
    assert code == 0 and not odd, odd[:3]


# An engine whose health says that it failed once a file exists; everything else is the real library's.
FAILING = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <unistd.h>
#include "kdtree.h"
static int is_set(const char* name) { const char* path = getenv(name); return path && access(path, F_OK) == 0; }
typedef kdt_status (*health_call)(kdt_engine*, kdt_health*);
kdt_status kdt_engine_health(kdt_engine* engine, kdt_health* health) {
  kdt_status status = ((health_call)dlsym(RTLD_NEXT, "kdt_engine_health"))(engine, health);
  if (is_set("TEST_FAILED")) { health->failed = 1; health->error = "experts: injected: expected to work"; }
  if (is_set("TEST_STALLED")) health->seconds_since_round = 100;
  return status;
}
"""


@pytest.fixture(scope="module")
def failing(tmp_path_factory):
  folder = tmp_path_factory.mktemp("failing")
  (folder / "failing.c").write_text(FAILING)
  library = folder / "failing.so"
  subprocess.run(["cc", "-shared", "-fPIC", f"-I{ROOT}/engine/include", "-o", library, folder / "failing.c", "-ldl"],
                 check=True)
  return library


def preload(library, **files):
  others = os.environ.get("LD_PRELOAD", "")
  return {"LD_PRELOAD": f"{library} {others}".strip()} | {name: str(path) for name, path in files.items()}


def test_a_failed_engine_fails_every_request_by_name_and_ends_the_daemon(failing, tmp_path):
  flag = tmp_path / "failed"
  with Daemon(env=preload(failing, TEST_FAILED=flag), check=False) as daemon:
    stream = open_stream(daemon)
    whole = daemon.connect()
    whole.sendall(http_bytes("/v1/completions", long_stream(stream=False)))
    daemon.until_running(2)
    flag.touch()
    data = receive_until_done(stream)
    assert finished(data) and "experts: injected" in last_error(data)["message"]
    assert last_error(data)["code"] == "engine_failed"
    status, body = daemon.get("/health")
    assert status == 503 and "experts: injected" in body["error"]["message"]
    assert daemon.get("/ready")[0] == 503
    assert receive_all(whole).startswith(b"HTTP/1.1 503")
    assert daemon.wait() == 1
    assert "experts: injected" in daemon.log()


def test_a_stalled_engine_is_not_healthy(failing, tmp_path):
  flag = tmp_path / "stalled"
  with Daemon("--stall-timeout", 30, env=preload(failing, TEST_STALLED=flag)) as daemon:
    assert daemon.get("/health")[0] == 200
    flag.touch()
    status, body = daemon.get("/health")
    assert status == 503 and "100 s" in body["error"]["message"]
    assert daemon.get("/ready")[0] == 503
    flag.unlink()
    assert daemon.get("/health")[0] == 200


def test_a_signal_while_the_model_loads():
  process = subprocess.Popen([RUN, "serve", "--port", "0"], stderr=subprocess.PIPE, env=clean_environment())
  time.sleep(0.05)
  process.send_signal(signal.SIGTERM)
  assert process.wait(10) in (0, -signal.SIGTERM)


def test_nothing_is_left_behind():
  with Daemon() as daemon:
    pid = daemon.process.pid
    children = subprocess.run(["ps", "--ppid", str(pid), "-o", "pid="], capture_output=True, text=True).stdout.split()
    assert not children
    assert daemon.stop() == 0
    assert re.search(r"\bstopped\b", daemon.lines[-1])
