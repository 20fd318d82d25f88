"""Storage formats: BF16, packed INT4, safetensors files."""
import json
import pathlib

import numpy as np


def bf16_to_float(bits):
  """uint16 [...] -> float32 [...]: a BF16 is the upper half of a binary32."""
  return (np.asarray(bits, np.uint16).astype(np.uint32) << 16).view(np.float32)


def float_to_bf16(x):
  """float32 [...] -> uint16 [...], nearest, ties to even."""
  bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
  return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def unpack_int4(packed):
  """int32 [n_out, n_in / 8] -> int8 [n_out, n_in]: element i of a word in bits 4i..4i+3, stored + 8."""
  words = np.ascontiguousarray(packed).view(np.uint32)
  nibbles = (words[..., None] >> np.arange(0, 32, 4, dtype=np.uint32)) & 15
  return nibbles.astype(np.int8).reshape(*words.shape[:-1], -1) - np.int8(8)


def pack_int4(q):
  """int [n_out, n_in] in -8..7 -> int32 [n_out, n_in / 8]."""
  nibbles = (np.asarray(q).astype(np.int64) + 8).reshape(*np.shape(q)[:-1], -1, 8)
  return (nibbles << np.arange(0, 32, 4)).sum(-1).astype(np.uint32).view(np.int32)


def dequantise(packed, scale_bits, group):
  """int32 [n_out, n_in / 8], bf16 bits [n_out, n_in / group] -> float32 [n_out, n_in]; exact."""
  return unpack_int4(packed).astype(np.float32) * np.repeat(bf16_to_float(scale_bits), group, axis=-1)


NUMPY_TYPES = {"BF16": np.uint16, "F32": np.float32, "I32": np.int32, "I64": np.int64}


def read_safetensors(path):
  """Every tensor of a file by name; BF16 as float32."""
  data = pathlib.Path(path).read_bytes()
  start = 8 + int.from_bytes(data[:8], "little")
  tensors = {}
  for name, entry in json.loads(data[8:start]).items():
    if name == "__metadata__":
      continue
    begin, end = entry["data_offsets"]
    array = np.frombuffer(data[start + begin:start + end], NUMPY_TYPES[entry["dtype"]]).reshape(entry["shape"])
    tensors[name] = array if entry["dtype"] != "BF16" else bf16_to_float(array)
  return tensors


def read_checkpoint(directory):
  """(config, tensors) of a target or drafter directory, INT4 matrices dequantised under `….weight`."""
  directory = pathlib.Path(directory)
  config = json.loads((directory / "config.json").read_text())
  config = config.get("text_config", config)
  tensors = {}
  for file in sorted(directory.glob("*.safetensors")):
    tensors |= read_safetensors(file)
  tensors = {name.removeprefix("language_model."): value for name, value in tensors.items()}
  for name in [n for n in tensors if n.endswith(".weight_packed")]:
    stem = name.removesuffix("_packed")
    packed, scale = tensors.pop(name), tensors.pop(stem + "_scale")
    tensors.pop(stem + "_shape")
    q = unpack_int4(packed).astype(np.float32)
    tensors[stem] = q * np.repeat(scale, q.shape[1] // scale.shape[1], axis=1)
  return config, tensors
