"""A kdt_engine shared by threads."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from typing import Any

from . import _ffi
from ._errors import SessionClosed


class Engine:
  """A kdt_engine that is destroyed once no call of another thread is inside it. Thread-safe.

  A forked child has the memory and none of the threads: there every call is an error and closing does nothing.
  """

  def __init__(self, api: _ffi.Api, handle: Any) -> None:
    self._api = api
    self._handle = handle
    self._changed = threading.Condition()
    self._calls = 0
    self._closed = False
    self._destroyed = False
    self._process = os.getpid()

  @contextlib.contextmanager
  def use(self) -> Iterator[Any]:
    if self._process != os.getpid():  # before the lock, which a thread that is not here may hold
      raise SessionClosed("session: of another process: expected one opened after the fork")
    with self._changed:
      if self._closed:
        raise SessionClosed("session: closed: expected an open one")
      self._calls += 1
    try:
      yield self._handle
    finally:
      with self._changed:
        self._calls -= 1
        self._changed.notify_all()

  def close(self) -> None:
    if self._process != os.getpid():
      return
    with self._changed:
      self._closed = True
      self._changed.wait_for(lambda: self._calls == 0)
      if not self._destroyed:
        self._destroyed = True
        self._api.lib.kdt_engine_destroy(self._handle)
