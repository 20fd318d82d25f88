// Draft trees one node after the other (spec/tree_build.h): by one warp, for any candidates; soonest for small budgets.
#pragma once

#include "cuda/vocabulary.cuh"
#include "spec/tree_build.h"

namespace kdt::cuda {

constexpr int kStaged = 8192;             // log-probabilities of candidates in shared memory
constexpr int kPlaceBits = 11;            // of a node, and of a place in the order of rank tuples
constexpr int kMaxNodes = spec::kMaxBudget + 1;
static_assert(kMaxNodes + 1 < 1 << kPlaceBits);

// A tree while it grows. One warp builds it, the block carries candidates in and nodes out.
//
// Every node but the deepest has one child that may come next: candidate `next` of the depth below. So what waits is one
// entry a node, that of node n with lane n % 32 as its n / 32-th. A step takes the heaviest entry, of equals the first in
// the order of rank tuples, and makes it a node: the new node's entry is its first child, its parent's the next sibling.
// In the order of rank tuples those two stand where the one stood, child before sibling, so that order is kept as places:
// the child has the old one, the sibling the one behind it, and what stood behind moves on by one.
struct Tree {
  float weight[kMaxNodes];
  uint16_t parent[kMaxNodes], rank[kMaxNodes], depth[kMaxNodes];
  uint16_t next[kMaxNodes];               // candidate of depth[n] + 1 that waits at n
  float staged[kStaged];                  // log q of the first `width` candidates of every depth
  int32_t n_nodes;
};

struct Candidates {
  const float* log_q;                     // [depths, k]
  int32_t depths, k, width;
  const float* staged;                    // the same of the first `width` of every depth, in shared memory; -inf for NaN

