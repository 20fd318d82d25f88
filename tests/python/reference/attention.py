"""Attention of both models: MLA in its two forms, and the drafter's grouped-query attention."""
import numpy as np

QUERY_CHUNK = 512   # bounds the memory of the score matrix


def attend(q, k, v, scale, visible):
  """One head. q [n, d], k [m, d], v [m, e], visible bool [n, m] -> [n, e]. What is not visible may be NaN."""
  out = np.empty((len(q), v.shape[1]), q.dtype)
  for i in range(0, len(q), QUERY_CHUNK):
    seen = visible[i:i + QUERY_CHUNK]
    used = seen.any(0)
    seen = seen[:, used]
    scores = np.where(seen, q[i:i + QUERY_CHUNK] @ k[used].T * scale, -np.inf)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    out[i:i + QUERY_CHUNK] = p @ v[used] / p.sum(-1, keepdims=True)
  return out


def split_kv_b(kv_b, n_heads, nope):
  """kv_b_proj [heads * (nope + v_head), kv_lora] -> (w_uk [heads, nope, kv_lora], w_uv [heads, v_head, kv_lora])."""
  per_head = kv_b.reshape(n_heads, -1, kv_b.shape[1])
  return per_head[:, :nope], per_head[:, nope:]


def mla(q, latent, k_pe, w_uk, w_uv, scale, visible):
  """Unabsorbed: every head's keys and values are made from the latent.

  q [n, heads, nope + rope] rotated, latent [m, kv_lora] normed, k_pe [m, rope] rotated, visible [n, m]
  -> [n, heads * v_head]."""
  heads = []
  for h in range(q.shape[1]):
    k = np.concatenate((latent @ w_uk[h].T, k_pe), -1)
    heads.append(attend(q[:, h], k, latent @ w_uv[h].T, scale, visible))
  return np.concatenate(heads, -1)


def mla_absorbed(q, latent, k_pe, w_uk, w_uv, scale, visible):
  """The same with w_uk folded into the query and w_uv applied to the attended latent: keys are latent | k_pe."""
  nope = w_uk.shape[1]
  keys = np.concatenate((latent, k_pe), -1)
  heads = []
  for h in range(q.shape[1]):
    query = np.concatenate((q[:, h, :nope] @ w_uk[h], q[:, h, nope:]), -1)
    heads.append(attend(query, keys, latent, scale, visible) @ w_uv[h].T)
  return np.concatenate(heads, -1)


def ancestors_visible(parents):
  """parents int [n], -1 without one -> bool [n, n]: each node sees itself and its ancestors."""
  visible = np.eye(len(parents), dtype=bool)
  for i, parent in enumerate(parents):
    if parent >= 0:
      visible[i] |= visible[parent]
  return visible


def window_visible(query_positions, key_positions, window):
  """bool [n, m]: a query at p sees keys k with p - k < window, nothing to its right is hidden; 0: all."""
  distance = np.asarray(query_positions)[:, None] - np.asarray(key_positions)[None]
  return distance < window if window else np.ones(distance.shape, bool)


def grouped_query(q, k, v, visible):
  """q [n, heads, d], k, v [m, kv_heads, d], visible [n, m] -> [n, heads * d]; scale d^-1/2."""
  group = q.shape[1] // k.shape[1]
  return np.concatenate([attend(q[:, h], k[:, h // group], v[:, h // group], q.shape[2] ** -0.5, visible)
                         for h in range(q.shape[1])], -1)
