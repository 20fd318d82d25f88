"""The files of a shard directory on disk: where each tensor lies, and how a file comes to be complete or not at all.

A rank file grows under its name with `.partial`. Which of its tensors are finished is in the journal, a file of JSON lines
that is locked while a run goes on. Only when every tensor is finished and on disk are the files renamed, then the manifest
is written beside them: a directory with a manifest.json is complete.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pathlib
import stat
import struct
import threading
from collections.abc import Iterator
from typing import Any

ALIGNMENT = 4096
MANIFEST = "manifest.json"
JOURNAL = "sharding.journal"
PARTIAL = ".partial"
BOOT_ID = pathlib.Path("/proc/sys/kernel/random/boot_id")


class ShardError(Exception):
  """What cannot be done, as `<file or flag>: <value>: expected <what>`."""


def header_of(plan: dict[str, Any], rank: int) -> bytes:
  """The length and the header of a rank's safetensors file, padded so that the data starts at a multiple of 4096."""
  header: dict[str, Any] = {"__metadata__": {
    "format": "kdtree-shard", "format_version": str(plan["format_version"]), "rank": str(rank), "tp": str(plan["tp"]),
    "tile_layout": plan["tile_layout"],
  }}
  end = 0
  for tensor in plan["tensors"]:
    begin, end = end, end + tensor["bytes"]
    header[tensor["name"]] = {"dtype": tensor["dtype"], "shape": tensor["shape"], "data_offsets": [begin, end]}
  text = json.dumps(header, separators=(",", ":")).encode()
  text += b" " * (-(8 + len(text)) % ALIGNMENT)
  return struct.pack("<Q", len(text)) + text


def offsets_of(plan: dict[str, Any]) -> list[int]:
  """Where each tensor's data begins, from the start of the data."""
  offsets, end = [], 0
  for tensor in plan["tensors"]:
    offsets.append(end)
    end += tensor["bytes"]
  return offsets


def open_file(path: pathlib.Path, flags: int) -> int:
  """A descriptor of a regular file; of anything else an error, at once: a FIFO would wait for its other end."""
  descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK, 0o644)
  if not stat.S_ISREG(os.fstat(descriptor).st_mode):
    os.close(descriptor)
    raise ShardError(f"{path}: not a file: expected a regular one")
  return descriptor


def read_file(path: pathlib.Path) -> bytes:
  with open(open_file(path, os.O_RDONLY), "rb") as file:
    return file.read()


def path_of(out: pathlib.Path, name: str, *, writing: bool) -> pathlib.Path:
  """Of a rank file. A run that was killed between two renames left finished names behind."""
  whole = out / name
  return whole if not writing or whole.exists() else whole.with_name(whole.name + PARTIAL)


def identities(out: pathlib.Path, plan: dict[str, Any]) -> list[list[int] | None]:
  """Which files, and how long, the ranks' are now."""
  found: list[list[int] | None] = []
  for name in plan["files"]:
    path = path_of(out, name, writing=True)
    found.append([(status := path.stat()).st_ino, status.st_size] if path.exists() else None)
  return found


def sync_directory(folder: pathlib.Path) -> None:
  descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
  try:
    os.fsync(descriptor)
  finally:
    os.close(descriptor)


def write_whole(path: pathlib.Path, data: bytes) -> None:
  """The file appears with all of its bytes or not at all."""
  aside = path.with_name(path.name + PARTIAL)
  with open(aside, "wb") as file:
    file.write(data)
    file.flush()
    os.fsync(file.fileno())
  os.rename(aside, path)
  sync_directory(path.parent)


