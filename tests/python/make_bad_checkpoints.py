"""Checkpoint directories made from the bundled pair: bad ones, each with what the error must say, and good variants.

Tests import `bad_checkpoints` and `good_checkpoints`; as a script, `make_bad_checkpoints.py OUT` writes them all.
"""

from __future__ import annotations

import json
import pathlib
import sys
from collections.abc import Iterator
from typing import NamedTuple

from checkpoint_edits import (
  INDEX,
  SHARDS,
  SINGLE,
  Edit,
  Header,
  Tensors,
  TensorsEdit,
  config,
  copy_of,
  drop,
  edit_header,
  edit_json,
  put,
  read_safetensors,
  replace_header,
  replace_tensors,
  replace_text,
  rewrite,
  truncate,
  write_safetensors,
)

NORM = "model.norm.weight"  # in the second shard
SCALE = "model.layers.1.mlp.experts.0.gate_proj.weight_scale"  # BF16, in the first
PACKED = "model.layers.1.mlp.experts.0.gate_proj.weight_packed"  # I32, in the first


class BadCase(NamedTuple):
  name: str
  model_dir: pathlib.Path
  draft_dir: pathlib.Path | None  # None where the model alone is bad
  expected: str  # a part of the error message


class GoodCase(NamedTuple):
  name: str
  model_dir: pathlib.Path
  draft_dir: pathlib.Path


def duplicate_in_header(folder: pathlib.Path) -> None:
  header, data = read_safetensors(folder / SHARDS[1])
  text = json.dumps(header, separators=(",", ":"))
  again = json.dumps({NORM: header[NORM]}, separators=(",", ":"))
  write_safetensors(folder / SHARDS[1], (text[:-1] + "," + again[1:]).encode(), data)


def duplicate_across_shards(folder: pathlib.Path) -> None:
  header, data = read_safetensors(folder / SHARDS[1])
  begin, end = header[NORM]["data_offsets"]
  norm = (header[NORM]["dtype"], header[NORM]["shape"], data[begin:end])
  replace_tensors(folder, SHARDS[0], lambda tensors: tensors.update({NORM: norm}))


def remove_tensor(folder: pathlib.Path) -> None:
  replace_tensors(folder, SHARDS[1], lambda tensors: tensors.pop(NORM))
  edit_json(INDEX, drop("weight_map", NORM))(folder)


def overlap(header: Header) -> None:
  """Two tensors of one size on the same bytes."""
  names = [n for n, info in header.items() if n.endswith("input_layernorm.weight")]
  header[names[1]]["data_offsets"] = header[names[0]]["data_offsets"]


def move_offsets(begin_by: int, end_by: int) -> Callable[[Header], None]:
  def change(header: Header) -> None:
    begin, end = header[NORM]["data_offsets"]
    header[NORM]["data_offsets"] = [begin + begin_by, end + end_by]

  return change


WEIGHTS = ("quantization_config", "config_groups", "group_0", "weights")

