"""The shard functions of kdtree.h as Python objects. Every call releases the GIL, so threads make pieces side by side."""

from __future__ import annotations

import json
import os
from typing import Any

from pyclient import _ffi


class Checksum:
  """XXH64 of bytes that come in pieces."""

  def __init__(self) -> None:
    self._api = api = _ffi.api()
    out = api.ffi.new("kdt_checksum **")
    api.check(api.lib.kdt_checksum_create(out))
    self._handle = api.ffi.gc(out[0], api.lib.kdt_checksum_destroy)

  def update(self, data: Any, n_bytes: int | None = None) -> None:
    """`data`: bytes, or a cffi buffer of which the first n_bytes count."""
    pointer = self._api.ffi.from_buffer(data) if n_bytes is None else data
    self._api.check(self._api.lib.kdt_checksum_update(self._handle, pointer, len(data) if n_bytes is None else n_bytes))

  def hex(self) -> str:
    value = self._api.ffi.new("uint64_t *")
    self._api.check(self._api.lib.kdt_checksum_value(self._handle, value))
    return f"{value[0]:016x}"


def checksum_of(data: bytes) -> str:
  checksum = Checksum()
  checksum.update(data)
  return checksum.hex()


def file_checksum(path: str | os.PathLike[str]) -> str:
  checksum = Checksum()
  with open(path, "rb") as file:
    while piece := file.read(1 << 20):
      checksum.update(piece)
  return checksum.hex()


class Pieces:
  """Memory for one piece of every rank, used again and again by one thread."""

  def __init__(self, tp: int, capacity: int) -> None:
    ffi = _ffi.api().ffi
    self.capacity = capacity
    self.ranks = [ffi.new("char[]", max(capacity, 1)) for _ in range(tp)]
    self.pointers = ffi.new("void *[]", self.ranks)

  def view(self, rank: int, n_bytes: int) -> memoryview:
    return memoryview(_ffi.api().ffi.buffer(self.ranks[rank], n_bytes))


class Sharding:
  """A checkpoint, opened and checked, to be cut for `tp` ranks. `plan` is the JSON of kdt_sharding_json."""

  def __init__(self, model: str | os.PathLike[str], draft: str | os.PathLike[str] | None, tp: int) -> None:
    self._api = api = _ffi.api()
    out = api.ffi.new("kdt_sharding **")
    model_bytes, draft_bytes = _ffi.path_bytes("CHECKPOINT", model), _ffi.path_bytes("--draft", draft)
    api.check(api.lib.kdt_sharding_create(api.ffi.new("char[]", model_bytes),
                                          api.ffi.NULL if draft_bytes is None else api.ffi.new("char[]", draft_bytes),
                                          tp, out))
    self._handle = api.ffi.gc(out[0], api.lib.kdt_sharding_destroy)
    self.plan: dict[str, Any] = json.loads(api.text(api.lib.kdt_sharding_json(self._handle)))

  def pieces(self) -> Pieces:
    return Pieces(self.plan["tp"], self.plan["largest_piece"])

  def make(self, tensor: int, piece: int, out: Pieces) -> int:
    """Computes a piece for every rank; returns its bytes."""
    n = self._api.ffi.new("int64_t *")
    self._api.check(self._api.lib.kdt_sharding_make(self._handle, tensor, piece, out.pointers, out.capacity, n))
    return n[0]

  def piece_bytes(self, tensor: int, piece: int, out: Pieces) -> int:
    """The size of a piece, without making it."""
    n = self._api.ffi.new("int64_t *")
    status = self._api.lib.kdt_sharding_make(self._handle, tensor, piece, out.pointers, 0, n)
    if status != self._api.lib.KDT_ERR_BUFFER_TOO_SMALL:
      self._api.check(status)
    return n[0]

  def compare(self, tensor: int, piece: int, made: Pieces, n_bytes: int) -> None:
    """Raises BadCheckpoint with the first place where what was read back is not what the checkpoint says."""
    pointers = self._api.ffi.cast("const void *const *", made.pointers)
    self._api.check(self._api.lib.kdt_sharding_compare(self._handle, tensor, piece, pointers, n_bytes))
