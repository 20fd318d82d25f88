"""Shapes and constants of the pair: the target in DeepSeek-V3's terms, the drafter in z-lab/dflash's.

The defaults are the bundled pair; the field names are those of the checkpoints' config.json.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from .files import read_json
from .special_tokens import N_RESERVED


def _yarn() -> dict[str, Any]:
    """YaRN (arXiv 2309.00071): 1024 positions stretched by 4; `rope_scaling` without its type."""
    return {
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 1024}


@dataclass
class TargetConfig:
    """tiny-k2. Widths divide by 8 ranks into multiples of one INT4 group (32)."""

    vocab_size: int = 2048
    hidden_size: int = 256
    num_hidden_layers: int = 5
    first_k_dense_replace: int = 1
    num_attention_heads: int = 8
    q_lora_rank: int = 128
    kv_lora_rank: int = 128
    qk_nope_head_dim: int = 32
    qk_rope_head_dim: int = 32
    v_head_dim: int = 32
    intermediate_size: int = 512
    moe_intermediate_size: int = 256
    n_routed_experts: int = 16
    n_shared_experts: int = 1
    num_experts_per_tok: int = 4
    routed_scaling_factor: float = 2.0
    rms_norm_eps: float = 1e-5
    rope_theta: float = 50000.0
    max_position_embeddings: int = 4096
    rope_scaling: dict[str, Any] = field(default_factory=lambda: {**_yarn(), "type": "yarn"})

    @property
    def n_ranks(self) -> int:
        """Size of the vocabulary without the reserved ids, which start here."""
        return self.vocab_size - N_RESERVED

    @classmethod
    def from_json(cls, path: Path) -> Self:
        """Read a plain config.json or the `text_config` of a K2.5/K2.6 wrapper."""
        values = read_json(path)
        values = values.get("text_config", values)
        return cls(**{name: values[name] for name in cls.__dataclass_fields__ if name in values})


@dataclass
class DraftConfig:
    """tiny-k2-dflash. The window is short because the drafter is trained on short rows only."""

    hidden_size: int = 256
    num_hidden_layers: int = 2
    num_attention_heads: int = 16
    num_key_value_heads: int = 8
    head_dim: int = 32
    intermediate_size: int = 512
    rms_norm_eps: float = 1e-5
    rope_theta: float = 50000.0
    rope_scaling: dict[str, Any] = field(
        default_factory=lambda: {**_yarn(), "rope_type": "yarn", "type": "yarn"})
    sliding_window: int = 256
    block_size: int = 8
    num_target_layers: int = 5
    max_position_embeddings: int = 4096
    vocab_size: int = 2048
    dflash_config: dict[str, Any] = field(
        default_factory=lambda: {"mask_token_id": 2046, "target_layer_ids": [1, 2, 3]})

    @property
    def mask_token_id(self) -> int:
        return self.dflash_config["mask_token_id"]

    @property
    def target_layer_ids(self) -> tuple[int, ...]:
        return tuple(self.dflash_config["target_layer_ids"])

    @classmethod
    def from_json(cls, path: Path) -> Self:
        values = read_json(path)
        return cls(**{name: values[name] for name in cls.__dataclass_fields__ if name in values})
