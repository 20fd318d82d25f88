"""What surrounds the ops: memory, and rounds that are sent, submitted, replayed and fetched."""
import ctypes

import numpy as np

from op_checks import ONE_OF_A_KIND, backends
from op_hooks import Guarded

pytestmark = ONE_OF_A_KIND


def test_memory_is_zero_at_first(backends):
  data = np.arange(1, 1001, dtype=np.uint8)
  for bytes_, offset in ((1000, 0), (4096, 17), (5_000_000, 4_999_000)):
    out = Guarded((bytes_,), np.uint8)
    backends[1].call("memory", data, offset, out)
    want = np.zeros(bytes_, np.uint8)
    want[offset:offset + 1000] = data
    assert (out.check() == want).all()


def test_capacity(backends):
  """Work is recorded for at least as many rows, and more rows never need less."""
  sizes = [backends[1].number("capacity", rows) for rows in range(1, 2000)]
  assert all(size >= rows for rows, size in enumerate(sizes, 1)) and sizes == sorted(sizes)
  assert all(backends[1].number("capacity", size) == size for size in set(sizes))


def run_rounds(backend, key, live, expert, n_experts):
  """-> (distinct, seconds, calls of the work)."""
  distinct, seconds, calls = Guarded((len(live),), np.int32), Guarded((len(live),), np.float64), ctypes.c_int64()
  backend.call("rounds", key, *expert.shape[1:], n_experts, np.array(live, np.int32), expert, distinct, seconds,
               ctypes.byref(calls))
  return distinct.check().tolist(), seconds.check(), calls.value


def test_rounds_are_replayed_on_what_was_sent(backends):
  """A key stands for the same work on other contents: live counts and rows are read when it runs."""
  rng = np.random.default_rng(0)
  for key, (n, k, n_experts) in enumerate(((1, 1, 1), (16, 8, 384), (70, 6, 64), (300, 8, 384))):
    live = [n, 0, 1, *rng.integers(0, n + 1, 12).tolist(), n]
    expert = rng.integers(0, n_experts, (len(live), n, k)).astype(np.int32)
    want = [len(np.unique(e[:m])) for m, e in zip(live, expert)]
    distinct, seconds, calls = run_rounds(backends[1], key, live, expert, n_experts)
    assert distinct == want and (seconds >= 0).all()
    assert calls == (1 if backends.bf16 else len(live))
    again, _, calls = run_rounds(backends[1], key, live[::-1], np.ascontiguousarray(expert[::-1]), n_experts)
    assert again == want[::-1] and calls == (0 if backends.bf16 else len(live))
