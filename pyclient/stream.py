"""A running generation as an iterator of tokens."""

from __future__ import annotations

import select
import threading
from collections.abc import Iterator, Sequence

from ._generation import Generation
from .result import Result, Token

# How long one wait inside the library lasts at most: Python delivers Ctrl-C between two of them.
_WAIT_SLICE_MS = 100


class Stream(Iterator[Token]):
  """The tokens of one generation, as they come; made by `Session.stream`.

  The texts of all tokens, joined, are the result's text. As a context manager it cancels what still runs when it is
  left. Iterating after the end raises StopIteration again; a Stream that is dropped unfinished is cancelled. Any thread
  may call cancel(); threads that iterate the same stream share its tokens.
  """

  def __init__(self, generation: Generation) -> None:
    self._generation = generation
    self._lock = threading.Lock()

  def __iter__(self) -> Stream:
    return self

  def __next__(self) -> Token:
    """Waits for the next token. EngineFailed when the engine failed; Ctrl-C cancels the generation."""
    generation = self._generation
    with self._lock:
      try:
        while not generation.ready and generation.result is None:
          generation.take(_WAIT_SLICE_MS)
      except BaseException:
        self.cancel()
        raise
      if generation.ready:
        return generation.ready.popleft()
      generation.raise_failure()
      raise StopIteration

  def __enter__(self) -> Stream:
    return self

  def __exit__(self, *exception: object) -> None:
    """Cancels and waits for the end, which comes within one round; the result is there afterwards."""
    self.cancel()
    with self._lock:
      while self._generation.result is None:
        self._generation.take(_WAIT_SLICE_MS)
      self._generation.ready.clear()

  def cancel(self) -> None:
    """Asks the generation to stop; it ends with finish reason "cancelled" within one round. Harmless after the end."""
    self._generation.cancel()

  def close(self) -> None:
    """What leaving `with` does, for contextlib.closing and the like. Harmless after the end."""
    self.__exit__()

  @property
  def result(self) -> Result:
    """The result; RuntimeError before the stream has ended."""
    return self._generation.finished()


def finish_together(generations: Sequence[Generation]) -> list[Result]:
  """Reads all of them to their ends, each as its tokens come: none waits for another to be read. On an exception,
  Ctrl-C included, all are cancelled."""
  try:
    running = {generation.descriptor(): generation for generation in generations}
    poller = select.poll()
    for descriptor in running:
      poller.register(descriptor, select.POLLIN)
    while running:
      for descriptor, _ in poller.poll():
        running[descriptor].take(0)
        if running[descriptor].result is not None:
          poller.unregister(descriptor)
          del running[descriptor]
    for generation in generations:
      generation.raise_failure()
  except BaseException:
    for generation in generations:
      generation.cancel()
    raise
  return [generation.finished() for generation in generations]
