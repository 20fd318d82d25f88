// Draft trees of all but small budgets (spec/tree_build.h), all nodes of a depth at once: by one block, the trees that grow()
// makes.
//
// Where log q is never positive no node is heavier than its parent or the sibling before it. So the tree is the `budget`
// first of all prefixes, by weight and then by rank tuple. They are found in three steps:
//   reach   A weight that at least so many prefixes have. Costs, -log q, are rounded up to whole bins; how many prefixes of
//           a depth cost so many bins is the convolution of the depth above with the candidates' own counts.
//   list    The prefixes that weigh as much, depth by depth: within a depth in the order of rank tuples.
//   order   By weight, in bins of about one prefix each; of equal weights by rank tuple, which places in the list and
//           ancestors tell.
// What has too many prefixes of that weight (many equal ones, say), too few, or too many depths is left to grow().
#pragma once

#include "cuda/tree_grow.cuh"

namespace kdt::cuda {

constexpr int kWideFrom = 32;             // budget from which this is sooner
constexpr int kWideDepths = 16;
constexpr float kEnough = 65536;          // more prefixes than will ever be needed
constexpr uint16_t kOfSpine = 0x8000;     // in parent[]

// Of a block of kThreads, as many as the largest budget.
template <int kThreads>
struct WideTree {
  static constexpr int kReached = 2 * kThreads;       // places in the list, the root's among them
  static constexpr int kCostBins = kThreads <= 256 ? 64 : 128, kParts = kThreads / kCostBins;
  static_assert(kReached <= kOfSpine);

  float weight[kReached];
  uint16_t parent[kReached], rank[kReached];
  uint8_t depth[kReached];
  uint16_t place[kReached];               // children listed before each parent's; at last the node's place in the tree
  float paths[2][kCostBins];              // prefixes of a depth by cost
  float reached[kCostBins];               // prefixes of all depths by cost
  int32_t sums[kThreads / kWarp];
  float parts[kThreads / kWarp];
  int32_t bin;
  union {                                 // of candidates by depth and cost: the first and the end, then how many
    struct {
      uint16_t first, end;
    } ranks[kWideDepths][kCostBins];
    float of_depth[kWideDepths][kCostBins];
  };
  union {
    float staged[kWideDepths * kThreads];
    struct {                              // when all are listed
      uint16_t in_bin[kReached], order[kReached];
      int32_t n_in_bin[kThreads];
      uint16_t first_in_bin[kThreads + 1];
    };
  };
};

// The weight of candidate `rank` below a node at `depth`; all that may be needed are staged.
__device__ inline float staged_weight(const Candidates& c, float weight, int32_t depth, int32_t rank) {
  return __fadd_rn(weight, c.staged[depth * c.width + rank]);
}

// A cost that at least `budget` prefixes of one or two tokens do not exceed; infinite where there are too few.
template <int kThreads>
__device__ inline float certain_cost(WideTree<kThreads>& tree, const Candidates& c, int32_t budget) {
  const auto i = static_cast<int32_t>(threadIdx.x);
  float cost = INFINITY;
  if (i < c.width) {
    const float first = -staged_weight(c, 0, 0, i);
    const int32_t each = (budget + i) / (i + 1);   // of the second depth, below each of i + 1 candidates
    if (i + 1 == budget)
      cost = first;
    else if (c.depths > 1 && each <= c.width)
      cost = first - staged_weight(c, 0, 1, each - 1);
  }
  return -block_maximum<kThreads>(-cost, tree.parts);
}

// Candidates by depth and cost, `per` bins a unit: those of a bin are neighbours.
template <int kThreads>
__device__ inline void count_costs(WideTree<kThreads>& tree, const Candidates& c, float per) {
  constexpr int kCostBins = WideTree<kThreads>::kCostBins;
  for (int32_t i = threadIdx.x; i < c.depths * kCostBins; i += kThreads) tree.of_depth[0][i] = 0;
  __syncthreads();
  const auto bin_of = [&](int32_t depth, int32_t rank) {
    const float bin = fmaxf(ceilf(-staged_weight(c, 0, depth, rank) * per), 0);
    return bin < kCostBins ? static_cast<int32_t>(bin) : kCostBins;
  };
  for (int32_t i = threadIdx.x; i < c.depths * c.width; i += kThreads) {
    const int32_t depth = i / c.width, rank = i - depth * c.width, bin = bin_of(depth, rank);
    if (bin == kCostBins) continue;
    if (rank == 0 || bin_of(depth, rank - 1) != bin) tree.ranks[depth][bin].first = static_cast<uint16_t>(rank);
    if (rank + 1 == c.width || bin_of(depth, rank + 1) != bin) tree.ranks[depth][bin].end = static_cast<uint16_t>(rank + 1);
  }
  __syncthreads();
  for (int32_t i = threadIdx.x; i < c.depths * kCostBins; i += kThreads) {
    const auto ranks = tree.ranks[0][i];
    tree.of_depth[0][i] = static_cast<float>(ranks.end - ranks.first);
  }
}

// The weight that at least `budget` prefixes have; NaN if there is none to be found.
template <int kThreads>
__device__ inline float reach(WideTree<kThreads>& tree, const Candidates& c, int32_t budget) {
  constexpr int kCostBins = WideTree<kThreads>::kCostBins, kParts = WideTree<kThreads>::kParts;
  const float range = certain_cost(tree, c, budget);
  bool falls = range > 0 && range < INFINITY;
  const int x = threadIdx.x / kParts, part = threadIdx.x % kParts;
  if (static_cast<int32_t>(threadIdx.x) < c.depths) falls &= staged_weight(c, 0, threadIdx.x, 0) <= 0;
  if (part == 0) tree.paths[0][x] = x == 0;
  if (threadIdx.x == 0) tree.bin = -1;
  if (!__syncthreads_and(falls)) return NAN;
  const float per = (kCostBins - 3) / range;         // two roundings up still fit
  count_costs(tree, c, per);
  __syncthreads();
  float reached = 0;
  for (int32_t depth = 0; depth < c.depths; ++depth) {
    const float *above = tree.paths[depth % 2], *own = tree.of_depth[depth];
    float sum = 0;                        // whole numbers: exact up to 2^24
#pragma unroll
    for (int i = 0; i < kCostBins / kParts; ++i)
      if (const int y = part + kParts * i; y <= x) sum += above[x - y] * own[y];
#pragma unroll
    for (int step = 1; step < kParts; step *= 2) sum += __shfl_xor_sync(kAllLanes, sum, step);
    sum = fminf(sum, kEnough);
    reached += sum;
    if (part == 0) tree.paths[(depth + 1) % 2][x] = sum;
    if (!__syncthreads_or(sum > 0)) break;
  }
  if (part == 0) tree.reached[x] = reached;
  __syncthreads();
  if (threadIdx.x < kWarp) {
    constexpr int kPer = kCostBins / kWarp;
    const int lane = threadIdx.x;
    float own[kPer], sum = 0;
#pragma unroll
    for (int i = 0; i < kPer; ++i) sum += own[i] = tree.reached[lane * kPer + i];
    float before = warp_sum_until(sum) - sum;
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      if (before < budget && before + own[i] >= budget) tree.bin = lane * kPer + i;
      before += own[i];
    }
  }
  __syncthreads();
  return tree.bin < 0 ? NAN : -1.00001f * static_cast<float>(tree.bin) / per;
}

