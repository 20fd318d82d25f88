"""A submitted request: its events become tokens and, at the end, the result. What `Stream` and `AsyncStream` share."""

from __future__ import annotations

import collections
import math
import os
from typing import Any

from . import _owner
from ._errors import EngineFailed, SessionClosed
from ._ffi import Api
from .result import Result, Token

_EVENTS_PER_CALL = 64


class Generation:
  """Owns a kdt_request, from before submit writes it to `slot`. One thread at a time, but for cancel()."""

  def __init__(self, api: Api, *, logprobs: bool, prompt_logprobs: bool) -> None:
    self._api = api
    self._process = os.getpid()
    self.slot = _owner.slot(api, "kdt_request", api.lib.kdt_request_destroy)
    self._events = api.ffi.new("kdt_event[]", _EVENTS_PER_CALL)
    self._n_events = api.ffi.new("int64_t *")
    self._logprobs = logprobs
    self._prompt_logprobs = prompt_logprobs
    self._tokens: list[Token] = []
    self._prompt: list[Token] = []
    self._texts: list[str] = []
    self._error: str | None = None
    self.ready: collections.deque[Token] = collections.deque()
    """Tokens that were not handed out yet."""
    self.result: Result | None = None
    """There once the last event was taken."""

  def take(self, wait_ms: int) -> bool:
    """Takes what events there are, after waiting so long for the first; False: none came."""
    api, lib = self._api, self._api.lib
    self._check_process()
    status = lib.kdt_request_next(self.slot[0], self._events, _EVENTS_PER_CALL, self._n_events, wait_ms)
    if status == lib.KDT_ERR_TIMEOUT:
      return False
    api.check(status)
    if not self._n_events[0]:   # the last event was handed out before, to a call that an interrupt cut short
      self._finish()
    for i in range(self._n_events[0]):
      event = self._events[i]
      text = bytes(api.ffi.buffer(event.text, event.text_bytes)).decode("utf-8") if event.text_bytes else ""
      if event.kind == lib.KDT_EVENT_TOKEN:
        token = self._token(event, text, self._logprobs)
        self._texts.append(text)
        self._tokens.append(token)
        self.ready.append(token)
      elif event.kind == lib.KDT_EVENT_PROMPT_TOKEN:
        self._prompt.append(self._token(event, text, self._prompt_logprobs))
      elif event.kind == lib.KDT_EVENT_FINISHED:
        if text:
          self._texts.append(text)
          self.ready.append(Token(None, text))
        self._finish()
    return True

  def cancel(self) -> None:
    """Nothing to do before it is submitted."""
    self._check_process()
    if self.slot[0]:
      self._api.check(self._api.lib.kdt_request_cancel(self.slot[0]))

  def descriptor(self) -> int:
    """Polls readable while take(0) would find something; closed with the request."""
    fd = self._api.ffi.new("int32_t *")
    self._api.check(self._api.lib.kdt_request_fd(self.slot[0], fd))
    return int(fd[0])

  def raise_failure(self) -> None:
    """EngineFailed, once, when that is how it ended."""
    if self._error is not None:
      error, self._error = self._error, None
      raise EngineFailed(error)

  def finished(self) -> Result:
    if self.result is None:
      raise RuntimeError("result: the stream still runs: expected it to be read to its end, or its `with` left")
    return self.result

  def _check_process(self) -> None:
    if self._process != os.getpid():
      raise SessionClosed("stream: of another process: expected one started after the fork")

  def _token(self, event: Any, text: str, logprobs: bool) -> Token:
    if not logprobs:
      return Token(event.token_id, text)
    top = {event.top_ids[i]: event.top_logprobs[i] for i in range(event.n_top)}
    return Token(event.token_id, text, None if math.isnan(event.logprob) else event.logprob, top)

  def _finish(self) -> None:
    api, lib = self._api, self._api.lib
    out = api.ffi.new("kdt_result *")
    out.struct_size = api.ffi.sizeof("kdt_result")
    api.check(lib.kdt_request_result(self.slot[0], out))
    if out.finish_reason == lib.KDT_FINISH_ERROR:
      self._error = api.text(out.error)
    self.result = Result(
      text="".join(self._texts),
      token_ids=[token.id for token in self._tokens if token.id is not None],
      prompt_tokens=out.prompt_tokens,
      rounds=out.rounds,
      tokens_per_round=out.tokens_per_round,
      tokens_per_second=out.tokens_per_second,
      first_token_ms=out.first_token_ms,
      accepted_by_depth=[out.accepted_by_depth[i] for i in range(out.n_depths)],
      finish_reason=api.text(lib.kdt_finish_name(out.finish_reason)),
      stop_reason=self._stop_reason(out),
      seed=out.seed,
      timings_ms={api.text(lib.kdt_stage_name(i)): out.timings_ms[i] for i in range(lib.KDT_N_STAGES)},
      cached_tokens=out.cached_tokens,
      drafted_rounds=out.drafted_rounds,
      draft_nodes=out.draft_nodes,
      preemptions=out.preemptions,
      queue_ms=out.queue_ms,
      total_ms=out.total_ms,
      logprobs=[_given(token.logprob) for token in self._tokens] if self._logprobs else None,
      top_logprobs=[token.top_logprobs or {} for token in self._tokens] if self._logprobs else None,
      prompt_logprobs=[token.logprob for token in self._prompt] if self._prompt_logprobs else None,
      prompt_top_logprobs=[token.top_logprobs or {} for token in self._prompt] if self._prompt_logprobs else None)

  def _stop_reason(self, out: Any) -> int | str | None:
    api, lib = self._api, self._api.lib
    if out.finish_reason == lib.KDT_FINISH_CANCELLED:   # the message is there when the timeout did it
      return "timeout" if api.text(out.error) else None
    return api.text(out.stop_string) or (out.stop_token if out.stop_token >= 0 else None)


def _given(logprob: float | None) -> float:
  return math.nan if logprob is None else logprob
