// Draft trees between the drafter and the target: build, rows of the pass, accept; and the count of experts.
#include "cuda/device.cuh"
#include "spec/tree_build.h"

namespace kdt::cuda {
namespace {

constexpr uint32_t kAllLanes = 0xffffffffu;
constexpr int kBuildThreads = 256;
constexpr int kRowsThreads = 512;
constexpr int kAcceptThreads = 512;
constexpr int kCountThreads = 1024;
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
};

// Ascends with the weight; 0 is no entry.
__device__ inline uint32_t weight_key(float weight) {
  const uint32_t bits = __float_as_uint(weight + 0.0f);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// The weight of candidate `rank` below a node at `depth`, and its key; 0 if there is none.
__device__ inline float child_weight(const Tree& tree, const Candidates& c, float weight, int32_t depth, int32_t rank) {
  const float log_q =
      rank < c.width ? tree.staged[depth * c.width + rank] : c.log_q[static_cast<int64_t>(depth) * c.k + rank];
  return log_q == log_q ? __fadd_rn(weight, log_q) : -INFINITY;
}
__device__ inline uint32_t child_key(const Tree& tree, const Candidates& c, float weight, int32_t depth, int32_t rank) {
  return depth < c.depths && rank < c.k ? weight_key(child_weight(tree, c, weight, depth, rank)) : 0;
}

// The chain of best candidates, by one lane. Returns its length.
__device__ int32_t grow_spine(Tree& tree, const Candidates& c, int32_t budget) {
  const int32_t n = min(c.depths, budget);
  float weight = 0;
  for (int32_t i = 0; i < n; ++i) {
    weight = child_weight(tree, c, weight, i, 0);
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
    key[j] = child_key(tree, c, tree.weight[node], tree.depth[node], tree.next[node]);
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
    const float weight = child_weight(tree, c, above, depth, rank);
    const uint32_t sibling = child_key(tree, c, above, depth, rank + 1);
    const uint32_t child = child_key(tree, c, weight, depth + 1, 0);
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

__global__ void __launch_bounds__(kBuildThreads) build_kernel(BuildTreesArgs args) {
  const int32_t stream = blockIdx.x;
  wait_for_previous();
  let_next_start();
  if (stream >= live_rows(args.n_streams)) return;
  __shared__ Tree tree;
  const StreamPlan plan = args.plan[stream];
  const TreeNodes nodes = args.nodes.from(plan.first);
  if (threadIdx.x == 0) {
    nodes.token[0] = plan.root;
    nodes.parent[0] = -1;
    nodes.depth[0] = 0;
    nodes.weight[0] = 0;
  }
  Candidates c{nullptr, min(plan.depths, static_cast<int32_t>(args.depths)), static_cast<int32_t>(args.k), 0};
  if (plan.budget <= 0 || c.depths <= 0 || c.k <= 0) {
    if (threadIdx.x == 0) args.n_nodes[stream] = 0;
    return;
  }
  const int64_t drafted = static_cast<int64_t>(plan.draft) * args.depths * args.k;
  const int32_t* token = args.token + drafted;
  c.log_q = args.log_q + drafted;
  c.width = min(min(c.k, plan.budget), kStaged / c.depths);
  for (int32_t i = threadIdx.x; i < c.depths * c.width; i += kBuildThreads)
    tree.staged[i] = c.log_q[static_cast<int64_t>(i / c.width) * c.k + i % c.width];
  __syncthreads();
  if (threadIdx.x < kWarp) {
    const int32_t budget = min(plan.budget, static_cast<int32_t>(spec::kMaxBudget));
    const bool spine = plan.spine != 0;
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
  if (threadIdx.x == 0) args.n_nodes[stream] = tree.n_nodes;
  for (int32_t i = 1 + static_cast<int32_t>(threadIdx.x); i <= tree.n_nodes; i += kBuildThreads) {
    nodes.token[i] = token[static_cast<int64_t>(tree.depth[i] - 1) * c.k + tree.rank[i]];
    nodes.parent[i] = tree.parent[i];
    nodes.depth[i] = tree.depth[i];
    nodes.weight[i] = tree.weight[i];
  }
}

// first[i] = the sum of the values before i, first[n] of all; values are in first[1 …]. Of one warp.
__device__ void sum_up(int32_t* first, int32_t n) {
  const int lane = threadIdx.x % kWarp;
  int32_t before = 0;
  for (int32_t begin = 1; begin <= n; begin += kWarp) {
    int32_t sum = begin + lane <= n ? first[begin + lane] : 0;
#pragma unroll
    for (int step = 1; step < kWarp; step *= 2) {
      const int32_t other = __shfl_up_sync(kAllLanes, sum, step);
      if (lane >= step) sum += other;
    }
    if (begin + lane <= n) first[begin + lane] = before + sum;
    before += __shfl_sync(kAllLanes, sum, kWarp - 1);
  }
  if (lane == 0) first[0] = 0;
}

// The stream whose part of [first[0], first[n]) has i.
__device__ inline int32_t stream_of(const int32_t* first, int32_t n, int32_t i) {
  int32_t low = 0, high = n;
  while (high - low > 1) {
    const int32_t middle = (low + high) / 2;
    (first[middle] <= i ? low : high) = middle;
  }
  return low;
}

__global__ void __launch_bounds__(kRowsThreads) lay_rows_kernel(LayRowsArgs args) {
  extern __shared__ int32_t first[];      // [streams + 1] rows of trees before each stream's
  wait_for_previous();
  let_next_start();
  const int32_t n = live_rows(args.n_streams);
  const RoundCounts counts = *args.counts;
  for (int32_t i = threadIdx.x; i < n; i += kRowsThreads) first[i + 1] = args.n_nodes[i] + 1;
  __syncthreads();
  if (threadIdx.x < kWarp) sum_up(first, n);
  __syncthreads();
  const int32_t rows = first[n];
  for (int32_t i = threadIdx.x; i < n; i += kRowsThreads) args.first_row[i] = counts.n_prompt + first[i];
  for (int32_t i = threadIdx.x; i < rows; i += kRowsThreads) {
    const int32_t stream = stream_of(first, n, i), node = i - first[stream];
    const StreamPlan& plan = args.plan[stream];
    const TreeNodes nodes = args.nodes.from(plan.first);
    const int32_t row = counts.n_prompt + i, sampled = counts.n_prompt_samples + i;
    const int32_t token = nodes.token[node], position = plan.length + nodes.depth[node];
    const int32_t parent = node == 0 ? -1 : first[stream] + nodes.parent[node];
    args.token[row] = args.sample_token[sampled] = token;
    args.position[row] = args.sample_position[sampled] = position;
    args.stream[row] = args.sample_stream[sampled] = stream;
    args.parent[row] = node == 0 ? -1 : counts.n_prompt + parent;
    args.sample_parent[sampled] = node == 0 ? -1 : counts.n_prompt_samples + parent;
    args.visible[row] = plan.length + 1;
    args.logits_row[counts.n_scored + sampled] = row;
  }
  if (threadIdx.x > 0) return;
  *args.n_rows = counts.n_prompt + rows;
  *args.n_sampled = counts.n_prompt_samples + rows;
  *args.n_logits = counts.n_scored + counts.n_prompt_samples + rows;
}

// The path of one tree, by one warp. Parents precede their children, so one pass over the nodes finds all of it.
__device__ int32_t walk(const TreeNodes& nodes, int32_t n_nodes, const int32_t* sample, int32_t* path) {
  const int lane = threadIdx.x % kWarp;
  int32_t current = 0, length = 1;
  if (lane == 0) path[0] = 0;
  for (int32_t begin = 1; begin <= n_nodes; begin += kWarp) {
    const int32_t node = begin + lane;
    int32_t parent = -1;                  // of nodes that are what the target said after their parent
    if (node <= n_nodes) {
      const int32_t above = nodes.parent[node];
      if (nodes.token[node] == sample[above]) parent = above;
    }
    while (const uint32_t found = __ballot_sync(kAllLanes, parent == current && node > current)) {
      current = begin + __ffs(static_cast<int>(found)) - 1;
      if (lane == 0) path[length] = current;
      ++length;
    }
  }
  return length;
}

__global__ void __launch_bounds__(kAcceptThreads) accept_kernel(AcceptArgs args) {
  extern __shared__ int32_t first[];      // [streams + 1] accepted nodes before each stream's
  wait_for_previous();
  let_next_start();
  const int32_t n = live_rows(args.n_streams);
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  constexpr int kWarps = kAcceptThreads / kWarp;
  const RoundCounts counts = *args.counts;
  const int32_t scored = counts.n_scored + counts.n_prompt_samples;
  for (int32_t i = counts.n_scored + static_cast<int32_t>(threadIdx.x); i < scored; i += kAcceptThreads)
    if (args.scored_token[i] >= 0) args.scored_token[i] = args.sample[i - counts.n_scored];
  for (int32_t i = warp; i < n; i += kWarps) {
    const int32_t at = args.plan[i].first;
    const int32_t* sample = args.sample + counts.n_prompt_samples + args.first_row[i] - counts.n_prompt;
    const int32_t length = walk(args.nodes.from(at), args.n_nodes[i], sample, args.path + at);
    if (lane == 0) args.n_path[i] = first[i + 1] = length;
  }
  __syncthreads();
  if (threadIdx.x < kWarp) sum_up(first, n);
  __syncthreads();
  for (int32_t i = warp; i < n; i += kWarps) {
    const StreamPlan& plan = args.plan[i];
    const int32_t root = args.first_row[i], sampled = counts.n_prompt_samples + root - counts.n_prompt;
    for (int32_t step = lane; step < first[i + 1] - first[i]; step += kWarp) {
      const int32_t node = args.path[plan.first + step], row = root + node;
      const int32_t token = args.sample[sampled + node];
      const int32_t kept = counts.n_prompt + first[i] + step, entry = scored + first[i] + step;
      args.token[plan.first + step] = token;
      args.kept_row[kept] = row;
      args.kept_position[kept] = args.position[row];
      args.kept_stream[kept] = i;
      args.scored_row[entry] = counts.n_scored + sampled + node;
      args.scored_token[entry] = plan.wants_logprobs ? token : -1;
    }
  }
  if (threadIdx.x > 0) return;
  *args.n_kept = counts.n_prompt + first[n];
  *args.n_logprobs = scored + first[n];
}

__global__ void __launch_bounds__(kCountThreads) count_experts_kernel(CountExpertsArgs args) {
  extern __shared__ uint32_t seen[];      // a bit an expert
  __shared__ int32_t distinct;
  wait_for_previous();
  let_next_start();
  const auto words = static_cast<int32_t>(divide_up(args.n_experts, 32));
  for (int32_t i = threadIdx.x; i < words; i += kCountThreads) seen[i] = 0;
  if (threadIdx.x == 0) distinct = 0;
  __syncthreads();
  const int64_t choices = live_rows(args.n) * args.k;
  for (int64_t i = threadIdx.x; i < choices; i += kCountThreads) {
    const int32_t expert = args.expert[i];
    atomicOr(&seen[expert / 32], 1u << expert % 32);
  }
  __syncthreads();
  for (int32_t i = threadIdx.x; i < words; i += kCountThreads)
    if (seen[i] != 0) atomicAdd(&distinct, __popc(seen[i]));
  __syncthreads();
  if (threadIdx.x == 0) *args.distinct = distinct;
}

}  // namespace

void CudaOps::build_trees(const BuildTreesArgs& args) {
  if (args.n_streams.most == 0) return;
  const auto streams = static_cast<unsigned>(args.n_streams.most);
  launch_overlapping("build_kernel", build_kernel, streams, kBuildThreads, 0, stream_, args);
}

// Without streams too: the prompts' counts are those of the pass.
void CudaOps::lay_rows(const LayRowsArgs& args) {
  const size_t shared = static_cast<size_t>(args.n_streams.most + 1) * sizeof(int32_t);
  launch_overlapping("lay_rows_kernel", lay_rows_kernel, 1, kRowsThreads, shared, stream_, args);
}

void CudaOps::accept(const AcceptArgs& args) {
  const size_t shared = static_cast<size_t>(args.n_streams.most + 1) * sizeof(int32_t);
  launch_overlapping("accept_kernel", accept_kernel, 1, kAcceptThreads, shared, stream_, args);
}

void CudaOps::count_experts(const CountExpertsArgs& args) {
  const size_t shared = static_cast<size_t>(divide_up(args.n_experts, 32)) * sizeof(uint32_t);
  launch_overlapping("count_experts_kernel", count_experts_kernel, 1, kCountThreads, shared, stream_, args);
}

}  // namespace kdt::cuda
