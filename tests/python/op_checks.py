"""What the op tests share: bounds, weights with their exact values, and the row-independence property."""
import numpy as np
import pytest

import op_hooks
from reference import numbers

TARGETS = op_hooks.cpu_targets()

THREADS = (1, 2, 3)
UNIT = 2.0 ** -24    # half an ulp of a float32 near 1


@pytest.fixture(scope="module", params=TARGETS)
def backends(request):
  """Every instruction set this CPU has, one after the other: the choice is process-wide."""
  opened = op_hooks.Backends(request.param)
  yield opened
  opened.close()


def same_bits(a, b):
  return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()


def assert_close(got, want, tolerance):
  """|got - want| <= tolerance (a number or an array)."""
  got = np.asarray(got, np.float64)
  assert got.shape == np.shape(want)
  excess = np.abs(got - want) - tolerance
  assert not np.isnan(got).any() or np.isnan(want).any()
  if got.size and excess.max() > 0:
    at = np.unravel_index(excess.argmax(), excess.shape)
    allowed = np.broadcast_to(tolerance, got.shape)[at]
    raise AssertionError(f"at {at}: {got[at]!r}, expected {want[at]!r} to within {allowed!r}")


def bf16_matrix(rng, n_out, n_in, scale=None):
  """(bits uint16, values float64) [n_out, n_in]."""
  bits = numbers.float_to_bf16(rng.standard_normal((n_out, n_in)) * (scale or n_in ** -0.5))
  return bits, numbers.bf16_to_float(bits).astype(np.float64)


def int4_matrix(rng, n_out, n_in, group):
  """((packed, scale bits), values float64)."""
  packed = numbers.pack_int4(rng.integers(-8, 8, (n_out, n_in)))
  scale = numbers.float_to_bf16(rng.uniform(0.2, 1, (n_out, n_in // group)) * 0.3 * n_in ** -0.5)
  return (packed, scale), numbers.dequantise(packed, scale, group).astype(np.float64)


def product_bound(x, weight):
  """The most a float32 sum of products can be off, in any order: [n, n_out]."""
  n_in = weight.shape[1]
  return 1.01 * (n_in + 2) * UNIT * (np.abs(x) @ np.abs(weight).T) + 1e-37


def check_rows_independent(backends, prepare, run, n, rng):
  """Every row of a batch of n has the same bits in any split of the batch, alone, and at any number of threads.

  prepare(backend) uploads weights, run(backend, weights, rows) -> tuple of arrays [len(rows), ...]; returns the
  batch's."""
  batch = None
  for threads in THREADS:
    backend = backends[threads]
    weights = prepare(backend)
    whole = run(backend, weights, np.arange(n))
    batch = batch or whole
    assert all(same_bits(a, b) for a, b in zip(batch, whole)), f"{threads} threads"
    cuts = np.sort(rng.integers(0, n + 1, 3))
    splits = [s for s in np.split(np.arange(n), cuts) if len(s)]
    alone = np.arange(n) if n <= 17 else rng.integers(0, n, 6)
    for rows in splits + [np.array([i]) for i in alone] + [rng.permutation(n)]:
      part = run(backend, weights, rows)
      assert all(same_bits(np.ascontiguousarray(a[rows]), b) for a, b in zip(batch, part)), \
          f"rows {rows} of {n}, {threads} threads"
  return batch
