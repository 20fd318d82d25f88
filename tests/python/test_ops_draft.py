"""The drafter's cached context and block attention, for every backend, against the numpy reference."""
import numpy as np
import pytest

from op_checks import SPARE, backends, same_bits, with_spare
from op_hooks import Guarded, Rows
from reference import attention, layers

EPS = 1e-5
# heads, kv heads, head_dim, block
SHAPES = [(1, 1, 32, 1), (4, 1, 24, 2), (16, 8, 32, 8), (6, 2, 64, 17), (2, 2, 128, 8), (3, 3, 6, 70)]


class Draft:
  """One drafter layer: its norms and its table, and what its ops do."""

  def __init__(self, backends, rng, shape):
    self.backends = backends
    self.heads, self.kv_heads, self.dim, self.block = shape
    self.q_norm, self.k_norm = (rng.uniform(0.5, 1.5, self.dim).astype(np.float32) for _ in range(2))
    self.cos, self.sin = layers.rope_table(1024, self.dim, 10000.0, None)

  def pool(self, backend, n_pages):
    size = backend.page_sizes(n_kv_heads=self.kv_heads, head_dim=self.dim)[2]
    return Guarded((n_pages, size + 64), np.uint8, aligned=True)

  def tokens(self, rng, *shape):
    return self.backends.normal(rng, *shape)

  def context(self, backend, rows, tables, kv, pool):
    backend.call("draft_context", rows, tables, len(tables), backend.rows_in(kv), self.k_norm, EPS, self.cos, self.sin,
                 self.kv_heads, self.dim, pool, pool.array.strides[0])
    assert (pool.check()[:, -64:] == 0xFF).all()

  def attend(self, backend, start, tables, qkv, window, pool, first_query=0, n_queries=None):
    """-> [streams, block, heads * dim]; rows that were not asked for stay NaN."""
    n_queries = self.block - first_query if n_queries is None else n_queries
    out = backend.rows_out((len(start), self.block, self.heads * self.dim))
    backend.call("draft_attention", backend.count(len(start)), self.block, backend.rows_in(start, np.int32),
                 backend.rows_in(tables, np.int32), backend.rows_in(qkv), self.q_norm, self.k_norm, EPS, self.cos, self.sin,
                 self.heads, self.kv_heads, self.dim, window, first_query, n_queries, pool, pool.array.strides[0], out)
    return out.check()

  def want(self, kv, qkv, start, window):
    """kv [start, 2 * kv_heads * dim] of the context, qkv [block, …] of one stream."""
    kv, qkv = kv.astype(np.float64), qkv.astype(np.float64)
    heads = lambda x: x.reshape(len(x), -1, self.dim)
    width = self.kv_heads * self.dim
    q, k, v = np.split(qkv, [self.heads * self.dim, self.heads * self.dim + width], -1)
    k, v = heads(np.concatenate((kv[:, :width], k))), heads(np.concatenate((kv[:, width:], v)))
    turn = lambda x, norm, places: layers.rotate_half(layers.rms_norm(x, norm, EPS), self.cos[places][:, None],
                                                      self.sin[places][:, None])
    keys, queries = np.arange(start + self.block), start + np.arange(self.block)
    visible = attention.window_visible(queries, keys, window)
    q, k = turn(heads(q), self.q_norm, queries), turn(k, self.k_norm, keys)
    if self.backends.bf16:
      q, k = (self.backends.act(x).astype(np.float64) for x in (q, k))
    return attention.grouped_query(q, k, v, visible)


