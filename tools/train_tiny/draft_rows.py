"""The drafter's training set: rows of text with the target's features, kept on the training device."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from tqdm import tqdm

from .cli import RecipeError
from .device import autocast
from .documents import KINDS
from .on_policy import Prompts, Rows
from .special_tokens import special_id
from .target import TinyK2

FEATURE_TOKENS = 2**17  # at once
MIN_DOCUMENT = 9  # tokens of a held-out document
CORPUS_FIRST = 4  # where anchors may begin in a window of the corpus
CORPUS_SEED = 3


class DraftRows(NamedTuple):
    """R rows of S tokens; anchors are drawn from [first, end - block)."""

    tokens: torch.Tensor  # int16 [R, S]
    first: torch.Tensor  # [R]
    end: torch.Tensor  # [R]
    features: torch.Tensor  # bf16 [R, S, taps * hidden]


def training_prompts(data: Mapping[str, np.ndarray], n_ranks: int, max_length: int, seed: int) -> Prompts:
    return Prompts(
        data["tokens"], data["offsets"], data["kinds"], data["weights"], special_id("</think>", n_ranks),
        max_length, seed)


def held_out_prompts(data: Mapping[str, np.ndarray], n_ranks: int, max_length: int, seed: int) -> Prompts:
    """The held-out streams, split into documents at [EOS]."""
    eos = special_id("[EOS]", n_ranks)
    documents, kinds = [], []
    for index, kind in enumerate(KINDS):
        stream = data[f"eval_{kind}"]
        for document in np.split(stream, np.where(stream == eos)[0] + 1):
            if len(document) >= MIN_DOCUMENT:
                documents.append(document)
                kinds.append(index)
    offsets = np.cumsum([0, *(len(document) for document in documents)])
    return Prompts(
        np.concatenate(documents), offsets, np.array(kinds), np.ones(len(kinds), np.int64),
        special_id("</think>", n_ranks), max_length, seed)


def corpus_rows(tokens: np.ndarray, n_rows: int, length: int, device: torch.device) -> Rows:
    """Windows of the corpus: real text instead of a continuation."""
    rng = np.random.default_rng(CORPUS_SEED)
    starts = torch.from_numpy(rng.integers(0, len(tokens) - length, n_rows))
    ids = torch.from_numpy(tokens.astype(np.int16))[starts[:, None] + torch.arange(length)]
    first = torch.full((n_rows,), CORPUS_FIRST, device=device)
    return Rows(ids.to(device), first, torch.full((n_rows,), length, device=device))


@torch.no_grad()
def target_features(target: TinyK2, tokens: torch.Tensor, layer_ids: Sequence[int]) -> torch.Tensor:
    """tokens int16 [R, S] -> the residual stream after the tapped layers, bf16 [R, S, taps * hidden]."""
    n_rows, length = tokens.shape
    width = len(layer_ids) * target.cfg.hidden_size
    features = torch.empty(n_rows, length, width, dtype=torch.bfloat16, device=tokens.device)
    chunk = max(1, FEATURE_TOKENS // length)
    for i in tqdm(range(0, n_rows, chunk), desc="features", unit="chunk"):
        with autocast(tokens.device):
            output = target(tokens[i:i + chunk].long(), taps=layer_ids, return_norm=True)
        features[i:i + chunk] = output.taps
    return features


def with_features(
    target: TinyK2, rows: Sequence[Rows], block_size: int, layer_ids: Sequence[int]
) -> DraftRows:
    """Join rows, drop those too short for a block, and compute the features of the rest."""
    tokens = torch.cat([r.tokens.to(torch.int16) for r in rows])
    first = torch.cat([r.first for r in rows])
    end = torch.cat([r.end for r in rows])
    keep = end - first > block_size + 1
    if not keep.any():
        raise RecipeError("rows: all too short for a block: expected longer continuations; raise --new")
    tokens, first, end = tokens[keep], first[keep], end[keep]
    return DraftRows(tokens, first, end, target_features(target, tokens, layer_ids))
