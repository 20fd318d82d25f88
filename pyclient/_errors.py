"""The exceptions of pyclient: one class for each kind of failure of the library, with its message."""

from __future__ import annotations


class KdtreeError(Exception):
  """Base of all. The text reads `<field or file>: <value>: expected <what>`."""


class InvalidArgument(KdtreeError, ValueError):
  """A setting or an input is out of its range."""


class ContextLength(KdtreeError, ValueError):
  """Prompt + max_tokens do not fit the context."""


class BadCheckpoint(KdtreeError):
  """A file of the checkpoint is malformed or does not fit its config."""


class ReadFailed(KdtreeError, OSError):
  """A file could not be opened or read."""


class OutOfMemory(KdtreeError, MemoryError):
  """The engine could not get the memory it needs."""


class Unsupported(KdtreeError):
  """Well-formed, but not implemented by this engine."""


class Cancelled(KdtreeError):
  """The work was cancelled, for example because another thread closed the session."""


class EngineFailed(KdtreeError):
  """The engine hit an error of its own and takes no more requests."""


class QueueFull(KdtreeError):
  """As many requests wait as may (`Session(max_waiting=...)`); try again later."""


class ShuttingDown(KdtreeError):
  """The session drains: it finishes what it has and takes nothing new."""


class InternalError(KdtreeError):
  """A fault of the library itself."""


class SessionClosed(KdtreeError, RuntimeError):
  """The session was used after close(), or in a forked child of the process that opened it."""


# kdt_status by the name that kdt_status_name gives it.
BY_STATUS_NAME: dict[str, type[KdtreeError]] = {
  "KDT_ERR_INVALID_ARGUMENT": InvalidArgument,
  "KDT_ERR_BAD_FILE": BadCheckpoint,
  "KDT_ERR_IO": ReadFailed,
  "KDT_ERR_OUT_OF_MEMORY": OutOfMemory,
  "KDT_ERR_CONTEXT_LENGTH": ContextLength,
  "KDT_ERR_UNSUPPORTED": Unsupported,
  "KDT_ERR_CANCELLED": Cancelled,
  "KDT_ERR_ENGINE_FAILED": EngineFailed,
  "KDT_ERR_INTERNAL": InternalError,
  "KDT_ERR_QUEUE_FULL": QueueFull,
  "KDT_ERR_SHUTTING_DOWN": ShuttingDown,
}
