"""DFlash's block-diffusion draft model, in the layout of z-lab/dflash's checkpoints (Qwen3-style layers).

Context: the target's residual stream after the layers `target_layer_ids` (0-based), concatenated, through
fc and hidden_norm; every draft layer projects THAT (not normed again) to its own keys and values. The
block: one known token and block_size - 1 mask tokens, embedded by the target, attending to the context
and to each other in both directions. The output at a mask position predicts the token of that position,
through the target's lm_head. Sliding window W: a query at position p sees the keys at k with p - k < W
(nothing is hidden to its right), so W - 1 context entries are all that is ever needed.
"""

import torch
import torch.nn.functional as F
from torch import nn

from .config import DraftConfig
from .layers import MLP, RMSNorm, init_normal, linear
from .rope import rope_half, rope_tables

KeysValues = tuple[torch.Tensor, torch.Tensor]  # [B, kv heads, length, head_dim] each
Rope = tuple[torch.Tensor, torch.Tensor]  # cos, sin broadcastable to [B, heads, length, head_dim / 2]


class DraftAttention(nn.Module):
    """Grouped-query attention with normed queries and keys."""

    def __init__(self, cfg: DraftConfig) -> None:
        super().__init__()
        self.n_heads, self.n_kv_heads = cfg.num_attention_heads, cfg.num_key_value_heads
        self.head_dim = cfg.head_dim
        self.q_proj = linear(cfg.hidden_size, self.n_heads * self.head_dim)
        self.k_proj = linear(cfg.hidden_size, self.n_kv_heads * self.head_dim)
        self.v_proj = linear(cfg.hidden_size, self.n_kv_heads * self.head_dim)
        self.o_proj = linear(self.n_heads * self.head_dim, cfg.hidden_size)
        self.q_norm = RMSNorm(self.head_dim, cfg.rms_norm_eps)
        self.k_norm = RMSNorm(self.head_dim, cfg.rms_norm_eps)

    def keys_values(self, x: torch.Tensor, rope: Rope) -> KeysValues:
        """x [B, L, hidden] -> rotated keys and values."""
        shape = (*x.shape[:2], self.n_kv_heads, self.head_dim)
        k = self.k_norm(self.k_proj(x).view(shape)).transpose(1, 2)
        return rope_half(k, *rope), self.v_proj(x).view(shape).transpose(1, 2)

    def forward(
        self, x: torch.Tensor, rope: Rope, context: KeysValues, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """x [B, Q, hidden] -> same shape; mask broadcastable to [B, H, Q, context + Q]."""
        batch, length, _ = x.shape
        q = self.q_norm(self.q_proj(x).view(batch, length, self.n_heads, self.head_dim)).transpose(1, 2)
        q = rope_half(q, *rope)
        k, v = self.keys_values(x, rope)
        k, v = torch.cat((context[0], k), 2), torch.cat((context[1], v), 2)
        n_groups = self.n_heads // self.n_kv_heads
        k, v = k.repeat_interleave(n_groups, 1), v.repeat_interleave(n_groups, 1)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self.head_dim**-0.5)
        return self.o_proj(out.transpose(1, 2).reshape(batch, length, self.n_heads * self.head_dim))


class DraftLayer(nn.Module):
    def __init__(self, cfg: DraftConfig) -> None:
        super().__init__()
        self.self_attn = DraftAttention(cfg)
        self.mlp = MLP(cfg.hidden_size, cfg.intermediate_size)
        self.input_layernorm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)

    def forward(
        self, x: torch.Tensor, rope: Rope, context: KeysValues, mask: torch.Tensor | None
    ) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rope, context, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class Drafter(nn.Module):
    cos: torch.Tensor  # [max positions, head_dim / 2]
    sin: torch.Tensor

    def __init__(self, cfg: DraftConfig) -> None:
        super().__init__()
        self.cfg = cfg
        self.fc = linear(len(cfg.target_layer_ids) * cfg.hidden_size, cfg.hidden_size)
        self.hidden_norm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)
        self.layers = nn.ModuleList(DraftLayer(cfg) for _ in range(cfg.num_hidden_layers))
        self.norm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)
        cos, sin = rope_tables(
            cfg.head_dim, cfg.rope_theta, cfg.rope_scaling, cfg.max_position_embeddings)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def rope(self, positions: torch.Tensor) -> Rope:
        """positions [L] or [B, L]."""
        cos, sin = self.cos[positions], self.sin[positions]
        return (cos.unsqueeze(1), sin.unsqueeze(1)) if positions.dim() == 2 else (cos, sin)

    def context_keys_values(self, taps: torch.Tensor, positions: torch.Tensor) -> list[KeysValues]:
        """taps [B, L, taps * hidden] -> per layer what to append to the drafter's cache."""
        h = self.hidden_norm(self.fc(taps))
        rope = self.rope(positions)
        return [layer.self_attn.keys_values(h, rope) for layer in self.layers]

    def forward(
        self, embedded: torch.Tensor, positions: torch.Tensor, context: list[KeysValues],
        mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """embedded [B, Q, hidden] block tokens -> the normed hidden states [B, Q, hidden].

        Without a mask: one block at consecutive positions, after a context that ends right before it.
        """
        rope = self.rope(positions)
        if mask is None:
            n_context = context[0][0].shape[2]
            before = positions[0] - n_context + torch.arange(n_context, device=embedded.device)
            keys = torch.cat((before, positions))
            mask = positions[:, None] - keys[None] < self.cfg.sliding_window
        x = embedded
        for layer, layer_context in zip(self.layers, context, strict=True):
            x = layer(x, rope, layer_context, mask)
        return self.norm(x)

    def init_weights(self, seed: int) -> "Drafter":
        """As the target's: std in**-0.5, scaled down where it writes to the residual stream."""
        generator = torch.Generator().manual_seed(seed)
        for name, param in self.named_parameters():
            if param.dim() == 1:
                continue
            std = param.shape[-1] ** -0.5
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                std *= (2 * self.cfg.num_hidden_layers) ** -0.5
            init_normal(param, std, generator)
        return self
