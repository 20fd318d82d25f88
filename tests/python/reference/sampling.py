"""Candidates, counter-based noise and the sampling chain."""
import numpy as np


def philox4x32(counter, key):
  """Philox4x32-10. counter: four, key: two uint32 scalars or arrays that broadcast -> four uint32 arrays."""
  c = [np.asarray(x, np.uint64) for x in counter]
  k = [int(x) for x in key]
  for _ in range(10):
    a, b = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
    low, high = np.uint64(0xFFFFFFFF), np.uint64(32)
    c = [(b >> high) ^ c[1] ^ np.uint64(k[0]), b & low, (a >> high) ^ c[3] ^ np.uint64(k[1]), a & low]
    k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
  return [x.astype(np.uint32) for x in c]


def noise_words(seed, choice, position, tokens, purpose=0):
  """uint32 of each token id: key = halves of the seed, counter = (choice, position, token, purpose), first word."""
  return philox4x32((choice, position, tokens, purpose), (seed & 0xFFFFFFFF, seed >> 32))[0]


def gumbel(words):
  return -np.log(-np.log((np.asarray(words, np.float64) + 0.5) / 2.0 ** 32))


def without_nan(x):
  return np.where(np.isnan(x), -np.inf, x)


def log_softmax(x):
  """[n, vocab]; NaN counts as -inf."""
  x = without_nan(np.asarray(x, np.float64))
  top = x.max(-1, keepdims=True)
  with np.errstate(divide="ignore", invalid="ignore"):
    return x - (top + np.log(np.exp(x - top).sum(-1, keepdims=True)))


def top_k(logits, k):
  """[n, vocab] -> (token int [n, k] best first, ties to the lower id, log_q [n, k])."""
  ranked = without_nan(np.asarray(logits, np.float64))
  token = np.argsort(-ranked, axis=-1, kind="stable")[:, :k]
  return token, np.take_along_axis(log_softmax(ranked), token, -1)


def noisy_logits(logits, sampling, position, depth=1):
  """One row: log q + w T noise of the token at `position`; at depth 1, where w is 1, its sample is the argmax of that."""
  weight = sampling["temperature"] * (1.0 if depth == 1 else 0.5)
  words = noise_words(sampling["seed"], sampling["choice"], position, np.arange(len(logits)))
  return without_nan(np.asarray(logits, np.float64)) + weight * gumbel(words)


def kept_tokens(logits, temperature, top_k=0, top_p=1.0, min_p=0.0):
  """Ids that survive top-k, top-p and min-p of one row, best first, and the margin of the two thresholds.

  The margin says how near the choice was to another one: a test skips rows where it is tiny."""
  z = without_nan(np.asarray(logits, np.float64)) / temperature
  order = np.argsort(-z, kind="stable")
  if top_k:
    order = order[:top_k]
  p = np.exp(z[order] - z[order[0]])
  p /= p.sum()
  margin = np.inf
  if top_p < 1:
    before = np.cumsum(p) - p            # a token is kept while those before it have not reached top_p
    margin = np.abs(before[1:] - top_p).min(initial=np.inf)
    order = order[before < top_p]
    p = p[:len(order)]
  if min_p > 0:
    margin = min(margin, np.abs(p[1:] / p[0] - min_p).min(initial=np.inf))
    order = order[p >= min_p * p[0]]
  return order, margin


def sample(logits, position, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, choice=0):
  """One row -> (token of position + 1, margin). Ties to the lower id; nothing finite: token 0."""
  z = without_nan(np.asarray(logits, np.float64))
  if temperature == 0 or z.max() == -np.inf:
    return int(np.argmax(z)), np.inf
  kept, margin = kept_tokens(z, temperature, top_k, top_p, min_p)
  kept = np.sort(kept)
  score = z[kept] / temperature + gumbel(noise_words(seed, choice, position + 1, kept))
  best = -np.sort(-score)
  return int(kept[np.argmax(score)]), min(margin, best[0] - best[1] if len(best) > 1 else np.inf)


def adjusted(logits, position, output, repetition=1.0, frequency=0.0, presence=0.0, seen=None, bias=None, banned=(),
             banned_until=0):
  """One row as its request wants it, float32. seen: {token: times in the output} of prompt and output; output: the row's
  own ancestors below the root, and itself."""
  x = np.array(logits, np.float32)
  counts = dict(seen or {})
  for token in output:
    counts[token] = counts.get(token, 0) + 1
  if (repetition, frequency, presence) != (1.0, 0.0, 0.0):
    for token, count in counts.items():
      x[token] = x[token] / np.float32(repetition) if x[token] > 0 else x[token] * np.float32(repetition)
      if count:
        x[token] -= np.float32(np.float32(frequency) * np.float32(count)) + np.float32(presence)
  for token, value in (bias or {}).items():
    x[token] += np.float32(value)
  if position + 1 < banned_until:
    x[list(banned)] = -np.inf
  return x
