"""Writes a checkpoint in Kimi's INT4 format as a GGUF file for llama.cpp, so that both engines run the same weights.

  make_gguf.py CHECKPOINT_DIR OUT.gguf        (needs numpy and gguf)

Routed experts become Q4_0, whose (nibble - 8) * scale has the same nibbles and the scale rounded to FP16; every other
matrix stays BF16 and every vector is F32. llama.cpp's name for the architecture is deepseek2.
"""

import json
import pathlib
import sys

import gguf
import numpy as np

GROUP = 32  # weights under one scale, in compressed-tensors' pack-quantized format as in Q4_0
BF16 = gguf.GGMLQuantizationType.BF16
Q4_0 = gguf.GGMLQuantizationType.Q4_0


class Checkpoint:
  """The tensors of a sharded safetensors directory, read through memory maps."""

  def __init__(self, folder):
    folder = pathlib.Path(folder)
    self.config = json.loads((folder / "config.json").read_text())
    self.shard_of = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    self.shards = {name: self._open(folder / name) for name in set(self.shard_of.values())}

  @staticmethod
  def _open(path):
    data = np.memmap(path, np.uint8, "r")
    n_header = int(data[:8].view("<u8")[0])
    return json.loads(bytes(data[8:8 + n_header])), data[8 + n_header:]

  def raw(self, name):
    """(dtype name, shape, bytes) of a tensor."""
    header, data = self.shards[self.shard_of[name]]
    entry = header[name]
    begin, end = entry["data_offsets"]
    return entry["dtype"], entry["shape"], data[begin:end]

  def floats(self, name):
    """A BF16 or F32 tensor as float32, exactly."""
    dtype, shape, data = self.raw(name)
    if dtype == "BF16":
      values = (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32)
    elif dtype == "F32":
      values = np.frombuffer(data, np.float32)
    else:
      raise SystemExit(f"error: {name}: {dtype}: expected BF16 or F32")
    return values.reshape(shape)

  def q4_0(self, names):
    """Packed INT4 matrices [out, in] as Q4_0 blocks, uint8 [n, out, in / 32 * 18]."""
    stacked = []
    for name in names:
      _, (n_out, n_words), data = self.raw(name + ".weight_packed")
      words = np.frombuffer(data, np.uint32).reshape(n_out, n_words, 1)
      nibbles = ((words >> (4 * np.arange(8, dtype=np.uint32))) & 15).astype(np.uint8).reshape(n_out, -1, GROUP)
      scales = self.floats(name + ".weight_scale").astype(np.float16)[..., None].view(np.uint8)
      # A block's byte j holds element j in its low nibble and element j + 16 in its high one.
      pairs = nibbles[..., :GROUP // 2] | (nibbles[..., GROUP // 2:] << 4)
      stacked.append(np.concatenate([scales, pairs], axis=-1).reshape(n_out, -1))
    return np.stack(stacked)


def add_metadata(out, config):
  rope = config["rope_scaling"]
  d_latent, d_rope = config["kv_lora_rank"], config["qk_rope_head_dim"]
  out.add_vocab_size(config["vocab_size"])
  out.add_tokenizer_model("no_vocab")  # token ids are compared, never text
  out.add_block_count(config["num_hidden_layers"])
  out.add_context_length(config["max_position_embeddings"])
  out.add_embedding_length(config["hidden_size"])
  out.add_feed_forward_length(config["intermediate_size"])
  out.add_head_count(config["num_attention_heads"])
  out.add_head_count_kv(1)  # the absorbed form of MLA: one shared latent
  out.add_layer_norm_rms_eps(config["rms_norm_eps"])
  out.add_q_lora_rank(config["q_lora_rank"])
  out.add_kv_lora_rank(d_latent)
  out.add_key_length(d_latent + d_rope)
  out.add_value_length(d_latent)
  out.add_key_length_mla(config["qk_nope_head_dim"] + d_rope)
  out.add_value_length_mla(config["v_head_dim"])
  out.add_rope_dimension_count(d_rope)
  out.add_rope_freq_base(config["rope_theta"])
  out.add_rope_scaling_type(gguf.RopeScalingType.YARN)
  out.add_rope_scaling_factor(rope["factor"])
  out.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
  out.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])
  out.add_leading_dense_block_count(config["first_k_dense_replace"])
  out.add_expert_count(config["n_routed_experts"])
  out.add_expert_used_count(config["num_experts_per_tok"])
  out.add_expert_shared_count(config["n_shared_experts"])
  out.add_expert_feed_forward_length(config["moe_intermediate_size"])
  out.add_expert_weights_scale(config["routed_scaling_factor"])
  out.add_expert_weights_norm(config["norm_topk_prob"])
  out.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
  out.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_0)


