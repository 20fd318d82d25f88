"""Decode with the fp32 reference: token by token, or speculatively with the drafter."""

from collections.abc import Callable, Collection, Sequence

import torch
import torch.nn.functional as F

from .draft_tree import DraftTree
from .drafter import Drafter, KeysValues
from .kv_cache import KVCache
from .target import TargetOutput, TinyK2

MAX_TREE = 256  # cache entries for one round's root and nodes


def pick(logits: torch.Tensor, temperature: float, generator: torch.Generator | None) -> list[int]:
    """logits [n, vocab] -> one token a row: the best, or a sample of softmax(logits / temperature)."""
    if temperature == 0:
        return logits.argmax(-1).tolist()
    probs = torch.softmax(logits / temperature, -1)
    return torch.multinomial(probs, 1, generator=generator)[:, 0].tolist()


@torch.no_grad()
def decode_plainly(
    target: TinyK2, ids: list[int], n_new: int, temperature: float = 0.0, stop: Collection[int] = (),
    generator: torch.Generator | None = None,
) -> list[int]:
    """Up to n_new tokens, ending with a stop token when one comes."""
    cache = KVCache.allocate(target.cfg, 1, len(ids) + n_new)
    logits = target(torch.tensor([ids]), cache=cache).out[0, -1:]
    new: list[int] = []
    while True:
        new += pick(logits, temperature, generator)
        if len(new) >= n_new or new[-1] in stop:
            return new
        logits = target(torch.tensor([new[-1:]]), cache=cache).out[0, -1:]


class DraftContext:
    """The drafter's keys and values of the committed tokens, and what it proposes after them."""

    def __init__(self, target: TinyK2, drafter: Drafter) -> None:
        self.drafter = drafter
        self.embedding, self.head = target.model.embed_tokens.weight, target.lm_head.weight
        self.keys_values: list[KeysValues] | None = None

    def append(self, taps: torch.Tensor, positions: torch.Tensor) -> None:
        """taps [1, L, taps * hidden] at positions [L]; entries out of every query's window are dropped."""
        new = self.drafter.context_keys_values(taps, positions)
        if self.keys_values is not None:
            new = [
                (torch.cat((old_k, k), 2), torch.cat((old_v, v), 2))
                for (old_k, old_v), (k, v) in zip(self.keys_values, new, strict=True)]
        window = self.drafter.cfg.sliding_window
        self.keys_values = [(k[:, :, -window:], v[:, :, -window:]) for k, v in new]

    def block_logits(self, root: int, start: int) -> torch.Tensor:
        """Logits [block - 1, vocab] of the positions after the root, a known token at position start."""
        cfg = self.drafter.cfg
        ids = torch.tensor([[root] + [cfg.mask_token_id] * (cfg.block_size - 1)])
        positions = torch.arange(start, start + cfg.block_size)
        hidden = self.drafter(F.embedding(ids, self.embedding), positions, self.keys_values)
        return F.linear(hidden[0, 1:], self.head)


def verify_tree(
    target: TinyK2, root: int, tree: DraftTree, cache: KVCache, taps: Sequence[int] = ()
) -> TargetOutput:
    """One target pass over the root and its tree ([1, 1 + nodes]), after a cache of all tokens before.

    The cache then holds the root and every node, accepted or not.
    """
    start = len(cache)
    committed = torch.ones(len(tree.tokens) + 1, start, dtype=torch.bool)
    mask = torch.cat((committed, tree.visibility()), 1)
    positions = start + torch.tensor([0, *tree.depths])
    return target(torch.tensor([[root, *tree.tokens]]), positions, mask, cache, taps)


def accepted_path(tree: DraftTree, samples: list[int]) -> list[int]:
    """From the root (0) down while the target's own token is a child: indices into [root, *nodes]."""
    children = tree.children()
    path = [0]
    while samples[path[-1]] in children[path[-1]]:
        path.append(children[path[-1]][samples[path[-1]]])
    return path


class Speculator:
    """Draft, verify, walk, commit; counts rounds, committed tokens (bonus included) and verified nodes."""

    def __init__(
        self, target: TinyK2, drafter: Drafter, build: Callable[[torch.Tensor], DraftTree]
    ) -> None:
        """build: logits [block - 1, vocab] -> the tree to verify."""
        self.target, self.drafter, self.build = target, drafter, build
        self.n_rounds = self.n_committed = self.n_nodes = 0

    @torch.no_grad()
    def decode(
        self, ids: list[int], n_new: int, temperature: float = 0.0, stop: Collection[int] = (),
        generator: torch.Generator | None = None,
    ) -> list[int]:
        """What decode_plainly yields; tokens of the last round past a stop or n_new are dropped."""
        taps = self.drafter.cfg.target_layer_ids
        cache = KVCache.allocate(self.target.cfg, 1, len(ids) + n_new + MAX_TREE)
        context = DraftContext(self.target, self.drafter)
        prompt = self.target(torch.tensor([ids]), cache=cache, taps=taps)
        context.append(prompt.taps, torch.arange(len(ids)))
        new = pick(prompt.out[0, -1:], temperature, generator)
        start = len(ids)
        while len(new) < n_new and new[-1] not in stop:
            tree = self.build(context.block_logits(new[-1], start))
            verified = verify_tree(self.target, new[-1], tree, cache, taps)
            samples = pick(verified.out[0], temperature, generator)
            path = accepted_path(tree, samples)
            committed = [tree.tokens[node - 1] for node in path[1:]] + [samples[path[-1]]]
            cache.keep(start, path)
            context.append(verified.taps[:, path], start + torch.arange(len(path)))
            start += len(path)
            self.n_rounds += 1
            self.n_committed += len(committed)
            self.n_nodes += len(tree.tokens) + 1
            for token in committed:
                new.append(token)
                if token in stop or len(new) >= n_new:
                    break
        return new
