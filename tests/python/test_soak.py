"""Two minutes (ten with --full) of clients that come, go, leave early and ask for everything: memory stays flat,
nothing is stuck, no page is lost, and what is asked for again is the same text."""

import json
import random
import threading
import time

from conftest import FULL
from serve_support import Daemon, http_bytes

SECONDS = 600 if FULL else 120
WARM_UP = 0.3 * SECONDS
CLIENTS = 12
# Two contexts of pages for eight streams: every page is written in the first seconds, and streams are preempted.
FLAGS = ["--max-context", 2048, "--kv-tokens", 4096, "--max-streams", 8, "--max-waiting", 64]

PROMPTS = ["def add(a, b):\n", "import os\n\n\ndef walk(path):\n", "The dictionary is",
           "class Queue:\n  def __init__(self):\n",
           "# Prints the numbers from one to ten\n" * 40, "x = [" + "1, 2, 3, " * 300,
           "\u6f22\u5b57 and \U0001f600 and \r\n"]


def random_body(rng):
  body = {"prompt": rng.choice(PROMPTS)[:rng.randint(5, 1500)], "max_tokens": rng.choice([1, 5, 30, 100, 300]),
          "temperature": rng.choice([0, 0.8]), "seed": rng.randint(0, 5), "ignore_eos": rng.random() < 0.7,
          "speculate": rng.choice(["auto", "auto", "off", "chain", "tree"]), "stream": rng.random() < 0.7}
  if rng.random() < 0.3:
    body |= {"stop": ["\n\n", "return"], "frequency_penalty": 0.5, "logit_bias": {"65": -5}}
  if rng.random() < 0.2:
    body |= {"logprobs": 3, "n": 2}
  if rng.random() < 0.1:
    body |= {"echo": True, "logprobs": 1}
  return body


def touch_everything(daemon):
  """The largest passes there can be, so that memory which is only touched by them is not seen as growth later."""
  body = {"prompt": "x = [" + "1, 2, 3, " * 120, "max_tokens": 200, "ignore_eos": True, "speculate": "tree",
          "budget": 1024, "echo": True, "logprobs": 5, "temperature": 0.9}
  threads = [threading.Thread(target=daemon.request, args=("POST", "/v1/completions", body | {"seed": seed}))
             for seed in range(8)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()


def resident_mib(process):
  with open(f"/proc/{process.pid}/status") as status:
    return next(int(line.split()[1]) for line in status if line.startswith("VmRSS")) / 1024


class Clients:
  def __init__(self, daemon):
    self.daemon, self.over, self.errors = daemon, threading.Event(), []
    self.counts = {"whole": 0, "left": 0, "refused": 0, "bad": 0}
    self.texts, self.lock = {}, threading.Lock()

  def count(self, what):
    with self.lock:
      self.counts[what] += 1

  def run(self, seed):
    rng = random.Random(seed)
    while not self.over.is_set():
      try:
        self.once(rng)
      except Exception as error:   # noqa: BLE001  a client thread must not end unseen
        self.errors.append(repr(error))
        return

  def once(self, rng):
    body = random_body(rng)
    kind = rng.random()
    if kind < 0.25:     # leaves: at once, or in the middle
      with self.daemon.connect() as client:
        client.sendall(http_bytes("/v1/completions", body))
        for _ in range(rng.choice([0, 0, 1, 3])):
          client.recv(rng.choice([1, 200]))
      self.count("left")
    elif kind < 0.3:
      status, _, _ = self.daemon.request("POST", "/v1/completions", rng.choice(["{", '{"prompt": 5}', '{"n": 1e9}']),
                                         {"Content-Type": "application/json"})
      assert status == 400
      self.count("bad")
    else:
      status, _, data = self.daemon.request("POST", "/v1/completions", body)
      if status == 429:
        time.sleep(0.1)
        return self.count("refused")
      assert status == 200, (status, data[:300])
      self.check(body, data)
      self.count("whole")

  def check(self, body, data):
    """The same request has the same text, however it was answered and whoever ran beside it."""
    text = {}
    documents = [json.loads(data)] if not body["stream"] else \
        [json.loads(line[6:]) for line in data.decode().splitlines() if line.startswith("data: {")]
    for document in documents:
      assert "error" not in document, document
      for choice in document["choices"]:
        text[choice["index"]] = text.get(choice["index"], "") + choice["text"]
    key = json.dumps({k: v for k, v in body.items() if k not in ("stream", "speculate")}, sort_keys=True)
    with self.lock:
      assert self.texts.setdefault(key, text) == text, key


def test_soak():
  with Daemon(*FLAGS) as daemon:
    clients = Clients(daemon)
    threads = [threading.Thread(target=clients.run, args=(seed,), daemon=True) for seed in range(CLIENTS)]
    touch_everything(daemon)
    start = time.monotonic()
    for thread in threads:
      thread.start()
    samples = []
    while time.monotonic() - start < SECONDS and not clients.errors:
      time.sleep(0.5)
      samples.append((time.monotonic() - start, resident_mib(daemon.process)))
    clients.over.set()
    for thread in threads:
      thread.join(120)
      assert not thread.is_alive(), "a client waits for an answer that does not come"
    assert not clients.errors, clients.errors
    daemon.until_idle()
    assert clients.counts["whole"] > SECONDS / 4 and clients.counts["left"] > 10, clients.counts
    warm = max(mib for at, mib in samples if at < WARM_UP)
    last = max(mib for at, mib in samples if at > WARM_UP)
    shown = ", ".join(f"{at:.0f} s: {mib:.1f}" for at, mib in samples[::len(samples) // 20])
    assert last < 1.02 * warm, f"{warm:.1f} MiB at the end of the warm-up, later {last:.1f} MiB ({shown})"
    status, body = daemon.post("/reset_prefix_cache", {})
    assert status == 200, body
    assert daemon.metrics()["kdtree:kv_cache_idle_perc"] == 0
