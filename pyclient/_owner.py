"""What a C handle belongs to: memory that the library writes it into and that destroys it once it is let go.

An exception of a signal handler (Ctrl-C) can come between any two steps of Python code. So none stands between the
library's writing of a handle and its having an owner, and none runs at its end, where weakref.finalize and __del__
could be cut short and swallow the exception: what is called then is made of C functions alone.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable, Iterable
from typing import Any

from ._ffi import Api

# Of the handles this process made. A forked child empties the list, which keeps it from destroying those of its parent
# (nobody would ever let go of their locks), and begins another.
_ours = [True]


def slot(api: Api, kind: str, destroy: Callable[[Any], None], memory: Any = None) -> Any:
  """A `kind *[1]` for an `out` parameter, NULL at first; its end destroys the handle in it. `memory`: such a one."""
  bare = api.ffi.new(f"{kind} *[1]") if memory is None else memory
  # compress() reads the handle, and whether it is still ours, when map() is asked for its first and only call.
  return at_end(api, bare, destroy, itertools.compress(bare, _ours))


def at_end(api: Api, memory: Any, function: Callable[[Any], None], arguments: Iterable[Any]) -> Any:
  """`memory`, at whose end `function` is called with the first of `arguments`, if there is one then."""
  # next(calls, memory): what cffi passes on is the default that next() returns when there is no call.
  return api.ffi.gc(memory, functools.partial(next, map(function, arguments)))


def _forked() -> None:
  global _ours
  _ours.clear()
  _ours = [True]


os.register_at_fork(after_in_child=_forked)
