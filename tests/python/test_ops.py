"""Row-wise ops of every backend against the numpy reference, to the rounding error that its types allow, and bit for bit
against themselves in other batches."""
import numpy as np
import pytest

import op_calls
import op_hooks
from op_checks import (CPU_TARGETS, UNIT, assert_close, backends, bf16_matrix, check_rows_independent, int4_matrix,
                       product_bound, same_bits, with_spare)
from reference import layers, numbers

ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 13, 17, 64, 130)


def test_targets(backends):
  for threads in backends.threads:
    assert backends[threads].describe()[0] == threads
  assert backends[1].describe()[1] == (2 if backends.bf16 else 4)
  assert backends[1].describe()[3] == backends.target or backends[1].describe()[3].startswith("sm_")
  assert op_hooks.cpu_targets() == CPU_TARGETS      # having chosen one hides no other


def test_unknown_target_is_refused_and_changes_nothing(backends):
  rng = np.random.default_rng(0)
  x, (bits, _) = backends.normal(rng, 3, 200), bf16_matrix(rng, 40, 200)
  before = backends[1].linear(x, backends[1].matrix(bits), 40)
  with pytest.raises(RuntimeError, match="^cpu_target: Z80: expected"):
    op_calls.Ops(1, "Z80")
  try:
    assert same_bits(backends[1].linear(x, backends[1].matrix(bits), 40), before)
  finally:
    op_calls.Ops(1, backends.target).close()


@pytest.mark.parametrize("hidden", [1, 5, 16, 33, 256])
def test_embed(backends, hidden):
  bits, values = bf16_matrix(np.random.default_rng(hidden), 40, hidden)
  for n in (0, 1, 17):
    tokens = np.random.default_rng(n).integers(0, 40, n)
    got = backends[2].embed(tokens, backends[2].raw(bits), hidden)
    assert (got == values[tokens]).all()
    assert same_bits(with_spare(backends[2], lambda: backends[2].embed(tokens, backends[2].raw(bits), hidden)), got)


@pytest.mark.parametrize("width", [1, 2, 3, 7, 8, 15, 16, 17, 32, 33, 64, 100, 128, 256, 1001])
def test_rms_norm(backends, width):
  rng = np.random.default_rng(width)
  n = 19
  x = backends.normal(rng, n, width, scale=10.0 ** rng.integers(-4, 4, (n, 1)))
  x[3] = 0
  weight = rng.standard_normal(width).astype(np.float32)
  run = lambda backend, _, rows: (backend.rms_norm(x[rows], weight, 1e-5),)
  (got,) = check_rows_independent(backends, lambda b: None, run, n, rng)
  want = layers.rms_norm(x.astype(np.float64), weight.astype(np.float64), np.float64(np.float32(1e-5)))
  backends.assert_sum(got, want, (width + 8) * UNIT * np.abs(want) + 1e-37)
  assert len(backends[1].rms_norm(x[:0], weight, 1e-5)) == 0


def test_rms_norm_of_chosen_rows_in_place(backends):
  """Strides beyond the width, an index on both sides, and out = x."""
  rng = np.random.default_rng(0)
  weight = rng.standard_normal(24).astype(np.float32)
  x = op_hooks.Guarded((9, 40), fill=backends.normal(rng, 9, 40))
  before, index = x.array.copy(), np.array([7, 2, 5], np.int32)
  want = backends[1].rms_norm(np.ascontiguousarray(before[index, :24]), weight, 1e-5)
  out = op_hooks.Guarded((5, 31))
  n = backends[2].count(3)
  backends[2].call("rms_norm", n, 24, x, 40, index, weight, 1e-5, out, 31, np.array([4, 0, 1], np.int32))
  assert same_bits(out.check()[[4, 0, 1], :24].copy(), want)
  assert np.isnan(out.array[[2, 3]]).all() and np.isnan(out.array[:, 24:]).all()
  backends[2].call("rms_norm", n, 24, x, 40, index, weight, 1e-5, x, 40, index)
  before[index, :24] = want
  assert same_bits(x.check(), before)


@pytest.mark.parametrize("n_out,n_in", [(1, 1), (3, 2), (15, 3), (16, 7), (17, 8), (31, 33), (33, 256), (48, 64),
                                        (63, 129), (64, 100), (65, 31), (80, 48), (250, 96), (40, 7168), (300, 1536),
                                        (7000, 48)])
