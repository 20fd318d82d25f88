"""Draft trees of a round's streams, from build to accept, against the reference: equal inputs give equal trees on every
backend."""
import os

import numpy as np
import pytest

from op_checks import ONE_OF_A_KIND, backends, same_bits
from op_hooks import NO_ID
from op_rounds import Round
from reference import rounds, tree

pytestmark = ONE_OF_A_KIND
ROUNDS = 1200 if os.environ.get("KDTREE_TEST_FULL") == "1" else 120    # of ten trees, as a mean


def random_candidates(rng, depths=None, k=None):
  """token, log_q [depths, k]: smooth, with many ties, with -inf and NaN at the tail."""
  depths, k = depths or int(rng.integers(1, 9)), k or int(rng.integers(1, 20))
  raw = rng.standard_normal((depths, k)) * rng.uniform(0.1, 5)
  kind = rng.integers(4)
  if kind == 1:
    raw = np.round(raw)
  log_q = raw - np.log(np.exp(raw).sum(-1, keepdims=True)) - rng.random()
  if kind == 2:
    log_q = np.round(log_q * 4) / 4
  log_q = -np.sort(-log_q.astype(np.float32))
  if kind == 3:
    for row in log_q:
      dead = row[rng.integers(0, k + 1):]
      dead[:] = np.where(rng.random(len(dead)) < 0.5, -np.inf, np.nan)
  token = np.stack([rng.permutation(1000)[:k] for _ in range(depths)])
  return token, log_q


def random_plan(rng, n_streams, depths, budgets):
  """Streams with and without a draft; those that draft share the candidates in no particular order."""
  drafts = iter(rng.permutation(n_streams).tolist())
  plan = []
  for _ in range(n_streams):
    budget = int(rng.choice(budgets))
    plan.append(dict(root=int(rng.integers(1000)), length=int(rng.integers(5000)), budget=budget,
                     draft=next(drafts) if budget else NO_ID,
                     depths=int(rng.integers(1, depths + 1)) if budget else NO_ID, spine=int(rng.integers(2)),
                     calibration=int(rng.integers(-1, 3)), wants_logprobs=int(rng.integers(2))))
  return plan


def drafting(budget, depths, spine, root=7):
  """A stream by itself, with the only candidates."""
  return dict(root=root, length=0, budget=budget, draft=0, depths=depths, spine=int(spine), calibration=-1,
              wants_logprobs=0)


def candidates_of(rng, n_drafts, depths, k):
  token, log_q = zip(*(random_candidates(rng, depths, k) for _ in range(n_drafts)))
  return np.stack(token), np.stack(log_q)


def spare_of(rng):
  return int(rng.choice([0, 0, 1, 9]))


def build_alone(backend, token, log_q, budget, spine=False):
  plan = [drafting(budget, len(log_q), spine)]
  return Round(backend, plan, np.random.default_rng(budget)).build(token[None], log_q[None])[0]


def test_trees_are_the_references(backends):
  rng = np.random.default_rng(0)
  for _ in range(ROUNDS):
    n_streams, depths, k = (int(rng.integers(1, most)) for most in (20, 9, 20))
    plan = random_plan(rng, n_streams, depths, [0, 1, 2, 3, 7, 16, 33, 100])
    token, log_q = candidates_of(rng, n_streams, depths, k)
    backends[1].spare = spare_of(rng)
    got = Round(backends[1], plan, rng).build(token, log_q)
    backends[1].spare = 0
    for p, built, want in zip(plan, got, rounds.build(plan, token, log_q)):
      assert [g.tolist() for g in built[:3]] == list(want[:3])
      assert same_bits(built[3].copy(), np.array(want[3], np.float32))
      assert (built[1] <= np.arange(len(built[1]))).all()        # a parent comes before its children
      if p["spine"] and p["budget"]:
        chain = min(p["depths"], p["budget"])
        assert built[2][:chain].tolist() == list(range(1, chain + 1))
        assert (built[0][:chain] == token[p["draft"], :chain, 0]).all()
      else:
        assert (built[3][1:] <= built[3][:-1]).all()


