"""Latent attention over pages and draft trees, for every backend: against the numpy reference, and bit for bit against the
same token committed.

Pools and scratch are all NaN at first, so whatever an op reads that it should not shows."""
import numpy as np
import pytest

from op_checks import SPARE, assert_close, backends, bf16_matrix, same_bits, with_spare
from op_hooks import Guarded, Rows
from reference import attention, layers

YARN = dict(factor=4.0, original_max_position_embeddings=1024, beta_fast=32.0, beta_slow=1.0, mscale=1.0,
            mscale_all_dim=1.0)
EPS = 1e-5
# heads, nope, rope, kv_lora, v_head
SHAPES = [(1, 32, 32, 128, 32), (3, 16, 8, 24, 20), (5, 7, 2, 17, 3), (8, 32, 32, 128, 32), (2, 128, 64, 512, 128)]
SMALL = SHAPES[1]


class Mla:
  """Weights of one layer, and what its ops do to given rows."""

  def __init__(self, backends, rng, shape):
    self.backends = backends
    self.heads, self.nope, self.rope, self.lora, self.v_head = shape
    self.uk, self.uk_values = zip(*(bf16_matrix(rng, self.lora, self.nope) for _ in range(self.heads)))
    self.uv, self.uv_values = zip(*(bf16_matrix(rng, self.v_head, self.lora) for _ in range(self.heads)))
    self.norm = rng.uniform(0.5, 1.5, self.lora).astype(np.float32)
    self.cos, self.sin = layers.rope_table(9300, self.rope, 50000.0, YARN)
    self.scale = float(np.float32((self.nope + self.rope) ** -0.5 * 1.3))

  def tokens(self, rng, n):
    """What the projections of n tokens gave: kv [n, lora + rope], q [n, heads * (nope + rope)]."""
    draw = lambda width: self.backends.normal(rng, n, width, scale=2)
    return draw(self.lora + self.rope), draw(self.heads * (self.nope + self.rope))

  def upload(self, backend):
    return [backend.matrix(w) for w in self.uk], [backend.matrix(w) for w in self.uv]

  def memory(self, backend, n_pages, n_rows):
    """(pages, further apart than they are long, scratch of n_rows and spare ones): all NaN."""
    page, scratch, _ = backend.page_sizes(self.lora, self.rope, n_rows + SPARE)
    return Guarded((n_pages, page + 128), np.uint8, aligned=True), Guarded((scratch,), np.uint8, aligned=True)

  def write(self, backend, rows, tables, kv, pages, scratch, q=(None, None, 0, None), stride=None):
    padded = np.full((len(kv), stride or self.lora + self.rope + 3), np.nan, np.float32)
    padded[:, :kv.shape[1]] = kv
    backend.call("latent_write", rows, tables, len(tables), backend.rows_in(padded), padded.shape[1], self.norm, EPS,
                 self.cos, self.sin, self.rope, self.lora, pages, pages.array.strides[0], scratch, *q)
    assert (pages.check()[:, -128:] == 0xFF).all()
    scratch.check()

  def attend(self, backend, weights, rows, tables, q, pages, scratch):
    out = backend.rows_out((len(rows), self.heads * self.v_head))
    backend.call("mla_attention", rows, tables, len(tables), backend.rows_in(q), *weights, self.heads, self.nope,
                 self.lora, self.v_head, self.cos, self.sin, self.rope, self.scale, pages, pages.array.strides[0],
                 scratch, out)
    return out.check()

  def forward(self, backend, weights, rows, tables, kv, q, pages, scratch):
    self.write(backend, rows, tables, kv, pages, scratch)
    return self.attend(backend, weights, rows, tables, q, pages, scratch)

  def commit(self, backend, kept, rows, tables, pages, scratch, n_layers=1, layer_page_bytes=0, layer_scratch_bytes=0):
    backend.call("commit", backend.count(len(kept)), backend.rows_in(kept, np.int32), rows, tables, len(tables), n_layers,
                 self.lora, self.rope, pages, pages.array.strides[0], layer_page_bytes, scratch, layer_scratch_bytes)

  def want(self, kv, q, position, visible):
    """The reference for the last len(q) of the tokens at these positions, visible bool [queries, keys] among them."""
    kv, q = kv.astype(np.float64), q.astype(np.float64).reshape(len(q), self.heads, -1)
    latent = layers.rms_norm(kv[:, :self.lora], self.norm, EPS)
    cos, sin = self.cos[position].astype(np.float64), self.sin[position].astype(np.float64)
    k_pe = layers.rotate_interleaved(kv[:, self.lora:], cos, sin)
    cos, sin = cos[len(kv) - len(q):, None], sin[len(kv) - len(q):, None]
    q_pe = layers.rotate_interleaved(q[..., self.nope:], cos, sin)
    if not self.backends.bf16:
      uk = np.stack(self.uk_values).transpose(0, 2, 1)      # [heads, nope, lora], as kv_b_proj has it
      q = np.concatenate((q[..., :self.nope], q_pe), -1)
      return attention.mla(q, latent, k_pe, uk, np.stack(self.uv_values), self.scale, visible)
    # In the absorbed form, with what is BF16 in between: KV, the query and the attended latent.
    act = lambda x: self.backends.act(x).astype(np.float64)
    latent, k_pe, q_pe = act(latent), act(k_pe), act(q_pe)
    keys, out = np.concatenate((latent, k_pe), -1), []
    for h in range(self.heads):
      query = np.concatenate((act(q[:, h, :self.nope] @ self.uk_values[h].T), q_pe[:, h]), -1)
      out.append(act(attention.attend(query, keys, latent, self.scale, visible)) @ self.uv_values[h].T)
    return np.concatenate(out, -1)

  def check(self, got, want):
    # On CUDA weights of keys are BF16 and means of segments FP16: more roundings than the reference has.
    self.backends.assert_act(got, want, 2e-5 * (1 + np.abs(want)), part=1.5e-2)


