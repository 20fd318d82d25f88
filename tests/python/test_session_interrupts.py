"""pyclient.Session under exceptions of signal handlers (Ctrl-C): wherever one comes, nothing is left behind.

Python checks for signals between its instructions. A trace function raises before each of them in turn, which misses
none; a timer then does the same from outside, as Ctrl-C would.
"""

import gc
import itertools
import pathlib
import random
import signal
import sys
import threading
import time

import pytest

import pyclient
from pyclient import Session

PACKAGE = pathlib.Path(pyclient.__file__).parent
# Where handles are held; the others make values alone.
TRACED = {str(PACKAGE / name) for name in ("_engine.py", "_generation.py", "_owner.py", "session.py", "stream.py")}
ENDLESS = {"max_tokens": 4000, "ignore_eos": True, "speculate": "off"}


class Interrupt(BaseException):
  pass


def interrupted_everywhere(work):
  """Calls work() with an Interrupt before each instruction in turn; yields that exception, which nothing else holds."""
  assert sys.gettrace() is None
  for before in itertools.count():
    left = before

    def trace(frame, event, _):
      nonlocal left
      if frame.f_code.co_filename not in TRACED:
        return None
      frame.f_trace_opcodes = True
      if event == "opcode":
        left -= 1
        if left < 0:
          sys.settrace(None)
          raise Interrupt
      return trace

    sys.settrace(trace)
    try:
      work()
      return
    except Interrupt as interrupt:
      raised = [interrupt]
    finally:
      sys.settrace(None)
    yield raised.pop()


def wait_until(condition, seconds=30):
  end = time.monotonic() + seconds
  while not condition():
    assert time.monotonic() < end
    time.sleep(0.005)


def close_in_time(session):
  """Closing waits for calls: one that an interrupt left counted would be waited for without end."""
  closing = threading.Thread(target=session.close, daemon=True)
  closing.start()
  closing.join(60)
  assert not closing.is_alive()


@pytest.fixture
def counted(monkeypatch):
  """The handles of requests that were submitted and not destroyed."""
  alive = set()
  opened = Session(threads=1, max_context=512)
  lib, number = opened._api.lib, lambda handle: int(opened._api.ffi.cast("intptr_t", handle))
  submit, destroy = lib.kdt_request_submit, lib.kdt_request_destroy

  def counting_submit(engine, options, out):
    status = submit(engine, options, out)
    if out[0]:
      alive.add(number(out[0]))
    return status

  def counting_destroy(handle):
    alive.discard(number(handle))
    destroy(handle)

  monkeypatch.setitem(vars(lib), "kdt_request_submit", counting_submit)
  monkeypatch.setitem(vars(lib), "kdt_request_destroy", counting_destroy)
  yield opened, alive
  opened.close()


def test_no_interrupt_leaves_a_generation(counted):
  opened, alive = counted
  streams = []
  n_interrupts, n_submitted = 0, 0
  for _ in interrupted_everywhere(lambda: streams.append(opened.stream([1, 2, 3], max_tokens=1))):
    n_interrupts += 1
    n_submitted += len(alive)
    _ = None
    assert not streams
    assert not alive, n_interrupts
  assert n_interrupts > 100 and n_submitted > 10
  assert len(alive) == len(streams) == 1


def test_an_interrupted_generation_is_cancelled_while_its_exception_is_held():
  """As in `except KeyboardInterrupt`, and in an interactive Python, which keeps the last traceback."""
  with Session(threads=1) as opened:
    submit = opened._api.lib.kdt_request_submit

    def interrupted_submit(*arguments):
      submit(*arguments)
      raise Interrupt

    with pytest.MonkeyPatch.context() as patch:
      patch.setitem(vars(opened._api.lib), "kdt_request_submit", interrupted_submit)
      for call in (lambda: opened.generate([1], **ENDLESS), lambda: opened.stream([1], **ENDLESS),
                   lambda: opened.astream([1], **ENDLESS), lambda: opened.generate([1], n=2, **ENDLESS),
                   lambda: opened.chat([{"role": "user", "content": "x"}], **ENDLESS)):
        with pytest.raises(Interrupt) as caught:
          call()
        wait_until(lambda: not opened.health().running and not opened.health().waiting)
        assert caught.value.__traceback__


def test_a_stream_whose_last_event_an_interrupt_took_ends():
  with Session(threads=1) as opened:
    lib = opened._api.lib
    next_events, interrupts = lib.kdt_request_next, iter([True])

    def interrupted_next(request, events, capacity, n, wait_ms):
      status = next_events(request, events, capacity, n, wait_ms)
      if any(events[i].kind == lib.KDT_EVENT_FINISHED for i in range(n[0])) and next(interrupts, False):
        raise Interrupt
      return status

    with pytest.MonkeyPatch.context() as patch:
      patch.setitem(vars(lib), "kdt_request_next", interrupted_next)
      with pytest.raises(Interrupt):
        with opened.stream([1, 2, 3], max_tokens=2, ignore_eos=True) as stream:
          list(stream)
      assert stream.result.finish_reason == "length"


def test_no_interrupt_keeps_a_session_from_closing():
  opened = Session(threads=1)
  kept = []
  for work in (lambda: opened.tokenize("abc"), opened.health, opened.info, lambda: opened.drain(0)):
    n_before = len(kept)
    kept += interrupted_everywhere(work)
    assert len(kept) - n_before > 20
  assert not opened._engine._freed
  close_in_time(opened)
  assert opened._engine._freed
  assert all(interrupt.__traceback__ for interrupt in kept)


def test_an_interrupted_close_can_be_called_again():
  opened = Session(threads=1)
  engine = opened._engine
  for _ in interrupted_everywhere(opened.close):
    pass
  assert engine._freed


def test_an_interrupted_opening_leaves_no_engine(monkeypatch):
  lib = pyclient._ffi.api().lib
  create, destroy = lib.kdt_engine_create, lib.kdt_engine_destroy
  destroyed = []

  def interrupted_create(*arguments):
    create(*arguments)
    raise Interrupt

  def counting_destroy(handle):
    destroyed.append(bool(handle))
    destroy(handle)

  monkeypatch.setitem(vars(lib), "kdt_engine_create", interrupted_create)
  monkeypatch.setitem(vars(lib), "kdt_engine_destroy", counting_destroy)
  with pytest.raises(Interrupt):
    Session(threads=1)
  gc.collect()
  assert destroyed == [True]


def test_interrupts_from_outside_leave_nothing(monkeypatch):
  unraisable = []
  monkeypatch.setattr(sys, "unraisablehook", lambda report: unraisable.append(repr(report.exc_value)))
  rng, armed, n_interrupts = random.Random(5), False, 0

  def handler(*_):
    nonlocal armed
    if armed:
      armed = False
      raise Interrupt

  opened = Session(threads=1)
  before = signal.signal(signal.SIGALRM, handler)
  try:
    end = time.monotonic() + 3
    while time.monotonic() < end:
      try:
        armed = True
        signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-5, 1e-3))
        while True:
          stream = opened.stream([1, 2, 3], **ENDLESS)
          stream.cancel()
          del stream
          opened.tokenize("abc")
      except Interrupt:
        n_interrupts += 1
        stream = None
  finally:
    armed = False
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)
  wait_until(lambda: not opened.health().running and not opened.health().waiting)
  assert n_interrupts > 20 and unraisable == []
  close_in_time(opened)