  // By all threads of a block of so many; they have to meet before anything is read.
  template <int kThreads>
  __device__ void stage(float* to, int32_t places, int32_t budget) {
    staged = to;
    width = min(min(k, budget), places / depths);
    for (int32_t i = threadIdx.x; i < depths * width; i += kThreads) {
      const float q = log_q[static_cast<int64_t>(i / width) * k + i % width];
      to[i] = q == q ? q : -INFINITY;
    }
  }
};

// Ascends with the weight; 0 is no entry.
__device__ inline uint32_t weight_key(float weight) {
  const uint32_t bits = __float_as_uint(weight + 0.0f);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// The weight of candidate `rank` below a node at `depth`, and its key; 0 if there is none.
__device__ inline float child_weight(const Candidates& c, float weight, int32_t depth, int32_t rank) {
  const float log_q =
      rank < c.width ? c.staged[depth * c.width + rank] : c.log_q[static_cast<int64_t>(depth) * c.k + rank];
  return log_q == log_q ? __fadd_rn(weight, log_q) : -INFINITY;
}
__device__ inline uint32_t child_key(const Candidates& c, float weight, int32_t depth, int32_t rank) {
  return depth < c.depths && rank < c.k ? weight_key(child_weight(c, weight, depth, rank)) : 0;
}

// The chain of best candidates, by one lane. Returns its length.
__device__ inline int32_t grow_spine(Tree& tree, const Candidates& c, int32_t budget) {
  const int32_t n = min(c.depths, budget);
  float weight = 0;
  for (int32_t i = 0; i < n; ++i) {
    weight = child_weight(c, weight, i, 0);
    tree.weight[i + 1] = weight;
    tree.parent[i + 1] = static_cast<uint16_t>(i);
    tree.rank[i + 1] = 0;
    tree.depth[i + 1] = static_cast<uint16_t>(i + 1);
    tree.next[i] = 1;
  }
  tree.next[n] = 0;
  return n;
}

// kEntries * 32 > budget. Of one warp.
template <int kEntries>
__device__ void grow(Tree& tree, const Candidates& c, int32_t budget, bool spine) {
  const int lane = threadIdx.x % kWarp;
  if (lane == 0) {
    tree.weight[0] = 0;
    tree.parent[0] = tree.rank[0] = tree.depth[0] = tree.next[0] = 0;
    tree.n_nodes = spine ? grow_spine(tree, c, budget) : 0;
  }
  __syncwarp();
  int32_t count = tree.n_nodes;
  uint32_t key[kEntries], place[kEntries];   // of the entries of this lane
#pragma unroll
  for (int j = 0; j < kEntries; ++j) {
    const int32_t node = j * kWarp + lane;
    key[j] = place[j] = 0;
    if (node > count) continue;
    key[j] = child_key(c, tree.weight[node], tree.depth[node], tree.next[node]);
    place[j] = static_cast<uint32_t>(count - node);   // siblings of deeper nodes come first
  }
  while (count < budget) {
    uint32_t best = 0;
#pragma unroll
    for (int j = 0; j < kEntries; ++j)
      if (j * kWarp <= count) best = max(best, key[j]);
    best = __reduce_max_sync(kAllLanes, best);
    if (best == 0) break;
    uint32_t first = ~0u;                 // place and node of the first that are so heavy
#pragma unroll
    for (int j = 0; j < kEntries; ++j)
      if (j * kWarp <= count && key[j] == best)
        first = min(first, place[j] << kPlaceBits | static_cast<uint32_t>(j * kWarp + lane));
    first = __reduce_min_sync(kAllLanes, first);
    const auto parent = static_cast<int32_t>(first & ((1u << kPlaceBits) - 1));
    const uint32_t at = first >> kPlaceBits;

    const int32_t depth = tree.depth[parent], rank = tree.next[parent], node = ++count;
    const float above = tree.weight[parent];
    const float weight = child_weight(c, above, depth, rank);
    const uint32_t sibling = child_key(c, above, depth, rank + 1);
    const uint32_t child = child_key(c, weight, depth + 1, 0);
#pragma unroll
    for (int j = 0; j < kEntries; ++j) {
      if (j * kWarp > count) break;
      const int32_t own = j * kWarp + lane;
      if (place[j] > at) ++place[j];
      if (own == parent) key[j] = sibling, place[j] = at + 1;
      if (own == node) key[j] = child, place[j] = at;
    }
    __syncwarp();                         // all lanes have read next[parent]
    if (lane == 0) {
      tree.weight[node] = weight;
      tree.parent[node] = static_cast<uint16_t>(parent);
      tree.rank[node] = static_cast<uint16_t>(rank);
      tree.depth[node] = static_cast<uint16_t>(depth + 1);
      tree.next[node] = 0;
      tree.next[parent] = static_cast<uint16_t>(rank + 1);
    }
    __syncwarp();
  }
  __syncwarp();                           // all lanes have read n_nodes
  if (lane == 0) tree.n_nodes = count;
}

// Of a block of kThreads: the tree of a plan, 0 < budget <= kMaxBudget, to its place.
template <int kThreads>
__device__ void grow_tree(Tree& tree, Candidates c, int32_t budget, bool spine, const int32_t* token, const TreeNodes& nodes,
                          int32_t* n_nodes) {
  c.stage<kThreads>(tree.staged, kStaged, budget);
  __syncthreads();
  if (threadIdx.x < kWarp) {
    if (budget < 2 * kWarp)
      grow<2>(tree, c, budget, spine);
    else if (budget < 4 * kWarp)
      grow<4>(tree, c, budget, spine);
    else if (budget < 12 * kWarp)
      grow<12>(tree, c, budget, spine);
    else
      grow<33>(tree, c, budget, spine);
  }
  __syncthreads();
  if (threadIdx.x == 0) *n_nodes = tree.n_nodes;
  for (int32_t i = 1 + static_cast<int32_t>(threadIdx.x); i <= tree.n_nodes; i += kThreads) {
    nodes.token[i] = token[static_cast<int64_t>(tree.depth[i] - 1) * c.k + tree.rank[i]];
    nodes.parent[i] = tree.parent[i];
    nodes.depth[i] = tree.depth[i];
    nodes.weight[i] = tree.weight[i];
  }
}

}  // namespace kdt::cuda
