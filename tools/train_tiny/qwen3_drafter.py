"""The drafter put together from transformers' Qwen3 parts, as z-lab/dflash does: a second implementation."""

from pathlib import Path

import torch
from torch import nn
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3Config, Qwen3MLP, Qwen3RMSNorm, Qwen3RotaryEmbedding, rotate_half)

from .files import read_json, read_tensors


class Qwen3Drafter:
    """Computes one block after a context; batch 1, nothing cached."""

    def __init__(self, folder: Path) -> None:
        raw = read_json(folder / "config.json")
        self.window = raw["sliding_window"]
        self.cfg = Qwen3Config(**{name: value for name, value in raw.items() if name != "architectures"})
        stored = read_tensors(folder / "model.safetensors")
        self.weights = {name: value.float() for name, value in stored.items()}
        self.rotary = Qwen3RotaryEmbedding(self.cfg)

    def project(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ self.weights[name + ".weight"].T

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        module = Qwen3RMSNorm(x.shape[-1], eps=self.cfg.rms_norm_eps)
        module.weight = nn.Parameter(self.weights[name + ".weight"])
        return module(x)

    def mlp(self, x: torch.Tensor, prefix: str) -> torch.Tensor:
        module = Qwen3MLP(self.cfg)
        for name in ("gate_proj", "up_proj", "down_proj"):
            getattr(module, name).weight = nn.Parameter(self.weights[f"{prefix}.{name}.weight"])
        return module(x)

    def heads(self, x: torch.Tensor, n_heads: int) -> torch.Tensor:
        """[1, L, heads * head_dim] -> [1, L, heads, head_dim]."""
        return x.view(1, x.shape[1], n_heads, self.cfg.head_dim)

    def attention(
        self, x: torch.Tensor, context: torch.Tensor, prefix: str, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        """x [1, Q, hidden] after context [1, n, hidden]; cos, sin [1, 1, n + Q, head_dim]."""
        n_context, length = context.shape[1], x.shape[1]
        n_heads, n_kv_heads = self.cfg.num_attention_heads, self.cfg.num_key_value_heads
        joined = torch.cat((context, x), 1)
        q = self.norm(self.heads(self.project(x, f"{prefix}.q_proj"), n_heads), f"{prefix}.q_norm")
        k = self.norm(self.heads(self.project(joined, f"{prefix}.k_proj"), n_kv_heads), f"{prefix}.k_norm")
        v = self.heads(self.project(joined, f"{prefix}.v_proj"), n_kv_heads)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        q = q * cos[..., -length:, :] + rotate_half(q) * sin[..., -length:, :]
        k = k * cos + rotate_half(k) * sin
        k, v = (t.repeat_interleave(n_heads // n_kv_heads, 1) for t in (k, v))
        queries, keys = torch.arange(n_context, n_context + length), torch.arange(n_context + length)
        is_far = queries[:, None] - keys[None] >= self.window
        scores = (q @ k.mT * self.cfg.head_dim**-0.5).masked_fill(is_far, float("-inf"))
        out = (torch.softmax(scores, -1) @ v).transpose(1, 2).reshape(1, length, -1)
        return self.project(out, f"{prefix}.o_proj")

    def block_hidden(self, embedded: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """embedded [1, Q, hidden], features [1, n, taps * hidden] -> normed hidden [1, Q, hidden]."""
        context = self.norm(self.project(features, "fc"), "hidden_norm")
        positions = torch.arange(features.shape[1] + embedded.shape[1])[None]
        cos, sin = (t[:, None] for t in self.rotary(embedded, positions))
        h = embedded
        for i in range(self.cfg.num_hidden_layers):
            x = self.norm(h, f"layers.{i}.input_layernorm")
            h = h + self.attention(x, context, f"layers.{i}.self_attn", cos, sin)
            x = self.norm(h, f"layers.{i}.post_attention_layernorm")
            h = h + self.mlp(x, f"layers.{i}.mlp")
        return self.norm(h, "norm")