// How many candidates of the next depth are no lighter than `least` behind a prefix.
__device__ inline int32_t n_reaching(const Candidates& c, float weight, int32_t depth, float least) {
  if (!(staged_weight(c, weight, depth, 0) >= least)) return 0;
  int32_t low = 1, high = c.width;        // those below `low` are; those from `high` on are not
  while (low < high) {
    const int32_t middle = (low + high) / 2;
    if (staged_weight(c, weight, depth, middle) >= least)
      low = middle + 1;
    else
      high = middle;
  }
  return low;
}

// Lists the root and all prefixes no lighter than `least`, the spine of so many in any case. Returns how many there are, or
// 0 if there is no room for all.
template <int kThreads>
__device__ inline int32_t list_prefixes(WideTree<kThreads>& tree, const Candidates& c, float least, int32_t spine) {
  if (threadIdx.x == 0) tree.weight[0] = 0, tree.parent[0] = tree.rank[0] = tree.depth[0] = 0;
  int32_t begin = 0, end = 1;             // of the depth above
  __syncthreads();
  for (int32_t depth = 0; depth < c.depths; ++depth) {
    const int32_t per = end - begin > kThreads ? 2 : 1, parent = begin + per * static_cast<int32_t>(threadIdx.x);
    int32_t n[2] = {0, 0}, total;
#pragma unroll
    for (int i = 0; i < 2; ++i)
      if (i < per && parent + i < end) n[i] = n_reaching(c, tree.weight[parent + i], depth, least);
    if (parent == begin && depth < spine) n[0] = max(n[0], 1);
    const int32_t before = sum_before<kThreads>(n[0] + n[1], tree.sums, total);
    if (total == 0) break;
    if (end + total > tree.kReached) return 0;
    if (parent < end) tree.place[parent] = static_cast<uint16_t>(before);
    if (per == 2 && parent + 1 < end) tree.place[parent + 1] = static_cast<uint16_t>(before + n[0]);
    __syncthreads();
    for (int32_t i = threadIdx.x; i < total; i += kThreads) {
      int32_t low = begin, high = end;    // the last parent whose children begin at i or before
      while (high - low > 1) {
        const int32_t middle = (low + high) / 2;
        (tree.place[middle] <= i ? low : high) = middle;
      }
      const int32_t rank = i - tree.place[low], node = end + i;
      tree.weight[node] = staged_weight(c, tree.weight[low], depth, rank);
      tree.parent[node] = static_cast<uint16_t>(low | (i == 0 && depth < spine ? kOfSpine : 0));
      tree.rank[node] = static_cast<uint16_t>(rank);
      tree.depth[node] = static_cast<uint8_t>(depth + 1);
    }
    begin = end;
    end += total;
    __syncthreads();
  }
  return end;
}

