"""A running generation as an asynchronous iterator of tokens. No thread waits for it: the event loop watches its
descriptor."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from ._generation import Generation
from .result import Result, Token


class AsyncStream(AsyncIterator[Token]):
  """The tokens of one generation, as they come; made by `Session.astream`.

  The texts of all tokens, joined, are the result's text. A task that is cancelled while it waits for a token cancels
  the generation, and so does leaving `async with`, which then waits for the end. One that is dropped unfinished is
  cancelled too. For one task at a time, in any event loop that has add_reader.
  """

  def __init__(self, generation: Generation) -> None:
    self._generation = generation
    self._waiting = False

  def __aiter__(self) -> AsyncStream:
    return self

  async def __anext__(self) -> Token:
    """Waits for the next token. EngineFailed when the engine failed."""
    generation = self._generation
    while not generation.ready and generation.result is None:
      await self._take()
    if generation.ready:
      return generation.ready.popleft()
    generation.raise_failure()
    raise StopAsyncIteration

  async def __aenter__(self) -> AsyncStream:
    return self

  async def __aexit__(self, *exception: object) -> None:
    """Cancels and waits for the end, which comes within one round; the result is there afterwards."""
    await self.aclose()

  async def aclose(self) -> None:
    """What leaving `async with` does."""
    self.cancel()
    await self._drain()

  async def finish(self) -> Result:
    """Reads the stream to its end. EngineFailed when the engine failed."""
    await self._drain()
    self._generation.raise_failure()
    return self.result

  def cancel(self) -> None:
    """Asks the generation to stop; it ends with finish reason "cancelled" within one round. Harmless after the end."""
    self._generation.cancel()

  @property
  def result(self) -> Result:
    """The result; RuntimeError before the stream has ended."""
    return self._generation.finished()

  async def _drain(self) -> None:
    while self._generation.result is None:
      await self._take()
      self._generation.ready.clear()
    self._generation.ready.clear()

  async def _take(self) -> None:
    """Takes what events there are, after waiting for the first."""
    if self._waiting:
      raise RuntimeError("stream: another task waits for it: expected one at a time")
    self._waiting = True
    try:
      if self._generation.take(0):
        # A model that is faster than its reader must not keep the loop from other work.
        await asyncio.sleep(0)
      else:
        await self._readable()
        self._generation.take(0)
    except BaseException:
      self.cancel()
      raise
    finally:
      self._waiting = False

  async def _readable(self) -> None:
    loop = asyncio.get_running_loop()
    readable: asyncio.Future[None] = loop.create_future()
    descriptor = self._generation.descriptor()
    loop.add_reader(descriptor, _wake, readable)
    try:
      await readable
    finally:
      loop.remove_reader(descriptor)


def _wake(future: asyncio.Future[None]) -> None:
  if not future.done():
    future.set_result(None)


async def finish_concurrently(generations: Sequence[Generation]) -> list[Result]:
  """Reads all of them to their ends. On an exception, cancellation included, all are cancelled."""
  try:
    return await asyncio.gather(*(AsyncStream(generation).finish() for generation in generations))
  except BaseException:
    for generation in generations:
      generation.cancel()
    raise
