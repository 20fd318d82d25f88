#!/usr/bin/env python3
"""Write a checkpoint of Kimi's architecture with random weights: names, shapes, dtypes and files as the published one's.

    make_synthetic.py OUT --config kimi-k2.6 --layers 2                # full width, 15.5 GB
    make_synthetic.py OUT --config kimi-k2.6 --layers 2 --no-vision --set vocab_size=2048 --set hidden_size=512 \\
      --set intermediate_size=1024 --set moe_intermediate_size=256 --set n_routed_experts=16 \\
      --set num_attention_heads=8 --set num_key_value_heads=8        # 32 MB, runs anywhere
    make_synthetic.py OUT --config kimi-k2.6 --layers 2 --draft DRAFT  # and a drafter that fits it

--config takes a preset (a folder of models/presets) or a config.json; --set changes a field of it, by dots from the top or,
without a dot, of the text model. Weights are scaled so that activations keep their size from layer to layer, INT4 values
use -7 to 7 as quantisation-aware training does. Equal seeds give equal bytes. The tokenizer's files are copied from
--tokenizer; the bundled one has 2048 tokens and no text for ids beyond: with vocab_size=2048 all output can be printed.
Exit codes: 0 ok, 1 the input or the run failed, 2 usage, 130 interrupted.
"""

from __future__ import annotations

import argparse
import difflib
import hashlib
import json
import math
import os
import pathlib
import shutil
import struct
import sys
from collections.abc import Iterator
from typing import Any

import checkout_python

checkout_python.demand("numpy", "tqdm", "pyclient")

import numpy as np
from sharding.kimi_layout import GROUP, Tensor, checkpoint_files, drafter_tensors, text_of
from tqdm import tqdm

ROOT = pathlib.Path(__file__).resolve().parents[1]
PRESETS = ROOT / "models" / "presets"
TOKENIZER_FILES = ("tiktoken.model", "tokenizer_config.json", "chat_template.jinja")
CHUNK = 16 << 20  # elements drawn at a time
INT4_STD = math.sqrt(sum(value * value for value in range(-7, 8)) / 15)


class SyntheticError(Exception):
  """What cannot be made, as `<field or file>: <value>: expected <what>`."""


def generator(seed: int, name: str) -> np.random.Generator:
  """A tensor's own: its bytes depend on nothing but the seed and its name."""
  digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
  return np.random.Generator(np.random.SFC64(np.frombuffer(digest, np.uint32)))


def uniform_bf16(rng: np.random.Generator, n: int, mean: float, spread: float) -> np.ndarray:
  """BF16 bits of mean ± spread."""
  values = rng.integers(-2**15, 2**15, n, dtype=np.int16).astype(np.float32)
  values *= np.float32(spread / 2**15)
  values += np.float32(mean)
  return (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16)


def nibbles(rng: np.random.Generator, n_words: int) -> np.ndarray:
  """Words of eight stored values 1 to 15, which mean -7 to 7."""
  pairs = np.frombuffer(rng.bytes(4 * n_words), np.uint8).copy()
  pairs[(pairs & 0x0F) == 0] |= 0x08
  pairs[(pairs & 0xF0) == 0] |= 0x80
  return pairs.view(np.int32)


def draw(tensor: Tensor, n_layers: int, seed: int) -> Iterator[np.ndarray]:
  """The tensor's values in pieces."""
  rng = generator(seed, tensor.name)
  total = math.prod(tensor.shape)
  # Uniform of unit variance over the inputs; what adds to the residual stream is smaller the more layers do.
  spread = math.sqrt(3.0 / math.prod(tensor.shape[1:])) if len(tensor.shape) > 1 else 0.0
  mean = 0.0
  if tensor.kind == "residual":
    spread /= math.sqrt(2 * n_layers)
  elif tensor.kind == "embedding":
    spread = 1.0
  elif tensor.kind == "norm":
    mean, spread = 1.0, 0.1
  elif tensor.kind == "scale":
    mean = 1 / (INT4_STD * math.sqrt(tensor.matrix[1]))
    spread = mean / 4
  for begin in range(0, total, CHUNK):
    n = min(CHUNK, total - begin)
    if tensor.kind == "packed":
      yield nibbles(rng, n)
    elif tensor.kind == "shape":
      yield np.array(tensor.matrix, np.int32)
    elif tensor.kind == "zero":
      yield np.zeros(n, np.uint16)
    elif tensor.kind == "bias":
      yield rng.uniform(-0.01, 0.01, n).astype(np.float32)
    else:
      yield uniform_bf16(rng, n, mean, spread)


