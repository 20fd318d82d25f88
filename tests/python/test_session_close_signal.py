"""pyclient.Session.close() from a signal handler: it never waits for the call it interrupted."""

import subprocess
import sys
import threading

import pytest

from conftest import clean_environment
from pyclient import Session, SessionClosed

PROGRAM = """
import signal, sys
from pyclient import Session, SessionClosed
session = Session(threads=1)
stream = session.stream("a", max_tokens=3000, ignore_eos=True)
next(stream)
signal.signal(signal.SIGALRM, lambda *_: session.close())
signal.setitimer(signal.ITIMER_REAL, 0.15)
try:
  print({work})
except SessionClosed as error:
  print(error)
for _ in stream: pass
try:
  session.health()
except SessionClosed:
  print(stream.result.finish_reason, session._engine._freed)
"""


@pytest.mark.parametrize("work, first_lines", [
  ("session.drain()", ["session: closed: expected an open one"]),
  ("session.score([1] * 400).shape", ["(400, 2048)", "session: closed: expected an open one"]),
  ("session.generate('a', max_tokens=3000, ignore_eos=True).finish_reason", ["cancelled"]),
])
def test_closing_from_a_handler_ends_what_it_interrupted(work, first_lines):
  done = subprocess.run([sys.executable, "-c", PROGRAM.format(work=work)], capture_output=True, text=True,
                        env=clean_environment(), timeout=120)
  assert done.returncode == 0, done.stderr
  first, last = done.stdout.splitlines()
  assert first in first_lines and last == "cancelled [True]"


def test_the_engine_lives_until_the_interrupted_call_is_over():
  opened = Session(threads=1)
  engine = opened._engine

  def interrupted(handle):
    opened.close()
    opened.close()
    assert not engine._freed
    with pytest.raises(SessionClosed):
      opened.health()
    return opened._api.text(opened._api.lib.kdt_engine_info_json(handle))

  assert engine.call(interrupted).startswith("{")
  assert engine._freed


def test_closing_waits_for_calls_of_other_threads():
  opened = Session(threads=1)
  inside, leave = threading.Event(), threading.Event()
  left = []

  def call(_):
    inside.set()
    leave.wait(60)
    left.append(not opened._engine._freed)

  caller = threading.Thread(target=opened._engine.call, args=(call,))
  caller.start()
  assert inside.wait(60)
  closer = threading.Thread(target=opened.close)
  closer.start()
  closer.join(0.1)
  assert closer.is_alive()
  with pytest.raises(SessionClosed):
    opened.tokenize("a")
  leave.set()
  closer.join(60)
  caller.join(60)
  assert not closer.is_alive() and left == [True] and opened._engine._freed