def shuffled_tables(rng, n_streams, width):
  """Pages of no particular order, none shared: [n_streams, width], and how many there are."""
  return rng.permutation(n_streams * width).reshape(n_streams, width).astype(np.int32), n_streams * width


@pytest.mark.parametrize("shape", SHAPES)
def test_prompts(backends, shape):
  """Streams of ragged lengths in one batch; the same in chunks, alone, token by token, at any number of threads."""
  rng = np.random.default_rng(shape[3])
  layer = Mla(backends, rng, shape)
  lengths = [1, 63, 64, 65, 150]
  tables, n_pages = shuffled_tables(rng, len(lengths), 3)
  stream = np.repeat(np.arange(len(lengths)), lengths)
  position = np.concatenate([np.arange(n) for n in lengths])
  kv, q = layer.tokens(rng, len(stream))
  whole = None
  for backend in backends:
    weights = layer.upload(backend)
    pages, scratch = layer.memory(backend, n_pages, len(stream))
    got = layer.forward(backend, weights, Rows(position, stream), tables, kv, q, pages, scratch)
    whole = got if whole is None else whole
    assert same_bits(got, whole)
    # In chunks; every fourth one is the end of one stream and the beginning of the next, every other one has spare rows.
    chunked, again = layer.memory(backend, n_pages, len(stream))
    cuts = np.sort(rng.choice(len(stream), 9, replace=False))
    for i, chunk in enumerate(np.split(np.arange(len(stream)), cuts)):
      run = lambda: layer.forward(backend, weights, Rows(position[chunk], stream[chunk]), tables, kv[chunk], q[chunk],
                                  chunked, again)
      assert same_bits(with_spare(backend, run, SPARE * (i % 2)), whole[chunk])
    assert same_bits(chunked.array, pages.array)
    for i in rng.choice(len(stream), 12, replace=False):
      one = layer.attend(backend, weights, Rows(position[i:i + 1], stream[i:i + 1]), tables, q[i:i + 1], pages, scratch)
      assert same_bits(one, whole[i:i + 1])
    mixed = rng.permutation(len(stream))
    assert same_bits(layer.attend(backend, weights, Rows(position[mixed], stream[mixed]), tables, q[mixed], pages,
                                  scratch), whole[mixed])
  for s in range(len(lengths)):
    own = stream == s
    want = layer.want(kv[own], q[own], position[own], np.tril(np.ones((lengths[s],) * 2, bool)))
    layer.check(whole[own], want)


