"""Everything that a golden vector records of one prompt, computed by the fp32 CPU reference."""

from dataclasses import dataclass

import numpy as np
import torch

from .decoding import DraftContext, verify_tree
from .draft_tree import DraftTree, build_ddtree
from .drafter import Drafter
from .kv_cache import KVCache
from .target import TargetOutput, TinyK2

N_GREEDY = 64
TREE_BUDGET = 16


@dataclass
class ReferenceRun:
    ids: np.ndarray  # int32 [n]
    logits: np.ndarray  # fp32 [n, vocab]
    experts: np.ndarray  # int16 [MoE layers, n, k], best biased score first
    expert_weights: np.ndarray  # fp32 [MoE layers, n, k], normalised, times routed_scaling_factor
    router_gap: np.ndarray  # fp32 [MoE layers, n]: the k-th best biased score minus the next one's
    hidden_last: np.ndarray  # fp32 [1 + layers, hidden]: the last position, embedded and after each layer
    greedy: np.ndarray  # int32 [64], stop tokens ignored
    margin: np.ndarray  # fp32 [64]: logit of the best minus the second best, at each greedy step
    draft_logits: np.ndarray  # fp32 [block - 1, vocab] for the block whose root is greedy[0] at position n
    tree: DraftTree  # DDTree of draft_logits with a budget of 16
    tree_logits: np.ndarray  # fp32 [1 + nodes, vocab], root and tree verified in one pass

    def draft_arrays(self) -> dict[str, np.ndarray]:
        """The arrays of the drafter and the tree, by their names in the golden files."""
        return {
            "draft_root": np.array(self.greedy[0]),
            "draft_start": np.array(len(self.ids), np.int32),
            "draft_logits": self.draft_logits,
            "tree16_tokens": np.array(self.tree.tokens, np.int32),
            "tree16_parents": np.array(self.tree.parents, np.int32),
            "tree16_depths": np.array(self.tree.depths, np.int32),
            "tree16_logits": self.tree_logits}


class _Observer:
    """Hooks that record routers and the last position's residual stream during one forward pass."""

    def __init__(self, target: TinyK2) -> None:
        self.gaps: list[torch.Tensor] = []
        self.weights: list[torch.Tensor] = []
        self.last_hidden: list[torch.Tensor] = []
        layers = [layer.register_forward_hook(self._after_layer) for layer in target.model.layers]
        routers = [block.gate.register_forward_hook(self._after_router) for block in target.moe_blocks()]
        self.handles = layers + routers

    def _after_layer(self, layer: torch.nn.Module, inputs: tuple, output: tuple) -> None:
        self.last_hidden.append(output[0][0, -1].clone())

    def _after_router(self, router: torch.nn.Module, inputs: tuple, output: tuple) -> None:
        self.gaps.append(router.gap(inputs[0]))
        self.weights.append(output[0])

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()


def _prefill(target: TinyK2, ids: list[int], cache: KVCache, taps: tuple[int, ...]) -> tuple[
        TargetOutput, _Observer]:
    observer = _Observer(target)
    try:
        return target(torch.tensor([ids]), cache=cache, taps=taps), observer
    finally:
        observer.remove()


def _greedy(target: TinyK2, logits: torch.Tensor, cache: KVCache) -> tuple[list[int], list[float]]:
    """Continue from logits [vocab]: tokens and margins."""
    tokens, margins = [], []
    for _ in range(N_GREEDY):
        best = logits.topk(2).values
        tokens.append(int(logits.argmax()))
        margins.append((best[0] - best[1]).item())
        logits = target(torch.tensor([tokens[-1:]]), cache=cache).out[0, -1]
    return tokens, margins


@torch.no_grad()
def reference_run(target: TinyK2, drafter: Drafter, ids: list[int]) -> ReferenceRun:
    n = len(ids)
    cache = KVCache.allocate(target.cfg, 1, n + N_GREEDY)
    output, observer = _prefill(target, ids, cache, drafter.cfg.target_layer_ids)
    tokens, margins = _greedy(target, output.out[0, -1], cache)
    context = DraftContext(target, drafter)
    context.append(output.taps, torch.arange(n))
    draft_logits = context.block_logits(tokens[0], n)
    tree = build_ddtree(draft_logits, TREE_BUDGET)
    cache.set_length(n)
    tree_logits = verify_tree(target, tokens[0], tree, cache).out[0]
    embedded = target.model.embed_tokens.weight[ids[-1]]
    return ReferenceRun(
        ids=np.array(ids, np.int32),
        logits=output.out[0].numpy(),
        experts=torch.stack(output.experts).numpy().astype(np.int16),
        expert_weights=torch.stack(observer.weights).numpy(),
        router_gap=torch.stack(observer.gaps).numpy(),
        hidden_last=torch.stack([embedded, *observer.last_hidden]).numpy(),
        greedy=np.array(tokens, np.int32),
        margin=np.array(margins, np.float32),
        draft_logits=draft_logits.numpy(),
        tree=tree,
        tree_logits=tree_logits.numpy())
