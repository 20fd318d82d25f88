"""Many HTTP streams at once, some of which leave, are aborted or preempted: the others have the text they have
alone."""

import json
import random
import re
import signal
import subprocess
import sys
import threading
import time

import pytest
from serve_support import Daemon, completion, events, http_bytes, long_stream, open_stream, receive_all

PROMPTS = ["def add(a, b):\n", "import os\n\n\ndef walk(path):\n", "class Queue:\n  def __init__(self):\n",
           "x = [1, 2, "]


def text_of(data):
  payloads = events(data)
  assert payloads[-1] == "[DONE]"
  documents = [json.loads(each) for each in payloads[:-1]]
  assert not [each for each in documents if "error" in each]
  return "".join(choice["text"] for each in documents for choice in each["choices"])


def body_of(index, **settings):
  return {"prompt": PROMPTS[index % 4] * (1 + index % 3), "max_tokens": 24 + index % 9, "ignore_eos": True,
          "temperature": 0.9 * (index % 2), "seed": index, "stream": True,
          "speculate": ("auto", "tree", "chain", "off")[index % 4]} | settings


def alone(daemon, body):
  return text_of(daemon.request("POST", "/v1/completions", body | {"speculate": "off"})[2])


def test_sixty_four_streams_of_which_half_leave():
  with Daemon("--max-streams", 64, "--log-interval", 0) as daemon:
    n_stay = 32
    wanted = {index: alone(daemon, body_of(index)) for index in range(0, n_stay, 4)}
    texts, errors = {}, []

    def stay(index):
      texts[index] = text_of(daemon.request("POST", "/v1/completions", body_of(index))[2])

    def leave(index):
      rng = random.Random(index)
      with daemon.connect() as client:
        client.sendall(http_bytes("/v1/completions", body_of(index, max_tokens=2000)))
        seen = b""
        for _ in range(rng.randrange(6)):
          seen += client.recv(rng.choice([1, 4096]))
        name = re.search(rb'"id":"([^"]+)"', seen)
        if name and index % 2:
          assert daemon.post("/v1/abort", {"id": name.group(1).decode()})[0] == 200
          assert json.loads(events(receive_all_of_stream(client, seen))[-2])["error"]

    def run(work, index):
      try:
        work(index)
      except Exception as error:  # noqa: BLE001  a thread must not end unseen
        errors.append((index, repr(error)))

    threads = [threading.Thread(target=run, args=(stay if index < n_stay else leave, index)) for index in range(64)]
    random.Random(1).shuffle(threads)
    for thread in threads:
      thread.start()
    for thread in threads:
      thread.join(120)
    assert not errors, errors
    daemon.until_idle()
    assert len(texts) == n_stay and {index: texts[index] for index in wanted} == wanted


def receive_all_of_stream(client, data):
  while b"data: [DONE]\n\n" not in data:
    more = client.recv(65536)
    assert more, data
    data += more
  return data


def test_penalties_survive_preemption_in_every_mode():
  settings = {"max_tokens": 120, "frequency_penalty": 0.7, "presence_penalty": 0.3, "repetition_penalty": 1.1,
              "logit_bias": {"65": 2}}
  bodies = [body_of(index, **settings) for index in range(8)]
  # Pages for two of them.
  with Daemon("--max-context", 256, "--kv-tokens", 384, "--max-streams", 8) as daemon:
    wanted = [alone(daemon, body) for body in bodies]
    texts = [None] * len(bodies)

    def run(index):
      texts[index] = text_of(daemon.request("POST", "/v1/completions", bodies[index])[2])

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(bodies))]
    for thread in threads:
      thread.start()
    for thread in threads:
      thread.join(120)
    assert daemon.until_idle()["kdtree:num_preemptions_total"] > 0
    assert texts == wanted


@pytest.mark.parametrize("timeout", [0.3, 100])
def test_sigterm_in_a_long_prefill(timeout):
  with Daemon("--prefill-chunk", 1, "--shutdown-timeout", timeout) as daemon:
    client = daemon.connect()
    client.sendall(http_bytes("/v1/completions", long_stream(prompt="x = 1\n" * (300 if timeout < 1 else 60), max_tokens=2)))
    daemon.until_running(1)
    begin = time.monotonic()
    daemon.send(signal.SIGTERM)
    data = receive_all(client)
    assert daemon.wait(timeout + 30) == 0 and time.monotonic() - begin < timeout + 20
    if timeout < 1:
      assert b"shutting_down" in data
    else:
      assert text_of(data)


def test_a_client_that_is_stopped_and_killed_with_requests_sent_ahead():
  with Daemon("--write-timeout", 1) as daemon:
    # Small buffers and long events: soon a write has to wait for the client that is stopped.
    ahead = 4 * http_bytes("/v1/completions", long_stream(n=4, logprobs=20))
    program = ("import socket, sys\n"
               "s = socket.socket()\n"
               "s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)\n"
               f"s.connect(('127.0.0.1', {daemon.port}))\n"
               "s.sendall(sys.stdin.buffer.read())\n"
               "while s.recv(512): print('.', flush=True)\n")
    for number in (signal.SIGSTOP, signal.SIGKILL):
      client = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
      client.stdin.write(ahead)
      client.stdin.close()
      assert client.stdout.read(1) == b"."
      client.send_signal(number)
      with open_stream(daemon, long_stream(max_tokens=50)) as other:  # nobody else waits for it
        assert b"[DONE]" in receive_all_of_stream(other, b"")
      daemon.until_idle()
      client.kill()
      client.wait()
    assert daemon.post("/v1/completions", completion())[0] == 200
