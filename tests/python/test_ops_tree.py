"""Draft trees and the walk that accepts a path, against the numpy reference. No instruction set changes them."""
import numpy as np
import pytest

import op_hooks
from op_checks import TARGETS, same_bits
from reference import tree


@pytest.fixture(scope="module")
def backend():
  opened = op_hooks.Backend(1, TARGETS[0])
  yield opened
  opened.close()


def random_candidates(rng):
  """token, log_q [depths, k]: smooth, with many ties, with -inf and NaN at the tail."""
  depths, k = int(rng.integers(1, 9)), int(rng.integers(1, 20))
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


def test_tree_is_the_references(backend):
  rng = np.random.default_rng(0)
  for _ in range(2000):
    token, log_q = random_candidates(rng)
    budget, spine = int(rng.choice([1, 2, 3, 7, 16, 33, 100])), bool(rng.integers(2))
    got = backend.build_tree(token, log_q, budget, spine)
    want = tree.build(token, log_q, budget, spine)
    assert [g.tolist() for g in got[:3]] == list(want[:3])
    assert same_bits(got[3].copy(), np.array(want[3], np.float32))
    assert (got[1] <= np.arange(len(got[1]))).all()        # a parent comes before its children
    if spine:
      chain = min(len(log_q), budget)
      assert got[2][:chain].tolist() == list(range(1, chain + 1)) and (got[0][:chain] == token[:chain, 0]).all()
    else:
      assert (got[3][1:] <= got[3][:-1]).all()


def test_trees_are_nested(backend):
  rng = np.random.default_rng(1)
  for _ in range(100):
    token, log_q = random_candidates(rng)
    for spine in (False, True):
      largest = backend.build_tree(token, log_q, 1024, spine)
      assert len(largest[0]) == min(1024, sum(log_q.shape[1] ** d for d in range(1, len(log_q) + 1)))
      for budget in (0, 1, 2, 5, 8, 40, 300):
        smaller = backend.build_tree(token, log_q, budget, spine)
        assert len(smaller[0]) == min(budget, len(largest[0]))
        assert all(same_bits(s.copy(), big[:len(s)].copy()) for s, big in zip(smaller, largest))


@pytest.mark.parametrize("spine", [False, True])
def test_tree_is_brute_force(backend, spine):
  rng = np.random.default_rng(2)
  for _ in range(300):
    depths, k = rng.integers(1, 5), rng.integers(1, 5)
    log_q = -np.sort(rng.integers(0, 4, (depths, k)) / 4).astype(np.float32)
    if rng.random() < 0.3:
      log_q[rng.integers(depths), rng.integers(k):] = -np.inf
    token = np.arange(depths * k).reshape(depths, k)
    budget = int(rng.integers(1, min(2 * k ** depths + 2, 600)))
    got = backend.build_tree(token, log_q, budget, spine)
    assert tree.rank_tuples(token, *got[:3]) == tree.brute_force(log_q, budget, spine)


def test_deep_narrow_tree(backend):
  """255 depths of one candidate: the longest path there is."""
  log_q, token = np.full((255, 1), -0.5, np.float32), np.arange(255)[:, None]
  for spine in (False, True):
    got = backend.build_tree(token, log_q, 1024, spine)
    assert got[1].tolist() == list(range(255)) and got[0].tolist() == list(range(255))


def test_accept(backend):
  rng = np.random.default_rng(3)
  lengths = set()
  for _ in range(500):
    token, log_q = random_candidates(rng)
    few = max(token.shape[1], 4)      # the same tokens at every depth
    token = np.stack([rng.permutation(few)[:token.shape[1]] for _ in token])
    nodes = tree.build(token, log_q, int(rng.integers(0, 40)))
    sample = rng.integers(0, 4, len(nodes[0]) + 1)
    got = backend.accept(nodes[0], nodes[1], sample).tolist()
    assert got == tree.accept(nodes[0], nodes[1], sample)
    lengths.add(len(got))
  assert {1, 2, 3, 4} <= lengths