def add_matrix(out, name, values):
  out.add_tensor(name, gguf.quants.quantize(np.ascontiguousarray(values), BF16), raw_dtype=BF16)


def add_vector(out, name, values):
  out.add_tensor(name, np.ascontiguousarray(values))


def add_attention(out, checkpoint, layer):
  config = checkpoint.config
  d_nope, d_value = config["qk_nope_head_dim"], config["v_head_dim"]
  target, source = f"blk.{layer}.", f"model.layers.{layer}.self_attn."
  add_matrix(out, target + "attn_q_a.weight", checkpoint.floats(source + "q_a_proj.weight"))
  add_vector(out, target + "attn_q_a_norm.weight", checkpoint.floats(source + "q_a_layernorm.weight"))
  add_matrix(out, target + "attn_q_b.weight", checkpoint.floats(source + "q_b_proj.weight"))
  add_matrix(out, target + "attn_kv_a_mqa.weight", checkpoint.floats(source + "kv_a_proj_with_mqa.weight"))
  add_vector(out, target + "attn_kv_a_norm.weight", checkpoint.floats(source + "kv_a_layernorm.weight"))
  kv_b = checkpoint.floats(source + "kv_b_proj.weight")
  kv_b = kv_b.reshape(config["num_attention_heads"], d_nope + d_value, config["kv_lora_rank"])
  add_matrix(out, target + "attn_k_b.weight", kv_b[:, :d_nope].transpose(0, 2, 1))
  add_matrix(out, target + "attn_v_b.weight", kv_b[:, d_nope:])
  add_matrix(out, target + "attn_output.weight", checkpoint.floats(source + "o_proj.weight"))


def add_experts(out, checkpoint, layer):
  target, source = f"blk.{layer}.", f"model.layers.{layer}.mlp."
  add_vector(out, target + "ffn_gate_inp.weight", checkpoint.floats(source + "gate.weight"))
  add_vector(out, target + "exp_probs_b.bias", checkpoint.floats(source + "gate.e_score_correction_bias"))
  for part in ("gate", "up", "down"):
    add_matrix(out, f"{target}ffn_{part}_shexp.weight", checkpoint.floats(f"{source}shared_experts.{part}_proj.weight"))
    names = [f"{source}experts.{e}.{part}_proj" for e in range(checkpoint.config["n_routed_experts"])]
    out.add_tensor(f"{target}ffn_{part}_exps.weight", checkpoint.q4_0(names), raw_dtype=Q4_0)


def write_gguf(folder, path):
  checkpoint = Checkpoint(folder)
  config = checkpoint.config
  out = gguf.GGUFWriter(path, "deepseek2")
  add_metadata(out, config)
  add_matrix(out, "token_embd.weight", checkpoint.floats("model.embed_tokens.weight"))
  add_matrix(out, "output.weight", checkpoint.floats("lm_head.weight"))
  add_vector(out, "output_norm.weight", checkpoint.floats("model.norm.weight"))
  for layer in range(config["num_hidden_layers"]):
    source = f"model.layers.{layer}."
    add_vector(out, f"blk.{layer}.attn_norm.weight", checkpoint.floats(source + "input_layernorm.weight"))
    add_vector(out, f"blk.{layer}.ffn_norm.weight", checkpoint.floats(source + "post_attention_layernorm.weight"))
    add_attention(out, checkpoint, layer)
    if layer < config["first_k_dense_replace"]:
      for part in ("gate", "up", "down"):
        add_matrix(out, f"blk.{layer}.ffn_{part}.weight", checkpoint.floats(f"{source}mlp.{part}_proj.weight"))
    else:
      add_experts(out, checkpoint, layer)
  out.write_header_to_file()
  out.write_kv_data_to_file()
  out.write_tensors_to_file()
  out.close()


if __name__ == "__main__":
  if len(sys.argv) != 3:
    raise SystemExit(__doc__)
  write_gguf(sys.argv[1], sys.argv[2])
