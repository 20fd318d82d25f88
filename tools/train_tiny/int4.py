"""Symmetric INT4 in groups of 32 along the input, as compressed-tensors' `pack-quantized` stores it.

scale = bf16(max|w| / 7.5), q = clamp(round_half_even(w / scale), -8, 7). Quantising a dequantised
weight again is NOT the identity (the largest |q| may be 7 or 8), so integers travel as integers.
"""

import torch

GROUP = 32
_PER_WORD = 8


def _group_scale(groups: torch.Tensor) -> torch.Tensor:
    """groups [..., in / 32, 32] -> scale bf16 [..., in / 32]."""
    return (groups.abs().amax(-1) / 7.5).clamp_min(1e-8).to(torch.bfloat16)


def int4_quant(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """w [..., out, in] -> (q int8 in -8..7 [..., out, in], scale bf16 [..., out, in / 32])."""
    groups = w.float().unflatten(-1, (-1, GROUP))
    scale = _group_scale(groups)
    q = torch.round(groups / scale.float().unsqueeze(-1)).clamp(-8, 7)
    return q.flatten(-2).to(torch.int8), scale


def int4_dequant(q: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """(q [..., out, in], scale [..., out, in / 32]) -> fp32 [..., out, in], exact."""
    return (q.float().unflatten(-1, (-1, GROUP)) * scale.float().unsqueeze(-1)).flatten(-2)


class _FakeInt4(torch.autograd.Function):
    """Straight-through (arXiv 1308.3432): forward is dequant(quant(w)), the gradient passes unchanged."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, w: torch.Tensor) -> torch.Tensor:
        groups = w.unflatten(-1, (-1, GROUP))
        scale = _group_scale(groups).float().unsqueeze(-1)
        return (torch.round(groups / scale).clamp(-8, 7) * scale).flatten(-2)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor) -> torch.Tensor:
        return grad


fake_int4 = _FakeInt4.apply


def pack_words(q: torch.Tensor) -> torch.Tensor:
    """q int8 [out, in] -> int32 [out, in / 8]: value i of a word in bits 4i..4i + 3, stored + 8."""
    nibbles = (q.to(torch.int64) + 8).unflatten(-1, (-1, _PER_WORD))
    words = (nibbles << torch.arange(0, 4 * _PER_WORD, 4)).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def unpack_words(packed: torch.Tensor, n_in: int) -> torch.Tensor:
    """int32 [out, ceil(in / 8)] -> q int8 [out, in]."""
    nibbles = (packed.unsqueeze(-1) >> torch.arange(0, 4 * _PER_WORD, 4)) & 0xF
    return (nibbles.flatten(-2)[:, :n_in] - 8).to(torch.int8)


def pack_bytes(q: torch.Tensor) -> torch.Tensor:
    """q int8 [out, in] -> uint8 [out, in / 2], low nibble first: the form of the training file."""
    nibbles = (q + 8).to(torch.uint8)
    return nibbles[:, 0::2] | (nibbles[:, 1::2] << 4)


def unpack_bytes(packed: torch.Tensor) -> torch.Tensor:
    """uint8 [out, in / 2] -> q int8 [out, in]."""
    return torch.stack((packed & 0xF, packed >> 4), -1).flatten(-2).to(torch.int8) - 8
