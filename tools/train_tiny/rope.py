"""Rotary positions: YaRN frequencies (arXiv 2309.00071) and the two pairings of RoPE (arXiv 2104.09864)."""

import math
from typing import Any

import torch


def yarn_mscale(factor: float, mscale: float) -> float:
    """YaRN's attention temperature; squared, it scales the softmax whatever the text's length."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def yarn_inv_freq(dim: int, base: float, scaling: dict[str, Any]) -> torch.Tensor:
    """Inverse frequencies [dim / 2] in fp32, blended once for all lengths."""
    extrapolated = 1.0 / base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    if not scaling:
        return extrapolated
    original = scaling["original_max_position_embeddings"]

    def correction_dim(n_rotations: float) -> float:
        return dim * math.log(original / (n_rotations * 2 * math.pi)) / (2 * math.log(base))

    low = max(math.floor(correction_dim(scaling["beta_fast"])), 0)
    high = min(math.ceil(correction_dim(scaling["beta_slow"])), dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)).clamp(0, 1)
    return extrapolated / scaling["factor"] * ramp + extrapolated * (1 - ramp)


def rope_tables(
    dim: int, base: float, scaling: dict[str, Any], n_positions: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [n_positions, dim / 2] in fp32, times mscale / mscale_all_dim (1 for this pair)."""
    positions = torch.arange(n_positions, dtype=torch.float32)
    angles = torch.outer(positions, yarn_inv_freq(dim, base, scaling))
    amplitude = 1.0
    if scaling:
        factor = scaling["factor"]
        amplitude = yarn_mscale(factor, scaling["mscale"]) / yarn_mscale(factor, scaling["mscale_all_dim"])
    return angles.cos() * amplitude, angles.sin() * amplitude


def rope_interleaved(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the pairs (x[2i], x[2i + 1]), as DeepSeek's and Kimi's checkpoints expect.

    x [..., L, dim]; cos, sin broadcastable to [..., L, dim / 2].
    """
    a, b = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2).to(x.dtype)


def rope_half(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the pairs (x[i], x[i + dim / 2]), Qwen3's convention, which the drafter follows.

    x [..., L, dim]; cos, sin broadcastable to [..., L, dim / 2].
    """
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)
