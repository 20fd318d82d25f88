"""The ops of a backend on numpy arrays, through the test hooks library (tests/hooks).

KDTREE_TEST_HOOKS names the library; without it the newest one under build*/tests/hooks is taken. Every output lies
between guard bytes and is poisoned before the call, so that an op that writes too much or too little is caught.
"""
import ctypes
import os
import pathlib

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[2]
GUARD = 0xA5
MARGIN = 4 * 17    # bytes on either side: no multiple of a vector, so that arrays are not aligned by luck
PAGE = 64          # kPageTokens


def library_path():
  named = os.environ.get("KDTREE_TEST_HOOKS")
  built = sorted(ROOT.glob("build*/tests/hooks/libkdt_test_hooks.so"), key=lambda p: p.stat().st_mtime)
  if not named and not built:
    raise RuntimeError("KDTREE_TEST_HOOKS: not set: expected the path of libkdt_test_hooks.so (meson builds it)")
  return named or str(built[-1])


LIBRARY = ctypes.CDLL(library_path())
LIBRARY.kdt_hook_cpu_targets.restype = ctypes.c_char_p


def cpu_targets():
  return LIBRARY.kdt_hook_cpu_targets().decode().split()


def noise(seed, choice, position, token):
  """(word, Gumbel noise) of base/philox.h."""
  word, value = ctypes.c_uint32(), ctypes.c_double()
  LIBRARY.kdt_hook_noise(ctypes.c_uint64(seed), ctypes.c_uint32(choice), ctypes.c_uint32(position),
                         ctypes.c_uint32(token), ctypes.byref(word), ctypes.byref(value))
  return word.value, value.value


class Guarded:
  """A poisoned array (NaN, or a number no op writes) between guard bytes; `aligned` to 64 bytes where an op may ask
  for that."""

  def __init__(self, shape, dtype=np.float32, fill=None, aligned=False):
    dtype = np.dtype(dtype)
    size = int(np.prod(shape)) * dtype.itemsize
    self.margin = 64 if aligned else MARGIN
    self.memory = np.full(size + 2 * self.margin + 64, GUARD, np.uint8)
    self.begin = self.margin + (-(self.memory.ctypes.data + self.margin) % 64) + (0 if aligned else 4)
    self.end = self.begin + size
    self.array = self.memory[self.begin:self.end].view(dtype).reshape(shape)
    if fill is None:
      fill = np.nan if dtype.kind == "f" else -777
    self.array[...] = fill

  def check(self):
    assert (self.memory[:self.begin] == GUARD).all() and (self.memory[self.end:] == GUARD).all(), "guard bytes"
    return self.array


def placed(values, dtype=np.float32):
  """A copy of an input with NaN on both sides (as guard bytes are no NaN, these are)."""
  guarded = Guarded(np.shape(values), dtype, values)
  guarded.memory[:guarded.begin] = 0xFF
  guarded.memory[guarded.end:] = 0xFF
  return guarded.array


class RowsStruct(ctypes.Structure):
  """kdt::Rows."""
  _fields_ = [("n", ctypes.c_int64)] + [(name, ctypes.c_void_p)
                                        for name in ("token", "position", "stream", "parent", "visible")]


class Rows:
  """Rows of a pass; every argument an int list of the same length."""

  def __init__(self, position, stream=None, parent=None, visible=None):
    n = len(position)
    self.position = np.asarray(position, np.int32)
    self.stream = np.zeros(n, np.int32) if stream is None else np.asarray(stream, np.int32)
    self.parent = np.full(n, -1, np.int32) if parent is None else np.asarray(parent, np.int32)
    self.visible = self.position + np.int32(1) if visible is None else np.asarray(visible, np.int32)
    self.token = np.full(n, -1, np.int32)
    self.struct = RowsStruct(n, *(pointer(a) for a in (self.token, self.position, self.stream, self.parent,
                                                       self.visible)))

  def __len__(self):
    return len(self.position)


def pointer(value):
  return None if value is None else value.ctypes.data


def argument(value):
  if isinstance(value, np.ndarray):
    assert value.flags.c_contiguous
    return ctypes.c_void_p(value.ctypes.data)
  if isinstance(value, Rows):
    return ctypes.byref(value.struct)
  if isinstance(value, float):
    return ctypes.c_float(value)
  if isinstance(value, bool):
    return ctypes.c_int(value)
  if isinstance(value, (int, np.integer)):
    return ctypes.c_int64(value)
  if value is None:
    return ctypes.c_void_p()
  return value     # a ctypes value already


