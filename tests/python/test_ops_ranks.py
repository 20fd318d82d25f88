"""What one rank of several gives: a partial and its sum are what the operation does without ranks, to the bit. And ranks that
meet, as threads: sums in their order, columns side by side, the same on every rank."""
import ctypes
import itertools

import numpy as np
import pytest

import op_hooks
from op_checks import backends, bf16_matrix, int4_matrix, same_bits, with_spare
from op_hooks import placed
from reference import numbers

ROWS = (1, 3, 8, 33)
EPS = 1e-5


def summed(backend, partial, initial, index=None):
  """`initial` with the partial's rows added, or, without it, those rows; to its rows `index`."""
  n, width = partial.shape
  out = backend.rows_out((n, width) if initial is None else initial.shape, fill=initial)
  backend.call("sum_ranks", backend.count(n), width, backend.rows_in(partial), out, initial is not None,
               None if index is None else backend.rows_in(index, np.int32), None, 0.0, None)
  return out.check()


def summed_and_normed(backend, partial, initial, norm, index=None):
  """The same, and the norm of the rows that were summed, where they lie; other rows of it are zero."""
  n, width = partial.shape
  shape = (n, width) if initial is None else initial.shape
  out = backend.rows_out(shape, fill=initial)
  normed = backend.rows_out(shape, fill=None if index is None else np.zeros(shape, np.float32))
  backend.call("sum_ranks", backend.count(n), width, backend.rows_in(partial), out, initial is not None,
               None if index is None else backend.rows_in(index, np.int32), placed(norm), EPS, normed)
  return out.check(), normed.check()


def linear_partial(backend, x, weight, n_out):
  partial = backend.rows_out((len(x), n_out))
  backend.call("linear_partial", backend.count(len(x)), backend.rows_in(x), None, weight, partial)
  return partial.check()


@pytest.mark.parametrize("n_out, n_in", [(16, 7), (33, 256), (65, 31), (256, 64)])
def test_linear(backends, n_out, n_in):
  rng = np.random.default_rng(n_out)
  bits, _ = bf16_matrix(rng, n_out, n_in)
  for n in ROWS:
    x, initial = backends.normal(rng, n, n_in), backends.normal(rng, n, n_out)
    for backend in backends:
      weight = backend.matrix(bits)
      partial = linear_partial(backend, x, weight, n_out)
      assert same_bits(partial, backend.logits(x, weight, n_out))
      assert same_bits(summed(backend, partial, initial), backend.linear(x, weight, n_out, initial))
      assert same_bits(summed(backend, partial, None), backend.linear(x, weight, n_out))
      assert same_bits(with_spare(backend, lambda b=backend, w=weight: linear_partial(b, x, w, n_out)), partial)


def test_chosen_rows(backends):
  """Rows of x are chosen; the partial is dense; its rows are added to chosen ones."""
  rng = np.random.default_rng(1)
  bits, _ = bf16_matrix(rng, 40, 64)
  x, initial = backends.normal(rng, 9, 64), backends.normal(rng, 9, 40)
  index = np.array([7, 2, 5], np.int32)
  backend = backends[2]
  weight, partial = backend.matrix(bits), backend.rows_out((3, 40))
  backend.call("linear_partial", backend.count(3), x, index, weight, partial)
  assert same_bits(partial.check(), linear_partial(backend, np.ascontiguousarray(x[index]), weight, 40))
  got = summed(backend, partial.array[:3], initial, index)
  want = initial.copy()
  want[index] = backend.linear(np.ascontiguousarray(x[index]), weight, 40, np.ascontiguousarray(initial[index]))
  assert same_bits(got, want)


@pytest.mark.parametrize("width", [7, 32, 200, 1031, 1536, 7168, 9000])
def test_sum_and_norm(backends, width):
  """A sum with the norm behind it is the sum, then rms_norm: of new rows, of a residual, and of chosen rows of one."""
  rng = np.random.default_rng(width)
  norm = rng.standard_normal(width).astype(np.float32)
  for n in ROWS:
    partial, initial = rng.standard_normal((n, width)).astype(np.float32), backends.normal(rng, n, width)
    for backend in backends:
      for residual in (initial, None):
        out, normed = summed_and_normed(backend, partial, residual, norm)
        assert same_bits(out, summed(backend, partial, residual))
        assert same_bits(normed, backend.rms_norm(out, norm, EPS))
      both = lambda b=backend: np.stack(summed_and_normed(b, partial, initial, norm))
      assert same_bits(with_spare(backend, both), both())
  partial, initial = rng.standard_normal((3, width)).astype(np.float32), backends.normal(rng, 9, width)
  index = np.array([7, 2, 5], np.int32)
  for backend in backends:
    out, normed = summed_and_normed(backend, partial, initial, norm, index)
    assert same_bits(out, summed(backend, partial, initial, index))
    want = np.zeros_like(initial)
    want[index] = backend.rms_norm(np.ascontiguousarray(out[index]), norm, EPS)
    assert same_bits(normed, want)


@pytest.mark.parametrize("hidden, width", [(32, 64), (256, 48)])
def test_mlp(backends, hidden, width):
  rng = np.random.default_rng(hidden)
  gate, up, down = (bf16_matrix(rng, *shape)[0] for shape in ((width, hidden), (width, hidden), (hidden, width)))
  for n in ROWS:
    x, initial = backends.normal(rng, n, hidden), backends.normal(rng, n, hidden)
    for backend in backends:
      gate_up, down_id = backend.gate_up(gate, up), backend.matrix(down)
      partial = backend.rows_out((n, hidden))
      backend.call("mlp_partial", backend.count(n), backend.rows_in(x), gate_up, down_id, None, partial)
      assert same_bits(summed(backend, partial.check(), initial), backend.mlp(x, gate_up, down_id, initial))