def test_chunks_of_long_prompts(backends):
  """Ends of two streams with contexts of many segments as one batch of many rows; rows of it alone."""
  rng = np.random.default_rng(7)
  layer = Mla(backends, rng, (8, 128, 64, 512, 128))
  lengths, rows_of = [1400, 9100], [75, 62]
  tables, n_pages = shuffled_tables(rng, 2, 9100 // 64 + 1)
  stream, position = np.repeat([0, 1], lengths), np.concatenate([np.arange(n) for n in lengths])
  last = np.concatenate([np.flatnonzero(stream == s)[-n:] for s, n in enumerate(rows_of)])
  kv, _ = layer.tokens(rng, len(stream))
  _, q = layer.tokens(rng, len(last))
  backend = backends[2]
  weights = layer.upload(backend)
  pages, scratch = layer.memory(backend, n_pages, len(stream))
  layer.write(backend, Rows(position, stream), tables, kv, pages, scratch)
  attend = lambda of: layer.attend(backend, weights, Rows(position[last[of]], stream[last[of]]), tables, q[of], pages, scratch)
  whole = attend(np.arange(len(last)))
  for of in (*rng.choice(len(last), (6, 1)), np.arange(20, 60), np.arange(70, 80)):
    assert same_bits(attend(of), whole[of])
  for s, n in enumerate(rows_of):
    own, some = stream == s, slice(0, rows_of[0]) if s == 0 else slice(rows_of[0], None)
    seen = np.arange(lengths[s]) <= np.arange(lengths[s] - n, lengths[s])[:, None]
    layer.check(whole[some], layer.want(kv[own], q[some], position[own], seen))


def random_parents(rng, n_nodes, style):
  """Parents of nodes 1..n as node numbers: a chain, a bush, or deep with branches."""
  if style == "chain":
    return list(range(n_nodes))
  reach = (lambda i: 0) if style == "bush" else (lambda i: max(0, i - 4))
  return [int(rng.integers(reach(i), i)) for i in range(1, n_nodes + 1)]


def path_to(parents, node):
  path = [node]
  while path[-1]:
    path.append(parents[path[-1] - 1])
  return path[::-1]


class Stream:
  """A committed context, and a tree whose root is the first token after it."""

  def __init__(self, rng, layer, context, parents):
    self.context, self.parents = context, parents
    self.depth = np.array([0] + [len(path_to(parents, i)) - 1 for i in range(1, len(parents) + 1)])
    self.old_kv, _ = layer.tokens(rng, context)
    self.kv, self.q = layer.tokens(rng, len(parents) + 1)


SHORT, LONG = [0, 1, 5, 62, 63, 64, 100, 127, 128], [1000, 1023, 1270, 8180, 8191, 8300, 9200]


@pytest.mark.parametrize("shape,style,seed,contexts", [(shape, style, seed, SHORT) for shape in SHAPES for seed, style in
                                                       enumerate(("chain", "bush", "deep"))] +
                         [(SMALL, "deep", seed, SHORT) for seed in range(3, 13)] +
                         [(SMALL, "deep", seed, LONG) for seed in range(3)] + [(SHAPES[4], "chain", 1, LONG[:3]), (SHAPES[4], "deep", 2, LONG[-1:])])
def test_draft_node_is_the_committed_token(backends, shape, style, seed, contexts):
  """In one batch: trees of several streams, and a prompt's rows. Each node equals its path alone, and the same tokens
  committed and decoded; the commit op leaves the pages that writing the tokens there leaves."""
  if shape == SHAPES[4] and min(contexts) > 9000 and not backends.bf16:
    pytest.skip("for segments of eight tiles on a GPU: minutes on the CPU")
  rng = np.random.default_rng([seed, shape[3], contexts[0]])
  layer = Mla(backends, rng, shape)
  streams = [Stream(rng, layer, int(rng.choice(contexts)),
                    random_parents(rng, int(rng.integers(1, 90 if style == "chain" else 40)), style)) for _ in range(3)]
  tables, n_pages = shuffled_tables(rng, len(streams) + 1, max(contexts) // 64 + 3)
  n_prompt = 140 if shape == SHAPES[4] and style == "deep" else 70   # more than 128 rows go another way on Hopper
  prompt_kv, prompt_q = layer.tokens(rng, n_prompt)

  # The batch: rows of all streams interleaved, each stream's own in order.
  order = rng.permutation(np.repeat(np.arange(len(streams)), [len(s.kv) for s in streams]))
  row_of = [np.flatnonzero(order == s) for s in range(len(streams))]
  node_of = np.empty(len(order), int)
  for rows in row_of:
    node_of[rows] = np.arange(len(rows))
  stream_row = lambda f: [f(streams[s], s, node) for s, node in zip(order, node_of)]
  position = stream_row(lambda s, _, node: s.context + s.depth[node]) + list(range(n_prompt))
  parent = stream_row(lambda s, i, node: row_of[i][s.parents[node - 1]] if node else -1) + [-1] * n_prompt
  visible = stream_row(lambda s, _, node: s.context + 1) + list(range(1, n_prompt + 1))
  rows = Rows(position, list(order) + [len(streams)] * n_prompt, parent, visible)
  kv = np.concatenate((np.stack(stream_row(lambda s, _, node: s.kv[node])), prompt_kv))
  q = np.concatenate((np.stack(stream_row(lambda s, _, node: s.q[node])), prompt_q))

  tree_bits = None
  for backend in backends:
    weights = layer.upload(backend)
    pages, scratch = layer.memory(backend, n_pages, len(rows))
    for i, s in enumerate(streams):
      if s.context:
        layer.write(backend, Rows(np.arange(s.context), [i] * s.context), tables, s.old_kv, pages, scratch)
    context_pages = pages.array.copy()
    spared_pages, spared_scratch = layer.memory(backend, n_pages, len(rows))
    spared_pages.array[...] = context_pages
    got = layer.forward(backend, weights, rows, tables, kv, q, pages, scratch)
    tree_bits = got if tree_bits is None else tree_bits
    assert same_bits(got, tree_bits)
    assert same_bits(with_spare(backend, lambda: layer.forward(backend, weights, rows, tables, kv, q, spared_pages,
                                                               spared_scratch)), got)
    assert same_bits(spared_pages.array, pages.array) and same_bits(spared_scratch.array, scratch.array)

    for i, s in enumerate(streams):
      deepest = int(s.depth.argmax())
      for node in {deepest, 0, *rng.integers(0, len(s.kv), 2).tolist()}:
        path = path_to(s.parents, node)
        n, row = len(path), row_of[i][node]
        places = s.context + np.arange(n)
        # The path alone, with scratch of its own.
        alone_pages, alone_scratch = layer.memory(backend, n_pages, n)
        alone_pages.array[...] = context_pages
        chain = Rows(places, [i] * n, [-1] + list(range(n - 1)), [s.context + 1] * n)
        alone = layer.forward(backend, weights, chain, tables, s.kv[path], s.q[path], alone_pages, alone_scratch)
        assert same_bits(alone[-1], got[row]), (i, node)
        # Committed, then the token alone.
        _, unused = layer.memory(backend, 1, 1)
        alone_pages.array[...] = context_pages
        layer.write(backend, Rows(places, [i] * n), tables, s.kv[path], alone_pages, unused)
        decoded = layer.attend(backend, weights, Rows(places[-1:], [i]), tables, s.q[node:node + 1], alone_pages,
                               unused)
        assert same_bits(decoded[0], got[row]), (i, node)
        # The commit op, from the batch's scratch rows; the root and a prompt's row are where they belong.
        committed, _ = layer.memory(backend, n_pages, 1)
        committed.array[...] = context_pages
        layer.write(backend, Rows(places[:1], [i]), tables, s.kv[:1], committed, unused)
        kept = np.concatenate(([len(rows) - 3], row_of[i][path]))
        with_spare(backend, lambda: layer.commit(backend, kept, rows, tables, committed, scratch), SPARE * (node % 2))
        assert same_bits(committed.check(), alone_pages.array)

  for i, s in enumerate(streams):
    among = attention.ancestors_visible([-1] + s.parents)
    seen = np.concatenate((np.ones((len(s.kv), s.context), bool), among), 1)
    places = np.concatenate((np.arange(s.context), s.context + s.depth))
    want = layer.want(np.concatenate((s.old_kv, s.kv)), s.q, places, seen)
    layer.check(tree_bits[row_of[i]], want)


@pytest.mark.parametrize("shape,width,n_out", [(SHAPES[0], 96, 40), (SHAPES[2], 5, 16), (SHAPES[4], 500, 33),
                                               (SHAPES[0], 1536, 200), (SHAPES[4], 1536, 1536), (SHAPES[2], 1040, 97)])
def test_latent_write_with_queries(backends, shape, width, n_out):
  """Both are what they are alone. Rows of queries are as far apart as those of kv."""
  rng = np.random.default_rng(width)
  layer, tables = Mla(backends, rng, shape), np.array([[1, 0]], np.int32)
  norm = rng.uniform(0.5, 1.5, width).astype(np.float32)
  bits, _ = bf16_matrix(rng, n_out, width, width ** -0.5)
  for n in (1, 7, 8, 13, 21):
    kv, _ = layer.tokens(rng, n)
    q = backends.normal(rng, n, (max(kv.shape[1], width) + 15) // 8 * 8 + 3 * (n == 7), scale=3)
    parents = [-1, *range(n - 1)]
    rows = Rows(np.arange(60, 60 + n), parent=parents, visible=[61] * n)
    for backend in backends:
      q_b = backend.matrix(bits)
      want = layer.memory(backend, 2, n)
      layer.write(backend, rows, tables, kv, *want, stride=q.shape[1])
      want_q = backend.linear(backend.rms_norm(q[:, :width].copy(), norm, EPS), q_b, n_out)

      def both():
        pages, scratch = layer.memory(backend, 2, n)
        out = backend.rows_out((n, n_out))
        layer.write(backend, rows, tables, kv, pages, scratch, (backend.rows_in(q), norm, q_b, out), q.shape[1])
        return pages.check(), scratch.check(), out.check()

      for pages, scratch, out in (both(), with_spare(backend, both)):
        assert same_bits(pages, want[0].array) and same_bits(scratch, want[1].array) and same_bits(out, want_q)


def test_commit_of_layers(backends):
  """A page has every layer's part, layer_page_bytes apart; what is between stays as it is."""
  rng = np.random.default_rng(4)
  layer, backend, n_layers = Mla(backends, rng, SMALL), backends[2], 3
  page, scratch_bytes, _ = backend.page_sizes(layer.lora, layer.rope, 6)
  pool = Guarded((2, n_layers, page + 64), np.uint8, 0x7F, True)
  scratch = Guarded((n_layers, scratch_bytes + 192), np.uint8, 0x7F, True)
  before, want, tables = pool.array.copy(), pool.array.copy(), np.array([[1, 0]], np.int32)
  rows = Rows(np.arange(60, 66), parent=[-1, 0, 1, 2, 3, 4], visible=[61] * 6)
  for i in range(n_layers):
    kv, _ = layer.tokens(rng, 6)
    pages, own = layer.memory(backend, 2, 6)
    layer.write(backend, rows, tables, kv, pages, own)
    scratch.array[i, :scratch_bytes] = own.array[:scratch_bytes]
    pages.array[:, :page] = 0x7F
    layer.write(backend, Rows([62, 63, 64]), tables, kv[[2, 3, 4]], pages, own)
    want[:, i, :page] = pages.array[:, :page]
  commit = lambda *kept: layer.commit(backend, kept, rows, tables, pool, scratch, n_layers, pool.array.strides[1],
                                      scratch.array.strides[0])
  commit()
  with_spare(backend, commit)
  commit(0)
  assert same_bits(pool.check(), before)
  commit(2, 0, 4, 3)
  assert same_bits(pool.check(), want) and not same_bits(before, want)


def test_no_rows(backends):
  layer = Mla(backends, np.random.default_rng(0), SMALL)
  pages, scratch = layer.memory(backends[2], 1, 1)
  kv, q = layer.tokens(np.random.default_rng(0), 0)
  tables = np.zeros((1, 1), np.int32)
  run = lambda: layer.forward(backends[2], layer.upload(backends[2]), Rows([]), tables, kv, q, pages, scratch)
  assert run().shape == with_spare(backends[2], run).shape == (0, layer.heads * layer.v_head)
  assert (pages.array == 0xFF).all() and (scratch.array == 0xFF).all()


def test_large_scores_do_not_overflow(backends):
  """Scores of thousands: the running maximum keeps every exponential in range."""
  rng = np.random.default_rng(9)
  layer = Mla(backends, rng, SMALL)
  kv, q = layer.tokens(rng, 140)
  q *= 1024
  pages, scratch = layer.memory(backends[1], 3, 1)
  tables = np.array([[2, 0, 1]], np.int32)
  got = layer.forward(backends[1], layer.upload(backends[1]), Rows(np.arange(140)), tables, kv, q, pages, scratch)
  assert np.isfinite(got).all()
  if not backends.bf16:      # there, rounding the query turns the largest score into another one
    assert_close(got, layer.want(kv, q, np.arange(140), np.tril(np.ones((140, 140), bool))), 0.05)
