"""Tensors made, or read back and compared, by several threads, with a progress bar."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import Any

from pyclient import BadCheckpoint
from tqdm import tqdm

from .library import Checksum, Pieces, Sharding
from .rank_files import Journal, RankFiles, ShardError, offsets_of


class Stopped(Exception):
  """Another thread failed, or the run was interrupted."""


class CtrlC:
  """Ctrl-C as a flag: KeyboardInterrupt may come where the pool's locks are taken and leave them locked for good.

  The second one ends the program where it is, as a kill would.
  """

  def __init__(self) -> None:
    self.pressed = False
    signal.signal(signal.SIGINT, self._press)

  def _press(self, *_: object) -> None:
    self.pressed = True
    signal.signal(signal.SIGINT, signal.SIG_DFL)

  def check(self) -> None:
    if self.pressed:
      raise KeyboardInterrupt


class Work:
  """What the threads of one run share."""

  def __init__(self, sharding: Sharding, files: RankFiles, jobs: int, ctrl_c: CtrlC) -> None:
    self.plan = sharding.plan
    self._sharding, self._files, self._jobs, self._ctrl_c = sharding, files, jobs, ctrl_c
    self._offsets = offsets_of(self.plan)
    self._stop = threading.Event()
    self._lock = threading.Lock()
    self._own = threading.local()

  def make(self, tensors: Iterable[int], journal: Journal) -> None:
    """Computes and writes tensors of every rank, and enters each in the journal."""
    tensors = list(tensors)

    def one(tensor: int, bar: tqdm) -> None:
      checksums = self._each_piece(tensor, bar, self._make_piece)
      with self._lock:
        journal.add(tensor, checksums)

    self._run(tensors, one, "sharding")

  def check(self, tensors: Iterable[int], expected: dict[int, list[str]], title: str, *, compare: bool) -> list[int]:
    """Reads tensors back: those whose checksums differ. With `compare`, against the checkpoint too; that raises."""
    wrong: list[int] = []

    def one(tensor: int, bar: tqdm) -> None:
      checksums = self._each_piece(tensor, bar, self._compare_piece if compare else self._read_piece)
      if checksums != expected[tensor]:
        with self._lock:
          wrong.append(tensor)

    self._run(list(tensors), one, title)
    return sorted(wrong)

  def _make_piece(self, tensor: int, piece: int, pieces: Pieces, offset: int, checksums: list[Checksum]) -> int:
    n_bytes = self._sharding.make(tensor, piece, pieces)
    for rank, checksum in enumerate(checksums):  # rank by rank: its bytes come from memory once
      checksum.update(pieces.ranks[rank], n_bytes)
      self._files.write(rank, pieces.view(rank, n_bytes), offset)
    return n_bytes

  def _read_piece(self, tensor: int, piece: int, pieces: Pieces, offset: int, checksums: list[Checksum]) -> int:
    n_bytes = self._sharding.piece_bytes(tensor, piece, pieces)
    for rank, checksum in enumerate(checksums):
      self._files.read(rank, pieces.view(rank, n_bytes), offset)
      checksum.update(pieces.ranks[rank], n_bytes)
    return n_bytes

  def _compare_piece(self, tensor: int, piece: int, pieces: Pieces, offset: int, checksums: list[Checksum]) -> int:
    n_bytes = self._read_piece(tensor, piece, pieces, offset, checksums)
    try:
      self._sharding.compare(tensor, piece, pieces, n_bytes)
    except BadCheckpoint as error:
      begin = self._files.place(offset)
      raise ShardError(f"{error} (among bytes {begin} to {begin + n_bytes - 1} of the file); --overwrite makes all shards "
                       "anew") from None
    return n_bytes

  def _each_piece(self, tensor: int, bar: tqdm, do: Callable[[int, int, Pieces, int, list[Checksum]], int]) -> list[str]:
    tp = self.plan["tp"]
    checksums = [Checksum() for _ in range(tp)]
    pieces: Pieces | None = getattr(self._own, "pieces", None)
    if pieces is None:
      pieces = self._own.pieces = self._sharding.pieces()
    offset = self._offsets[tensor]
    for piece in range(self.plan["tensors"][tensor]["pieces"]):
      if self._stop.is_set():
        raise Stopped
      n_bytes = do(tensor, piece, pieces, offset, checksums)
      offset += n_bytes
      with self._lock:
        bar.update(n_bytes * tp)
    end = self._offsets[tensor] + self.plan["tensors"][tensor]["bytes"]
    if offset != end:
      raise ShardError(f"{self.plan['tensors'][tensor]['name']}: {offset} bytes: expected {end}")
    return [checksum.hex() for checksum in checksums]

  def _run(self, tensors: list[int], one: Callable[[int, tqdm], None], title: str) -> None:
    if not tensors:
      return
    total = sum(self.plan["tensors"][tensor]["bytes"] for tensor in tensors) * self.plan["tp"]
    # Without a terminal there is no bar: the lines before and after tell.
    with (tqdm(total=total, desc=title, unit="B", unit_scale=True, smoothing=0.05, disable=None, leave=False) as bar,
          ThreadPoolExecutor(self._jobs) as pool):
      futures: list[Any] = [pool.submit(one, tensor, bar) for tensor in tensors]
      try:
        left = set(futures)
        while left and not self._ctrl_c.pressed:
          done, left = wait(left, timeout=0.1, return_when=FIRST_EXCEPTION)
          if any(future.exception() for future in done):
            break
      finally:
        self._stop.set()
        for future in futures:
          future.cancel()
      failures = [future.exception() for future in futures if future.done() and not future.cancelled()]
    self._stop.clear()
    self._ctrl_c.check()
    for failure in failures:
      if failure is not None and not isinstance(failure, Stopped):
        raise failure
