"""pyclient.Session: closing, dropping, draining, and programs that do neither."""

import asyncio
import concurrent.futures
import gc
import subprocess
import sys
import time
import weakref

import pytest

import pyclient
from conftest import clean_environment
from pyclient import Session, SessionClosed, ShuttingDown

PROMPT = "def add(a, b):\n"


def test_use_after_close_and_closing_twice():
  with Session(threads=1) as opened:
    stream = opened.stream(PROMPT, max_tokens=4)
    list(stream)
  opened.close()
  for call in (lambda: opened.generate(PROMPT), lambda: opened.tokenize("x"), lambda: opened.detokenize([1]),
               lambda: opened.score([1]), lambda: opened.chat_tokens([]), opened.info, opened.stats,
               lambda: opened.astream(PROMPT), lambda: opened.chat([{"role": "user", "content": "x"}]), opened.drain,
               opened.reply_reader, opened.health, opened.cancel_all, opened.reset_prefix_cache):
    with pytest.raises(SessionClosed, match="closed"):
      call()
  assert stream.result.finish_reason in ("length", "stop")


def test_closing_ends_what_other_threads_wait_for():
  opened = Session(threads=1)
  with concurrent.futures.ThreadPoolExecutor(1) as pool:
    running = opened.stream(PROMPT, max_tokens=3000, speculate="off", ignore_eos=True)
    next(running)
    waiting = pool.submit(lambda: list(running))
    opened.close()
    waiting.result(timeout=60)
  assert running.result.finish_reason == "cancelled"


def test_draining_finishes_what_runs_and_takes_nothing_new():
  with Session(threads=1, max_streams=1) as opened:
    running = opened.stream(PROMPT, max_tokens=400, speculate="off", ignore_eos=True)
    queued = opened.stream(PROMPT, max_tokens=4, ignore_eos=True)
    next(running)
    assert not opened.drain(0.01)
    health = opened.health()
    assert health.draining and not health.failed and health.error == ""
    assert (health.running, health.waiting) == (1, 1)
    for call in (lambda: opened.generate(PROMPT), lambda: opened.score([1]),
                 lambda: asyncio.run(opened.agenerate(PROMPT))):
      with pytest.raises(ShuttingDown, match="expected"):
        call()
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
      read = [pool.submit(list, stream) for stream in (running, queued)]
      assert pool.submit(opened.drain).result(timeout=120)
      assert [len(tokens.result(timeout=60)) for tokens in read] == [399, 4]
    assert running.result.finish_reason == queued.result.finish_reason == "length"
    assert opened.drain(0) and opened.drain()
    assert (opened.health().running, opened.health().waiting) == (0, 0)


def test_cancel_all_ends_running_and_queued():
  with Session(threads=1, max_streams=2) as opened:
    streams = [opened.stream(PROMPT, max_tokens=3000, speculate="off", ignore_eos=True) for _ in range(5)]
    next(streams[0])
    opened.cancel_all()
    for stream in streams:
      list(stream)
      assert stream.result.finish_reason == "cancelled"
    assert not opened.health().draining
    assert opened.generate(PROMPT, max_tokens=2, ignore_eos=True).finish_reason == "length"


def test_dropping_streams_and_sessions_frees_them():
  opened = Session(threads=1)
  engine = weakref.ref(opened._engine)
  stream = opened.stream(PROMPT, max_tokens=3000, speculate="off", ignore_eos=True)
  next(stream)
  del stream
  assert opened.generate(PROMPT, max_tokens=2, ignore_eos=True).finish_reason == "length"
  del opened
  gc.collect()
  assert engine() is None


def test_a_program_that_closes_nothing_ends_well():
  program = ("from pyclient import Session\n"
             "session = Session(threads=1)\n"
             f"stream = session.stream({PROMPT!r}, max_tokens=3000, speculate='off', ignore_eos=True)\n"
             "print(next(stream).id >= 0)\n")
  done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=clean_environment(),
                        timeout=120)
  assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")


def test_a_forked_child_is_told_and_ends_well():
  program = ("import os, sys\n"
             "from pyclient import Session, SessionClosed\n"
             "session = Session(threads=1)\n"
             f"stream = session.stream({PROMPT!r}, max_tokens=300, speculate='off', ignore_eos=True)\n"
             "next(stream)\n"
             "child = os.fork()\n"
             "if not child:\n"
             "  for call in (lambda: session.generate('x'), lambda: list(stream), stream.cancel, session.health):\n"
             "    try: call()\n"
             "    except SessionClosed as error: assert 'another process' in str(error)\n"
             "    else: sys.exit(3)\n"
             "  session.close()\n"
             "  del stream\n"
             "  with Session(threads=1) as own: own.generate('x', max_tokens=2)\n"
             "  sys.exit(0)\n"
             "assert os.waitpid(child, 0)[1] == 0\n"
             "print(len(list(stream)))\n")
  done = subprocess.run([sys.executable, "-W", "ignore::DeprecationWarning", "-c", program], capture_output=True,
                        text=True, env=clean_environment(), timeout=120)
  assert (done.returncode, done.stdout, done.stderr) == (0, "299\n", "")


def test_importing_the_package_loads_no_library():
  program = ("import sys, pyclient, pyclient._launch\n"
             "assert 'cffi' not in sys.modules and 'numpy' not in sys.modules\n"
             "assert set(pyclient.__all__) <= set(dir(pyclient))\n"
             "assert all(hasattr(pyclient, name) for name in pyclient.__all__)\n")
  subprocess.run([sys.executable, "-c", program], check=True, env=clean_environment(), timeout=120)
  with pytest.raises(AttributeError):
    pyclient.nothing
