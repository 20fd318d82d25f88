"""Layers that the target and the drafter share."""

import torch
import torch.nn.functional as F
from torch import nn


def linear(n_in: int, n_out: int) -> nn.Linear:
    return nn.Linear(n_in, n_out, bias=False)


class RMSNorm(nn.Module):
    """Root-mean-square norm (arXiv 1910.07467), computed in fp32."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x.float()
        normed = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight.float()
        return normed.to(x.dtype)


class MLP(nn.Module):
    """SwiGLU (arXiv 2002.05202): down(silu(gate(x)) * up(x)), [..., dim] -> [..., dim]."""

    def __init__(self, dim: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = linear(dim, inner)
        self.up_proj = linear(dim, inner)
        self.down_proj = linear(inner, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


@torch.no_grad()
def init_normal(param: torch.Tensor, std: float, generator: torch.Generator) -> None:
    """Fill from a CPU generator, so that the weights do not depend on the device."""
    param.copy_(torch.empty(param.shape).normal_(0, std, generator=generator))
