"""Speculation, threads and chunks change no token and no bit: the same ids in every mode, budget and setting."""

import functools
import itertools

import numpy as np
import pytest

from conftest import FULL, golden, matrix
from pyclient import Session

PROMPTS = golden("eval_prompts.json")
N_TOKENS = 128 if FULL else 64
BUDGETS = (1, 2, 3, 7, 8, 16, 32, 64, 256)
SAMPLINGS = {
  "greedy": {},
  "T0.8": {"temperature": 0.8, "seed": 0x123456789ABCDEF},
  "T1-cut": {"temperature": 1.0, "seed": 42, "top_k": 60, "top_p": 0.95, "min_p": 0.01},
}
MODES = {
  "auto": {"speculate": "auto"},
  "chain": {"speculate": "chain"},
  "chain3": {"speculate": "chain", "budget": 3},
  "plain-ranking": {"speculate": "tree", "budget": 16, "ranking": "plain"},
  **{f"tree{b}{'-spine' * spine}": {"speculate": "tree", "budget": b, "spine": spine}
     for b in BUDGETS for spine in (False, True)},
}
CASES = matrix(itertools.product(range(len(PROMPTS)), SAMPLINGS, MODES))


@functools.cache
def without_speculation(session, prompt, sampling):
  return generate(session, prompt, sampling, {"speculate": "off"})


def generate(session, prompt, sampling, mode, n=N_TOKENS):
  result = session.generate(PROMPTS[prompt]["ids"], max_tokens=n, ignore_eos=True, **SAMPLINGS[sampling], **mode)
  assert len(result.token_ids) == n
  return result.token_ids


@pytest.mark.parametrize("prompt, sampling, mode", CASES)
def test_every_mode_yields_the_same_tokens(session, prompt, sampling, mode):
  assert generate(session, prompt, sampling, MODES[mode]) == without_speculation(session, prompt, sampling)


def test_every_mode_is_in_the_short_run():
  assert {mode for _, _, mode in CASES} == set(MODES)
  assert {sampling for _, sampling, _ in CASES} == set(SAMPLINGS)


def test_seeds_matter(session):
  """So that the matrix above compares texts that could differ."""
  texts = {tuple(session.generate(PROMPTS[0]["ids"], max_tokens=16, temperature=1.0, seed=seed).token_ids)
           for seed in range(4)}
  assert len(texts) == 4


def test_stop_tokens_end_the_same_text(session):
  chat = [p for p in PROMPTS if p["kind"] == "chat"]
  for prompt in chat if FULL else chat[:3]:
    results = [session.generate(prompt["ids"], max_tokens=200, **MODES[mode]) for mode in ("auto", "chain", "tree64")]
    results.append(session.generate(prompt["ids"], max_tokens=200, speculate="off"))
    assert len({(tuple(r.token_ids), r.text, r.finish_reason) for r in results}) == 1


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 8, 9])
def test_short_outputs_are_prefixes(session, max_tokens):
  for sampling in SAMPLINGS:
    whole = without_speculation(session, 0, sampling)
    for mode in ("auto", "chain", "tree64"):
      assert generate(session, 0, sampling, MODES[mode], max_tokens) == whole[:max_tokens]


# ------------------------------------------------------------------------------------------------ threads and chunks

LONG_IDS = sum((p["ids"] for p in PROMPTS[:4]), [])[:550]
SHORT_IDS = PROMPTS[13]["ids"]


def outputs(session, ids):
  """Ids of a few settings, and the logits of every position."""
  runs = [session.generate(ids, max_tokens=48, ignore_eos=True, **SAMPLINGS[sampling], **MODES[mode]).token_ids
          for sampling, mode in zip(SAMPLINGS, ("tree16", "tree64-spine", "auto"), strict=True)]
  return runs, session.score(ids)


@pytest.fixture(scope="module")
def expected(session):
  return {len(ids): outputs(session, ids) for ids in (SHORT_IDS, LONG_IDS)}


@pytest.mark.parametrize("options", [
  {"threads": 1}, {"threads": 2}, {"threads": 3}, {"prefill_chunk": 7}, {"prefill_chunk": 64}, {"prefill_chunk": 100},
  {"prefill_chunk": 512}, {"prefill_chunk": 1, "threads": 3},
], ids=str)
def test_threads_and_chunks_change_no_bit(expected, options):
  with Session(**options) as session:
    for ids in (SHORT_IDS,) if options.get("prefill_chunk") == 1 else (SHORT_IDS, LONG_IDS):
      runs, logits = outputs(session, ids)
      assert runs == expected[len(ids)][0]
      assert np.array_equal(logits, expected[len(ids)][1])


def test_scores_are_what_decoding_sees(session):
  """The greedy tokens are the argmax of the logits of the whole text, scored in one go."""
  ids = PROMPTS[6]["ids"]
  tokens = without_speculation(session, 6, "greedy")
  logits = session.score(ids + tokens)
  assert logits[len(ids) - 1:-1].argmax(1).tolist() == tokens


def test_requests_before_leave_no_trace(session):
  """Pages and scratch of another request are reused as they are."""
  before = generate(session, 2, "T0.8", MODES["tree16"])
  session.generate(LONG_IDS, max_tokens=40, temperature=1.5, seed=1, speculate="tree", budget=256)
  assert generate(session, 2, "T0.8", MODES["tree16"]) == before