@pytest.mark.parametrize("window", [0, 1, 5, 64, 100, 256])
@pytest.mark.parametrize("shape", SHAPES)
def test_block(backends, shape, window):
  rng = np.random.default_rng([window, shape[2]])
  draft = Draft(backends, rng, shape)
  starts = [0, 1, 63, 64, 130, 300] if shape[2] < 100 else [65, 200]
  tables = rng.permutation(len(starts) * 5).reshape(len(starts), 5).astype(np.int32)
  stream = np.repeat(np.arange(len(starts)), starts)
  position = np.concatenate([np.arange(n) for n in starts])
  kv = draft.tokens(rng, len(stream), 2 * draft.kv_heads * draft.dim)
  row_width = (draft.heads + 2 * draft.kv_heads) * draft.dim
  qkv = draft.tokens(rng, len(starts), draft.block, row_width)
  whole = written = None
  for backend in backends:
    pool, in_parts = draft.pool(backend, tables.size), draft.pool(backend, tables.size)
    draft.context(backend, Rows(position, stream), tables, kv, pool)
    mixed = rng.permutation(len(stream))
    for i, part in enumerate(np.array_split(mixed, 7) + [mixed[:1]]):
      with_spare(backend, lambda: draft.context(backend, Rows(position[part], stream[part]), tables, kv[part], in_parts),
                 SPARE * (i % 2))
    assert same_bits(in_parts.array, pool.array)
    got = draft.attend(backend, starts, tables, qkv, window, pool)
    whole, written = (got, pool.array) if whole is None else (whole, written)
    assert same_bits(got, whole) and same_bits(pool.array, written)
    spared = with_spare(backend, lambda: draft.attend(backend, starts, tables, qkv, window, pool))
    assert same_bits(spared, whole)
    for i in range(len(starts)):
      alone = draft.attend(backend, starts[i:i + 1], tables[i:i + 1], qkv[i:i + 1], window, pool)
      assert same_bits(alone, got[i:i + 1])
    first = int(rng.integers(0, draft.block))
    count = int(rng.integers(1, draft.block - first + 1))
    some = draft.attend(backend, starts, tables, qkv, window, pool, first, count)
    assert same_bits(some[:, first:first + count].copy(), got[:, first:first + count].copy())
    assert np.isnan(some[:, :first]).all() and np.isnan(some[:, first + count:]).all()
  for i, start in enumerate(starts):
    want = draft.want(kv[stream == i], qkv[i], start, window)
    backends.assert_act(whole[i], want, 1e-5 * (1 + np.abs(want)))


@pytest.mark.parametrize("window", [0, 100, 2048])
def test_long_contexts(backends, window):
  rng = np.random.default_rng(window)
  draft = Draft(backends, rng, (4, 2, 32, 8))
  draft.cos, draft.sin = layers.rope_table(8500, draft.dim, 10000.0, None)
  starts = [2047, 2048, 2400, 8191, 8300]
  tables = rng.permutation(len(starts) * 131).reshape(len(starts), 131).astype(np.int32)
  stream, position = np.repeat(np.arange(len(starts)), starts), np.concatenate([np.arange(n) for n in starts])
  kv, qkv = draft.tokens(rng, len(stream), 128), draft.tokens(rng, len(starts), 8, 8 * 32)
  pool = draft.pool(backends[2], tables.size)
  draft.context(backends[2], Rows(position, stream), tables, kv, pool)
  whole = draft.attend(backends[2], starts, tables, qkv, window, pool)
  for i, start in enumerate(starts):
    alone = draft.attend(backends[1], starts[i:i + 1], tables[i:i + 1], qkv[i:i + 1], window, pool)
    assert same_bits(alone[0], whole[i])
    backends.assert_act(whole[i], draft.want(kv[stream == i], qkv[i], start, window), 2e-5)


def test_pages_out_of_the_window_are_not_read(backends):
  """What every query has lost sight of may be anything: its pages may be gone."""
  rng = np.random.default_rng(1)
  draft = Draft(backends, rng, (4, 2, 32, 8))
  tables, start, window = np.array([[3, 1, 0, 2]], np.int32), 200, 70
  kv, qkv = draft.tokens(rng, start, 2 * draft.kv_heads * draft.dim), draft.tokens(rng, 1, 8, 8 * 32)
  pool, recent = draft.pool(backends[1], 4), draft.pool(backends[1], 4)
  draft.context(backends[1], Rows(np.arange(start)), tables, kv, pool)
  draft.context(backends[1], Rows(np.arange(128, start)), tables, kv[128:], recent)
  # The first query sees from 131 on; slots 128 to 130 are in its page, the two pages before it are NaN.
  forgotten = np.array([[-(1 << 30), -(1 << 30), 0, 2]], np.int32)
  assert same_bits(draft.attend(backends[1], [start], forgotten, qkv, window, recent),
                   draft.attend(backends[1], [start], tables, qkv, window, pool))


def test_no_streams(backends):
  draft = Draft(backends, np.random.default_rng(0), SHAPES[2])
  pool = draft.pool(backends[2], 1)
  tables = np.zeros((0, 1), np.int32)
  assert draft.attend(backends[2], [], tables, np.zeros((0, 8, 32 * 32), np.float32), 0, pool).size == 0
  draft.context(backends[2], Rows([]), tables, np.zeros((0, 512), np.float32), pool)
  assert (pool.array == 0xFF).all()