def test_linear(backends, n_out, n_in):
  rng = np.random.default_rng(n_out * 1000 + n_in)
  bits, values = bf16_matrix(rng, n_out, n_in)
  prepare = lambda backend: backend.matrix(bits)
  assert len(backends[2].linear(np.zeros((0, n_in), np.float32), prepare(backends[2]), n_out)) == 0
  for n in ROWS if n_out in (33, 65) else (1, 2, 3, 5, 13, 17) if n_out * n_in < 100000 else (1, 9, 70):
    x, initial = backends.normal(rng, n, n_in), backends.normal(rng, n, n_out)
    run = lambda backend, weight, rows: (backend.linear(x[rows], weight, n_out), backend.logits(x[rows], weight, n_out),
                                         backend.linear(x[rows], weight, n_out, initial[rows]))
    got, logits, added = check_rows_independent(backends, prepare, run, n, rng)
    want, bound = x.astype(np.float64) @ values.T, product_bound(x.astype(np.float64), values)
    backends.assert_sum(got, want, bound)
    assert_close(logits, want, 4 * bound if backends.bf16 else bound)
    assert same_bits(backends.act(logits), got) and same_bits(backends.act(initial + logits), added)


@pytest.mark.parametrize("n_out,n_in", [(64, 64), (80, 48), (132, 200), (448, 1024), (300, 1536), (104, 7168), (4200, 136)])
def test_linear_of_many_rows(backends, n_out, n_in):
  """A row alone and among as many as have kernels of their own, the values of a row of any size."""
  rng = np.random.default_rng(n_out + n_in)
  bits, values = bf16_matrix(rng, n_out, n_in)
  for n in (127, 129, *((24, 50, 64, 128, 200, 400) if backends.bf16 else ()), *((2048,) if backends.bf16 and n_in < 2000 else ())):
    x, initial = backends.normal(rng, n, n_in, scale=2.0 ** rng.integers(-40, 40, (n, n_in))), backends.normal(rng, n, n_out)
    x[1::2] = backends.normal(rng, n // 2, n_in)
    run = lambda backend, weight, rows: (backend.linear(x[rows], weight, n_out), backend.logits(x[rows], weight, n_out),
                                         backend.linear(x[rows], weight, n_out, initial[rows]))
    got, logits, added = check_rows_independent(backends, lambda b: b.matrix(bits), run, n, rng)
    some = rng.integers(0, n, 20)
    want, bound = x[some].astype(np.float64) @ values.T, product_bound(x[some].astype(np.float64), values)
    backends.assert_sum(got[some], want, bound)
    assert same_bits(backends.act(logits), got) and same_bits(backends.act(initial + logits), added)


def test_linear_stacks_matrices(backends):
  rng = np.random.default_rng(0)
  parts = [bf16_matrix(rng, n_out, 24) for n_out in (5, 16, 1, 30)]
  x = backends.normal(rng, 7, 24)
  got = backends[2].linear(x, backends[2].matrix(*(bits for bits, _ in parts)), 52)
  one_by_one = [backends[2].linear(x, backends[2].matrix(bits), len(bits)) for bits, _ in parts]
  assert same_bits(got, np.concatenate(one_by_one, 1))


def test_linear_of_some_columns(backends):
  """A source whose rows lie further apart than they are long."""
  rng = np.random.default_rng(2)
  bits, _ = bf16_matrix(rng, 19, 50)
  for begin, end in ((0, 50), (0, 7), (9, 41), (49, 50)):
    x = backends.normal(rng, 4, end - begin)
    cut, whole = backends[1].matrix(bits, columns=(begin, end)), backends[1].matrix(bits[:, begin:end])
    assert same_bits(backends[1].linear(x, cut, 19), backends[1].linear(x, whole, 19))


def test_linear_of_chosen_rows(backends):
  rng = np.random.default_rng(1)
  bits, _ = bf16_matrix(rng, 21, 24)
  x = backends.normal(rng, 9, 30)
  for n in (1, 3, 5, 8):
    x_index, out_index = (rng.permutation(9)[:n].astype(np.int32) for _ in range(2))
    for backend in (backends[1], backends[3]):
      weight, out = backend.matrix(bits), op_hooks.Guarded((9, 40))
      backend.call("linear", backend.count(n), x, 30, x_index, weight, out, 40, out_index, False)
      assert same_bits(out.check()[out_index, :21].copy(), backend.linear(x[x_index, :24].copy(), weight, 21))
      untouched = np.setdiff1d(np.arange(9), out_index)
      assert np.isnan(out.array[untouched]).all() and np.isnan(out.array[:, 21:]).all()


def refuse_int4(backends):
  """On a GPU INT4 is for experts, which are tested with them."""
  if not backends.bf16:
    return
  (packed, scale), _ = int4_matrix(np.random.default_rng(0), 16, 64, 32)
  with pytest.raises(RuntimeError, match="INT4"):
    backends[1].linear(np.zeros((1, 64), np.float32), backends[1].int4(packed, scale), 16)
  pytest.skip("linear takes no INT4 on this backend")


@pytest.mark.parametrize("n_out,n_in,group", [(1, 8, 8), (17, 32, 32), (16, 64, 64), (33, 96, 32), (50, 128, 32)])
def test_linear_int4(backends, n_out, n_in, group):
  refuse_int4(backends)
  rng = np.random.default_rng(n_out)
  packed, values = int4_matrix(rng, n_out, n_in, group)
  values = backends.act(values).astype(np.float64)
  for n in ROWS:
    x = backends.normal(rng, n, n_in)
    run = lambda backend, weight, rows: (backend.linear(x[rows], weight, n_out),)
    (got,) = check_rows_independent(backends, lambda backend: backend.int4(*packed), run, n, rng)
    backends.assert_sum(got, x.astype(np.float64) @ values.T, product_bound(x.astype(np.float64), values))


def test_int4_weights_are_exact(backends):
  """Inputs with few bits make every product and sum exact: all nibbles at all places of a word, times their scales."""
  refuse_int4(backends)
  rng = np.random.default_rng(0)
  values = np.stack([np.roll(np.arange(64) % 16 - 8, i) for i in range(20)])
  scale = np.full((20, 2), 0x3D80, np.uint16)     # 1/16
  scale[::3] = 0x4110                             # 9
  weight = numbers.dequantise(numbers.pack_int4(values), scale, 32).astype(np.float64)
  for n in (1, 2, 4, 8, 30, 70):
    x = rng.integers(-100, 100, (n, 64)).astype(np.float32)
    got = backends[1].linear(x, backends[1].int4(numbers.pack_int4(values), scale), 20)
    assert same_bits(got, backends.act(x.astype(np.float64) @ weight.T))


@pytest.mark.parametrize("hidden,width", [(1, 1), (8, 17), (24, 16), (33, 40), (64, 96), (100, 15), (2048, 300)])
def test_mlp(backends, hidden, width):
  rng = np.random.default_rng(hidden)
  (gate, gate_values), (up, up_values), (down, down_values) = (
      bf16_matrix(rng, *shape) for shape in ((width, hidden), (width, hidden), (hidden, width)))
  prepare = lambda backend: (backend.gate_up(gate, up), backend.matrix(down))
  for n in ROWS if hidden == 33 else (0, 1, 2, 3, 6, 17, *([300] if hidden > 60 else [])):
    x, initial = (backends.normal(rng, n, hidden) for _ in range(2))
    run = lambda backend, weights, rows: (backend.mlp(x[rows], *weights, initial[rows]),)
    (got,) = check_rows_independent(backends, prepare, run, n, rng)
    want = initial + layers.mlp(x.astype(np.float64), gate_values, up_values, down_values)
    backends.assert_act(got, want, (1e-5 if hidden > 1000 else 2e-6) * (1 + np.abs(want)))


def test_mlp_of_chosen_rows(backends):
  rng = np.random.default_rng(5)
  (gate, _), (up, _), (down, _) = (bf16_matrix(rng, *shape) for shape in ((20, 24), (20, 24), (24, 20)))
  x, initial = (backends.normal(rng, 9, 24) for _ in range(2))
  for n in (1, 4, 7):
    index = rng.permutation(9)[:n].astype(np.int32)
    for backend in (backends[1], backends[3]):
      gate_up, down_id = backend.gate_up(gate, up), backend.matrix(down)
      out = op_hooks.Guarded((9, 24), fill=initial)
      backend.call("mlp", backend.count(n), x, gate_up, down_id, out, index)
      want = initial.copy()
      want[index] = backend.mlp(x[index], gate_up, down_id, initial[index])
      assert same_bits(out.check(), want)


def test_copy(backends):
  rng = np.random.default_rng(0)
  for n, width in ((0, 5), (1, 1), (3, 37), (17, 64), (70, 8)):
    x = backends.normal(rng, n, width)
    run = lambda backend, _, rows: (backend.copy(x[rows]),)
    (got,) = check_rows_independent(backends, lambda b: None, run, n, rng)
    assert same_bits(got, x)
