// Draft trees in a pass of the target: their rows, accept; and the count of experts. Their build is tree_build.cu.
#include "cuda/device.cuh"

namespace kdt::cuda {
namespace {

constexpr uint32_t kAllLanes = 0xffffffffu;
constexpr int kRowsThreads = 256, kRowsBlocks = 8;
constexpr int kAcceptThreads = 512;
constexpr int kCountThreads = 1024;

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
  const int32_t rows = first[n], thread = static_cast<int32_t>(blockIdx.x * kRowsThreads + threadIdx.x);
  constexpr int32_t kThreads = kRowsBlocks * kRowsThreads;
  for (int32_t i = thread; i < n; i += kThreads) args.first_row[i] = counts.n_prompt + first[i];
  for (int32_t i = thread; i < rows; i += kThreads) {
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
  if (thread > 0) return;
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

// Without streams too: the prompts' counts are those of the pass.
void CudaOps::lay_rows(const LayRowsArgs& args) {
  const size_t shared = static_cast<size_t>(args.n_streams.most + 1) * sizeof(int32_t);
  launch_overlapping("lay_rows_kernel", lay_rows_kernel, kRowsBlocks, kRowsThreads, shared, stream_, args);
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