def write_file(path: pathlib.Path, tensors: list[Tensor], n_layers: int, seed: int, bar: tqdm) -> None:
  header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
  end = 0
  for tensor in tensors:
    begin, end = end, end + tensor.n_bytes
    header[tensor.name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [begin, end]}
  text = json.dumps(header, separators=(",", ":")).encode()
  text += b" " * (-len(text) % 8)
  aside = path.with_name(path.name + ".partial")
  with open(aside, "wb") as file:
    file.write(struct.pack("<Q", len(text)) + text)
    for tensor in tensors:
      for piece in draw(tensor, n_layers, seed):
        file.write(memoryview(piece).cast("B"))
        bar.update(piece.nbytes)
  os.rename(aside, path)


def load_config(name: str) -> dict[str, Any]:
  path = PRESETS / name / "config.json"
  if not path.is_file():
    path = pathlib.Path(name)
    path = path / "config.json" if path.is_dir() else path
  if not path.is_file():
    known = ", ".join(sorted(folder.name for folder in PRESETS.iterdir()))
    raise SyntheticError(f"--config: {name}: expected one of {known}, or a config.json")
  try:
    config = json.loads(path.read_text())
  except ValueError as error:
    raise SyntheticError(f"{path}: {error}: expected JSON") from None
  if not isinstance(config, dict):
    raise SyntheticError(f"{path}: {type(config).__name__}: expected a JSON object")
  return config


def change(config: dict[str, Any], assignment: str) -> None:
  """`key=value`: a dotted path from the top, or a field of the text model. The value is JSON, or else text."""
  key, equals, text = assignment.partition("=")
  if not equals:
    raise SyntheticError(f"--set: {assignment}: expected KEY=VALUE")
  try:
    value = json.loads(text)
  except ValueError:
    value = text
  *path, last = key.split(".")
  place = config if path else text_of(config)
  for step in path:
    if not isinstance(place.get(step), dict):
      raise SyntheticError(f"--set: {key}: no {step} in the config: expected a path that exists")
    place = place[step]
  if last not in place:
    near = difflib.get_close_matches(last, sorted(place), n=1)
    raise SyntheticError(f"--set: {key}: no such field: expected {f'perhaps {near[0]}' if near else 'one of the config'}")
  place[last] = value


