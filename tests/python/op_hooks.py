"""The test hooks library (tests/hooks) on numpy arrays: memory, arguments and backends. The ops are in op_calls.py.

KDTREE_TEST_HOOKS names the library; without it the newest one under build*/tests/hooks is taken. Every output lies
between guard bytes and is poisoned before the call, so that an op that writes too much or too little is caught. Needs
nothing but numpy: these tests also run on a machine that has a GPU and no development packages.
"""
import ctypes
import os
import pathlib

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[2]
GUARD = 0xA5
MARGIN = 4 * 17    # bytes on either side: no multiple of a vector, so that arrays are not aligned by luck
PAGE = 64          # kPageTokens
NO_ID = -777       # a number no op writes, and no index


def library_path():
  named = os.environ.get("KDTREE_TEST_HOOKS")
  built = sorted(ROOT.glob("build*/tests/hooks/libkdt_test_hooks.so"), key=lambda p: p.stat().st_mtime)
  if not named and not built:
    raise RuntimeError("KDTREE_TEST_HOOKS: not set: expected the path of libkdt_test_hooks.so (meson builds it)")
  return named or str(built[-1])


LIBRARY = ctypes.CDLL(library_path())
LIBRARY.kdt_hook_cpu_targets.restype = ctypes.c_char_p
LIBRARY.kdt_hook_why_no_cuda.restype = ctypes.c_char_p


def cpu_targets():
  return LIBRARY.kdt_hook_cpu_targets().decode().split()


def why_no_cuda():
  """"" where the backend "cuda" can be had."""
  return LIBRARY.kdt_hook_why_no_cuda().decode()


def noise(seed, choice, position, token):
  """(word, Gumbel noise) of base/philox.h."""
  word, value = ctypes.c_uint32(), ctypes.c_double()
  LIBRARY.kdt_hook_noise(ctypes.c_uint64(seed), ctypes.c_uint32(choice), ctypes.c_uint32(position),
                         ctypes.c_uint32(token), ctypes.byref(word), ctypes.byref(value))
  return word.value, value.value


def poison(dtype):
  kind = np.dtype(dtype).kind
  return np.nan if kind == "f" else NO_ID if kind == "i" else np.iinfo(dtype).max


class Guarded:
  """A poisoned array between guard bytes; `aligned` to 64 bytes where an op may ask for that.

  `spare` rows more than its shape says stay poisoned: rows behind the live ones, which an op leaves alone."""

  def __init__(self, shape, dtype=np.float32, fill=None, aligned=False, spare=0):
    dtype, self.n = np.dtype(dtype), shape[0] if spare else None
    shape = (shape[0] + spare, *shape[1:]) if spare else shape
    size = int(np.prod(shape)) * dtype.itemsize
    self.margin = 64 if aligned else MARGIN
    self.memory = np.full(size + 2 * self.margin + 64, GUARD, np.uint8)
    self.begin = self.margin + (-(self.memory.ctypes.data + self.margin) % 64) + (0 if aligned else 4)
    self.end = self.begin + size
    self.array = self.memory[self.begin:self.end].view(dtype).reshape(shape)
    self.array[...] = poison(dtype)
    self.unused = None if self.n is None else self.array[self.n:].tobytes()
    if fill is not None:
      self.array[:self.n] = fill

  def check(self):
    """The array without its spare rows."""
    assert (self.memory[:self.begin] == GUARD).all() and (self.memory[self.end:] == GUARD).all(), "guard bytes"
    if self.n is None:
      return self.array
    assert self.array[self.n:].tobytes() == self.unused, "rows that are not live"
    return self.array[:self.n]


def placed(values, dtype=np.float32, spare=0):
  """A copy of an input with NaN on both sides (as guard bytes are no NaN, these are), and `spare` poisoned rows."""
  guarded = Guarded(np.shape(values), dtype, values, spare=spare)
  guarded.memory[:guarded.begin] = 0xFF
  guarded.memory[guarded.end:] = 0xFF
  return guarded.array


# Arguments as tests/hooks/hooks.h has them.

class Array(ctypes.Structure):
  _fields_ = [("data", ctypes.c_void_p), ("bytes", ctypes.c_int64)]

  def __init__(self, array):
    assert array.flags.c_contiguous
    self.held = array
    super().__init__(array.ctypes.data, array.nbytes)


class Count(ctypes.Structure):
  """n rows that are live, of n + spare; without spare there is no live count."""
  _fields_ = [("most", ctypes.c_int64), ("live", ctypes.c_void_p)]

  def __init__(self, n, spare=0):
    self.now = np.array([n], np.int32)
    super().__init__(n + spare, self.now.ctypes.data if spare else None)


class Arrays(ctypes.Structure):
  """A struct of arrays, in the order of `_fields_`; the caller keeps them."""


