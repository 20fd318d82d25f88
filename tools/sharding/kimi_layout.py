"""The tensors of Kimi's published checkpoints by config: names, dtypes, shapes and the file each lies in.

K2.5 and K2.6 (a wrapper with `text_config`): names begin with `language_model.`, and files are one for each layer, one for
embedding, norm and lm_head, one for the projector and one for the vision tower. K2-Thinking has no wrapper and no vision.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

DTYPE_BYTES = {"BF16": 2, "F32": 4, "I32": 4}
GROUP = 32
PREFIX = "language_model."


class Tensor(NamedTuple):
  name: str
  dtype: str
  shape: tuple[int, ...]
  kind: str  # how a synthetic one is drawn: weight, residual (a weight that adds to the stream), embedding, norm, zero,
  #            bias (of the router), packed, scale, shape (of the unpacked matrix)
  matrix: tuple[int, int] = (0, 0)  # of packed, scale and shape: the matrix [out, in]

  @property
  def n_bytes(self) -> int:
    return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


def text_of(config: dict[str, Any]) -> dict[str, Any]:
  return config.get("text_config", config)


def _matrix(name: str, n_out: int, n_in: int, kind: str = "weight") -> Tensor:
  return Tensor(name + ".weight", "BF16", (n_out, n_in), kind)


def _norm(name: str, n: int) -> Tensor:
  return Tensor(name + ".weight", "BF16", (n,), "norm")


def _int4(name: str, n_out: int, n_in: int) -> Iterator[Tensor]:
  matrix = (n_out, n_in)
  yield Tensor(name + ".weight_packed", "I32", (n_out, n_in // 8), "packed", matrix)
  yield Tensor(name + ".weight_scale", "BF16", (n_out, n_in // GROUP), "scale", matrix)
  yield Tensor(name + ".weight_shape", "I32", (2,), "shape", matrix)


def _mlp(name: str, width: int, hidden: int) -> Iterator[Tensor]:
  yield _matrix(name + "gate_proj", width, hidden)
  yield _matrix(name + "up_proj", width, hidden)
  yield _matrix(name + "down_proj", hidden, width, "residual")


def layer_tensors(text: dict[str, Any], index: int) -> Iterator[Tensor]:
  hidden, heads, lora = text["hidden_size"], text["num_attention_heads"], text["kv_lora_rank"]
  nope, rope, v_head = text["qk_nope_head_dim"], text["qk_rope_head_dim"], text["v_head_dim"]
  layer = f"model.layers.{index}."
  attn, mlp = layer + "self_attn.", layer + "mlp."
  yield _norm(layer + "input_layernorm", hidden)
  yield _matrix(attn + "q_a_proj", text["q_lora_rank"], hidden)
  yield _norm(attn + "q_a_layernorm", text["q_lora_rank"])
  yield _matrix(attn + "q_b_proj", heads * (nope + rope), text["q_lora_rank"])
  yield _matrix(attn + "kv_a_proj_with_mqa", lora + rope, hidden)
  yield _norm(attn + "kv_a_layernorm", lora)
  yield _matrix(attn + "kv_b_proj", heads * (nope + v_head), lora)
  yield _matrix(attn + "o_proj", hidden, heads * v_head, "residual")
  yield _norm(layer + "post_attention_layernorm", hidden)
  if index < text["first_k_dense_replace"]:
    yield from _mlp(mlp, text["intermediate_size"], hidden)
    return
  width = text["moe_intermediate_size"]
  yield _matrix(mlp + "gate", text["n_routed_experts"], hidden)
  yield Tensor(mlp + "gate.e_score_correction_bias", "F32", (text["n_routed_experts"],), "bias")
  for expert in range(text["n_routed_experts"]):
    yield from _int4(f"{mlp}experts.{expert}.gate_proj", width, hidden)
    yield from _int4(f"{mlp}experts.{expert}.up_proj", width, hidden)
    yield from _int4(f"{mlp}experts.{expert}.down_proj", hidden, width)
  yield from _mlp(mlp + "shared_experts.", width * text["n_shared_experts"], hidden)


def top_tensors(text: dict[str, Any]) -> Iterator[Tensor]:
  hidden, vocab = text["hidden_size"], text["vocab_size"]
  yield Tensor("model.embed_tokens.weight", "BF16", (vocab, hidden), "embedding")
  yield _norm("model.norm", hidden)
  yield _matrix("lm_head", vocab, hidden)


def _with_bias(name: str, *shape: int, kind: str = "weight") -> Iterator[Tensor]:
  yield Tensor(name + ".weight", "BF16", shape, kind)
  yield Tensor(name + ".bias", "BF16", shape[:1], "zero")


def vision_tensors(vision: dict[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
  """(projector, tower)."""
  width, inner, patch = vision["vt_hidden_size"], vision["vt_intermediate_size"], vision["patch_size"]
  merged = width * math.prod(vision["merge_kernel_size"])
  projector = [*_with_bias("mm_projector.pre_norm", width, kind="norm"),
               *_with_bias("mm_projector.proj.0", merged, merged),
               *_with_bias("mm_projector.proj.2", vision["text_hidden_size"], merged)]
  tower = [*_with_bias("vision_tower.patch_embed.proj", width, 3, patch, patch),
           Tensor("vision_tower.patch_embed.pos_emb.weight", "BF16",
                  (vision["init_pos_emb_height"], vision["init_pos_emb_width"], width), "embedding")]
  for block in range(vision["vt_num_hidden_layers"]):
    at = f"vision_tower.encoder.blocks.{block}."
    tower += [*_with_bias(at + "norm0", width, kind="norm"), *_with_bias(at + "norm1", width, kind="norm"),
              *_with_bias(at + "wqkv", 3 * width, width), *_with_bias(at + "wo", width, width),
              *_with_bias(at + "mlp.fc0", inner, width), *_with_bias(at + "mlp.fc1", width, inner)]
  return projector, [*tower, *_with_bias("vision_tower.encoder.final_layernorm", width, kind="norm")]


def checkpoint_files(config: dict[str, Any]) -> dict[str, list[Tensor]]:
  """File name -> its tensors, in the order of the files."""
  text = text_of(config)
  groups = [list(layer_tensors(text, i)) for i in range(text["num_hidden_layers"])]
  groups.append(list(top_tensors(text)))
  if "text_config" in config:
    groups = [[tensor._replace(name=PREFIX + tensor.name) for tensor in group] for group in groups]
    if "vision_config" in config:
      groups += vision_tensors(config["vision_config"])
  return {f"model-{i + 1:05d}-of-{len(groups):06d}.safetensors": group for i, group in enumerate(groups)}


def drafter_tensors(config: dict[str, Any]) -> Iterator[Tensor]:
  """Of a DFlash drafter: one file, model.safetensors."""
  hidden, head_dim = config["hidden_size"], config["head_dim"]
  q_dim, kv_dim = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
  yield _matrix("fc", hidden, len(config["dflash_config"]["target_layer_ids"]) * hidden)
  yield _norm("hidden_norm", hidden)
  for i in range(config["num_hidden_layers"]):
    layer = f"layers.{i}."
    yield _norm(layer + "input_layernorm", hidden)
    yield _matrix(layer + "self_attn.q_proj", q_dim, hidden)
    yield _matrix(layer + "self_attn.k_proj", kv_dim, hidden)
    yield _matrix(layer + "self_attn.v_proj", kv_dim, hidden)
    yield _norm(layer + "self_attn.q_norm", head_dim)
    yield _norm(layer + "self_attn.k_norm", head_dim)
    yield _matrix(layer + "self_attn.o_proj", hidden, q_dim, "residual")
    yield _norm(layer + "post_attention_layernorm", hidden)
    yield from _mlp(layer + "mlp.", config["intermediate_size"], hidden)
  yield _norm("norm", hidden)
