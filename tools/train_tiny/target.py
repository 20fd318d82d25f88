"""tiny-k2: a DeepSeek-V3 / Kimi-K2 decoder in plain PyTorch.

One implementation serves training (CUDA, bf16 autocast, torch.compile of each layer) and the fp32 CPU
reference. Parameter names are those of the Hugging Face checkpoints, except that the routed experts of
a layer are stacked here and split on export.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from .attention import LatentAttention
from .config import TargetConfig
from .kv_cache import KVCache, LayerCache
from .layers import MLP, RMSNorm, init_normal, linear
from .moe import MoE
from .rope import rope_tables


class Layer(nn.Module):
    """Attention and (dense or MoE) feed-forward, both pre-normed and residual."""

    def __init__(self, cfg: TargetConfig, index: int, dropout: float, fake_quant: bool) -> None:
        super().__init__()
        self.self_attn = LatentAttention(cfg)
        is_dense = index < cfg.first_k_dense_replace
        self.mlp = MLP(cfg.hidden_size, cfg.intermediate_size) if is_dense else MoE(cfg, fake_quant)
        self.input_layernorm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)
        self.dropout = dropout

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor,
        mask: torch.Tensor | None = None, cache: LayerCache | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """x [B, L, hidden] -> (same shape, experts [B * L, k] or None, load [experts] or None)."""
        h = self.self_attn(self.input_layernorm(x), cos, sin, mask, cache)
        x = x + F.dropout(h, self.dropout, self.training)
        h = self.mlp(self.post_attention_layernorm(x))
        experts = load = None
        if isinstance(self.mlp, MoE):
            h, experts, load = h
        return x + F.dropout(h, self.dropout, self.training), experts, load


class Backbone(nn.Module):
    """The part under `model.` in the checkpoint's names."""

    def __init__(self, cfg: TargetConfig, dropout: float, fake_quant: bool) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(cfg.vocab_size, cfg.hidden_size)
        self.layers = nn.ModuleList(
            Layer(cfg, i, dropout, fake_quant) for i in range(cfg.num_hidden_layers))
        self.norm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)


class TargetOutput(NamedTuple):
    out: torch.Tensor  # logits [B, L, vocab], or the final normed hidden states [B, L, hidden]
    taps: torch.Tensor | None  # residual stream after the tapped layers, [B, L, taps * hidden]
    experts: list[torch.Tensor]  # per MoE layer [B * L, k]
    loads: list[torch.Tensor]  # per MoE layer [experts]


class TinyK2(nn.Module):
    cos: torch.Tensor  # [max positions, rope / 2]
    sin: torch.Tensor

    def __init__(self, cfg: TargetConfig, dropout: float = 0.0, fake_quant: bool = False) -> None:
        super().__init__()
        self.cfg = cfg
        self.model = Backbone(cfg, dropout, fake_quant)
        self.lm_head = linear(cfg.hidden_size, cfg.vocab_size)
        self.register_buffer("cos", None, persistent=False)
        self.register_buffer("sin", None, persistent=False)
        self.fill_rope_tables("cpu")

    def fill_rope_tables(self, device: torch.device | str) -> None:
        """cos and sin [max positions, rope / 2]: fp32 whatever the weights' type."""
        cfg = self.cfg
        cos, sin = rope_tables(
            cfg.qk_rope_head_dim, cfg.rope_theta, cfg.rope_scaling, cfg.max_position_embeddings)
        self.cos, self.sin = cos.to(device), sin.to(device)

    def moe_blocks(self) -> list[MoE]:
        return [layer.mlp for layer in self.model.layers if isinstance(layer.mlp, MoE)]

    def forward(
        self, ids: torch.Tensor, positions: torch.Tensor | None = None, mask: torch.Tensor | None = None,
        cache: KVCache | None = None, taps: Sequence[int] = (), return_norm: bool = False,
    ) -> TargetOutput:
        """ids [B, L]; positions [L] or [B, L] (default: right after the cache).

        mask: bool, broadcastable to [B, H, L, keys], True = may attend (default: causal).
        taps: indices of the layers whose output is returned; return_norm: skip lm_head.
        """
        length = ids.shape[1]
        n_cached = len(cache) if cache is not None else 0
        if positions is None:
            cos, sin = self.cos[n_cached:n_cached + length], self.sin[n_cached:n_cached + length]
        else:
            cos, sin = self.cos[positions], self.sin[positions]
            if positions.dim() == 2:
                cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        if mask is None and n_cached and length > 1:
            mask = torch.ones(length, n_cached + length, dtype=torch.bool, device=ids.device)
            mask = mask.tril(n_cached)

        x = self.model.embed_tokens(ids)
        tapped, experts, loads = [], [], []
        for i, layer in enumerate(self.model.layers):
            layer_cache = cache.layers[i] if cache is not None else None
            x, chosen, load = layer(x, cos, sin, mask, layer_cache)
            if i in taps:
                tapped.append(x)
            if chosen is not None:
                experts.append(chosen)
                loads.append(load)
        h = self.model.norm(x)
        out = h if return_norm else self.lm_head(h)
        return TargetOutput(out, torch.cat(tapped, -1) if tapped else None, experts, loads)

    def init_weights(self, seed: int) -> "TinyK2":
        """Normal with std in**-0.5; what writes to the residual stream is scaled down by its depth."""
        generator = torch.Generator().manual_seed(seed)
        for name, param in self.named_parameters():
            if param.dim() == 1:
                continue
            std = param.shape[-1] ** -0.5
            if name.endswith(("o_proj.weight", "down_proj.weight", "down_proj")):
                std *= (2 * self.cfg.num_hidden_layers) ** -0.5
            if "embed_tokens" in name:
                std = 0.3
            if "lm_head" in name or "gate.weight" in name:
                std = 0.02
            init_normal(param, std, generator)
        return self
