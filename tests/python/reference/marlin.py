"""The Marlin repack of INT4 weights as vLLM and SGLang state it: permutation tables over K x N matrices, in numpy.

Independent of the engine's closed form: here a tile of 16 x 64 is gathered through a table of 1024 places.
"""

from __future__ import annotations

import numpy as np

from .numbers import unpack_int4

TILE = 16


def weight_permutation() -> np.ndarray:
  """For 1024 places of a row of four tiles: which nibble of the flattened 16 x 16 tiles lies there."""
  places = []
  for thread in range(32):
    column = thread // 4
    one = [TILE * row + column + 8 * block
           for block in (0, 1)
           for row in (2 * (thread % 4), 2 * (thread % 4) + 1, 2 * (thread % 4 + 4), 2 * (thread % 4 + 4) + 1)]
    for tile in range(4):
      places += [place + 256 * tile for place in one]
  return np.array(places).reshape(-1, 8)[:, [0, 2, 4, 6, 1, 3, 5, 7]].reshape(-1)


def scale_permutation() -> list[int]:
  return [i + 8 * j for i in range(8) for j in range(8)]


def tiles(packed: np.ndarray) -> np.ndarray:
  """int32 [out, in / 8] -> int32 [in / 16, 2 * out]."""
  weight = (unpack_int4(packed) + 8).astype(np.uint8).T  # [K, N], the stored nibbles
  n_in, n_out = weight.shape
  by_tile = weight.reshape(n_in // TILE, TILE, n_out // TILE, TILE).transpose(0, 2, 1, 3).reshape(n_in // TILE,
                                                                                                  n_out * TILE)
  permuted = by_tile.reshape(-1, 1024)[:, weight_permutation()].reshape(by_tile.shape).astype(np.uint32)
  out = np.zeros((n_in // TILE, n_out * 2), np.uint32)
  for i in range(8):
    out |= permuted[:, i::8] << np.uint32(4 * i)
  return out.view(np.int32)


def scales(scale: np.ndarray) -> np.ndarray:
  """[out, in / 32] of any 16-bit type -> [in / 32, out]."""
  by_group = np.ascontiguousarray(scale.T)
  return by_group.reshape(-1, 64)[:, scale_permutation()].reshape(by_group.shape)
