"""Draft trees over a block's logits: DFlash's chain and DDTree's best-first tree.

A tree is its nodes in the order they were chosen, without the root (the last committed token).
"""

import heapq
from typing import NamedTuple

import torch


class DraftTree(NamedTuple):
    tokens: list[int]
    parents: list[int]  # 0 = the root, i + 1 = node i
    depths: list[int]  # of the root's children: 1

    def visibility(self) -> torch.Tensor:
        """bool [1 + nodes, 1 + nodes]: the root and nodes each see themselves and their ancestors."""
        visible = torch.eye(len(self.tokens) + 1, dtype=torch.bool)
        for node, parent in enumerate(self.parents, 1):
            visible[node] |= visible[parent]
        return visible

    def children(self) -> list[dict[int, int]]:
        """Per root and node: token -> index of the child (1 = node 0)."""
        children: list[dict[int, int]] = [{} for _ in range(len(self.tokens) + 1)]
        for node, (token, parent) in enumerate(zip(self.tokens, self.parents, strict=True), 1):
            children[parent][token] = node
        return children


def build_chain(logits: torch.Tensor) -> DraftTree:
    """logits [depths, vocab] -> the most probable token of every position, without branches."""
    tokens = logits.argmax(-1).tolist()
    return DraftTree(tokens, list(range(len(tokens))), list(range(1, len(tokens) + 1)))


def build_ddtree(logits: torch.Tensor, budget: int) -> DraftTree:
    """logits [depths, vocab] -> the `budget` most probable prefixes of their product, best first.

    Ties are broken by the tuple of ranks, as a heap of (-log probability, ranks) does.
    """
    n_depths, n_vocab = logits.shape
    width = min(budget, n_vocab)
    best, best_ids = torch.topk(logits.float(), width, dim=-1)
    normaliser = torch.logsumexp(logits.float(), -1, keepdim=True)
    log_probs = (best - normaliser).double().tolist()
    token_ids = best_ids.tolist()
    tree = DraftTree([], [], [])
    heap: list[tuple[float, tuple[int, ...], int]] = [(-log_probs[0][0], (0,), 0)]
    while heap and len(tree.tokens) < budget:
        negative, ranks, parent = heapq.heappop(heap)
        depth, rank = len(ranks), ranks[-1]
        tree.tokens.append(token_ids[depth - 1][rank])
        tree.parents.append(parent)
        tree.depths.append(depth)
        if rank + 1 < width:
            here = log_probs[depth - 1]
            sibling = (negative + here[rank] - here[rank + 1], (*ranks[:-1], rank + 1), parent)
            heapq.heappush(heap, sibling)
        if depth < n_depths:
            heapq.heappush(heap, (negative - log_probs[depth][0], (*ranks, 0), len(tree.tokens)))
    return tree