# name -> (edit of a copy of the model's directory, part of the error message)
BAD_MODELS: dict[str, tuple[Edit, str]] = {
  "no-config": (lambda d: (d / "config.json").unlink(), "config.json: "),
  "no-weights": (
    lambda d: [(d / n).unlink() for n in (INDEX, *SHARDS)],
    "no weights: expected model.safetensors.index.json",
  ),
  "no-tokenizer": (lambda d: (d / "tiktoken.model").unlink(), "tiktoken.model"),
  "missing-shard": (lambda d: (d / SHARDS[1]).unlink(), f"{SHARDS[1]}: no such file"),
  "empty-shard": (truncate(SHARDS[1], 0), f"{SHARDS[1]}: truncated: 0 bytes"),
  "shard-cut-in-length": (truncate(SHARDS[1], 5), f"{SHARDS[1]}: truncated: 5 bytes"),
  "shard-cut-in-header": (truncate(SHARDS[1], 1000), f"{SHARDS[1]}: truncated: 1000 bytes"),
  "shard-cut-in-data": (truncate(SHARDS[1], -100), f"{SHARDS[1]}: "),
  "index-names-missing-file": (
    edit_json(INDEX, put("weight_map", NORM, "model-00003-of-000002.safetensors")),
    "model-00003-of-000002.safetensors: no such file",
  ),
  "index-leaves-directory": (
    edit_json(INDEX, put("weight_map", NORM, "../" + SHARDS[1])),
    f"weight_map.{NORM}: \"../{SHARDS[1]}\": expected the plain name",
  ),
  "index-names-absent-tensor": (
    edit_json(INDEX, put("weight_map", "model.extra.weight", SHARDS[0])),
    f"{SHARDS[0]}: model.extra.weight: absent",
  ),
  "index-not-json": (
    replace_text(INDEX, '{"weight_map": {'),
    f"{INDEX}: JSON error",
  ),
  "header-past-end": (
    replace_header(SHARDS[1], b"{}", 1 << 24),
    f"{SHARDS[1]}: truncated: ",
  ),
  "header-length-huge": (
    replace_header(SHARDS[1], b"{}", (1 << 64) - 1),
    f"{SHARDS[1]}: a header of 18446744073709551615 bytes",
  ),
  "header-not-json": (replace_header(SHARDS[1], b"not JSON at all"), f"{SHARDS[1]}: JSON error"),
  "header-not-utf8": (replace_header(SHARDS[1], b'{"\xff\xfe":{}}'), f"{SHARDS[1]}: JSON error"),
  "header-too-deep": (replace_header(SHARDS[1], b"[" * 1_000_000), f"{SHARDS[1]}: JSON nested too deep"),
  "header-no-object": (replace_header(SHARDS[1], b"[1,2,3]"), f"{SHARDS[1]}: an array of 3: expected a JSON object"),
  "offsets-overlap": (edit_header(SHARDS[1], overlap), "it overlaps another tensor"),
  "offsets-underflow": (
    edit_header(SHARDS[1], lambda h: h[NORM]["data_offsets"].reverse()),
    f"{SHARDS[1]}: {NORM}: bytes ",
  ),
  "offsets-negative": (edit_header(SHARDS[1], put(NORM, "data_offsets", [-512, 0])), f"{NORM}.data_offsets: -512"),
  "offsets-past-end": (edit_header(SHARDS[1], move_offsets(1 << 40, 1 << 40)), f"{NORM}: bytes "),
  "offsets-overflow": (
    edit_header(SHARDS[1], put(NORM, "data_offsets", [(1 << 64) - 512, (1 << 64)])),
    f"{NORM}.data_offsets: 1844674407370955",
  ),
  "span-not-shape": (edit_header(SHARDS[1], put(NORM, "shape", [255])), f"{SHARDS[1]}: {NORM}: bytes "),
  "shape-overflows": (
    edit_header(SHARDS[1], put(NORM, "shape", [1 << 32, 1 << 32])),
    f"{NORM}: a shape of more than 2^63 bytes",
  ),
  "shape-negative": (edit_header(SHARDS[1], put(NORM, "shape", [-256])), f"{NORM}.shape: -256"),
  "dtype-unknown": (edit_header(SHARDS[1], put(NORM, "dtype", "F8_E4M3")), f"{NORM}.dtype: \"F8_E4M3\""),
  "dtype-wrong": (
    edit_header(SHARDS[1], put(NORM, "dtype", "F16")),
    f"{SHARDS[1]}: {NORM}: F16 [256]: expected a tensor of BF16 [256]",
  ),
  "packed-dtype-wrong": (
    edit_header(SHARDS[0], put(PACKED, "dtype", "F32")),
    f"{SHARDS[0]}: {PACKED}: F32 [256, 32]: expected a tensor of I32",
  ),
  "scale-of-other-groups": (
    rewrite(SHARDS[0], lambda t: t.update({SCALE: ("BF16", [256, 4], t[SCALE][2][:2048])})),
    f"{SCALE}: BF16 [256, 4]: expected a tensor of BF16 [256, 8]",
  ),
  "shape-wrong": (
    edit_header(SHARDS[1], put(NORM, "shape", [128, 2])),
    f"{SHARDS[1]}: {NORM}: BF16 [128, 2]: expected a tensor of BF16 [256]",
  ),
  "tensor-empty": (
    rewrite(SHARDS[1], lambda t: t.update({NORM: ("BF16", [0], b"")})),
    f"{SHARDS[1]}: {NORM}: BF16 [0]: expected a tensor of BF16 [256]",
  ),
  "tensor-absent": (remove_tensor, f"{NORM}: absent: expected a tensor of BF16 [256]"),
  "tensor-twice-in-header": (duplicate_in_header, f"{SHARDS[1]}: \"{NORM}\" twice"),
  "tensor-in-two-shards": (duplicate_across_shards, f"{SHARDS[1]}: {NORM}: duplicate"),
  "config-not-json": (
    lambda d: ((d / "config.json").unlink(), (d / "config.json").write_text("{,}")),
    "config.json: JSON error",
  ),
  "quantization-absent": (config(drop("quantization_config")), "config.json: quantization_config: absent"),
  "quantization-unknown": (
    config(put("quantization_config", "quant_method", "gptq")),
    "quantization_config.quant_method: \"gptq\"",
  ),
  "quantization-fp8": (
    config(put("quantization_config", "format", "float-quantized")),
    "quantization_config.format: \"float-quantized\"",
  ),
  "quantization-8-bits": (config(put(*WEIGHTS, "num_bits", 8)), "weights.num_bits: 8: expected 4"),
  "quantization-asymmetric": (config(put(*WEIGHTS, "symmetric", False)), "weights.symmetric: false: expected true"),
  "group-size-wrong": (config(put(*WEIGHTS, "group_size", 128)), "weights.group_size: 128: expected 32"),
  "hidden-size-absent": (config(drop("hidden_size")), "config.json: hidden_size: absent"),
  "hidden-size-text": (config(put("hidden_size", "256")), "config.json: hidden_size: \"256\""),
  "hidden-size-huge": (config(put("hidden_size", 1 << 62)), f"config.json: hidden_size: {1 << 62}"),
  "hidden-size-other": (config(put("hidden_size", 512)), "expected a tensor of "),
  "layers-negative": (config(put("num_hidden_layers", -5)), "config.json: num_hidden_layers: -5"),
  "layers-too-many": (config(put("num_hidden_layers", 6)), "model.layers.5."),
  "top-k-past-experts": (config(put("num_experts_per_tok", 17)), "config.json: num_experts_per_tok: 17"),
  "rope-dim-odd": (config(put("qk_rope_head_dim", 31)), "config.json: qk_rope_head_dim: 31"),
  "eps-zero": (config(put("rms_norm_eps", 0)), "config.json: rms_norm_eps: 0"),
  "router-softmax": (config(put("scoring_func", "softmax")), "config.json: scoring_func: \"softmax\""),
  "router-groups": (config(put("n_group", 8)), "config.json: n_group: 8: expected 1"),
  "rope-unknown": (config(put("rope_scaling", "type", "longrope")), "rope_scaling.type: \"longrope\""),
  "eos-past-vocabulary": (
    edit_json("generation_config.json", put("eos_token_id", [2048])),
    "generation_config.json: eos_token_id: 2048",
  ),
}

