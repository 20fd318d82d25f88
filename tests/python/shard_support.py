"""What the tests of the shard format share: running the tools, and the layout stated once more in numpy."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import numpy as np

from conftest import MODELS, ROOT, clean_environment
from reference import marlin
from reference.numbers import NUMPY_TYPES

MODEL, DRAFT = MODELS / "tiny-k2", MODELS / "tiny-k2-dflash"
SHARD = ROOT / "tools" / "shard_weights.py"
SYNTHETIC = ROOT / "tools" / "make_synthetic.py"


def start_tool(tool, *arguments, **options):
  return subprocess.Popen([sys.executable, os.fspath(tool), *map(os.fspath, arguments)], stdin=subprocess.DEVNULL,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=clean_environment(), **options)


def tool(path, *arguments, timeout=600):
  with start_tool(path, *arguments) as process:
    try:
      out, err = process.communicate(timeout=timeout)
    finally:
      process.kill()
  return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def shard(*arguments):
  done = tool(SHARD, *arguments)
  assert done.returncode == 0, done.stderr
  return done


def demand_refusal(done, words, code=1):
  assert done.returncode == code, (done.returncode, done.stderr)
  lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
  assert len(lines) == 1 and ": expected " in lines[0], done.stderr
  assert words in lines[0], done.stderr
  assert "Traceback" not in done.stderr


def rank_name(rank, tp):
  return f"rank-{rank:05d}-of-{tp:05d}.safetensors"


def contents(folder: pathlib.Path) -> dict[str, bytes]:
  return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def raw_tensors(path):
  """Every tensor of a file by name, in the file's order; BF16 as its bits."""
  data = pathlib.Path(path).read_bytes()
  start = 8 + int.from_bytes(data[:8], "little")
  header = json.loads(data[8:start])
  return {name: np.frombuffer(data[start + entry["data_offsets"][0] : start + entry["data_offsets"][1]],
                              NUMPY_TYPES[entry["dtype"]]).reshape(entry["shape"])
          for name, entry in header.items() if name != "__metadata__"}


def checkpoint_tensors(folder, prefix=""):
  """Every tensor of a checkpoint's files, names without the wrapper's prefix."""
  tensors = {}
  for path in sorted(folder.glob("*.safetensors")):
    tensors.update({name.removeprefix(prefix): array for name, array in raw_tensors(path).items()})
  return tensors


def rows(array, rank, tp):
  n = len(array) // tp
  return array[rank * n : (rank + 1) * n]


def columns(array, rank, tp):
  n = array.shape[1] // tp
  return array[:, rank * n : (rank + 1) * n]


