"""Tokens per round on the evaluation prompts against the reference implementation's (tests/golden/README.md)."""

import functools

import pytest

from conftest import FULL, golden

PROMPTS = golden("eval_prompts.json")
EXPECTED = golden("acceptance.json")
KINDS = ["code", "prose", "chat", "all"]


def options(method):
  if method == "chain":
    return {"speculate": "chain"}
  return {"speculate": "tree", "budget": int(method.removeprefix("ddtree"))}


@functools.cache
def committed_and_rounds(session, method):
  """By kind and in all: [tokens committed by rounds, rounds]."""
  sums = {kind: [0, 0] for kind in KINDS}
  for prompt in PROMPTS:
    result = session.generate(prompt["ids"], max_tokens=96, **options(method))
    for kind in (prompt["kind"], "all"):
      sums[kind][0] += round(result.tokens_per_round * result.rounds)
      sums[kind][1] += result.rounds
  return sums


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", list(EXPECTED) if FULL else ["chain", "ddtree16"])
def test_tokens_per_round(session, method, kind):
  committed, rounds = committed_and_rounds(session, method)[kind]
  assert committed / rounds == pytest.approx(EXPECTED[method][kind], rel=0.03)


def test_depths_add_up(session):
  """A round commits one token for every depth it accepted, and the bonus token; none past max_tokens."""
  for prompt in PROMPTS[::5]:
    for mode in ("chain", "tree", "auto"):
      for max_tokens in (2, 3, 64):
        result = session.generate(prompt["ids"], max_tokens=max_tokens, ignore_eos=True, speculate=mode)
        committed = round(result.tokens_per_round * result.rounds)
        assert committed == result.rounds + sum(result.accepted_by_depth) == max_tokens - 1
        assert len(result.accepted_by_depth) <= 7
        assert mode == "auto" or result.drafted_rounds >= result.rounds - 1


def test_auto_knows_what_its_drafts_bring(session):
  before = session.stats()
  drafts = nodes = 0
  for prompt in PROMPTS:
    result = session.generate(prompt["ids"], max_tokens=96, ignore_eos=True, speculate="auto")
    assert result.drafted_rounds <= result.draft_nodes   # not one of which nothing was verified
    drafts, nodes = drafts + result.drafted_rounds, nodes + result.draft_nodes
  after = session.stats()
  expected, accepted = (after[name] - before[name]
                        for name in ("spec_auto_expected_tokens_total", "spec_auto_accepted_tokens_total"))
  drafted = after["spec_decode_num_draft_tokens_total"] - before["spec_decode_num_draft_tokens_total"]
  assert drafted == nodes
  assert after["spec_decode_num_drafts_total"] - before["spec_decode_num_drafts_total"] == drafts
  assert 0 <= accepted <= drafted and 0 <= expected <= drafted
  # The CPU's costs decide how many drafts there are: of a handful no mean can be told.
  if accepted >= 100:
    assert expected == pytest.approx(accepted, rel=0.3)