class Backend:
  """One CPU backend. Choosing an instruction set is process-wide: backends alive together have the same one."""

  def __init__(self, threads, target):
    self.handle = ctypes.c_void_p()
    self.check(LIBRARY.kdt_hook_create, ctypes.c_int(threads), ctypes.c_char_p(target.encode()),
               ctypes.byref(self.handle))

  def close(self):
    LIBRARY.kdt_hook_destroy(self.handle)
    self.handle = ctypes.c_void_p()

  @staticmethod
  def check(function, *arguments):
    function.restype = ctypes.c_char_p
    message = function(*arguments)
    if message is not None:
      raise RuntimeError(message.decode())

  def call(self, name, *arguments):
    self.check(getattr(LIBRARY, "kdt_hook_" + name), self.handle, *map(argument, arguments))

  def number(self, name, *arguments):
    out = ctypes.c_int64(-1)
    self.call(name, *arguments, ctypes.byref(out))
    return out.value

  def describe(self):
    numbers = [ctypes.c_int64() for _ in range(3)]
    name = ctypes.c_char_p()
    self.call("describe", *map(ctypes.byref, numbers), ctypes.byref(name))
    return *(n.value for n in numbers), name.value.decode()

  # Weights: BF16 as uint16 [n_out, n_in], INT4 as (int32 [n_out, n_in / 8], uint16 [n_out, n_in / group]).

  def matrix(self, *stacked, columns=None):
    """`columns` (begin, end): only those of every source."""
    sources = [placed(s, np.uint16) for s in stacked]
    width = sources[0].shape[1]
    begin, end = columns or (0, width)
    pointers = (ctypes.c_void_p * len(sources))(*(s.ctypes.data + 2 * begin for s in sources))
    n_out = np.array([len(s) for s in sources], np.int64)
    return self.number("upload_matrix", len(sources), pointers, n_out, end - begin, width if columns else 0)

  def gate_up(self, gate, up):
    return self.number("upload_gate_up", placed(gate, np.uint16), placed(up, np.uint16), *gate.shape)

  def int4(self, packed, scale):
    n_out, n_in = packed.shape[0], packed.shape[1] * 8
    return self.number("upload_int4", placed(packed, np.int32), placed(scale, np.uint16), n_out, n_in,
                       n_in // scale.shape[1])

  def int4_gate_up(self, gate, up):
    (packed, scale), n_in = gate, gate[0].shape[1] * 8
    return self.number("upload_int4_gate_up", placed(packed, np.int32), placed(scale, np.uint16),
                       placed(up[0], np.int32), placed(up[1], np.uint16), len(packed), n_in, n_in // scale.shape[1])

  def raw(self, array):
    out = ctypes.c_void_p()
    self.call("upload_raw", placed(array, array.dtype), array.nbytes, ctypes.byref(out))
    return out

  def page_sizes(self, kv_lora=16, rope=16, rows=1, n_kv_heads=1, head_dim=16):
    """Bytes of a latent page, of latent scratch for `rows`, of a draft page."""
    sizes = [ctypes.c_int64() for _ in range(3)]
    self.call("sizes", rows, kv_lora, rope, n_kv_heads, head_dim, *map(ctypes.byref, sizes))
    return [s.value for s in sizes]

  # Ops. Inputs are copied between NaN, outputs come back checked.

  def embed(self, tokens, table, hidden):
    out = Guarded((len(tokens), hidden))
    self.call("embed", len(tokens), placed(tokens, np.int32), table, hidden, out.array)
    return out.check()

  def rms_norm(self, x, weight, eps):
    out = Guarded(x.shape)
    self.call("rms_norm", len(x), x.shape[1], placed(x), 0, None, placed(weight), eps, out.array, 0, None)
    return out.check()

  def linear(self, x, weight, n_out, initial=None):
    out = Guarded((len(x), n_out), fill=initial)
    self.call("linear", len(x), placed(x), 0, None, weight, out.array, 0, None, initial is not None)
    return out.check()

  def logits(self, x, weight, n_out):
    out = Guarded((len(x), n_out))
    self.call("logits", len(x), placed(x), weight, out.array)
    return out.check()

  def mlp(self, x, gate_up, down, width, initial):
    scratch, out = Guarded((len(x), width)), Guarded(x.shape, fill=initial)
    self.call("mlp", len(x), placed(x), gate_up, down, scratch.array, out.array, None)
    scratch.check()
    return out.check()

  def route(self, x, gate, bias, k, normalise, scaling):
    n, n_experts = len(x), len(bias)
    scores, expert, weight = Guarded((n, n_experts)), Guarded((n, k), np.int32), Guarded((n, k))
    self.call("route", n, placed(x), gate, placed(bias), n_experts, k, normalise, scaling, scores.array, expert.array,
              weight.array)
    scores.check()
    return expert.check(), weight.check()

  def experts(self, x, expert, weight, gate_up, down, width, shared_gate_up, shared_down, shared_width, initial):
    n, hidden = x.shape
    k, n_experts = expert.shape[1], len(gate_up)
    size = self.number("experts_scratch", n, k, n_experts, width, shared_width, hidden)
    scratch, out = Guarded((size,), np.uint8, 0xFF, aligned=True), Guarded(x.shape, fill=initial)
    self.call("experts", n, hidden, placed(x), placed(expert, np.int32), placed(weight), n_experts, k,
              np.array(gate_up, np.int64), np.array(down, np.int64), width, shared_gate_up, shared_down, scratch.array,
              out.array)
    scratch.check()
    return out.check()

  def top_k(self, logits, k, sampling=None, position=None):
    """sampling: one dictionary a stream, of temperature, seed and choice; rows are shared out evenly."""
    n, vocab = logits.shape
    token, log_q = Guarded((n, k), np.int32), Guarded((n, k))
    column = lambda name, dtype: np.array([s[name] for s in sampling], dtype) if sampling else None
    self.call("top_k", n, vocab, k, placed(logits), sampling is not None, n // len(sampling) if sampling else 1,
              None if position is None else np.asarray(position, np.int32), column("temperature", np.float64),
              column("seed", np.uint64), column("choice", np.uint32), token.array, log_q.array)
    return token.check(), log_q.check()

  def sample(self, logits, position, sampling, stream):
    token = Guarded((len(logits),), np.int32)
    column = lambda name, dtype, default: np.array([s.get(name, default) for s in sampling], dtype)
    self.call("sample", len(logits), np.asarray(position, np.int32), np.asarray(stream, np.int32), logits.shape[1],
              placed(logits), len(sampling), column("temperature", np.float64, 0), column("top_p", np.float64, 1),
              column("min_p", np.float64, 0), column("top_k", np.int32, 0), column("seed", np.uint64, 0),
              column("choice", np.uint32, 0), token.array)
    return token.check()

  def sample_adjusted(self, logits, row_token, position, stream, parent, sampling, adjust):
    """adjust: one dict a stream, with the arguments of reference.sampling.adjusted."""
    token = Guarded((len(logits),), np.int32)
    column = lambda name, dtype, default: np.array([s.get(name, default) for s in sampling], dtype)
    lists = lambda key: [list(a.get(key, {}).items()) for a in adjust]
    first = lambda of: np.concatenate([[0], np.cumsum([len(x) for x in of])]).astype(np.int64)
    part = lambda of, i, dtype: np.array([x[i] for one in of for x in one] or [0], dtype)
    seen, bias, banned = lists("seen"), lists("bias"), [[(t, 0) for t in a.get("banned", ())] for a in adjust]
    self.call("sample_adjusted", len(logits), np.asarray(row_token, np.int32), np.asarray(position, np.int32),
              np.asarray(stream, np.int32), np.asarray(parent, np.int32), logits.shape[1], placed(logits), len(sampling),
              column("temperature", np.float64, 0), column("seed", np.uint64, 0),
              np.array([[a.get("repetition", 1), a.get("frequency", 0), a.get("presence", 0)] for a in adjust], np.float32),
              first(seen), part(seen, 0, np.int32), part(seen, 1, np.int32),
              first(bias), part(bias, 0, np.int32), part(bias, 1, np.float32),
              first(banned), part(banned, 0, np.int32), np.array([a.get("banned_until", 0) for a in adjust], np.int32),
              token.array)
    return token.check()

  def logprobs(self, logits, row, token, n_top):
    n = len(row)
    own, top, values = Guarded((n,)), Guarded((n, n_top), np.int32), Guarded((n, n_top))
    self.call("logprobs", n, logits.shape[1], n_top, placed(logits), np.asarray(row, np.int32),
              np.asarray(token, np.int32), own.array, top.array, values.array)
    return own.check(), top.check(), values.check()

  def build_tree(self, token, log_q, budget, spine=False):
    """-> (token, parent, depth, weight) of nodes 1..n."""
    depths, k = log_q.shape
    columns = [Guarded((budget + 1,), dtype) for dtype in (np.int32, np.int32, np.int32, np.float32)]
    n = self.number("build_tree", depths, k, placed(token, np.int32), placed(log_q), budget, spine,
                    *(c.array for c in columns))
    node_token, parent, depth, weight = (c.check() for c in columns)
    assert (node_token[0], parent[0], depth[0], weight[0]) == (-777, -1, 0, 0)
    assert (parent[n + 1:] == -777).all()
    return node_token[1:n + 1], parent[1:n + 1], depth[1:n + 1], weight[1:n + 1]

  def accept(self, node_token, node_parent, sample):
    """Nodes 1..n (the root is added here), sample [n + 1]."""
    n = len(node_token)
    path = Guarded((n + 1,), np.int32)
    root = lambda values, first: np.concatenate(([first], values)).astype(np.int32)
    length = self.number("accept", n, root(node_token, -1), root(node_parent, -1), np.asarray(sample, np.int32),
                         path.array)
    return path.check()[:length]


class Backends:
  """Backends of one instruction set by thread count, and the same weights in each of them."""

  def __init__(self, target):
    self.target = target
    self.by_threads = {}

  def __getitem__(self, threads):
    if threads not in self.by_threads:
      self.by_threads[threads] = Backend(threads, self.target)
    return self.by_threads[threads]

  def close(self):
    for backend in self.by_threads.values():
      backend.close()
    self.by_threads.clear()