def fit_drafter(draft: dict[str, Any], text: dict[str, Any]) -> None:
  """The drafter's fields that its target decides. Taps that a shorter target lacks are spread over its layers."""
  n_layers, dflash = text["num_hidden_layers"], draft["dflash_config"]
  draft["hidden_size"], draft["vocab_size"] = text["hidden_size"], text["vocab_size"]
  draft["max_position_embeddings"] = text["max_position_embeddings"]
  dflash["mask_token_id"] = min(dflash["mask_token_id"], text["vocab_size"] - 2)
  if draft["num_target_layers"] != n_layers:
    n_taps = min(len(dflash["target_layer_ids"]), n_layers)
    dflash["target_layer_ids"] = [i * n_layers // n_taps for i in range(n_taps)]
    draft["num_target_layers"] = n_layers
  for key in ("eos_token_id", "bos_token_id", "pad_token_id"):
    draft[key] = text[key]


def fit_vocabulary(config: dict[str, Any]) -> None:
  """Token ids beyond a smaller vocabulary become its last ones."""
  last = text_of(config)["vocab_size"] - 1
  for fields in {id(config): config, id(text_of(config)): text_of(config)}.values():
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
      if isinstance(fields.get(key), int):
        fields[key] = min(fields[key], last)


def check_new(out: pathlib.Path, flag: str, needed: int) -> None:
  if out.exists() and (not out.is_dir() or any(out.iterdir())):
    raise SyntheticError(f"{flag}: {out}: expected a directory that is empty or does not exist")
  out.mkdir(parents=True, exist_ok=True)
  free = shutil.disk_usage(out).free
  if needed > free:
    raise SyntheticError(f"{flag}: {out}: {free / 1e9:.2f} GB of disk free: expected {needed / 1e9:.2f} GB")


def write_checkpoint(out: pathlib.Path, config: dict[str, Any], files: dict[str, list[Tensor]], seed: int,
                     tokenizer: pathlib.Path | None, title: str) -> int:
  total = sum(tensor.n_bytes for tensors in files.values() for tensor in tensors)
  n_layers = text_of(config)["num_hidden_layers"]
  with tqdm(total=total, desc=title, unit="B", unit_scale=True, disable=None) as bar:
    for name, tensors in files.items():
      write_file(out / name, tensors, n_layers, seed, bar)
  if len(files) > 1:
    index = {"metadata": {"total_size": total},
             "weight_map": {tensor.name: name for name, tensors in files.items() for tensor in tensors}}
    (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")
  for name in TOKENIZER_FILES if tokenizer else ():
    if (tokenizer / name).is_file():
      shutil.copyfile(tokenizer / name, out / name)
  (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")  # last: without it this is no checkpoint
  return total


def parse_arguments() -> argparse.Namespace:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("out", metavar="OUT", type=pathlib.Path, help="a new directory")
  parser.add_argument("--config", metavar="NAME", default="kimi-k2.6",
                      help="preset or config.json [default: %(default)s]")
  parser.add_argument("--layers", metavar="L", type=int, help="layers [default: the config's]")
  parser.add_argument("--set", metavar="KEY=VALUE", action="append", default=[], help="change a field of the config")
  parser.add_argument("--no-vision", action="store_true", help="leave the vision tower and its projector out")
  parser.add_argument("--tokenizer", metavar="DIR", type=pathlib.Path, default=ROOT / "models" / "tiny-k2",
                      help="whose tokenizer files are copied [default: the bundled model]")
  parser.add_argument("--draft", metavar="DRAFT", type=pathlib.Path, help="a new directory for a drafter that fits")
  parser.add_argument("--draft-config", metavar="NAME", default="kimi-k2.6-dflash", help="[default: %(default)s]")
  parser.add_argument("--draft-set", metavar="KEY=VALUE", action="append", default=[],
                      help="change a field of the drafter's")
  parser.add_argument("--seed", type=int, default=0, help="[default: %(default)s]")
  return parser.parse_args()


def run(args: argparse.Namespace) -> None:
  config = load_config(args.config)
  for assignment in args.set:
    change(config, assignment)
  text = text_of(config)
  if args.layers is not None:
    text["num_hidden_layers"] = args.layers
  if not isinstance(text.get("num_hidden_layers"), int) or text["num_hidden_layers"] < 1:
    raise SyntheticError(f"--layers: {text.get('num_hidden_layers')}: expected 1 or more")
  if args.no_vision:
    config.pop("vision_config", None)
  elif "vision_config" in config:
    config["vision_config"]["text_hidden_size"] = text["hidden_size"]
  fit_vocabulary(config)
  draft = load_config(args.draft_config) if args.draft else None
  try:
    files = checkpoint_files(config)
    if draft is not None:
      fit_drafter(draft, text)
      for assignment in args.draft_set:
        change(draft, assignment)
      drafter = list(drafter_tensors(draft))
  except (KeyError, TypeError, ValueError) as error:
    raise SyntheticError(f"--config: {args.config}: {error!r}: expected the fields of Kimi's architecture") from None
  tensors = [tensor for group in files.values() for tensor in group]
  for tensor in tensors:
    ragged = tensor.kind == "packed" and tensor.matrix[1] % GROUP != 0
    if ragged or any(not isinstance(n, int) or n < 1 for n in tensor.shape):
      raise SyntheticError(f"{tensor.name}: shape {list(tensor.shape)}: expected positive integers (INT4 needs multiples of 32)")
  check_new(args.out, "OUT", sum(tensor.n_bytes for tensor in tensors))
  if draft is not None:
    check_new(args.draft, "--draft", sum(tensor.n_bytes for tensor in drafter))
  total = write_checkpoint(args.out, config, files, args.seed, args.tokenizer, "checkpoint")
  print(f"{args.out}: {len(tensors)} tensors in {len(files)} files, {total} bytes")
  if draft is not None:
    total = write_checkpoint(args.draft, draft, {"model.safetensors": drafter}, args.seed, None, "drafter")
    print(f"{args.draft}: {len(drafter)} tensors, {total} bytes")


def main() -> int:
  args = parse_arguments()
  try:
    run(args)
  except SyntheticError as error:
    print(f"error: {error}", file=sys.stderr)
    return 1
  except OSError as error:
    print(f"error: {error.filename or args.out}: {error.strerror}: expected to be read and written", file=sys.stderr)
    return 1
  except KeyboardInterrupt:
    return 130
  return 0


if __name__ == "__main__":
  sys.exit(main())
