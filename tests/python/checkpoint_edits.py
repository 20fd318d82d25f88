"""Edits of a checkpoint directory: an Edit changes the files of a folder in place.

Folders are made by `copy_of` and hold links to the originals, so an edit replaces a file and never writes into one.
"""

from __future__ import annotations

import json
import pathlib
import shutil
import struct
from collections.abc import Callable

INDEX = "model.safetensors.index.json"
SHARDS = ("model-00001-of-000002.safetensors", "model-00002-of-000002.safetensors")
SINGLE = "model.safetensors"

Header = dict[str, dict]
Tensors = dict[str, tuple[str, list[int], bytes]]  # dtype, shape, content
TensorsEdit = Callable[[Tensors], object]
Edit = Callable[[pathlib.Path], object]


def copy_of(source: pathlib.Path, target: pathlib.Path) -> pathlib.Path:
  """A new directory of links to the files of `source`, as Hugging Face's cache has them."""
  if target.exists():
    shutil.rmtree(target)
  target.mkdir(parents=True)
  for path in source.iterdir():
    (target / path.name).symlink_to(path.resolve())
  return target


def replace_text(name: str, text: str) -> Edit:
  def edit(folder: pathlib.Path) -> None:
    (folder / name).unlink()
    (folder / name).write_text(text)

  return edit


def read_safetensors(path: pathlib.Path) -> tuple[Header, bytes]:
  """The header and the data bytes after it."""
  blob = path.read_bytes()
  (length,) = struct.unpack_from("<Q", blob)
  return json.loads(blob[8 : 8 + length]), blob[8 + length :]


def write_safetensors(path: pathlib.Path, header: Header | bytes, data: bytes, length: int | None = None) -> None:
  """`header` is JSON text when given as bytes; `length` overrides the header's true length."""
  text = header if isinstance(header, bytes) else json.dumps(header, separators=(",", ":")).encode()
  path.unlink(missing_ok=True)  # it may be a link to the bundled file
  path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)


def edit_header(shard: str, change: Callable[[Header], object]) -> Edit:
  def edit(folder: pathlib.Path) -> None:
    header, data = read_safetensors(folder / shard)
    change(header)
    write_safetensors(folder / shard, header, data)

  return edit


def replace_header(shard: str, text: bytes, length: int | None = None) -> Edit:
  def edit(folder: pathlib.Path) -> None:
    _, data = read_safetensors(folder / shard)
    write_safetensors(folder / shard, text, data, length)

  return edit


def edit_json(name: str, change: Callable[[dict], object]) -> Edit:
  def edit(folder: pathlib.Path) -> None:
    path = folder / name
    document = json.loads(path.read_text())
    change(document)
    path.unlink()
    path.write_text(json.dumps(document))

  return edit


def config(change: Callable[[dict], object]) -> Edit:
  return edit_json("config.json", change)


def put(*path_and_value: object) -> Callable[[dict], None]:
  """put("a", "b", 3) sets document["a"]["b"] to 3."""
  *path, key, value = path_and_value

  def change(document: dict) -> None:
    for step in path:
      document = document[step]
    document[key] = value

  return change


def drop(*path: str) -> Callable[[dict], None]:
  *steps, key = path

  def change(document: dict) -> None:
    for step in steps:
      document = document[step]
    del document[key]

  return change


def replace_tensors(folder: pathlib.Path, shard: str, change: TensorsEdit) -> None:
  """Rewrites a shard from {name: (dtype, shape, bytes)}, contiguous again after `change`."""
  header, data = read_safetensors(folder / shard)
  header.pop("__metadata__", None)
  tensors = {
    name: (info["dtype"], info["shape"], data[info["data_offsets"][0] : info["data_offsets"][1]])
    for name, info in header.items()
  }
  change(tensors)
  out: Header = {}
  end = 0
  for name, (dtype, shape, content) in tensors.items():
    out[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + len(content)]}
    end += len(content)
  write_safetensors(folder / shard, out, b"".join(content for _, _, content in tensors.values()))


def rewrite(shard: str, change: TensorsEdit) -> Edit:
  return lambda folder: replace_tensors(folder, shard, change)


def truncate(shard: str, keep: int) -> Edit:
  """Keeps that many bytes from the start; a negative number takes them off the end."""

  def edit(folder: pathlib.Path) -> None:
    path = folder / shard
    blob = path.read_bytes()[:keep]
    path.unlink()
    path.write_bytes(blob)

  return edit
