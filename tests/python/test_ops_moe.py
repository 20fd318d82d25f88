"""The router and the experts of every backend against the numpy reference, and against themselves in other batches."""
import numpy as np
import pytest

from op_checks import (assert_close, backends, bf16_matrix, check_rows_independent, int4_matrix, same_bits, with_spare)
from reference import layers

GAP = 1e-5    # choices nearer than this may be swapped by rounding


def route_case(backends, rng, n, n_experts, hidden):
  bits, values = bf16_matrix(rng, n_experts, hidden)
  x = backends.normal(rng, n, hidden)
  bias = (rng.standard_normal(n_experts) * 0.2).astype(np.float32)
  return bits, values, x, bias


@pytest.mark.parametrize("n_experts,hidden", [(1, 8), (2, 3), (7, 33), (16, 64), (17, 31), (48, 100), (384, 1000)])
def test_route(backends, n_experts, hidden):
  rng = np.random.default_rng(n_experts)
  for k in sorted({1, 2, 4, 8, n_experts // 2, n_experts - 1, n_experts} & set(range(1, min(n_experts, 64) + 1))):
    for n in (1, 5, 33):
      bits, values, x, bias = route_case(backends, rng, n, n_experts, hidden)
      normalise, scaling = bool(rng.integers(2)), float(np.float32(rng.uniform(0.5, 3)))
      run = lambda backend, gate, rows: backend.route(x[rows], gate, bias, k, normalise, scaling)
      expert, weight = check_rows_independent(backends, lambda b: b.matrix(bits), run, n, rng)
      want, want_weight, choice = layers.route(x.astype(np.float64), values, bias.astype(np.float64), k, normalise,
                                               scaling)
      best = -np.sort(-choice, -1)
      clear = (best[:, :-1] - best[:, 1:])[:, :k].min(-1, initial=np.inf) > GAP
      assert clear.mean() > 0.9
      assert (expert == want)[clear].all()
      assert_close(weight[clear], want_weight[clear], (1e-5 if backends.bf16 else 3e-6) * want_weight[clear])


def test_route_ties_go_to_the_lower_expert(backends):
  rng = np.random.default_rng(0)
  bits, _ = bf16_matrix(rng, 3, 40)
  bits = np.repeat(bits, 6, 0)[rng.permutation(18)]      # 18 experts, three different ones
  x = backends.normal(rng, 20, 40)
  bias = np.zeros(18, np.float32)
  for backend in (backends[1], backends[3]):
    expert, weight = backend.route(x, backend.matrix(bits), bias, 18, False, 1.0)
    assert (np.sort(expert) == np.arange(18)).all()
    tied = weight[:, 1:] == weight[:, :-1]
    assert (tied.sum(-1) == 15).all() and (weight[:, 1:] <= weight[:, :-1]).all()
    assert (expert[:, 1:] > expert[:, :-1])[tied].all()


def test_route_of_saturated_and_nan_rows(backends):
  """Experts are distinct and in range whatever the scores, so that no later op reads out of bounds."""
  bits, _ = bf16_matrix(np.random.default_rng(1), 9, 16)
  x = backends.normal(np.random.default_rng(2), 6, 16)
  x[1], x[2], x[3, 0], x[4, 0], x[5] = 2.0 ** 100, -2.0 ** 100, np.nan, np.inf, 0
  for k in (1, 4, 9):
    expert, weight = backends[2].route(x, backends[2].matrix(bits), np.zeros(9, np.float32), k, True, 2.0)
    assert ((expert >= 0) & (expert < 9)).all()
    assert all(len(set(row)) == k for row in expert.tolist())
    assert (expert[5] == np.arange(k)).all()
    assert_close(weight[5], np.full(k, 2 / k), 1e-6)


class Experts:
  def __init__(self, backends, rng, n_experts, hidden, width, group, shared_width):
    parts = [[int4_matrix(rng, *shape, group) for _ in range(n_experts)]
             for shape in ((width, hidden), (width, hidden), (hidden, width))]
    self.gate, self.up, self.down = ([packed for packed, _ in part] for part in parts)
    self.values = [[backends.act(values).astype(np.float64) for _, values in part] for part in parts]
    shared = [bf16_matrix(rng, *shape) for shape in ((shared_width, hidden), (shared_width, hidden),
                                                     (hidden, shared_width))]
    self.shared, self.shared_values = zip(*shared)

  def upload(self, backend):
    return ([backend.int4_gate_up(g, u) for g, u in zip(self.gate, self.up)], [backend.int4(*d) for d in self.down],
            backend.gate_up(*self.shared[:2]), backend.matrix(self.shared[2]))

  def run(self, backend, weights, x, expert, weight, initial):
    return backend.experts(x, expert, weight, *weights, initial)

  def want(self, x, expert, weight, initial):
    wide = lambda a: a.astype(np.float64)
    return initial + layers.experts(wide(x), expert, wide(weight), *self.values, self.shared_values)


def routings(rng, n, n_experts, k):
  """Random; everything to the same experts; half of the experts with no token."""
  yield np.argsort(rng.random((n, n_experts)), -1)[:, :k]
  yield np.tile(rng.permutation(n_experts)[:k], (n, 1))
  if 2 * k <= n_experts:
    yield np.argsort(rng.random((n, n_experts // 2)), -1)[:, :k] * 2 + 1


@pytest.mark.parametrize("n_experts,k,hidden,width,group,shared_width",
                         [(1, 1, 8, 8, 8, 1), (4, 4, 32, 32, 32, 48), (7, 3, 24, 40, 8, 17), (16, 4, 64, 96, 32, 64),
                          (33, 8, 96, 64, 32, 33), (5, 1, 128, 32, 32, 32),
                          (6, 2, 128, 128, 64, 16), (20, 8, 512, 256, 32, 256), (12, 8, 4608, 64, 32, 64)])
def test_experts(backends, n_experts, k, hidden, width, group, shared_width):
  rng = np.random.default_rng(n_experts)
  case = Experts(backends, rng, n_experts, hidden, width, group, shared_width)
  for n in (1, 2, 3, 4, 5, 12, 17, 64, 130) if n_experts in (4, 16) else (1, 7, 33):
    for expert in routings(rng, n, n_experts, k):
      x, initial = (backends.normal(rng, n, hidden) for _ in range(2))
      weight = rng.random((n, k)).astype(np.float32)
      run = lambda backend, weights, rows: (case.run(backend, weights, x[rows], expert[rows], weight[rows],
                                                     initial[rows]),)
      (got,) = check_rows_independent(backends, case.upload, run, n, rng)
      want = case.want(x, expert, weight, initial)
      backends.assert_act(got, want, (1e-5 if hidden > 1000 else 3e-6) * (1 + np.abs(want)))


@pytest.mark.parametrize("n_experts,k,hidden,width,shared_width",
                         [(20, 8, 512, 256, 256), (5, 2, 256, 128, 48), (6, 4, 384, 128, 16), (12, 8, 4608, 128, 64)])
def test_experts_of_many_rows(backends, n_experts, k, hidden, width, shared_width):
  """A row alone and among so many that an expert has whole tiles of them."""
  rng = np.random.default_rng(n_experts + hidden)
  case = Experts(backends, rng, n_experts, hidden, width, 32, shared_width)
  for n in (30,) if not backends.bf16 else (150,) if hidden > 1000 else (60, 130, 300):
    for expert in routings(rng, n, n_experts, k):
      x, initial = (backends.normal(rng, n, hidden) for _ in range(2))
      weight = rng.random((n, k)).astype(np.float32)
      run = lambda backend, weights, rows: (case.run(backend, weights, x[rows], expert[rows], weight[rows],
                                                     initial[rows]),)
      (got,) = check_rows_independent(backends, case.upload, run, n, rng)
      some = rng.integers(0, n, 12)
      want = case.want(x[some], expert[some], weight[some], initial[some])
      backends.assert_act(got[some], want, (1e-5 if hidden > 1000 else 3e-6) * (1 + np.abs(want)))


@pytest.mark.parametrize("n_experts,k,n", [(12, 8, 2), (12, 8, 4), (9, 4, 8), (3, 2, 8), (40, 8, 3)])
def test_experts_of_few_rows(backends, n_experts, k, n):
  """Up to 32 pairs of a row and an expert, and as many with fewer live rows, have the bits that more have. (Of a CPU's kernels there are no such two kinds.)"""
  if not backends.bf16:
    pytest.skip("of GPUs alone")
  rng = np.random.default_rng(n_experts + n)
  case = Experts(backends, rng, n_experts, 4608, 128, 32, 64)
  for expert in routings(rng, n, n_experts, k):
    x, initial = (backends.normal(rng, n, 4608) for _ in range(2))
    weight = rng.random((n, k)).astype(np.float32)
    run = lambda backend, weights, rows: (case.run(backend, weights, x[rows], expert[rows], weight[rows], initial[rows]),)
    (got,) = check_rows_independent(backends, case.upload, run, n, rng)
    want = case.want(x, expert, weight, initial)
    backends.assert_act(got, want, 1e-5 * (1 + np.abs(want)))
    for backend in backends:
      weights = case.upload(backend)
      for live in range(n):
        (few,) = with_spare(backend, lambda: run(backend, weights, np.arange(live)), n - live)
        assert same_bits(few, np.ascontiguousarray(got[:live])), f"{live} of {n} rows live"
      (among,) = run(backend, weights, np.tile(np.arange(n), 12))
      assert same_bits(np.ascontiguousarray(among[:n]), got), "among many"


def test_experts_are_added_in_routing_order(backends):
  """Ascending rank, then the shared expert, then what was there. Four experts of equal weights, so that a large pair of
  opposite signs cancels exactly, and swallows whatever was added between or before."""
  rng = np.random.default_rng(3)
  case = Experts(backends, rng, 1, 64, 64, 32, 16)
  x, zero, initial = backends.normal(rng, 1, 64), np.zeros((1, 64), np.float32), backends.normal(rng, 1, 64)
  big = 2.0 ** 40
  for backend in (backends[1], backends[3]):
    (gate_up,), (down,), *shared = case.upload(backend)
    weights = [gate_up] * 4, [down] * 4, *shared
    run = lambda weight, initial: case.run(backend, weights, x, np.array([[2, 0, 3]]), np.array([weight], np.float32),
                                           initial)
    only_shared, half = run([0, 0, 0], zero), run([0, 0, 0.5], zero)
    assert not same_bits(only_shared, half)
    assert same_bits(run([big, -big, 0.5], zero), half)
    assert same_bits(run([0.5, big, -big], zero), only_shared)
    assert same_bits(run([big, 0.5, -big], zero), only_shared)
    if not backends.bf16:      # there, `half` has been rounded
      assert same_bits(run([big, -big, 0.5], initial), initial + half)


def test_no_rows(backends):
  case = Experts(backends, np.random.default_rng(0), 2, 32, 32, 32, 16)
  none = np.zeros((0, 32), np.float32)
  run = lambda: case.run(backends[2], case.upload(backends[2]), none, np.zeros((0, 2), np.int64),
                         np.zeros((0, 2), np.float32), none)
  assert run().shape == with_spare(backends[2], run).shape == (0, 32)


def test_count_experts(backends):
  rng = np.random.default_rng(0)
  for n_experts, k, n in ((1, 1, 1), (8, 2, 0), (8, 2, 3), (64, 6, 17), (384, 8, 1), (384, 8, 70), (500, 3, 600)):
    for expert in (rng.integers(0, n_experts, (n, k)), np.full((n, k), n_experts - 1)):
      distinct = len(np.unique(expert))
      assert backends[1].count_experts(expert, n_experts) == distinct
      assert with_spare(backends[1], lambda: backends[1].count_experts(expert, n_experts)) == distinct
