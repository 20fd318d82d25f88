// Draft trees of a round, a block a stream.
#include <algorithm>
#include <cstddef>

#include "cuda/tree_wide.cuh"

namespace kdt::cuda {
namespace {

// A stream's root, and what its tree is made of; false if the root is all of it.
__device__ bool begin_tree(const BuildTreesArgs& args, int32_t stream, const TreeNodes& nodes, Candidates& candidates) {
  const StreamPlan plan = args.plan[stream];
  candidates = {nullptr, min(plan.depths, static_cast<int32_t>(args.depths)), static_cast<int32_t>(args.k), 0, nullptr};
  const bool grows = plan.budget > 0 && candidates.depths > 0 && candidates.k > 0;
  if (grows) candidates.log_q = args.log_q + static_cast<int64_t>(plan.draft) * args.depths * args.k;
  if (threadIdx.x > 0) return grows;
  nodes.token[0] = plan.root;
  nodes.parent[0] = -1;
  nodes.depth[0] = 0;
  nodes.weight[0] = 0;
  if (!grows) args.n_nodes[stream] = 0;
  return grows;
}

template <int kThreads>
constexpr size_t kShared = std::max(sizeof(WideTree<kThreads>), sizeof(Tree));
static_assert(kShared<1024> <= 99 * 1024);

template <int kThreads>
__global__ void __launch_bounds__(kThreads) build_kernel(BuildTreesArgs args) {
  extern __shared__ __align__(16) std::byte shared[];
  const int32_t stream = blockIdx.x;
  wait_for_previous();
  let_next_start();
  if (stream >= live_rows(args.n_streams)) return;
  const StreamPlan plan = args.plan[stream];
  const TreeNodes nodes = args.nodes.from(plan.first);
  Candidates candidates;
  if (!begin_tree(args, stream, nodes, candidates)) return;
  const int32_t* token = args.token + static_cast<int64_t>(plan.draft) * args.depths * args.k;
  const int32_t budget = min(plan.budget, static_cast<int32_t>(spec::kMaxBudget));
  const bool spine = plan.spine != 0;
  if (budget >= kWideFrom) {
    if (build_wide(*reinterpret_cast<WideTree<kThreads>*>(shared), candidates, budget, spine, token, nodes)) {
      if (threadIdx.x == 0) args.n_nodes[stream] = budget;
      return;
    }
    __syncthreads();                      // its memory is free
  }
  grow_tree<kThreads>(*reinterpret_cast<Tree*>(shared), candidates, budget, spine, token, nodes, args.n_nodes + stream);
}

template <int kThreads>
void build(const BuildTreesArgs& args, cudaStream_t stream) {
  const auto kernel = build_kernel<kThreads>;
  constexpr size_t kBytes = kShared<kThreads>;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(kBytes)), "build_kernel");
  launch_overlapping("build_kernel", kernel, static_cast<unsigned>(args.n_streams.most), kThreads, kBytes, stream, args);
}

}  // namespace

// There are candidates enough for every budget, so with few no budget is large.
void CudaOps::build_trees(const BuildTreesArgs& args) {
  if (args.n_streams.most == 0) return;
  args.k <= 256 ? build<256>(args, stream_) : build<1024>(args, stream_);
}

}  // namespace kdt::cuda
