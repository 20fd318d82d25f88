"""Sampled tokens against a plain statement: the sampling chain and the counter-based noise, on the engine's logits."""

import json

import numpy as np
import pytest

from conftest import FULL, golden
from reference import sampling

PROMPTS = golden("eval_prompts.json")
SETTINGS = [
  {"temperature": 0.7},
  {"temperature": 1.0},
  {"temperature": 0.7, "top_k": 1},
  {"temperature": 0.7, "top_k": 40},
  {"temperature": 1.5, "top_p": 0.8},
  {"temperature": 1.0, "top_p": 1e-6},
  {"temperature": 2.0, "min_p": 0.05},
  {"temperature": 1.2, "top_k": 200, "top_p": 0.9, "min_p": 0.02},
  {"temperature": 100.0, "top_k": 5000},
  {"temperature": 1e-3},
]
NEAR = 1e-5    # of a threshold or of the best two: float32 may decide otherwise there


@pytest.mark.parametrize("setting", SETTINGS, ids=json.dumps)
def test_tokens_are_those_of_the_plain_statement(session, setting):
  """Each token follows from its own prefix's logits, so one score() of the whole text checks all of them."""
  near = total = 0
  for index, seed in enumerate((0, 1, 2**32, 2**64 - 1) if FULL else (1, 2**64 - 1)):
    ids = PROMPTS[5 * index]["ids"]
    tokens = session.generate(ids, max_tokens=64, seed=seed, ignore_eos=True, **setting).token_ids
    logits = session.score(ids + tokens)
    for position in range(len(ids) - 1, len(ids) + len(tokens) - 1):
      want, margin = sampling.sample(logits[position], position, seed=seed, **setting)
      if margin < NEAR:
        near += 1
      else:
        assert tokens[position + 1 - len(ids)] == want, (seed, position)
      total += 1
  assert near <= total // 50


def test_equal_settings_give_equal_text_and_seeds_do_not(session):
  texts = [session.generate("x = ", max_tokens=24, temperature=1.0, seed=seed, ignore_eos=True).token_ids
           for seed in (3, 3, 4, 2**63 + 3)]
  assert texts[0] == texts[1]
  assert len({tuple(t) for t in texts}) == 3


def test_first_tokens_follow_the_law(session):
  """A rough check from outside: the law itself is tested with many draws in tests/unit/test_sampling.cpp."""
  ids = session.tokenize("def ")
  kept, _ = sampling.kept_tokens(session.score(ids)[-1], 1.0, top_k=8)
  z = session.score(ids)[-1][kept].astype(np.float64)
  p = np.exp(z - z.max())
  p /= p.sum()
  n = 2000 if FULL else 400
  draws = [session.generate(ids, max_tokens=1, temperature=1.0, top_k=8, seed=seed, ignore_eos=True).token_ids[0]
           for seed in range(n)]
  observed = np.array([draws.count(token) for token in kept])
  assert observed.sum() == n
  assert (np.abs(observed - n * p) < 5 * np.sqrt(n * p * (1 - p)) + 1).all()