def expected_target(tensors, config, rank, tp):
  """name -> array of what a rank holds of the target, in order of use: docs/shard_format.md in numpy."""
  heads, nope, rope, v_head = (config[k] for k in ("num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim",
                                                   "v_head_dim"))
  out = {"model.embed_tokens.weight": rows(tensors["model.embed_tokens.weight"], rank, tp)}
  for i in range(config["num_hidden_layers"]):
    p = f"model.layers.{i}."
    a, m = p + "self_attn.", p + "mlp."

    def gate_up(at):
      return np.concatenate([rows(tensors[at + f"{which}_proj.weight"], rank, tp) for which in ("gate", "up")])

    out[p + "input_layernorm.weight"] = tensors[p + "input_layernorm.weight"]
    out[a + "qkv_a_proj.weight"] = np.concatenate([tensors[a + "q_a_proj.weight"],
                                                   tensors[a + "kv_a_proj_with_mqa.weight"]])
    out[a + "q_a_layernorm.weight"] = tensors[a + "q_a_layernorm.weight"]
    out[a + "kv_a_layernorm.weight"] = tensors[a + "kv_a_layernorm.weight"]
    q_b = tensors[a + "q_b_proj.weight"].reshape(heads, nope + rope, -1)
    out[a + "q_b_proj.weight"] = rows(q_b, rank, tp).reshape(-1, q_b.shape[-1])
    kv_b = rows(tensors[a + "kv_b_proj.weight"].reshape(heads, nope + v_head, -1), rank, tp)
    out[a + "w_uk"] = kv_b[:, :nope].transpose(0, 2, 1)
    out[a + "w_uv"] = kv_b[:, nope:]
    out[a + "o_proj.weight"] = columns(tensors[a + "o_proj.weight"], rank, tp)
    out[p + "post_attention_layernorm.weight"] = tensors[p + "post_attention_layernorm.weight"]
    if i < config["first_k_dense_replace"]:
      out[m + "gate_up_proj.weight"] = gate_up(m)
      out[m + "down_proj.weight"] = columns(tensors[m + "down_proj.weight"], rank, tp)
      continue
    out[m + "gate.weight"] = tensors[m + "gate.weight"]
    out[m + "gate.e_score_correction_bias"] = tensors[m + "gate.e_score_correction_bias"]
    for name, fused, cut, projections in (("w13", True, rows, ("gate", "up")), ("w2", False, columns, ("down",))):
      for suffix, source, transform in (("", "weight_packed", marlin.tiles), ("_scale", "weight_scale", marlin.scales)):
        out[m + "experts." + name + suffix] = np.stack([
          transform(np.concatenate([cut(tensors[f"{m}experts.{e}.{which}_proj.{source}"], rank, tp)
                                    for which in projections]))
          for e in range(config["n_routed_experts"])])
    shared = m + "shared_experts."
    out[shared + "gate_up_proj.weight"] = gate_up(shared)
    out[shared + "down_proj.weight"] = columns(tensors[shared + "down_proj.weight"], rank, tp)
  out["model.norm.weight"] = tensors["model.norm.weight"]
  out["lm_head.weight"] = rows(tensors["lm_head.weight"], rank, tp)
  return out


def expected_drafter(tensors, config, rank, tp):
  out = {"fc.weight": rows(tensors["fc.weight"], rank, tp), "hidden_norm.weight": tensors["hidden_norm.weight"]}
  for i in range(config["num_hidden_layers"]):
    p = f"layers.{i}."
    a, m = p + "self_attn.", p + "mlp."
    out[p + "input_layernorm.weight"] = tensors[p + "input_layernorm.weight"]
    out[a + "q_proj.weight"] = rows(tensors[a + "q_proj.weight"], rank, tp)
    out[a + "kv_proj.weight"] = np.concatenate([rows(tensors[a + f"{which}_proj.weight"], rank, tp)
                                                for which in ("k", "v")])
    for name in ("q_norm.weight", "k_norm.weight"):
      out[a + name] = tensors[a + name]
    out[a + "o_proj.weight"] = columns(tensors[a + "o_proj.weight"], rank, tp)
    out[p + "post_attention_layernorm.weight"] = tensors[p + "post_attention_layernorm.weight"]
    out[m + "gate_up_proj.weight"] = np.concatenate([rows(tensors[m + f"{which}_proj.weight"], rank, tp)
                                                     for which in ("gate", "up")])
    out[m + "down_proj.weight"] = columns(tensors[m + "down_proj.weight"], rank, tp)
  out["norm.weight"] = tensors["norm.weight"]
  return {"draft." + name: array for name, array in out.items()}


def text_config(folder):
  config = json.loads((folder / "config.json").read_text())
  return config.get("text_config", config)


def demand_layout(out, model, draft, tp):
  """Every rank file of `out` against numpy, to the byte, in order of use."""
  tensors = checkpoint_tensors(model, "language_model.")
  for rank in range(tp):
    path = out / rank_name(rank, tp)
    expected = expected_target(tensors, text_config(model), rank, tp)
    if draft is not None:
      expected |= expected_drafter(checkpoint_tensors(draft), text_config(draft), rank, tp)
    found = raw_tensors(path)
    blob = path.read_bytes()
    length = int.from_bytes(blob[:8], "little")
    assert (8 + length) % 4096 == 0
    header = json.loads(blob[8 : 8 + length])
    header.pop("__metadata__")
    assert list(header) == list(expected)
    offsets = [info["data_offsets"][0] for info in header.values()]
    assert offsets == sorted(offsets)
    for name, array in expected.items():
      assert found[name].shape == array.shape, name
      assert found[name].tobytes() == np.ascontiguousarray(array).tobytes(), name