// Whether a listed node comes before another: those of the spine first, then by weight, then by rank tuple.
template <int kThreads>
__device__ inline bool comes_before(const WideTree<kThreads>& tree, int32_t a, int32_t b) {
  const uint32_t key_a = tree.parent[a] & kOfSpine ? ~0u : weight_key(tree.weight[a]);
  const uint32_t key_b = tree.parent[b] & kOfSpine ? ~0u : weight_key(tree.weight[b]);
  if (key_a != key_b) return key_a > key_b;
  int32_t from = a, to = b;
  while (tree.depth[from] > tree.depth[b]) from = tree.parent[from] & ~kOfSpine;
  while (tree.depth[to] > tree.depth[a]) to = tree.parent[to] & ~kOfSpine;
  return from != to ? from < to : tree.depth[a] < tree.depth[b];
}

// Gives the n nodes behind the root their places. Prefixes are about e times as many for every unit that they may cost more, so
// bins are narrow near `least`; every step to a bin is monotone in the weight as computed.
template <int kThreads>
__device__ inline void order_prefixes(WideTree<kThreads>& tree, int32_t n, float least) {
  const auto thread = static_cast<int32_t>(threadIdx.x);
  tree.n_in_bin[thread] = 0;
  if (thread == 0) tree.place[0] = 0;
  __syncthreads();
  int32_t bin[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int32_t node = 1 + thread + i * kThreads;
    if (node > n) continue;
    const float above = fmaxf(tree.weight[node] - least, 0);
    bin[i] = tree.parent[node] & kOfSpine ? 0 : static_cast<int32_t>((kThreads - 1) / (1 + 2 * above));
    tree.in_bin[node] = static_cast<uint16_t>(atomicAdd(&tree.n_in_bin[bin[i]], 1));
  }
  __syncthreads();
  int32_t total;
  tree.first_in_bin[thread] = static_cast<uint16_t>(sum_before<kThreads>(tree.n_in_bin[thread], tree.sums, total));
  if (thread == 0) tree.first_in_bin[kThreads] = static_cast<uint16_t>(n);
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 2; ++i)
    if (const int32_t node = 1 + thread + i * kThreads; node <= n)
      tree.order[tree.first_in_bin[bin[i]] + tree.in_bin[node]] = static_cast<uint16_t>(node);
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int32_t node = 1 + thread + i * kThreads;
    if (node > n) continue;
    int32_t place = tree.first_in_bin[bin[i]];
    const int32_t begin = place, end = tree.first_in_bin[bin[i] + 1];
    for (int32_t j = begin; j < end; ++j)
      if (const int32_t other = tree.order[j]; other != node) place += comes_before(tree, other, node);
    tree.place[node] = static_cast<uint16_t>(place + 1);
  }
  __syncthreads();
}

// The tree of a plan to its place, by a block; false, and nothing written, if it is for grow() to make. c is
// not staged yet.
template <int kThreads>
__device__ inline bool build_wide(WideTree<kThreads>& tree, Candidates c, int32_t budget, bool spine, const int32_t* token,
                                  const TreeNodes& nodes) {
  if (budget > kThreads || c.depths > kWideDepths) return false;
  c.stage<kThreads>(tree.staged, kWideDepths * kThreads, budget);
  __syncthreads();
  const float least = reach(tree, c, budget);
  if (!(least <= 0)) return false;
  const int32_t n = list_prefixes(tree, c, least, spine ? min(c.depths, budget) : 0) - 1;
  if (n < budget) return false;
  order_prefixes(tree, n, least);
  for (int32_t node = 1 + static_cast<int32_t>(threadIdx.x); node <= n; node += kThreads) {
    const int32_t to = tree.place[node], depth = tree.depth[node];
    if (to > budget) continue;
    nodes.token[to] = token[static_cast<int64_t>(depth - 1) * c.k + tree.rank[node]];
    nodes.parent[to] = tree.place[tree.parent[node] & ~kOfSpine];
    nodes.depth[to] = depth;
    nodes.weight[to] = tree.weight[node];
  }
  return true;
}

}  // namespace kdt::cuda
