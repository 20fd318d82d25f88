"""pyclient.Session shared by threads, and cancellation."""

import concurrent.futures
import random
import signal
import subprocess
import sys
import threading
import time

import pytest

from conftest import clean_environment
from pyclient import QueueFull, Session

PROMPT = "def add(a, b):\n"


def test_threads_share_a_session(session):
  jobs = [(f"def f{i}(x):\n", {"max_tokens": 24, "temperature": 0.9 * (i % 2), "seed": i, "ignore_eos": True})
          for i in range(12)]
  alone = [session.generate(prompt, **options).token_ids for prompt, options in jobs]
  with concurrent.futures.ThreadPoolExecutor(6) as pool:
    together = list(pool.map(lambda job: session.generate(job[0], **job[1]).token_ids, jobs))
    texts = list(pool.map(lambda job: session.detokenize(session.tokenize(job[0])), jobs))
  assert together == alone
  assert texts == [prompt for prompt, _ in jobs]


def test_many_threads_with_every_setting_and_cancels(session):
  rng = random.Random(11)
  jobs = []
  for i in range(40):
    options = {"max_tokens": rng.randrange(5, 60), "temperature": rng.choice([0.0, 1.0]), "seed": i, "ignore_eos": True,
               "speculate": rng.choice(["auto", "off", "chain", "tree"])}
    options |= rng.choice([{}, {"presence_penalty": 1.5}, {"repetition_penalty": 1.2}, {"logit_bias": {32: 2.0}},
                           {"stop": ["\n", "):"]}, {"logprobs": 2}, {"min_tokens": 5, "stop": "a"}])
    jobs.append((f"def f{i % 7}(x):\n" * rng.randrange(1, 12), options, rng.random() < 0.2))
  alone = [session.generate(prompt, **(options | {"speculate": "off"})) for prompt, options, _ in jobs]

  def work(job):
    prompt, options, cancelled = job
    with session.stream(prompt, **options) as stream:
      for _ in stream:
        if cancelled:
          break
      else:
        return stream.result
    return None

  with concurrent.futures.ThreadPoolExecutor(30) as pool:
    together = list(pool.map(work, jobs))
  for result, expected in zip(together, alone):
    if result is not None:
      assert (result.token_ids, result.text, result.stop_reason, result.top_logprobs) == \
        (expected.token_ids, expected.text, expected.stop_reason, expected.top_logprobs)
  assert sum(result is not None for result in together) > 20
  assert session.health().running == 0


def test_a_full_queue_is_an_error_of_its_own():
  with Session(threads=1, max_streams=1, max_waiting=2) as narrow:
    endless = {"max_tokens": 3000, "speculate": "off", "ignore_eos": True}
    first = narrow.stream(PROMPT, **endless)
    next(first)
    queued = [narrow.stream(PROMPT, **endless) for _ in range(2)]
    with pytest.raises(QueueFull, match="expected"):
      narrow.stream(PROMPT, **endless)
    with pytest.raises(QueueFull):
      narrow.generate(PROMPT, n=3, **endless)
    assert narrow.health().waiting == 2
    queued[0].cancel()
    list(queued[0])
    assert queued[0].result.finish_reason == "cancelled" and queued[0].result.token_ids == []
    again = narrow.stream(PROMPT, max_tokens=1, ignore_eos=True)
    first.cancel()
    queued[1].cancel()
    assert len(list(again)) == 1


def test_cancel_ends_a_stream_early(session):
  stream = session.stream(PROMPT, max_tokens=3000, ignore_eos=True)
  got = [next(stream)]
  stream.cancel()
  got += stream
  assert stream.result.finish_reason == "cancelled"
  assert 1 <= len(stream.result.token_ids) < 3000
  assert "".join(token.text for token in got) == stream.result.text
  stream.cancel()


def test_leaving_the_with_block_cancels(session):
  with session.stream(PROMPT, max_tokens=3000, ignore_eos=True) as stream:
    next(stream)
  assert stream.result.finish_reason == "cancelled"
  assert list(stream) == []
  assert session.generate(PROMPT, max_tokens=2, ignore_eos=True).finish_reason == "length"


def test_cancel_from_another_thread(session):
  stream = session.stream(PROMPT, max_tokens=3000, speculate="off", ignore_eos=True)
  threading.Timer(0.1, stream.cancel).start()
  list(stream)
  assert stream.result.finish_reason == "cancelled"


@pytest.mark.parametrize("streaming", [False, True])
def test_ctrl_c_cancels(streaming):
  work = "for token in session.stream(**options): pass" if streaming else "session.generate(**options)"
  program = ("from pyclient import Session\n"
             "session = Session(threads=1)\n"
             f"options = dict(prompt={PROMPT!r}, max_tokens=3500, speculate='off', ignore_eos=True)\n"
             "print('started', flush=True)\n"
             "try:\n"
             f"  {work}\n"
             "  print('ran to its end')\n"
             "except KeyboardInterrupt:\n"
             "  print(session.generate('x', max_tokens=2, ignore_eos=True).finish_reason)\n"
             "  raise\n")
  with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                        env=clean_environment(), restore_signals=True) as process:
    assert process.stdout.readline() == "started\n"
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    sent = time.monotonic()
    out, err = process.communicate(timeout=120)
    assert time.monotonic() - sent < 5
  assert process.returncode in (130, -signal.SIGINT), err
  assert out == "length\n" and "KeyboardInterrupt" in err


def test_other_threads_run_while_the_engine_works(session):
  """One call of the library that lasts: were the GIL held, the ticker could not tick inside it."""
  ids = (session.tokenize("x = 1\n") * 2000)[:2000]
  ticks, stop = [], threading.Event()

  def tick():
    while not stop.wait(0.001):
      ticks.append(time.monotonic())

  ticker = threading.Thread(target=tick)
  ticker.start()
  try:
    start = time.monotonic()
    session.score(ids)
    end = time.monotonic()
  finally:
    stop.set()
    ticker.join()
  middle = [t for t in ticks if start + 0.1 * (end - start) < t < end - 0.1 * (end - start)]
  assert len(middle) >= min(10, (end - start) / 0.02)