class RankFiles:
  """The open files of every rank: `<name>.partial` while they grow, or the finished ones, to be read."""

  def __init__(self, out: pathlib.Path, plan: dict[str, Any], *, writing: bool) -> None:
    self._out = out
    self._names: list[str] = plan["files"]
    self._headers = [header_of(plan, rank) for rank in range(plan["tp"])]
    self._descriptors: list[int] = []
    flags = os.O_RDWR | os.O_CREAT if writing else os.O_RDONLY
    try:
      for rank, header in enumerate(self._headers):
        path = path_of(out, self._names[rank], writing=writing)
        self._descriptors.append(open_file(path, flags))
        size = len(header) + plan["rank_bytes"]
        if writing:
          os.ftruncate(self._descriptors[rank], size)
          self._write_at(rank, header, 0, path)
        elif (found := os.fstat(self._descriptors[rank]).st_size) != size:
          raise ShardError(f"{path}: {found} bytes: expected {size}")
        elif os.pread(self._descriptors[rank], len(header), 0) != header:
          raise ShardError(f"{path}: another header: expected the one of this checkpoint at tp {plan['tp']}")
    except BaseException:
      self.close()
      raise

  def write(self, rank: int, data: memoryview, offset: int) -> None:
    self._write_at(rank, data, len(self._headers[rank]) + offset, self._out / self._names[rank])

  def _write_at(self, rank: int, data: bytes | memoryview, at: int, path: pathlib.Path) -> None:
    view = memoryview(data)
    while view:
      try:
        n = os.pwrite(self._descriptors[rank], view, at)
      except OSError as error:
        raise ShardError(f"{path}: {error.strerror}: expected {len(view)} bytes to be written at {at}") from error
      view, at = view[n:], at + n

  def place(self, offset: int) -> int:
    """In the file of rank 0, and of the others unless their headers differ in length, of what lies at `offset` of the data."""
    return len(self._headers[0]) + offset

  def read(self, rank: int, into: memoryview, offset: int) -> None:
    at = len(self._headers[rank]) + offset
    view = into
    while view:
      n = os.preadv(self._descriptors[rank], [view], at)
      if n == 0:
        raise ShardError(f"{self._out / self._names[rank]}: ends at {at}: expected {len(view)} bytes more")
      view, at = view[n:], at + n

  @contextlib.contextmanager
  def flushing(self) -> Iterator[None]:
    """What is written meanwhile goes on to the disk at once, so that finish() has little left to wait for."""
    over = threading.Event()
    failures: list[OSError] = []

    def flush() -> None:
      try:
        while not over.is_set():
          for descriptor in self._descriptors:
            os.fdatasync(descriptor)
          over.wait(0.1)
      except OSError as error:  # told once: no later call would tell it again
        failures.append(error)

    thread = threading.Thread(target=flush)
    thread.start()
    try:
      yield
    finally:
      over.set()
      thread.join()
    if failures:
      raise failures[0]

  def finish(self) -> None:
    """On disk, under their own names."""
    for descriptor in self._descriptors:
      os.fsync(descriptor)
    for name in self._names:
      path = path_of(self._out, name, writing=True)
      if path.name != name:
        os.rename(path, self._out / name)
    sync_directory(self._out)

  def size(self, rank: int) -> int:
    return os.fstat(self._descriptors[rank]).st_size

  def close(self) -> None:
    for descriptor in self._descriptors:
      os.close(descriptor)
    self._descriptors = []


class Journal:
  """Which tensors are finished, with their checksums by rank: lines that are only ever appended.

  The first line says of what: a journal of another checkpoint, layout or tp is not this run's. A tensor's line is written
  once its last byte was handed to the kernel. That outlives the process; a restart of the machine it may not, and somebody
  may have moved, cut or copied the rank files: then `trusted` is false, and what the journal says must be read again before
  it counts.
  """

  def __init__(self, out: pathlib.Path, of: dict[str, Any], plan: dict[str, Any]) -> None:
    self._path = out / JOURNAL
    self._of = of
    self._n_tensors, self._tp = len(plan["tensors"]), plan["tp"]
    self._there = identities(out, plan)
    # The lock lives as long as the object.
    self._file = open(open_file(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND), "a+b", buffering=0)  # noqa: SIM115
    try:
      fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
      self._file.close()
      raise ShardError(f"{self._path}: locked: expected no other run that writes into {out}") from None
    self._boot = BOOT_ID.read_text().strip() if BOOT_ID.exists() else ""
    self.finished: dict[int, list[str]] = {}
    self.of_another_run, self.trusted = self._read()

  def _read(self) -> tuple[bool, bool]:
    self._file.seek(0)
    text = self._file.read()
    whole = text.rfind(b"\n") + 1
    if whole < len(text):
      self._file.truncate(whole)  # a kill cut the last line off
    if whole == 0:
      self._append({**self._of, "boot": self._boot})
      return False, False
    try:
      first, *entries = [json.loads(line) for line in text[:whole].splitlines()]
      boot, files = first.pop("boot"), None
      for entry in entries:
        boot, files = entry.get("boot", boot), entry.get("files", files)
        if "tensor" in entry:
          self.finished[self._index(entry["tensor"])] = self._checksums(entry["checksums"])
        if "forgotten" in entry:
          del self.finished[self._index(entry["forgotten"])]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
      return True, False
    return first != self._of, boot != "" and boot == self._boot and files == self._there

  def _index(self, tensor: Any) -> int:
    if not (isinstance(tensor, int) and 0 <= tensor < self._n_tensors):
      raise ValueError(tensor)
    return tensor

  def _checksums(self, values: Any) -> list[str]:
    if not (isinstance(values, list) and len(values) == self._tp and all(isinstance(value, str) for value in values)):
      raise ValueError(values)
    return values

  def _append(self, entry: dict[str, Any]) -> None:
    self._file.write(json.dumps(entry).encode() + b"\n")

  def start_anew(self) -> None:
    self._file.truncate(0)
    self.finished, self.of_another_run, self.trusted = {}, False, False
    self._append({**self._of, "boot": self._boot})

  def add(self, tensor: int, checksums: list[str]) -> None:
    self.finished[tensor] = checksums
    self._append({"tensor": tensor, "checksums": checksums})

  def forget(self, tensor: int) -> None:
    del self.finished[tensor]
    self._append({"forgotten": tensor})

  def trust(self, files: list[list[int] | None]) -> None:
    """Everything that is left was read from these files and found as it was written."""
    self.trusted = True
    self._append({"boot": self._boot, "files": files})

  def remove(self) -> None:
    with contextlib.suppress(FileNotFoundError):
      self._path.unlink()

  def close(self) -> None:
    self._file.close()
