"""A kdt_engine shared by threads."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn, TypeVar

from . import _owner
from ._errors import SessionClosed
from ._ffi import Api

T = TypeVar("T")

_POLL_S = 0.005   # how often closing looks whether the calls of other threads are over; an interrupt can spoil no look


class Engine:
  """A kdt_engine that is destroyed once it is closed and no call is inside it. Thread-safe.

  A call is inside while its frame holds a reference to the slot. Nothing is counted: an interrupt has no count to leave
  behind, wherever it comes.

  A forked child has the memory and none of the threads: there every call is an error and closing does nothing.
  """

  def __init__(self, api: Api, options: Any) -> None:
    self._process = os.getpid()
    self._freed: list[bool] = []
    """Not empty once the engine is destroyed."""
    memory = _owner.at_end(api, api.ffi.new("kdt_engine *[1]"), self._freed.append, [True])   # after its slot's end
    self._slot: Any = _owner.slot(api, "kdt_engine", api.lib.kdt_engine_destroy, memory)
    api.check(api.lib.kdt_engine_create(options, self._slot))
    self._handle = self._slot[0]

  def call(self, function: Callable[..., T], *arguments: Any) -> T:
    """function(engine, *arguments). The engine lives until that is over, whoever closes it meanwhile."""
    if self._process != os.getpid():
      raise SessionClosed("session: of another process: expected one opened after the fork")
    # The slot is held by the stack of this frame and not by a variable, which the traceback of an exception would keep.
    return (self._slot or _closed(), function(self._handle, *arguments))[1]

  def close(self) -> None:
    """Waits until no call is inside, but for one of this thread: that one destroys the engine when it is over."""
    if self._process != os.getpid():
      return
    self._slot = None
    if not self._interrupts_a_call():
      while not self._freed:
        time.sleep(_POLL_S)

  def _interrupts_a_call(self) -> bool:
    """Whether a call of this thread is not over: a signal handler runs between its steps."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
      if frame.f_code is Engine.call.__code__ and frame.f_locals["self"] is self:
        return True
      frame = frame.f_back
    return False


def _closed() -> NoReturn:
  raise SessionClosed("session: closed: expected an open one")
