"""An endless shuffled stream of the training tokens, cut into windows on the training device."""

from collections.abc import Mapping

import numpy as np
import torch


class TokenStream:
    """An epoch repeats each document `weight` times in a new random order, shifted by a random amount."""

    def __init__(
        self, data: Mapping[str, np.ndarray], window: int, batch: int, device: torch.device, seed: int
    ) -> None:
        """data: tokens, offsets and weights of data.npz."""
        self.tokens = torch.from_numpy(data["tokens"].astype(np.int16)).to(device)
        self.starts, self.ends = data["offsets"][:-1], data["offsets"][1:]
        self.weights = data["weights"]
        self.window, self.batch, self.device = window, batch, device
        self.rng = np.random.default_rng(seed)
        self.epoch = -1
        self._start_epoch()

    def _start_epoch(self) -> None:
        order = np.repeat(np.arange(len(self.weights)), self.weights)
        self.rng.shuffle(order)
        lengths = (self.ends - self.starts)[order]
        total = int(lengths.sum())
        # position of each token of the epoch in `tokens`, gathered on the device
        before = np.concatenate(([0], np.cumsum(lengths)[:-1]))
        jump = torch.from_numpy((self.starts[order] - before).astype(np.int32)).to(self.device)
        repeats = torch.from_numpy(lengths.astype(np.int64)).to(self.device)
        source = torch.repeat_interleave(jump, repeats)
        source = source + torch.arange(total, device=self.device, dtype=torch.int32)
        self.flat = self.tokens[source.long()]
        self.shift = int(self.rng.integers(0, self.window))
        n_windows = (total - self.shift - 1) // self.window
        self.order = torch.from_numpy(self.rng.permutation(n_windows)).to(self.device)
        self.used = 0
        self.epoch += 1

    def next(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and labels, int64 [batch, window] each."""
        if self.used + self.batch > len(self.order):
            self._start_epoch()
        rows = self.order[self.used:self.used + self.batch]
        self.used += self.batch
        within = torch.arange(self.window + 1, device=self.device)
        ids = self.flat[self.shift + rows[:, None] * self.window + within].long()
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
