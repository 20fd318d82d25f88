"""A running generation as an iterator of tokens."""

from __future__ import annotations

import collections
import threading
import weakref
from collections.abc import Iterator
from typing import Any

from ._errors import EngineFailed
from ._ffi import Api
from .result import Result, Token

# How long one wait inside the library lasts at most: Python delivers Ctrl-C between two of them.
_WAIT_SLICE_MS = 100
_EVENTS_PER_CALL = 64


class Stream(Iterator[Token]):
  """The tokens of one generation, as they come; made by `Session.stream`.

  The texts of all tokens, joined, are the result's text. As a context manager it cancels what still runs when it is
  left. Iterating after the end raises StopIteration again; a Stream that is dropped unfinished is cancelled. Any thread
  may call cancel(); threads that iterate the same stream share its tokens.
  """

  def __init__(self, api: Api, request: Any) -> None:
    self._api = api
    self._request = request
    # Not at interpreter exit: a daemon thread may still be waiting on the request then, and closing the engine ends it.
    weakref.finalize(self, api.lib.kdt_request_destroy, request).atexit = False
    self._events = api.ffi.new("kdt_event[]", _EVENTS_PER_CALL)
    self._n_events = api.ffi.new("int64_t *")
    self._lock = threading.Lock()
    self._ready: collections.deque[Token] = collections.deque()
    self._token_ids: list[int] = []
    self._texts: list[str] = []
    self._result: Result | None = None
    self._error: str | None = None

  def __iter__(self) -> Stream:
    return self

  def __next__(self) -> Token:
    """Waits for the next token. EngineFailed when the engine failed; Ctrl-C cancels the generation."""
    with self._lock:
      try:
        while not self._ready and self._result is None:
          self._wait()
      except BaseException:
        self.cancel()
        raise
      if self._ready:
        return self._ready.popleft()
      if self._error is not None:
        error, self._error = self._error, None
        raise EngineFailed(error)
      raise StopIteration

  def __enter__(self) -> Stream:
    return self

  def __exit__(self, *exception: object) -> None:
    """Cancels and waits for the end, which comes within one round; the result is there afterwards."""
    self.cancel()
    with self._lock:
      while self._result is None:
        self._wait()
      self._ready.clear()

  def cancel(self) -> None:
    """Asks the generation to stop; it ends with finish reason "cancelled" within one round. Harmless after the end."""
    self._api.check(self._api.lib.kdt_request_cancel(self._request))

  @property
  def result(self) -> Result:
    """The result; RuntimeError before the stream has ended."""
    if self._result is None:
      raise RuntimeError("result: the stream still runs: expected it to be read to its end, or its `with` left")
    return self._result

  def _wait(self) -> None:
    """Takes what events there are, after waiting one slice for the first."""
    api = self._api
    status = api.lib.kdt_request_next(self._request, self._events, _EVENTS_PER_CALL, self._n_events, _WAIT_SLICE_MS)
    if status == api.lib.KDT_ERR_TIMEOUT:
      return
    api.check(status)
    for i in range(self._n_events[0]):
      event = self._events[i]
      text = api.ffi.buffer(event.text, event.text_bytes)[:].decode("utf-8") if event.text_bytes else ""
      self._texts.append(text)
      if event.kind == api.lib.KDT_EVENT_TOKEN:
        self._token_ids.append(event.token_id)
        self._ready.append(Token(event.token_id, text))
      elif event.kind == api.lib.KDT_EVENT_FINISHED:
        if text:
          self._ready.append(Token(None, text))
        self._finish()

  def _finish(self) -> None:
    api, lib = self._api, self._api.lib
    out = api.ffi.new("kdt_result *")
    out.struct_size = api.ffi.sizeof("kdt_result")
    api.check(lib.kdt_request_result(self._request, out))
    if out.finish_reason == lib.KDT_FINISH_ERROR:
      self._error = api.text(out.error)
    self._result = Result(
      text="".join(self._texts),
      token_ids=self._token_ids,
      prompt_tokens=out.prompt_tokens,
      rounds=out.rounds,
      tokens_per_round=out.tokens_per_round,
      tokens_per_second=out.tokens_per_second,
      first_token_ms=out.first_token_ms,
      accepted_by_depth=[out.accepted_by_depth[i] for i in range(out.n_depths)],
      finish_reason=api.text(lib.kdt_finish_name(out.finish_reason)),
      seed=out.seed,
      timings_ms={api.text(lib.kdt_stage_name(i)): out.timings_ms[i] for i in range(lib.KDT_N_STAGES)})
