"""kdtree-engine from Python: `Session` loads a checkpoint and generates, over the C ABI of kdtree.h.

    from pyclient import Session

    with Session() as session:                      # the bundled model and its drafter
        print(session.generate("def add(a, b):\\n", max_tokens=64).text)

Names are loaded when they are first used, so that the launcher of kdtree-run loads no library.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
  from ._errors import (BadCheckpoint, Cancelled, ContextLength, EngineFailed, InternalError, InvalidArgument,
                        KdtreeError, OutOfMemory, ReadFailed, SessionClosed, Unsupported)
  from .result import Result, Token
  from .session import GenerateOptions, Session
  from .stream import Stream

_HOMES = {
  "Session": "session", "GenerateOptions": "session", "Stream": "stream", "Result": "result", "Token": "result",
  "KdtreeError": "_errors", "InvalidArgument": "_errors", "BadCheckpoint": "_errors", "ReadFailed": "_errors",
  "ContextLength": "_errors", "Unsupported": "_errors", "Cancelled": "_errors", "OutOfMemory": "_errors",
  "EngineFailed": "_errors", "InternalError": "_errors", "SessionClosed": "_errors",
}

__all__ = [
  "BadCheckpoint", "Cancelled", "ContextLength", "EngineFailed", "GenerateOptions", "InternalError", "InvalidArgument",
  "KdtreeError", "OutOfMemory", "ReadFailed", "Result", "Session", "SessionClosed", "Stream", "Token", "Unsupported",
]


def __getattr__(name: str) -> Any:
  home = _HOMES.get(name)
  if home is None:
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
  value = getattr(importlib.import_module(f".{home}", __name__), name)
  globals()[name] = value
  return value


def __dir__() -> list[str]:
  return sorted({*globals(), *__all__})