def test_trees_are_nested(backends):
  rng = np.random.default_rng(1)
  for _ in range(60):
    token, log_q = random_candidates(rng)
    plan = [drafting(budget, len(log_q), spine, root=i) for i, (spine, budget) in
            enumerate((s, b) for s in (0, 1) for b in (1024, 300, 40, 8, 5, 2, 1, 0))]
    trees = Round(backends[1], plan, rng).build(token[None], log_q[None])
    for i, (p, smaller) in enumerate(zip(plan, trees)):
      largest = trees[i // 8 * 8]
      assert len(largest[0]) == min(1024, sum(log_q.shape[1] ** d for d in range(1, len(log_q) + 1)))
      assert len(smaller[0]) == min(p["budget"], len(largest[0]))
      assert all(same_bits(s.copy(), big[:len(s)].copy()) for s, big in zip(smaller, largest))


@pytest.mark.parametrize("spine", [False, True])
def test_tree_is_brute_force(backends, spine):
  rng = np.random.default_rng(2)
  for _ in range(300):
    depths, k = rng.integers(1, 5), rng.integers(1, 5)
    log_q = -np.sort(rng.integers(0, 4, (depths, k)) / 4).astype(np.float32)
    if rng.random() < 0.3:
      log_q[rng.integers(depths), rng.integers(k):] = -np.inf
    token = np.arange(depths * k).reshape(depths, k)
    budget = int(rng.integers(1, min(2 * k ** depths + 2, 600)))
    got = build_alone(backends[1], token, log_q, budget, spine)
    assert tree.rank_tuples(token, *got[:3]) == tree.brute_force(log_q, budget, spine)


def large_candidates(rng, depths, k):
  """log_q of a peaky drafter, smooth or rounded so that many are equal; some rows end in -inf, some are all 0 or flat."""
  raw = -np.sort(-rng.standard_normal((depths, k)) * rng.uniform(0.3, 5))
  log_q = raw - np.log(np.exp(raw).sum(-1, keepdims=True)) - rng.random((depths, 1))
  if rng.random() < 0.3:
    log_q = np.round(log_q * 8) / 8
  for row in log_q:
    if rng.random() < 0.05:
      row[rng.integers(0, k):] = -np.inf
    if rng.random() < 0.05:
      row[:] = rng.choice([0, -5])
  return np.stack([rng.permutation(5000)[:k] for _ in range(depths)]), np.minimum(log_q, 0).astype(np.float32)


@pytest.mark.parametrize("k", [128, 300, 1024])
def test_large_trees(backends, k):
  """Budgets for which a backend may list prefixes by depth instead of one after the other; small ones among them."""
  rng = np.random.default_rng(k)
  for i in range(ROUNDS // 10):
    n_streams, depths = int(rng.integers(1, 4)), int(rng.choice([1, 2, 3, 7, 15, 40]))
    plan = random_plan(rng, n_streams, depths, [1, 60, 127, 128, 129, 256, 777, 1023, 1024])
    token, log_q = (np.stack(of) for of in zip(*(large_candidates(rng, depths, k) for _ in range(n_streams))))
    got = Round(backends[1], plan, rng).build(token, log_q)
    for built, want in zip(got, rounds.build(plan, token, log_q)):
      assert [g.tolist() for g in built[:3]] == list(want[:3])
      assert same_bits(built[3].copy(), np.array(want[3], np.float32))


def test_deep_narrow_tree(backends):
  """255 depths of one candidate: the longest path there is."""
  log_q, token = np.full((255, 1), -0.5, np.float32), np.arange(255)[:, None]
  for spine in (False, True):
    got = build_alone(backends[1], token, log_q, 1024, spine)
    assert got[1].tolist() == list(range(255)) and got[0].tolist() == list(range(255))


def random_tables(rng, n_streams):
  """Costs that grow with rows, mostly concave; a lambda from nothing to more than any node is worth."""
  verify = np.cumsum(rng.uniform(0.1, 1, 19)) * 1e-3
  promised = rng.uniform(0, 30, (3, 24))
  return {"lambda": float(rng.choice([0, 50, 200, 1000, 5000]) * rng.uniform(0.5, 2)), "verify": verify,
          "base_rows": n_streams + (prompt_rows := int(rng.choice([0, 1, 30, 500]))),
          "most_rows": n_streams + prompt_rows + int(rng.choice([0, 5, 40, 1000])),
          "hits": promised * rng.uniform(0, 1.5, (3, 24)), "mass": promised}


def test_cut_takes_what_pays_together(backends):
  rng = np.random.default_rng(3)
  compared, taken, plain = 0, [], 0
  for i in range(200):
    n_streams, depths, k = (int(rng.integers(1, most)) for most in (12, 7, 9))
    plan = random_plan(rng, n_streams, depths, [0, 1, 4, 15, 63])
    if i % 25 == 0:
      plan = [p | dict(calibration=-1) for p in plan]
    trees = rounds.build(plan, *candidates_of(rng, n_streams, depths, k))
    tables = random_tables(rng, n_streams)
    backends[1].spare = spare_of(rng)
    batch = Round(backends[1], plan, rng)
    batch.put(trees)
    n_nodes, outlook = batch.cut(tables)
    backends[1].spare = 0
    want, want_outlook, margin = rounds.joint_cut(plan, trees, tables)
    np.testing.assert_allclose(outlook, want_outlook, rtol=1e-9, atol=1e-9 * n_streams)
    if margin > 1e-9:
      compared += 1
      assert n_nodes == want
    automatic = [n for n, p in zip(n_nodes, plan) if p["calibration"] >= 0]
    taken.append(sum(automatic))
    plain += not any(automatic)
  assert compared > 130 and 20 < plain < 130 and max(taken) > 60


def random_sample(rng, plan, trees, n_prompt_samples):
  """Of every sampled row; often a child's token, so that paths are long."""
  sample = rng.integers(0, 1000, n_prompt_samples).tolist()
  for token, parent, _, _ in trees:
    for node in range(len(token) + 1):
      children = [t for t, above in zip(token, parent) if above == node]
      sample.append(int(rng.choice(children)) if children and rng.random() < 0.7 else int(rng.integers(1000)))
  return np.array(sample, np.int32)


def test_rows_and_paths_of_a_round(backends):
  """Prompts' rows before those of trees, some scored, some sampled; streams without a draft; a pass without a stream."""
  rng = np.random.default_rng(4)
  lengths = set()
  for _ in range(120):
    n_streams, depths, k = int(rng.integers(0, 12)), int(rng.integers(1, 9)), int(rng.integers(1, 20))
    plan = random_plan(rng, n_streams, depths, [0, 1, 2, 7, 20, 60])
    token, log_q = candidates_of(rng, max(n_streams, 1), depths, k)
    n_prompt = int(rng.choice([0, 1, 70]))
    n_prompt_samples = int(rng.integers(0, min(n_prompt, 4) + 1))
    counts = n_prompt, int(rng.integers(0, n_prompt - n_prompt_samples + 1)), n_prompt_samples
    whole = rounds.build(plan, token, log_q)
    n_nodes = [int(rng.integers(0, len(t[0]) + 1)) for t in whole]      # as a cut leaves them
    trees = [tuple(column[:n] for column in t) for t, n in zip(whole, n_nodes)]
    backends[1].spare = spare_of(rng)
    batch = Round(backends[1], plan, rng)
    batch.put(whole)
    batch.n_nodes = np.array(n_nodes, np.int32)
    assert batch.lay_rows(*counts) == rounds.lay_rows(plan, trees, *counts)
    sample = random_sample(rng, plan, trees, n_prompt_samples)
    of_prompts = np.concatenate((rng.integers(-1, 1000, counts[1]), rng.integers(-1, 1, n_prompt_samples)))
    paths, tokens, kept, scored, said = batch.accept(sample, of_prompts)
    backends[1].spare = 0
    assert (paths, tokens, kept, scored) == rounds.accept(plan, trees, sample, *counts)
    want = of_prompts.copy()
    want[counts[1]:] = np.where(want[counts[1]:] < 0, -1, sample[:n_prompt_samples])
    assert said == want.tolist()
    lengths |= {len(p) for p in paths}
  assert {1, 2, 3, 4, 5} <= lengths
