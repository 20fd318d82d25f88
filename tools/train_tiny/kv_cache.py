"""Keys and values of the tokens that the target has seen: preallocated buffers and a length."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .config import TargetConfig


class LayerCache:
    """One layer: keys [B, H, size, qk] and values [B, H, size, v], of which `length` are filled."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.keys = keys
        self.values = values
        self.length = 0

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Add L entries [B, H, L, ...]; returns all keys and values so far."""
        end = self.length + keys.shape[2]
        self.keys[:, :, self.length:end] = keys
        self.values[:, :, self.length:end] = values
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]


class KVCache:
    """The caches of all layers, of equal length."""

    def __init__(self, layers: list[LayerCache]) -> None:
        self.layers = layers

    @classmethod
    def allocate(
        cls, cfg: TargetConfig, batch: int, size: int, dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> KVCache:
        def zeros(width: int) -> torch.Tensor:
            return torch.zeros(batch, cfg.num_attention_heads, size, width, dtype=dtype, device=device)

        qk = cfg.qk_nope_head_dim + cfg.qk_rope_head_dim
        return cls([LayerCache(zeros(qk), zeros(cfg.v_head_dim)) for _ in range(cfg.num_hidden_layers)])

    def __len__(self) -> int:
        return self.layers[0].length

    def rows(self, start: int, stop: int) -> KVCache:
        """An empty cache over the buffers of batch rows start..stop; what it appends lands here."""
        return KVCache([LayerCache(c.keys[start:stop], c.values[start:stop]) for c in self.layers])

    def set_length(self, length: int) -> None:
        for layer in self.layers:
            layer.length = length

    def keep(self, start: int, accepted: Sequence[int]) -> None:
        """Keep, of the entries from `start` on, those at the relative indices `accepted`, in order."""
        sources = [start + i for i in accepted]
        end = start + len(accepted)
        for layer in self.layers:
            layer.keys[:, :, start:end] = layer.keys[:, :, sources]
            layer.values[:, :, start:end] = layer.values[:, :, sources]
            layer.length = end
