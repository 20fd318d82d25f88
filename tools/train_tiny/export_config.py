"""config.json of the exported pair, as Kimi's and z-lab/dflash's checkpoints have it."""

from dataclasses import asdict
from typing import Any

from .config import DraftConfig, TargetConfig
from .int4 import GROUP
from .special_tokens import special_id


def quantization_config() -> dict[str, Any]:
    """compressed-tensors' `pack-quantized`: INT4 for the routed experts only."""
    weights: dict[str, Any] = {
        "actorder": None, "block_structure": None, "dynamic": False, "group_size": GROUP, "num_bits": 4,
        "observer": "minmax", "observer_kwargs": {}, "strategy": "group", "symmetric": True, "type": "int"}
    group = {
        "input_activations": None, "output_activations": None, "targets": ["Linear"], "weights": weights}
    return {
        "config_groups": {"group_0": group},
        "format": "pack-quantized",
        "ignore": [
            "lm_head", "re:.*self_attn.*", "re:.*shared_experts.*",
            r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed"}


def target_config(cfg: TargetConfig) -> dict[str, Any]:
    """The plain form (K2-Thinking's naming)."""
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "aux_loss_alpha": 0.001,
        "bos_token_id": special_id("[BOS]", cfg.n_ranks),
        "dtype": "bfloat16",
        "eos_token_id": special_id("<|im_end|>", cfg.n_ranks),
        "ep_size": 1,
        "first_k_dense_replace": cfg.first_k_dense_replace,
        "hidden_act": "silu",
        "hidden_size": cfg.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": cfg.intermediate_size,
        "kv_lora_rank": cfg.kv_lora_rank,
        "max_position_embeddings": cfg.max_position_embeddings,
        "model_type": "kimi_k2",
        "moe_intermediate_size": cfg.moe_intermediate_size,
        "moe_layer_freq": 1,
        "n_group": 1,
        "n_routed_experts": cfg.n_routed_experts,
        "n_shared_experts": cfg.n_shared_experts,
        "norm_topk_prob": True,
        "num_attention_heads": cfg.num_attention_heads,
        "num_experts_per_tok": cfg.num_experts_per_tok,
        "num_hidden_layers": cfg.num_hidden_layers,
        "num_key_value_heads": cfg.num_attention_heads,
        "num_nextn_predict_layers": 0,
        "pad_token_id": special_id("[PAD]", cfg.n_ranks),
        "pretraining_tp": 1,
        "q_lora_rank": cfg.q_lora_rank,
        "qk_nope_head_dim": cfg.qk_nope_head_dim,
        "qk_rope_head_dim": cfg.qk_rope_head_dim,
        "quantization_config": quantization_config(),
        "rms_norm_eps": cfg.rms_norm_eps,
        "rope_scaling": cfg.rope_scaling,
        "rope_theta": cfg.rope_theta,
        "routed_scaling_factor": cfg.routed_scaling_factor,
        "scoring_func": "sigmoid",
        "seq_aux": True,
        "tie_word_embeddings": False,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "use_cache": True,
        "v_head_dim": cfg.v_head_dim,
        "vocab_size": cfg.vocab_size}


def wrapper_config(cfg: TargetConfig) -> dict[str, Any]:
    """K2.5/K2.6's multimodal wrapper around the plain form."""
    return {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "dtype": "bfloat16",
        "media_placeholder_token_id": special_id("<|media_pad|>", cfg.n_ranks),
        "bos_token_id": special_id("[BOS]", cfg.n_ranks),
        "eos_token_id": special_id("[EOS]", cfg.n_ranks),
        "pad_token_id": special_id("[PAD]", cfg.n_ranks),
        "tie_word_embeddings": False,
        "text_config": target_config(cfg)}


def draft_config(cfg: DraftConfig, n_ranks: int) -> dict[str, Any]:
    """z-lab/dflash's form: Qwen3's fields and `dflash_config`, sorted by name."""
    config = {
        "architectures": ["DFlashDraftModel"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": special_id("[BOS]", n_ranks),
        "dtype": "bfloat16",
        "eos_token_id": special_id("<|im_end|>", n_ranks),
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "layer_types": ["sliding_attention"] * cfg.num_hidden_layers,
        "max_window_layers": 0,
        "model_type": "qwen3",
        "pad_token_id": special_id("[PAD]", n_ranks),
        "tie_word_embeddings": False,
        "use_cache": True,
        "use_sliding_window": True,
        **asdict(cfg)}
    return dict(sorted(config.items()))
