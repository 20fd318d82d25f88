// How many nodes the automatic streams of a round verify: spec::JointCut by one block.
//
// The merge of all streams, best first and each in its own order, needs no queue: a node is taken when the least gain of
// its stream up to it is the largest left. So nodes are ordered by that, then by stream, then within the stream, and a
// node's place is the number of nodes before it in every stream.
#include <algorithm>

#include "cuda/device.cuh"
#include "spec/cut.h"

namespace kdt::cuda {
namespace {

constexpr int kThreads = 1024;
constexpr int kMaxNodes = 4096;           // of all automatic streams; of each its share at most: 64 of 64 streams

constexpr int kPoints = static_cast<int>(spec::Outlook::kPoints);

struct CutLaunch {
  CutArgs args;
  int64_t sizes[spec::CostTable::kEntries];   // CostTable::kRows
  double points[kPoints];                     // Outlook::kNodes
};

// Of every stream; in dynamic shared memory behind the nodes.
struct StreamShare {
  int32_t first;                          // place of its nodes among those of all
  int32_t n_nodes;
  int32_t taken;
  int32_t calibration;
};

struct Shared {
  double gain[kMaxNodes];                 // of every node, stream after stream: probability that it is accepted
  double least[kMaxNodes];                // the least gain of the stream up to the node; then tokens by nodes taken
  uint16_t parent[kMaxNodes];             // then the nodes in the order they are taken
  double costs[spec::CostTable::kEntries];
  int64_t sizes[spec::CostTable::kEntries];
  double best_value[kThreads];
  int32_t best_n[kThreads];
  int32_t base_rows, n_automatic, n_nodes;
};

__device__ inline int32_t stream_of(const StreamShare* shares, int32_t n, int32_t node) {
  int32_t low = 0, high = n;              // of streams without nodes the last has it
  while (high - low > 1) {
    const int32_t middle = (low + high) / 2;
    (shares[middle].first <= node ? low : high) = middle;
  }
  return low;
}

// How many nodes of another stream come before one with this least gain: those that have more; of an earlier stream also
// those that have as much.
__device__ inline int32_t nodes_before(const double* least, int32_t n, double gain, bool earlier) {
  int32_t low = 0, high = n;
  while (low < high) {
    const int32_t middle = (low + high) / 2;
    if (least[middle] > gain || (earlier && least[middle] == gain))
      low = middle + 1;
    else
      high = middle;
  }
  return low;
}

__global__ void __launch_bounds__(kThreads) cut_kernel(CutLaunch launch) {
  extern __shared__ double dynamic[];
  const CutArgs& args = launch.args;
  wait_for_previous();
  let_next_start();
  Shared& s = *reinterpret_cast<Shared*>(dynamic);
  auto* shares = reinterpret_cast<StreamShare*>(&s + 1);
  const int32_t n = live_rows(args.n_streams);
  const auto thread = static_cast<int32_t>(threadIdx.x);
  const spec::CutTables& tables = *args.tables;
  if (thread == 0) {
    s.base_rows = tables.base_rows;
    s.n_automatic = 0;
  }
#pragma unroll
  for (int32_t i = 0; i < static_cast<int32_t>(spec::CostTable::kEntries); ++i) {
    if (thread != i) continue;
    s.costs[i] = tables.verify[i];
    s.sizes[i] = launch.sizes[i];
  }
  __syncthreads();
  for (int32_t i = thread; i < n; i += kThreads) {
    const StreamPlan& plan = args.plan[i];
    const bool drafted = plan.budget > 0, automatic = drafted && plan.calibration >= 0;
    shares[i] = {0, automatic ? args.n_nodes[i] : 0, 0, automatic ? plan.calibration : -1};
    if (automatic)
      atomicAdd(&s.n_automatic, 1);
    else if (drafted)
      atomicAdd(&s.base_rows, args.n_nodes[i]);
  }
  __syncthreads();
  const int32_t n_automatic = s.n_automatic;
  if (n_automatic == 0) {
    if (thread < kPoints) args.outlook[thread] = 0;
    return;
  }
  if (thread == 0) {
    int32_t first = 0;
    for (int32_t i = 0; i < n; ++i) {
      shares[i].first = first;
      shares[i].n_nodes = min(shares[i].n_nodes, kMaxNodes / n_automatic);
      first += shares[i].n_nodes;
    }
    s.n_nodes = first;
  }
  __syncthreads();

  // What a node's draft is worth by itself, then along its path.
  const int32_t n_nodes = s.n_nodes;
  for (int32_t i = thread; i < n_nodes; i += kThreads) {
    const int32_t stream = stream_of(shares, n, i), node = i - shares[stream].first + 1;
    const TreeNodes nodes = args.nodes.from(args.plan[stream].first);
    const int32_t parent = nodes.parent[node];
    const double q = exp(static_cast<double>(nodes.weight[node]) - static_cast<double>(nodes.weight[parent]));
    s.gain[i] = spec::Calibration::accept_probability(tables.calibration[shares[stream].calibration], q);
    s.parent[i] = static_cast<uint16_t>(parent);
  }
  __syncthreads();
  for (int32_t i = thread; i < n; i += kThreads) {
    double* gain = s.gain + shares[i].first;
    double least = INFINITY;
    for (int32_t node = 0; node < shares[i].n_nodes; ++node) {
      const int32_t at = shares[i].first + node, parent = s.parent[at];
      const double value = (parent == 0 ? 1.0 : gain[parent - 1]) * gain[node];
      gain[node] = value;
      least = value < least ? value : least;
      s.least[at] = least;
    }
  }
  __syncthreads();
  uint16_t* taken = s.parent;             // nobody needs parents any more
  for (int32_t i = thread; i < n_nodes; i += kThreads) {
    const int32_t stream = stream_of(shares, n, i);
    int32_t place = i - shares[stream].first;
    for (int32_t other = 0; other < n; ++other)
      if (other != stream)
        place += nodes_before(s.least + shares[other].first, shares[other].n_nodes, s.least[i], other < stream);
    taken[place] = static_cast<uint16_t>(i);
  }
  __syncthreads();
  for (int32_t i = thread; i < n_nodes; i += kThreads) s.least[i] = s.gain[taken[i]];
  __syncthreads();
  if (thread == 0) {                      // in the order of choose_nodes
    double tokens = tables.n_roots;
    for (int32_t i = 0; i < n_nodes; ++i) s.least[i] = tokens += s.least[i];
  }
  __syncthreads();

  // The best number of nodes; of equals the least.
  const auto tokens_of = [&](int32_t n) { return n == 0 ? static_cast<double>(tables.n_roots) : s.least[n - 1]; };
  const auto seconds_of = [&](int32_t n) {
    return spec::CostTable::at(s.sizes, s.costs, s.base_rows + n);
  };
  const int32_t most = max(0, min(n_nodes, tables.most_rows - s.base_rows));
  double best = -INFINITY;
  int32_t best_n = 0;
  for (int32_t i = thread; i <= most; i += kThreads) {
    const double value = __dsub_rn(tokens_of(i), __dmul_rn(tables.lambda, seconds_of(i)));
    if (value > best) best = value, best_n = i;
  }
  s.best_value[thread] = best;
  s.best_n[thread] = best_n;
  __syncthreads();
  for (int32_t half = kThreads / 2; half > 0; half /= 2) {
    if (thread < half) {
      const double value = s.best_value[thread + half];
      const int32_t at = s.best_n[thread + half];
      if (value > s.best_value[thread] || (value == s.best_value[thread] && at < s.best_n[thread])) {
        s.best_value[thread] = value;
        s.best_n[thread] = at;
      }
    }
    __syncthreads();
  }
  for (int32_t i = thread; i < s.best_n[0]; i += kThreads) atomicAdd(&shares[stream_of(shares, n, taken[i])].taken, 1);
  __syncthreads();
  for (int32_t i = thread; i < n; i += kThreads)
    if (shares[i].calibration >= 0) args.n_nodes[i] = shares[i].taken;

#pragma unroll
  for (int i = 0; i < kPoints; ++i) {     // constant places: launch parameters are not copied
    if (thread != i) continue;
    const double nodes = launch.points[i] * n_automatic;
    const int32_t whole = min(static_cast<int32_t>(nodes), n_nodes);
    const double rest = whole < n_nodes ? (nodes - whole) * (tokens_of(whole + 1) - tokens_of(whole)) : 0.0;
    args.outlook[i] = (tokens_of(whole) - tables.n_roots + rest) / n_automatic;
  }
}

}  // namespace

void CudaOps::cut(const CutArgs& args) {
  if (args.n_streams.most == 0) return;
  CutLaunch launch{args, {}, {}};
  std::copy(spec::CostTable::kRows.begin(), spec::CostTable::kRows.end(), launch.sizes);
  std::copy(spec::Outlook::kNodes.begin(), spec::Outlook::kNodes.end(), launch.points);
  const size_t shared = sizeof(Shared) + static_cast<size_t>(args.n_streams.most) * sizeof(StreamShare);
  const auto bytes = static_cast<int>(shared);
  check(cudaFuncSetAttribute(cut_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), "cut_kernel");
  launch_overlapping("cut_kernel", cut_kernel, 1, kThreads, shared, stream_, launch);
}

}  // namespace kdt::cuda
