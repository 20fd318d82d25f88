"""What one token goes through: norms, rotary embedding, MLPs, the router and its experts."""
import math

import numpy as np


def rms_norm(x, weight, eps):
  """x [..., width], weight [width]."""
  return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def linear(x, weight):
  """x [n, n_in], weight [n_out, n_in] -> [n, n_out]."""
  return x @ weight.T


def sigmoid(x):
  with np.errstate(over="ignore"):
    return 1 / (1 + np.exp(-x))


def mlp(x, gate, up, down):
  """SwiGLU: gate, up [width, hidden], down [hidden, width]."""
  g = linear(x, gate)
  return linear(g * sigmoid(g) * linear(x, up), down)


def route(x, gate, bias, k, normalise, scaling):
  """x [n, hidden], gate [n_experts, hidden] -> (expert int [n, k] best first, weight [n, k], choice [n, n_experts]).

  Chosen by score + bias, ties to the lower expert; weighted by the score alone."""
  scores = sigmoid(linear(x, gate))
  choice = scores + bias
  expert = np.argsort(-choice, axis=-1, kind="stable")[:, :k]
  weight = np.take_along_axis(scores, expert, -1)
  if normalise:
    weight = weight / (weight.sum(-1, keepdims=True) + 1e-20)
  return expert, weight * scaling, choice


def experts(x, expert, weight, gate, up, down, shared):
  """Routed experts in ascending routing rank, then the shared one. gate, up [n_experts] of [width, hidden], down
  [n_experts] of [hidden, width]; shared (gate, up, down) -> [n, hidden]."""
  out = np.zeros_like(x)
  for rank in range(expert.shape[1]):
    for e in np.unique(expert[:, rank]):
      rows = np.flatnonzero(expert[:, rank] == e)
      out[rows] += weight[rows, rank, None] * mlp(x[rows], gate[e], up[e], down[e])
  return out + mlp(x, *shared)


def yarn_mscale(factor, mscale):
  return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def yarn_amplitude(scaling):
  """What cos and sin are multiplied by."""
  if not scaling:
    return 1.0
  return (yarn_mscale(scaling["factor"], scaling.get("mscale", 1)) /
          yarn_mscale(scaling["factor"], scaling.get("mscale_all_dim", 0)))


def inverse_frequencies(dim, theta, scaling):
  """float32 [dim / 2]. YaRN: dimensions that turn fast keep their frequency, slow ones are divided by the factor.

  In float32 step by step, as the models are trained: an ulp of a frequency is 3e-4 rad at position 3000, which moves
  the logits by more than everything else together."""
  f32 = np.float32
  power = (float(theta) ** (np.arange(0, dim, 2) / dim)).astype(f32)
  plain = f32(1) / power
  if not scaling:
    return plain

  def dimension_turning(times):
    return dim * math.log(scaling["original_max_position_embeddings"] / (times * 2 * math.pi)) / (2 * math.log(theta))
  low = max(math.floor(dimension_turning(scaling["beta_fast"])), 0)
  high = min(math.ceil(dimension_turning(scaling["beta_slow"])), dim - 1)
  ramp = np.clip((np.arange(dim // 2, dtype=f32) - f32(low)) / f32(max(high - low, 0.001)), f32(0), f32(1))
  return plain / f32(scaling["factor"]) * ramp + plain * (f32(1) - ramp)


def rope_table(n, dim, theta, scaling):
  """(cos, sin) float32 [n, dim / 2]; the angle is a float32 product too."""
  angle = np.arange(n, dtype=np.float32)[:, None] * inverse_frequencies(dim, theta, scaling)
  amplitude = yarn_amplitude(scaling)
  return tuple((f(angle.astype(np.float64)) * amplitude).astype(np.float32) for f in (np.cos, np.sin))


def rotate_interleaved(x, cos, sin):
  """Pairs (x[2i], x[2i + 1]). x [..., dim]; cos, sin broadcast to [..., dim / 2]."""
  a, b = x[..., 0::2], x[..., 1::2]
  return np.stack((a * cos - b * sin, b * cos + a * sin), -1).reshape(x.shape)


def rotate_half(x, cos, sin):
  """Pairs (x[i], x[i + dim / 2])."""
  a, b = np.split(x, 2, -1)
  return np.concatenate((a * cos - b * sin, b * cos + a * sin), -1)
