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
                        KdtreeError, OutOfMemory, QueueFull, ReadFailed, SessionClosed, ShuttingDown, Unsupported)
  from .async_stream import AsyncStream
  from .chat import ChatReply, Part, ReplyReader, ToolCall
  from .options import GenerateOptions, SamplingOptions
  from .result import Health, Result, Token
  from .session import Session
  from .stream import Stream

_HOMES = {
  "Session": "session", "GenerateOptions": "options", "SamplingOptions": "options", "Stream": "stream",
  "AsyncStream": "async_stream", "Result": "result", "Token": "result", "Health": "result", "ChatReply": "chat",
  "Part": "chat", "ReplyReader": "chat", "ToolCall": "chat", "KdtreeError": "_errors", "InvalidArgument": "_errors",
  "BadCheckpoint": "_errors", "ReadFailed": "_errors", "ContextLength": "_errors", "Unsupported": "_errors",
  "Cancelled": "_errors", "OutOfMemory": "_errors", "EngineFailed": "_errors", "InternalError": "_errors",
  "QueueFull": "_errors", "ShuttingDown": "_errors", "SessionClosed": "_errors",
}

__all__ = [
  "AsyncStream", "BadCheckpoint", "Cancelled", "ChatReply", "ContextLength", "EngineFailed", "GenerateOptions",
  "Health", "InternalError", "InvalidArgument", "KdtreeError", "OutOfMemory", "Part", "QueueFull", "ReadFailed",
  "ReplyReader", "Result", "SamplingOptions", "Session", "SessionClosed", "ShuttingDown", "Stream", "Token",
  "ToolCall", "Unsupported",
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
