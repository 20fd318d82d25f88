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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
  """A finished generation; the same fields and meanings as the JSON of `kdtree-run generate --json`."""

  schema_version: int = 1
  text: str
  """The generated text, without the stop token."""
  token_ids: list[int]
  """The generated ids, without the stop token."""
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
  """"stop", "length", "cancelled" or "error"."""
  seed: int
  """The seed given, or the one that was drawn."""
  timings_ms: dict[str, float]
  """Milliseconds by stage: prefill, draft, build, verify, sample, accept, commit, emit."""

  def to_json(self) -> str:
    """One JSON object on one line."""
    return json.dumps(dataclasses.asdict(self), ensure_ascii=False, separators=(",", ":"))
