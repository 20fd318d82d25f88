"""The draft tree: best first, by brute force, and the walk that accepts a path of it."""
import heapq
import itertools

import numpy as np


def weight_of(parent_weight, log_q):
  """float32(parent's weight + log q); NaN counts as -inf."""
  with np.errstate(invalid="ignore"):
    weight = np.float32(parent_weight) + np.float32(log_q)
  return np.float32(-np.inf) if np.isnan(weight) else weight


def build(token, log_q, budget, spine=False):
  """token, log_q [depths, k], log_q descending in k -> nodes without the root as (token, parent, depth, weight) lists.

  Parent 0 is the root, i + 1 node i. Order: weight descending, then the rank tuple. With a spine the first
  min(depths, budget) nodes are the top-1 chain and the rest is best first without them."""
  depths, k = np.shape(log_q)
  nodes, heap = [], []

  def push(ranks, parent, parent_weight):
    if len(ranks) <= depths and ranks[-1] < k:
      weight = weight_of(parent_weight, log_q[len(ranks) - 1][ranks[-1]])
      heapq.heappush(heap, (-weight, ranks, parent, parent_weight))

  def add(ranks, parent, weight):
    nodes.append((int(token[len(ranks) - 1][ranks[-1]]), parent, len(ranks), weight))
    return len(nodes)

  weight = np.float32(0)
  chain = min(depths, budget) if spine else 0
  for d in range(chain):
    parent_weight, weight = weight, weight_of(weight, log_q[d][0])
    add((0,) * (d + 1), d, weight)
    push((0,) * d + (1,), d, parent_weight)
  if not chain:
    push((0,), 0, np.float32(0))
  while heap and len(nodes) < budget:
    negative, ranks, parent, parent_weight = heapq.heappop(heap)
    index = add(ranks, parent, -negative)
    push(ranks[:-1] + (ranks[-1] + 1,), parent, parent_weight)
    push(ranks + (0,), index, -negative)
  return tuple(list(column) for column in zip(*nodes)) if nodes else ([], [], [], [])


def brute_force(log_q, budget, spine=False):
  """Rank tuples of the same tree, by sorting every prefix there is."""
  depths, k = np.shape(log_q)
  weights = {(): np.float32(0)}
  for d in range(1, depths + 1):
    for ranks in itertools.product(range(k), repeat=d):
      weights[ranks] = weight_of(weights[ranks[:-1]], log_q[d - 1][ranks[-1]])
  del weights[()]
  chain = [(0,) * d for d in range(1, depths + 1)] if spine else []
  rest = sorted((r for r in weights if r not in chain), key=lambda ranks: (-weights[ranks], ranks))
  return (chain + rest)[:budget]


def rank_tuples(token, node_token, node_parent, node_depth):
  """The rank tuple of every node, for candidates whose tokens differ within a depth."""
  tuples = [()]
  for t, parent, depth in zip(node_token, node_parent, node_depth):
    tuples.append(tuples[parent] + (list(token[depth - 1]).index(t),))
  return tuples[1:]


def accept(node_token, node_parent, samples):
  """Nodes without the root as above, samples [n + 1] the target's token after each -> accepted nodes, the root (0)
  first."""
  path = [0]
  while True:
    children = [i for i, (t, p) in enumerate(zip(node_token, node_parent), 1)
                if p == path[-1] and t == samples[path[-1]]]
    if not children:
      return path
    path.append(children[0])
