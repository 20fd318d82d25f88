"""Multi-head latent attention (MLA) of DeepSeek-V2/V3 (arXiv 2405.04434), computed unabsorbed."""

import torch
import torch.nn.functional as F
from torch import nn

from .config import TargetConfig
from .kv_cache import LayerCache
from .layers import RMSNorm, linear
from .rope import rope_interleaved, yarn_mscale


class LatentAttention(nn.Module):
    """Queries and keys/values go through low-rank latents; one rotary key is shared by all heads."""

    def __init__(self, cfg: TargetConfig) -> None:
        super().__init__()
        self.n_heads = cfg.num_attention_heads
        self.nope, self.rope, self.v = cfg.qk_nope_head_dim, cfg.qk_rope_head_dim, cfg.v_head_dim
        self.kv_rank = cfg.kv_lora_rank
        self.q_a_proj = linear(cfg.hidden_size, cfg.q_lora_rank)
        self.q_a_layernorm = RMSNorm(cfg.q_lora_rank, cfg.rms_norm_eps)
        self.q_b_proj = linear(cfg.q_lora_rank, self.n_heads * (self.nope + self.rope))
        self.kv_a_proj_with_mqa = linear(cfg.hidden_size, self.kv_rank + self.rope)
        self.kv_a_layernorm = RMSNorm(self.kv_rank, cfg.rms_norm_eps)
        self.kv_b_proj = linear(self.kv_rank, self.n_heads * (self.nope + self.v))
        self.o_proj = linear(self.n_heads * self.v, cfg.hidden_size)
        self.scale = (self.nope + self.rope) ** -0.5
        scaling = cfg.rope_scaling
        if scaling and scaling.get("mscale_all_dim"):
            self.scale *= yarn_mscale(scaling["factor"], scaling["mscale_all_dim"]) ** 2

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor,
        mask: torch.Tensor | None = None, cache: LayerCache | None = None,
    ) -> torch.Tensor:
        """x [B, L, hidden]; cos, sin broadcastable to [B, H, L, rope / 2] -> [B, L, hidden].

        mask: bool, broadcastable to [B, H, L, keys], True = may attend; None = causal.
        """
        batch, length, _ = x.shape
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        q = q.view(batch, length, self.n_heads, self.nope + self.rope).transpose(1, 2)
        latent, k_rope = self.kv_a_proj_with_mqa(x).split([self.kv_rank, self.rope], -1)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent))
        kv = kv.view(batch, length, self.n_heads, self.nope + self.v).transpose(1, 2)

        q = torch.cat((q[..., :self.nope], rope_interleaved(q[..., self.nope:], cos, sin)), -1)
        k_rope = rope_interleaved(k_rope.unsqueeze(1), cos, sin)
        k_rope = k_rope.expand(batch, self.n_heads, length, self.rope)
        k, v = torch.cat((kv[..., :self.nope], k_rope), -1), kv[..., self.nope:]
        if cache is not None:
            k, v = cache.append(k, v)

        if mask is None and length > 1:
            # flash attention wants one head size for q, k and v
            padded = F.pad(v, (0, self.nope + self.rope - self.v))
            out = F.scaled_dot_product_attention(q, k, padded, is_causal=True, scale=self.scale)
            out = out[..., :self.v]
        else:
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self.scale)
        return self.o_proj(out.transpose(1, 2).reshape(batch, length, self.n_heads * self.v))
