"""The public DDTree procedure's tree (Ringel et al., arXiv 2604.12989), as users of Python have it: a heap on the host."""
import heapq

import numpy as np


def best_first(token, log_q, budget):
  """Candidates of each depth, best first -> tokens, parents (0 the root, i + 1 node i), depths of the best prefixes."""
  tokens, parents, depths = [], [], []
  heap = [(-log_q[0][0], (0,), 0, 1, 0, log_q[0][0])]
  while heap and len(tokens) < budget:
    _, ranks, parent, depth, rank, weight = heapq.heappop(heap)
    tokens.append(token[depth - 1][rank])
    parents.append(parent)
    depths.append(depth)
    if rank + 1 < len(log_q[0]):
      sibling = weight - log_q[depth - 1][rank] + log_q[depth - 1][rank + 1]
      heapq.heappush(heap, (-sibling, ranks[:-1] + (rank + 1,), parent, depth, rank + 1, sibling))
    if depth < len(log_q):
      child = weight + log_q[depth][0]
      heapq.heappush(heap, (-child, ranks + (0,), len(tokens), depth + 1, 0, child))
  return tokens, parents, depths


def visibility(parents):
  """[n + 1, n + 1]: which rows a row of the tree sees, the root first."""
  visible = np.eye(len(parents) + 1, dtype=bool)
  for i, parent in enumerate(parents, 1):
    visible[i] |= visible[parent]
  return visible
