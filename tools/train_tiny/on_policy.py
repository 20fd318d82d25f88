"""Text that the target writes: prompts cut from the corpus, and their continuations.

A drafter must predict what the TARGET writes, so this matters more than the corpus itself.
"""

from typing import NamedTuple

import numpy as np
import torch

from .device import autocast
from .documents import KINDS
from .kv_cache import KVCache
from .special_tokens import special_id
from .target import TinyK2

MIN_FILE = 65  # tokens of a document that prompts are cut from
MIN_PROMPT = 12  # tokens
SHARE_AT_START = 0.2  # of the prompts that start with their document
SHARE_CHAT = 0.25
SHARE_T1 = 0.7  # of the sampled rows; the rest is sampled at T = 0.6
PREFILL_TOKENS = 2**18  # at once: the MLP over all experts is wide


class Rows(NamedTuple):
    """R rows of S tokens, left-aligned: prompt, continuation, then tokens of no meaning."""

    tokens: torch.Tensor  # int64 [R, S]
    first: torch.Tensor  # [R]: where anchors may begin
    end: torch.Tensor  # [R]: one past the first stop token of the continuation, or past its last


class Prompts:
    """Random prompts from packed documents; chats are cut after their last '</think>'."""

    def __init__(
        self, tokens: np.ndarray, offsets: np.ndarray, kinds: np.ndarray, weights: np.ndarray,
        think_end: int, max_length: int, seed: int,
    ) -> None:
        """tokens [n], offsets [documents + 1], kinds and weights [documents], as in data.npz."""
        self.tokens, self.offsets = tokens, offsets
        self.think_end, self.max_length = think_end, max_length
        self.rng = np.random.default_rng(seed)
        lengths = offsets[1:] - offsets[:-1]
        self.files = np.where((kinds != KINDS.index("chat")) & (lengths >= MIN_FILE))[0]
        share = (lengths * weights)[self.files].astype(float)
        self.file_shares = share / share.sum()
        self.chats = np.where(kinds == KINDS.index("chat"))[0]

    def _document(self, index: int) -> np.ndarray:
        return self.tokens[self.offsets[index]:self.offsets[index + 1]]

    def _chat_prompt(self) -> np.ndarray:
        while True:
            document = self._document(self.chats[self.rng.integers(len(self.chats))])
            thinks = np.where(document == self.think_end)[0]
            if len(thinks) and thinks[-1] + 1 <= self.max_length:
                return document[:thinks[-1] + 1]

    def _file_prompt(self, index: int) -> np.ndarray:
        document = self._document(index)
        length = int(self.rng.integers(MIN_PROMPT, self.max_length + 1))
        start = 0
        if self.rng.random() >= SHARE_AT_START:
            start = int(self.rng.integers(0, max(1, len(document) - length)))
        return document[start:start + length]

    def batch(self, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        """n prompts, right-aligned int64 [n, max_length], and their lengths [n]."""
        prompts = torch.zeros(n, self.max_length, dtype=torch.long)
        lengths = torch.zeros(n, dtype=torch.long)
        # all files at once: rng.choice with probabilities is slow one by one
        files = self.rng.choice(self.files, size=n, p=self.file_shares)
        is_chat = self.rng.random(n) < SHARE_CHAT
        for row in range(n):
            use_chat = is_chat[row] and len(self.chats)
            ids = self._chat_prompt() if use_chat else self._file_prompt(files[row])
            lengths[row] = len(ids)
            prompts[row, self.max_length - len(ids):] = torch.from_numpy(ids.astype(np.int64))
        return prompts, lengths


@torch.no_grad()
def generate(
    target: TinyK2, prompts: torch.Tensor, lengths: torch.Tensor, n_new: int, temperatures: torch.Tensor
) -> torch.Tensor:
    """Continue right-aligned prompts [R, P] of lengths [R] by n_new tokens -> left-aligned [R, P + n_new].

    temperatures [R]: 0 = greedy. A left-padding row sees itself: with no visible key it would be NaN, and
    NaN keys poison even masked attention.
    """
    device = prompts.device
    n_rows, n_prompt = prompts.shape
    total = n_prompt + n_new
    pad = n_prompt - lengths
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    cache = KVCache.allocate(target.cfg, n_rows, total, dtype, device)
    index = torch.arange(total, device=device)
    is_token = index[None] >= pad[:, None]
    positions = (index[None, :n_prompt] - pad[:, None]).clamp_min(0)
    mask = (index[None, None, :n_prompt] <= index[None, :n_prompt, None]) & is_token[:, None, :n_prompt]
    mask = mask | torch.eye(n_prompt, dtype=torch.bool, device=device)[None]

    rows = torch.zeros(n_rows, total, dtype=torch.long, device=device)
    rows[:, :n_prompt] = prompts
    inverse = torch.where(
        temperatures > 0, 1 / temperatures.clamp_min(1e-3), torch.ones_like(temperatures))
    is_sampled = (temperatures > 0).float()
    with autocast(device):
        last_logits = []
        chunk = max(1, PREFILL_TOKENS // n_prompt)
        for i in range(0, n_rows, chunk):
            part = slice(i, i + chunk)
            hidden = target(
                prompts[part], positions[part], mask[part, None], cache.rows(i, i + chunk),
                return_norm=True).out
            last_logits.append(target.lm_head(hidden[:, -1]))
        cache.set_length(n_prompt)
        logits = torch.cat(last_logits).float()
        for t in range(n_new):
            gumbel = -torch.log(-torch.log(torch.rand_like(logits).clamp(1e-9, 1 - 1e-7)))
            tokens = (logits * inverse[:, None] + gumbel * is_sampled[:, None]).argmax(-1)
            rows[:, n_prompt + t] = tokens
            if t < n_new - 1:
                visible = is_token[:, None, None, :n_prompt + t + 1]
                step = target(tokens[:, None], (n_prompt + t - pad)[:, None], visible, cache)
                logits = step.out[:, 0].float()
    return rows.gather(1, (index[None] + pad[:, None]) % total)


def write_rows(
    target: TinyK2, prompts: Prompts, n_rows: int, n_new: int, greedy_share: float, prompt_tail: int,
    device: torch.device,
) -> Rows:
    """Let the target continue n_rows prompts: a share greedily, the rest at T = 1 and T = 0.6.

    Anchors may lie in the last prompt_tail tokens of the prompt too.
    """
    ids, lengths = (tensor.to(device) for tensor in prompts.batch(n_rows))
    draw = torch.rand(n_rows, device=device)
    is_t1 = draw < greedy_share + (1 - greedy_share) * SHARE_T1
    temperatures = torch.where(draw < greedy_share, 0.0, torch.where(is_t1, 1.0, 0.6))
    tokens = generate(target, ids, lengths, n_new, temperatures)
    eos, im_end = (special_id(content, target.cfg.n_ranks) for content in ("[EOS]", "<|im_end|>"))
    is_new = torch.arange(tokens.shape[1], device=device)[None] >= lengths[:, None]
    is_stop = ((tokens == eos) | (tokens == im_end)) & is_new
    end = torch.where(is_stop.any(1), is_stop.float().argmax(1) + 1, lengths + n_new)
    return Rows(tokens, (lengths - prompt_tail).clamp_min(1), end)
