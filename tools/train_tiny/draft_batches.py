"""Blocks to train the drafter on: random anchors in rows of text, with what each block may see."""

from typing import NamedTuple

import torch


class Blocks(NamedTuple):
    """N blocks of `size` positions in each of R rows."""

    anchors: torch.Tensor  # [R, N]: position of each block's first, known token
    ids: torch.Tensor  # [R, N, size]: that token and size - 1 mask tokens
    labels: torch.Tensor  # [R, N, size - 1]: the tokens under the masks

    def positions(self) -> torch.Tensor:
        """[R, N * size]."""
        within = torch.arange(self.ids.shape[2], device=self.ids.device)
        return (self.anchors[:, :, None] + within).view(len(self.anchors), -1)


def random_blocks(
    rows: torch.Tensor, first: torch.Tensor, end: torch.Tensor, n_anchors: int, size: int, mask_id: int,
    generator: torch.Generator | None = None,
) -> Blocks:
    """rows int64 [R, S]; anchors are drawn from [first, end - size), one range a row ([R] each)."""
    n_rows, device = len(rows), rows.device
    span = (end - size - first).clamp_min(1)
    draw = torch.rand(n_rows, n_anchors, device=device, generator=generator)
    anchors = first[:, None] + (draw * span[:, None]).long()
    source = (anchors[:, :, None] + torch.arange(size, device=device)).view(n_rows, -1)
    tokens = rows.gather(1, source).view(n_rows, n_anchors, size)
    ids = torch.full_like(tokens, mask_id)
    ids[:, :, 0] = tokens[:, :, 0]
    return Blocks(anchors, ids, tokens[:, :, 1:])


def block_mask(blocks: Blocks, n_context: int, window: int) -> torch.Tensor:
    """bool [R, 1, N * size, n_context + N * size], True = may attend.

    A block sees the context before its anchor (the anchor's own feature is not known when drafting) and
    within the window, and itself in both directions.
    """
    n_rows, n_blocks, size = blocks.ids.shape
    device = blocks.ids.device
    keys = torch.arange(n_context, device=device)[None, None]
    queries = blocks.positions()[:, :, None]
    is_before = keys < blocks.anchors.repeat_interleave(size, 1)[:, :, None]
    in_context = is_before & (queries - keys < window)
    block = torch.arange(n_blocks * size, device=device) // size
    in_block = (block[:, None] == block[None])[None].expand(n_rows, -1, -1)
    return torch.cat((in_context, in_block), -1)[:, None]
