"""A round of several streams around its trees: which nodes are verified, the rows of the pass, what is accepted and kept.

A plan is one dictionary a stream: root, length, budget, depths, spine, calibration (-1: all nodes are verified),
wants_logprobs. Trees are (token, parent, depth, weight) of nodes 1..n as tree.build gives them."""
import math

import numpy as np

from . import tree

COST_ROWS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512)
BINS, PRIOR = 24, 8.0
OUTLOOK = (0.25, 0.5, 1, 2, 3, 4, 6, 8, 12, 16, 32, 63)   # nodes a stream


def build(plan, token, log_q):
  """token, log_q [drafts, depths, k]; plan["draft"]: which of them is the stream's."""
  return [tree.build(token[p["draft"]][:p["depths"]], log_q[p["draft"]][:p["depths"]], p["budget"], p["spine"])
          if p["budget"] > 0 else ([], [], [], []) for p in plan]


def seconds_at(verify, rows):
  """Interpolated between COST_ROWS, extrapolated behind them."""
  i = next((i for i in range(1, len(COST_ROWS) - 1) if COST_ROWS[i] >= rows), len(COST_ROWS) - 1)
  low, high = COST_ROWS[i - 1], COST_ROWS[i]
  return verify[i - 1] + (rows - low) / (high - low) * (verify[i] - verify[i - 1])


def accept_probability(hits, mass, q):
  """(probability, how far q is from the border of its bin)."""
  if not q > 0:
    return 0.0, np.inf
  half_octaves = -2 * math.log2(q)
  at = int(min(max(math.floor(half_octaves), 0), BINS - 1))
  margin = np.inf if half_octaves >= BINS or half_octaves == 0 else abs(half_octaves - round(half_octaves))
  return min(max(q * (hits[at] + PRIOR * q) / (mass[at] + PRIOR * q), 0.0), 1.0), margin


def joint_cut(plan, trees, tables):
  """-> (n_nodes [streams], outlook [OUTLOOK], margin): expected tokens less lambda times seconds is largest, in most_rows rows.

  tables: lambda, verify, hits and mass [3][24], base_rows, most_rows. margin: how near another answer was."""
  base, margin, gains = tables["base_rows"], np.inf, {}
  for i, (p, (_, parent, _, weight)) in enumerate(zip(plan, trees)):
    if p["budget"] > 0 and p["calibration"] < 0:
      base += len(parent)
    elif p["budget"] > 0:
      gains[i] = []
      hits, mass = tables["hits"][p["calibration"]], tables["mass"][p["calibration"]]
      above = [0.0, *map(float, weight)]
      for node in range(len(parent)):
        with np.errstate(invalid="ignore"):
          q = float(np.exp(np.float64(weight[node]) - np.float64(above[parent[node]])))
        probability, near = accept_probability(hits, mass, q)
        margin = min(margin, near)
        gains[i].append((gains[i][parent[node] - 1] if parent[node] else 1.0) * probability)
  n_nodes = [len(t[1]) for t in trees]
  if not gains:
    return n_nodes, np.zeros(len(OUTLOOK)), margin
  # Best first, each stream's nodes in their own order.
  at, order = dict.fromkeys(gains, 0), []
  while heads := [(-gains[i][at[i]], i) for i in gains if at[i] < len(gains[i])]:
    best = min(heads)
    margin = min([margin] + [h[0] - best[0] for h in heads if h[0] > best[0]])
    order.append(best[1])
    at[best[1]] += 1
  at, expected = dict.fromkeys(gains, 0), [float(len(plan))]
  for i in order:
    expected.append(expected[-1] + gains[i][at[i]])
    at[i] += 1
  room = min(len(order), max(0, tables["most_rows"] - base))
  values = [expected[n] - tables["lambda"] * seconds_at(tables["verify"], base + n) for n in range(room + 1)]
  n = int(np.argmax(values))
  margin = min([margin] + [values[n] - v for v in values if v < values[n]])
  for i in gains:
    n_nodes[i] = order[:n].count(i)
  accepted = np.interp(np.array(OUTLOOK) * len(gains), np.arange(len(expected)), np.array(expected) - len(plan))
  return n_nodes, accepted / len(gains), margin


def lay_rows(plan, trees, n_prompt, n_scored, n_prompt_samples):
  """Behind a prompt's rows, each stream's root and nodes: token, position, stream, parent, visible of rows; logits_row;
  sample_token, … of the rows that are sampled; first_row. All without the entries of prompts."""
  out = {name: [] for name in ("token", "position", "stream", "parent", "visible", "logits_row", "sample_parent",
                               "first_row")}
  for i, (p, (token, parent, depth, _)) in enumerate(zip(plan, trees)):
    first, size = n_prompt + len(out["token"]), len(token) + 1
    sampled = n_prompt_samples + len(out["token"])
    out["first_row"].append(first)
    out["token"] += [p["root"], *token]
    out["position"] += [p["length"]] + [p["length"] + d for d in depth]
    out["stream"] += [i] * size
    out["parent"] += [-1] + [first + above for above in parent]
    out["sample_parent"] += [-1] + [sampled + above for above in parent]
    out["visible"] += [p["length"] + 1] * size
    out["logits_row"] += range(first, first + size)
  for name in ("token", "position", "stream"):
    out["sample_" + name] = out[name]
  return out


def accept(plan, trees, sample, n_prompt, n_scored, n_prompt_samples):
  """sample: the target's token of every sampled row, those of prompts first. -> (paths and tokens [streams] of lists; kept
  rows, positions and streams, and scored rows and tokens, without the entries of prompts)."""
  rows = lay_rows(plan, trees, n_prompt, n_scored, n_prompt_samples)
  paths, tokens, kept, scored = [], [], [], []
  for i, (p, (token, parent, depth, _)) in enumerate(zip(plan, trees)):
    at = rows["first_row"][i] - n_prompt
    own = sample[n_prompt_samples + at:]
    paths.append(tree.accept(token, parent, own))
    tokens.append([int(own[node]) for node in paths[-1]])
    for node, said in zip(paths[-1], tokens[-1]):
      kept.append((n_prompt + at + node, rows["position"][at + node], i))
      scored.append((n_scored + n_prompt_samples + at + node, said if p["wants_logprobs"] else -1))
  return paths, tokens, kept, scored