BAD_DRAFTERS: dict[str, tuple[Edit, str]] = {
  "draft-no-config": (lambda d: (d / "config.json").unlink(), "config.json: "),
  "draft-no-weights": (lambda d: (d / SINGLE).unlink(), "no weights"),
  "draft-truncated": (truncate(SINGLE, -1), f"{SINGLE}: "),
  "draft-hidden-size": (config(put("hidden_size", 128)), "hidden_size: 128: expected the target model's 256"),
  "draft-vocabulary": (config(put("vocab_size", 163840)), "vocab_size: 163840: expected the target model's 2048"),
  "draft-target-layers": (
    config(put("num_target_layers", 61)),
    "num_target_layers: 61: expected the target model's 5",
  ),
  "draft-taps": (config(put("dflash_config", "target_layer_ids", [1, 2, 9])), "target_layer_ids: 9"),
  "draft-too-few-taps": (
    config(put("dflash_config", "target_layer_ids", [1, 2])),
    "fc.weight: BF16 [256, 768]: expected a tensor of BF16 [256, 512]",
  ),
  "draft-mask": (config(put("dflash_config", "mask_token_id", 4096)), "mask_token_id: 4096"),
  "draft-block": (config(put("block_size", 1)), "block_size: 1: expected an integer from 2 to 256"),
  "draft-no-dflash": (config(drop("dflash_config")), "dflash_config: absent"),
  "draft-head-dim": (config(put("head_dim", 64)), "expected a tensor of BF16"),
  "draft-dtype": (
    edit_header(SINGLE, put("norm.weight", "dtype", "F16")),
    "norm.weight: F16 [256]: expected a tensor of BF16 [256]",
  ),
}


def bad_checkpoints(models: pathlib.Path, out: pathlib.Path) -> Iterator[BadCase]:
  """One directory a case under `out`; `models` holds the bundled pair. A bad drafter comes with the bundled model."""
  model, draft = models / "tiny-k2", models / "tiny-k2-dflash"
  for name, (edit, expected) in BAD_MODELS.items():
    folder = copy_of(model, out / name)
    edit(folder)
    yield BadCase(name, folder, None, expected)
  for name, (edit, expected) in BAD_DRAFTERS.items():
    folder = copy_of(draft, out / name)
    edit(folder)
    yield BadCase(name, model, folder, expected)


