"""pyclient.Session at the borders of its settings: the smallest engine, many threads, a full context, whole pages."""

import pytest

from conftest import golden
from pyclient import ContextLength, InvalidArgument, Session

PROMPT = "def add(a, b):\n"
CONTEXT = 4096


def test_the_smallest_engine_gives_the_same_text(session):
  wanted = session.generate(PROMPT, max_tokens=40, ignore_eos=True, speculate="off").token_ids
  with Session(max_context=64, max_budget=1, prefill_chunk=1, max_streams=1, max_waiting=1, kv_tokens=64,
               threads=1) as small:
    for speculate in ("off", "chain", "tree", "auto"):
      budget = {} if speculate in ("off", "auto") else {"budget": 1}
      got = small.generate(PROMPT, max_tokens=40, ignore_eos=True, speculate=speculate, **budget)
      assert got.token_ids == wanted, speculate
    n_left = 64 - len(small.tokenize(PROMPT))
    assert len(small.generate(PROMPT, max_tokens=n_left, ignore_eos=True).token_ids) == n_left
    with pytest.raises(ContextLength):
      small.generate(PROMPT, max_tokens=n_left + 1)
    with pytest.raises(InvalidArgument, match="budget"):
      small.generate(PROMPT, max_tokens=4, speculate="tree", budget=2)


def test_more_threads_than_any_machine_has(session):
  wanted = session.generate(PROMPT, max_tokens=4, ignore_eos=True).token_ids
  with Session(threads=256) as wide, Session(threads=1) as narrow:
    assert wide.info()["threads"] == 256
    assert wide.generate(PROMPT, max_tokens=4, ignore_eos=True).token_ids == wanted
    assert narrow.generate(PROMPT, max_tokens=4, ignore_eos=True).token_ids == wanted


def test_a_prompt_that_fills_the_context(session):
  ids = (session.tokenize(golden("golden.json")["code"]["prompt"]) * CONTEXT)[:CONTEXT]
  whole = session.generate(ids[:-1], max_tokens=1, ignore_eos=True)
  assert (whole.prompt_tokens, len(whole.token_ids), whole.finish_reason) == (CONTEXT - 1, 1, "length")
  # With the prefix cache, and in another mode: a draft has no place to go.
  for speculate in ("chain", "tree", "auto"):
    again = session.generate(ids[:-1], max_tokens=1, ignore_eos=True, speculate=speculate)
    assert again.token_ids == whole.token_ids and again.cached_tokens > 0
  with pytest.raises(ContextLength, match=str(CONTEXT)):
    session.generate(ids, max_tokens=1)
  scored = session.generate(ids, max_tokens=0, prompt_logprobs=0)
  assert len(scored.prompt_logprobs) == CONTEXT and scored.token_ids == []
  nearly = session.generate(ids[:-20], max_tokens=20, ignore_eos=True, speculate="tree", budget=64)
  assert nearly.token_ids == session.generate(ids[:-20], max_tokens=20, ignore_eos=True, speculate="off").token_ids


@pytest.mark.parametrize("n_prompt", [63, 64, 65, 127, 128, 129])
def test_a_cached_prompt_around_a_page_border(session, n_prompt):
  ids = (session.tokenize(golden("golden.json")["code"]["prompt"]) * 4)[3:3 + n_prompt]
  settings = {"max_tokens": 12, "ignore_eos": True, "logprobs": 3, "temperature": 0.7, "seed": 5}
  session.reset_prefix_cache()
  cold, hit = (session.generate(ids, **settings) for _ in range(2))
  # The last token's logits have to be computed: its page is never taken whole.
  assert cold.cached_tokens == 0 and hit.cached_tokens == (n_prompt - 1) // 64 * 64
  assert (hit.token_ids, hit.logprobs, hit.top_logprobs) == (cold.token_ids, cold.logprobs, cold.top_logprobs)
