"""What the op tests share: backends, bounds, weights with their exact values, and the row-independence property.

Every test that takes `backends` runs on each instruction set of the CPU and on CUDA: the same cases. KDTREE_TEST_TARGETS
names some of them ("AVX2 cuda"); one that is named and cannot be had fails."""
import os

import numpy as np
import pytest

import op_calls
import op_hooks
from reference import numbers

CPU_TARGETS = op_hooks.cpu_targets()
NAMED = os.environ.get("KDTREE_TEST_TARGETS", "").split()
TARGETS = NAMED or [*CPU_TARGETS, "cuda"]
# For ops that no instruction set changes: pytestmark of their files.
ONE_OF_A_KIND = pytest.mark.parametrize("backends", sorted({TARGETS[0], TARGETS[-1]}), indirect=True, scope="module")

THREADS = (1, 2, 3)
UNIT = 2.0 ** -24    # half an ulp of a float32 near 1
BF16_UNIT = 2.0 ** -8
SPARE = 5            # rows behind the live ones


class Backends:
  """A backend by thread count. CUDA is one for all counts, and its activations are BF16."""

  def __init__(self, target):
    self.target, self.bf16 = target, target == "cuda"
    self.threads = (1,) if self.bf16 else THREADS
    self.by_threads = {}

  def __getitem__(self, threads):
    threads = 1 if self.bf16 else threads
    if threads not in self.by_threads:
      self.by_threads[threads] = op_calls.Ops(threads, self.target)
    return self.by_threads[threads]

  def __iter__(self):
    return (self[threads] for threads in self.threads)

  def close(self):
    for backend in self.by_threads.values():
      backend.close()
    self.by_threads.clear()

  # Numbers as the backend holds them.

  def act(self, x):
    """float32, as activations are: what goes in, so that the reference computes with the same."""
    x = np.asarray(x, np.float32)
    return numbers.bf16_to_float(numbers.float_to_bf16(x)) if self.bf16 else x

  def normal(self, rng, *shape, scale=1.0):
    return self.act(rng.standard_normal(shape) * scale)

  def assert_act(self, got, want, tolerance, part=1e-2):
    """An op's activations: within `tolerance` where they are fp32. Where they are BF16, so may be values in between: each
    element to `part` of its own size or its row's, and all together to four thousandths."""
    if not self.bf16:
      return assert_close(got, want, tolerance)
    want = np.asarray(want, np.float64)
    size = np.sqrt((want * want).mean(-1, keepdims=True)) if want.size else want
    assert_close(got, want, part * (np.abs(want) + size) + tolerance)
    assert np.linalg.norm(got - want) <= 4e-3 * np.linalg.norm(want) + np.max(tolerance, initial=0) * want.size ** 0.5

  def assert_sum(self, got, want, bound):
    """A sum within `bound` that was rounded once to an activation. Tensor cores cut what fp32 additions would round."""
    assert_close(got, want, 4 * bound + 1.01 * BF16_UNIT * np.abs(want) if self.bf16 else bound)


@pytest.fixture(scope="module", params=TARGETS)
def backends(request):
  """One after the other: the choice of an instruction set is process-wide."""
  if request.param == "cuda" and not NAMED and op_hooks.why_no_cuda():
    pytest.skip(op_hooks.why_no_cuda())
  opened = Backends(request.param)
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


def with_spare(backend, run, spare=SPARE):
  """run() with rows behind the live ones."""
  backend.spare = spare
  try:
    return run()
  finally:
    backend.spare = 0


def check_rows_independent(backends, prepare, run, n, rng):
  """Every row of a batch of n has the same bits in any split of the batch, alone, at any number of threads, and with rows
  behind it that are not live.

  prepare(backend) uploads weights, run(backend, weights, rows) -> tuple of arrays [len(rows), ...]; returns the
  batch's."""
  batch = None
  for backend in backends:
    weights = prepare(backend)
    whole = run(backend, weights, np.arange(n))
    batch = batch or whole
    where = f"{backend.describe()[0]} threads"
    assert all(same_bits(a, b) for a, b in zip(batch, whole)), where
    spared = with_spare(backend, lambda: run(backend, weights, np.arange(n)), int(rng.integers(1, 70)))
    assert all(same_bits(a, np.ascontiguousarray(b)) for a, b in zip(batch, spared)), f"spare rows, {where}"
    cuts = np.sort(rng.integers(0, n + 1, 3))
    splits = [s for s in np.split(np.arange(n), cuts) if len(s)]
    alone = np.arange(n) if n <= 17 else rng.integers(0, n, 6)
    for rows in splits + [np.array([i]) for i in alone] + [rng.permutation(n)]:
      part = run(backend, weights, rows)
      assert all(same_bits(np.ascontiguousarray(a[rows]), b) for a, b in zip(batch, part)), f"rows {rows} of {n}, {where}"
  return batch