class RowsArgument(Arrays):
  _fields_ = [("n", Count)] + [(name, Array) for name in ("token", "position", "stream", "parent", "visible")]


class Rows:
  """Rows of a pass; every argument an int list of the same length."""

  def __init__(self, position, stream=None, parent=None, visible=None, token=None):
    n = len(position)
    self.position = np.asarray(position, np.int32)
    self.stream = np.zeros(n, np.int32) if stream is None else np.asarray(stream, np.int32)
    self.parent = np.full(n, -1, np.int32) if parent is None else np.asarray(parent, np.int32)
    self.visible = self.position + np.int32(1) if visible is None else np.asarray(visible, np.int32)
    self.token = np.full(n, -1, np.int32) if token is None else np.asarray(token, np.int32)

  def __len__(self):
    return len(self.position)

  def argument(self, spare):
    columns = [placed(c, np.int32, spare) for c in (self.token, self.position, self.stream, self.parent, self.visible)]
    self.held = Count(len(self), spare), [Array(c) for c in columns]
    return RowsArgument(self.held[0], *self.held[1])


class Backend:
  """A backend: a CPU's instruction set with so many threads, or "cuda". Choosing an instruction set is process-wide:
  CPU backends alive together have the same one.

  With `spare` every op is given so many rows more than are live: filled with what would fault as an index and shows as
  NaN in a sum; and it runs twice, as recorded work does (Staged::run)."""

  def __init__(self, threads, target):
    self.handle, self.spare = ctypes.c_void_p(), 0
    self.check(LIBRARY.kdt_hook_create, ctypes.c_int(threads), ctypes.c_char_p(target.encode()),
               ctypes.byref(self.handle))
    self.bf16 = self.describe()[1] == 2     # activations: what is not, is fp32

  def close(self):
    LIBRARY.kdt_hook_destroy(self.handle)
    self.handle = ctypes.c_void_p()

  @staticmethod
  def check(function, *arguments):
    function.restype = ctypes.c_char_p
    message = function(*arguments)
    if message is not None:
      raise RuntimeError(message.decode())

  def argument(self, value):
    if isinstance(value, np.ndarray):
      return ctypes.byref(Array(value))
    if isinstance(value, Guarded):
      return ctypes.byref(Array(value.array))
    if isinstance(value, Rows):
      return ctypes.byref(value.argument(self.spare))
    if isinstance(value, (Arrays, Count)):
      return ctypes.byref(value)
    if isinstance(value, float):
      return ctypes.c_float(value)
    if isinstance(value, bool):
      return ctypes.c_int(value)
    if isinstance(value, (int, np.integer)):
      return ctypes.c_int64(value)
    if isinstance(value, list):      # of numbers that the hook alone reads
      return (ctypes.c_int64 * len(value))(*value)
    if value is None:
      return ctypes.c_void_p()
    return value     # a ctypes value already

  def call(self, name, *arguments):
    self.check(getattr(LIBRARY, "kdt_hook_" + name), self.handle, *map(self.argument, arguments))

  def number(self, name, *arguments):
    out = ctypes.c_int64(-1)
    self.call(name, *arguments, ctypes.byref(out))
    return out.value

  def describe(self):
    numbers = [ctypes.c_int64() for _ in range(3)]
    name = ctypes.c_char_p()
    self.call("describe", *map(ctypes.byref, numbers), ctypes.byref(name))
    return *(n.value for n in numbers), name.value.decode()

  # Rows with the spare ones behind them.

  def count(self, n):
    return Count(n, self.spare)

  def rows_in(self, values, dtype=np.float32):
    return placed(values, dtype, self.spare)

  def rows_out(self, shape, dtype=np.float32, fill=None):
    return Guarded(shape, dtype, fill, spare=self.spare)

  # Weights: BF16 as uint16 [n_out, n_in], INT4 as (int32 [n_out, n_in / 8], uint16 [n_out, n_in / group]).

  def matrix(self, *stacked, columns=None):
    """`columns` (begin, end): only those of every source."""
    sources = [placed(s, np.uint16) for s in stacked]
    width = sources[0].shape[1]
    begin, end = columns or (0, width)
    pointers = (ctypes.c_void_p * len(sources))(*(s.ctypes.data + 2 * begin for s in sources))
    return self.number("upload_matrix", len(sources), pointers, [len(s) for s in sources], end - begin,
                       width if columns else 0)

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
    self.call("upload_raw", placed(array, array.dtype), ctypes.byref(out))
    return out

  def page_sizes(self, kv_lora=16, rope=16, rows=1, n_kv_heads=1, head_dim=16):
    """Bytes of a latent page, of latent scratch for `rows`, of a draft page."""
    sizes = [ctypes.c_int64() for _ in range(3)]
    self.call("sizes", rows, kv_lora, rope, n_kv_heads, head_dim, *map(ctypes.byref, sizes))
    return [s.value for s in sizes]