@pytest.mark.parametrize("hidden", [128, 4608])
@pytest.mark.parametrize("n", ROWS)
def test_experts(backends, n, hidden):
  rng = np.random.default_rng(n)
  width, n_experts, k = 64, 6, 3
  experts = [[int4_matrix(rng, *shape, 32)[0] for shape in ((width, hidden), (width, hidden), (hidden, width))]
             for _ in range(n_experts)]
  shared = [bf16_matrix(rng, *shape)[0] for shape in ((width, hidden), (width, hidden), (hidden, width))]
  x, initial = backends.normal(rng, n, hidden), backends.normal(rng, n, hidden)
  expert = np.array([rng.choice(n_experts, k, replace=False) for _ in range(n)], np.int32)
  weight = rng.random((n, k), np.float32)
  for backend in backends:
    matrices = ([backend.int4_gate_up(gate, up) for gate, up, _ in experts], [backend.int4(*down) for _, _, down in experts],
                backend.gate_up(*shared[:2]), backend.matrix(shared[2]))
    partial = backend.rows_out((n, hidden))
    backend.call("experts_partial", backend.count(n), hidden, backend.rows_in(x), backend.rows_in(expert, np.int32),
                 backend.rows_in(weight), n_experts, k, *matrices, partial)
    assert same_bits(summed(backend, partial.check(), initial), backend.experts(x, expert, weight, *matrices, initial))


def test_embed(backends):
  """Tokens of other ranks are zero."""
  from op_hooks import Rows
  rng = np.random.default_rng(3)
  bits, values = bf16_matrix(rng, 40, 33)
  tokens = np.array([0, 9, 10, 19, 20, 39, 12])
  backend = backends[2]
  partial = backend.rows_out((len(tokens), 33))
  backend.call("embed_partial", Rows(np.zeros(len(tokens)), token=tokens), backend.raw(bits[10:20].copy()), 33, 10, 10, partial)
  here = (tokens >= 10) & (tokens < 20)
  assert (partial.check() == np.where(here[:, None], values[tokens], 0)).all()


def test_gather(backends):
  """Where there are no other ranks their columns stay as they are."""
  rng = np.random.default_rng(4)
  part, initial = rng.standard_normal((5, 7)).astype(np.float32), rng.standard_normal((5, 28)).astype(np.float32)
  backend = backends[2]
  out = backend.rows_out((5, 28), fill=initial)
  backend.call("gather_ranks", backend.count(5), 7, backend.rows_in(part), 2, 4, out)
  want = initial.copy()
  want[:, 14:21] = part
  assert same_bits(out.check(), want)


def chain(target, recorded, live, x, norm, weight, head):
  """What the ranks' last gather yields [rounds, ranks, rows, width], see kdt_hook_rank_chain."""
  ranks, steps, width, _ = weight.shape
  out = np.zeros((len(live), ranks, len(x), width), np.float32)
  arrays = [ctypes.byref(op_hooks.Array(a)) for a in (np.array(live, np.int32), x, norm, weight, head, out)]
  op_hooks.Backend.check(op_hooks.LIBRARY.kdt_hook_rank_chain, ctypes.c_char_p(target.encode()),
                         *map(ctypes.c_int64, (ranks, len(x), width, steps)), ctypes.c_int(recorded), ctypes.c_float(EPS), *arrays)
  return out


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("rows, width, steps", [(1, 64, 6), (9, 200, 3), (70, 1032, 8)])
def test_ranks_that_meet(backends, ranks, rows, width, steps):
  """Sums that follow one another at once, in work that is recorded and in work that is not: each is of this round's partials,
  added in the order of ranks, on every rank alike; so are the norms between them."""
  rng = np.random.default_rng(rows)
  x = numbers.float_to_bf16(rng.standard_normal((rows, width)))
  weight = np.stack([[bf16_matrix(rng, width, width, 0.3 * (width * ranks) ** -0.5)[0] for _ in range(steps)]
                     for _ in range(ranks)])
  head = bf16_matrix(rng, width, width)[0].reshape(ranks, width // ranks, width)
  norm = rng.standard_normal(width).astype(np.float32)
  backend = backends[1]
  now = numbers.bf16_to_float(x)
  normed = backend.rms_norm(now, norm, EPS)
  for step in range(steps):
    partials = [backend.logits(normed, backend.matrix(weight[rank, step]), width) for rank in range(ranks)]
    total = partials[0]
    for partial in partials[1:]:
      total = total + partial
    now = backends.act(now + total)
    normed = backend.rms_norm(now, norm, EPS)
  want = np.concatenate([backend.logits(normed, backend.matrix(head[rank]), width // ranks) for rank in range(ranks)], axis=1)
  live = [rows, max(1, rows // 3), rows, 1, rows]
  ways = [backends.target] + ["cuda two shots", "cuda measured"] * (backends.target == "cuda")
  for way, recorded in itertools.product(ways, (False, True)):
    got = chain(way, recorded, live, x, norm, weight, head)
    for n, of_round in zip(live, got, strict=True):
      for of_rank in of_round:
        assert same_bits(of_rank[:n], want[:n])
        assert np.isnan(of_rank[n:]).all()