def wrap(folder: pathlib.Path) -> None:
  """The K2.5/K2.6 wrapper: text_config with the quantisation inside, prefixed names, vision tensors to skip."""
  text = json.loads((folder / "config.json").read_text())
  wrapper = {
    "architectures": ["KimiK25ForConditionalGeneration"],
    "model_type": "kimi_k25",
    "dtype": "bfloat16",
    "bos_token_id": text["bos_token_id"],
    "eos_token_id": text["eos_token_id"],
    "pad_token_id": text["pad_token_id"],
    "tie_word_embeddings": False,
    "vision_config": {"hidden_size": 64, "num_hidden_layers": 1},
    "text_config": text,
  }
  replace_text("config.json", json.dumps(wrapper, indent=1))(folder)
  prefix = "language_model."
  for shard in SHARDS:

    def rename(tensors: Tensors, shard: str = shard) -> None:
      renamed = {prefix + name: tensor for name, tensor in tensors.items()}
      tensors.clear()
      tensors.update(renamed)
      if shard == SHARDS[1]:
        tensors["vision_tower.patch_embed.proj.weight"] = ("BF16", [4, 3], bytes(24))
        tensors["vision_tower.encoder.blocks.0.norm0.bias"] = ("BF16", [4], bytes(8))
        tensors["mm_projector.pre_norm.weight"] = ("BF16", [4], bytes(8))

    replace_tensors(folder, shard, rename)
  index = json.loads((folder / INDEX).read_text())
  index["weight_map"] = {name: shard for shard in SHARDS for name in read_safetensors(folder / shard)[0]}
  replace_text(INDEX, json.dumps(index))(folder)


def join(folder: pathlib.Path) -> None:
  """One model.safetensors without an index."""
  collected: Tensors = {}
  replace_tensors(folder, SHARDS[0], lambda tensors: collected.update(tensors))
  replace_tensors(folder, SHARDS[1], lambda tensors: collected.update(tensors))
  write_safetensors(folder / SINGLE, {}, b"")
  replace_tensors(folder, SINGLE, lambda tensors: tensors.update(collected))
  for name in (INDEX, *SHARDS):
    (folder / name).unlink()


def prefix_draft(tensors: Tensors) -> None:
  renamed = {"model." + name: tensor for name, tensor in tensors.items()}
  tensors.clear()
  tensors.update(renamed)


def move_block_size(config: dict) -> None:
  config["dflash_config"]["block_size"] = config.pop("block_size")


def newer_rope(config: dict) -> None:
  config["rope_parameters"] = {**config.pop("rope_scaling"), "rope_theta": config.pop("rope_theta")}


def hoist_quantization(config: dict) -> None:
  config["quantization_config"] = config["text_config"].pop("quantization_config")


def good_checkpoints(models: pathlib.Path, out: pathlib.Path) -> Iterator[GoodCase]:
  """Other spellings of the bundled pair: each must yield the bundled pair's tokens."""
  model, draft = models / "tiny-k2", models / "tiny-k2-dflash"
  targets: dict[str, list[Edit]] = {
    "wrapped": [wrap],
    "wrapped-quantization-on-top": [wrap, config(hoist_quantization)],
    "single-file": [join],
    "newer-rope": [config(newer_rope)],
    "extra-tensor": [rewrite(SHARDS[1], lambda t: t.update({"model.layers.5.extra": ("F32", [1], bytes(4))}))],
  }
  drafters: dict[str, list[Edit]] = {
    "draft-prefixed": [rewrite(SINGLE, prefix_draft)],
    "draft-block-in-dflash": [config(move_block_size)],
    "draft-newer-rope": [config(newer_rope)],
  }
  for name, edits in targets.items():
    folder = copy_of(model, out / name)
    for edit in edits:
      edit(folder)
    yield GoodCase(name, folder, draft)
  for name, edits in drafters.items():
    folder = copy_of(draft, out / name)
    for edit in edits:
      edit(folder)
    yield GoodCase(name, model, folder)


def main() -> None:
  models = pathlib.Path(__file__).resolve().parents[2] / "models"
  out = pathlib.Path(sys.argv[1])
  for case in bad_checkpoints(models, out):
    print(case.name, case.model_dir, case.draft_dir or "", case.expected, sep="\t")
  for good in good_checkpoints(models, out):
    print(good.name, good.model_dir, good.draft_dir, "", sep="\t")


if __name__ == "__main__":
  main()
