"""What a generation yields: `Token` while it runs, `Result` at its end."""

from __future__ import annotations

import dataclasses
import json
from typing import NamedTuple


class Token(NamedTuple):
  """One step of a stream."""

  id: int | None
  """The token's id. None for text that was still held back at the end: an incomplete character, as U+FFFD."""
  text: str
  """The characters that became complete with this token; "" while one is incomplete."""
  logprob: float | None = None
  """The token's log-probability under the model's own distribution: before temperature, penalties and bias. None unless
  logprobs were asked for."""
  top_logprobs: dict[int, float] | None = None
  """The most probable tokens here and their log-probabilities, best first. None alike."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
  """A finished generation; the fields of the JSON of `kdtree-run generate --json` mean the same here."""

  schema_version: int = 1
  text: str
  """The generated text, without the stop token or stop string."""
  token_ids: list[int]
  """The generated ids, without the stop token and those of the stop string."""
  prompt_tokens: int
  rounds: int
  """Decode rounds; prefill is none."""
  tokens_per_round: float
  """Committed tokens per round: the bonus token counted, prefill's token not."""
  tokens_per_second: float
  """Of decoding alone."""
  first_token_ms: float
  """Milliseconds from submit to the first token."""
  accepted_by_depth: list[int]
  """i-th: rounds that accepted depth i + 1 of the draft."""
  finish_reason: str
  """"stop", "length", "cancelled" (stop_reason tells by what) or "error"."""
  stop_reason: int | str | None
  """With finish_reason "stop" the token id or the stop string that ended the text; with "cancelled" the string "timeout"
  when `timeout` ended it; else None."""
  seed: int
  """The seed given, or the one that was drawn."""
  timings_ms: dict[str, float]
  """Milliseconds by stage: prefill, draft, build, verify, sample, accept, commit, emit."""
  cached_tokens: int
  """Prompt tokens whose KV came from the prefix cache."""
  drafted_rounds: int
  """Rounds that verified draft nodes."""
  draft_nodes: int
  """Draft nodes verified in all."""
  preemptions: int
  """Times its pages were taken and recomputed; changes no token."""
  queue_ms: float
  """Milliseconds from submit until it was first admitted."""
  total_ms: float
  """Milliseconds from submit to the end."""
  logprobs: list[float] | None = None
  """By token of token_ids; None unless asked for, like the lists below."""
  top_logprobs: list[dict[int, float]] | None = None
  """By token of token_ids: the most probable tokens, best first."""
  prompt_logprobs: list[float | None] | None = None
  """By token of the prompt; the first has none."""
  prompt_top_logprobs: list[dict[int, float]] | None = None

  def to_json(self) -> str:
    """One JSON object on one line."""
    return json.dumps(dataclasses.asdict(self), ensure_ascii=False, separators=(",", ":"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Health:
  """How a session's engine is."""

  failed: bool
  """The engine hit an error of its own; every request ended with it."""
  draining: bool
  """`Session.drain` was called."""
  running: int
  """Generations that hold KV pages."""
  waiting: int
  seconds_since_round: float
  """Since pending work last moved on; 0 when nothing is pending."""
  error: str
  """Of a failed engine, else ""."""
