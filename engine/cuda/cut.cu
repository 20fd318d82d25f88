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

constexpr int kMostThreads = 1024;
constexpr int kStreamNodes = 64;          // of each automatic stream, when all that there may be are
constexpr int kMaxNodes = 4096;           // of all of them

constexpr int kPoints = static_cast<int>(spec::Outlook::kPoints);

struct CutLaunch {
  CutArgs args;
  int64_t sizes[spec::CostTable::kEntries];   // CostTable::kRows
  double points[kPoints];                     // Outlook::kNodes
  int32_t most_nodes;                         // there is shared memory for
};

// Of every stream; in dynamic shared memory behind the nodes.
struct StreamShare {
  int32_t first;                          // place of its nodes among those of all
  int32_t n_nodes;
  int32_t taken;
  int32_t calibration;
};

// In front of what there is of every node, stream after stream, and of every stream: as much as the launch may need, since a
// block that takes most of the shared memory keeps others waiting.
struct Shared {
  double costs[spec::CostTable::kEntries];
  int64_t sizes[spec::CostTable::kEntries];
  double best_value[kMostThreads];
  int32_t best_n[kMostThreads];
  double warp_sum[kMostThreads / kWarp];
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

// In place: values become their sums from the first on. Always in the same order, whatever the number of threads does to the
// last bits is the same on every rank. All threads call it.
__device__ void running_sums(double* values, int32_t n, double first, double* warp_sum) {
  const int32_t thread = static_cast<int32_t>(threadIdx.x), lane = thread % kWarp, warp = thread / kWarp;
  const auto threads = static_cast<int32_t>(blockDim.x);
  for (int32_t begin = 0; begin < n; begin += threads) {
    const int32_t i = begin + thread;
    double sum = i < n ? values[i] : 0.0;
    for (int32_t step = 1; step < kWarp; step *= 2) {
      const double before = __shfl_up_sync(0xffffffffu, sum, step);
      if (lane >= step) sum += before;
    }
    if (lane == kWarp - 1) warp_sum[warp] = sum;
    __syncthreads();
    double before = first;
    for (int32_t other = 0; other < warp; ++other) before += warp_sum[other];
    if (i < n) values[i] = before + sum;
    for (int32_t other = warp; other < threads / kWarp; ++other) before += warp_sum[other];
    first = before;
    __syncthreads();
  }
}

__global__ void __launch_bounds__(kMostThreads) cut_kernel(CutLaunch launch) {
  extern __shared__ double dynamic[];
  const CutArgs& args = launch.args;
  const int32_t most_nodes = launch.most_nodes;
  wait_for_previous();
  let_next_start();
  Shared& s = *reinterpret_cast<Shared*>(dynamic);
  double* const gains = reinterpret_cast<double*>(&s + 1);     // of every node: probability that it is accepted
  double* const least = gains + most_nodes;                    // the least of its stream up to the node; then tokens by nodes taken
  auto* shares = reinterpret_cast<StreamShare*>(least + most_nodes);
  auto* parents = reinterpret_cast<uint16_t*>(shares + args.n_streams.most);   // then the nodes in the order they are taken
  const auto threads = static_cast<int32_t>(blockDim.x);
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
  for (int32_t i = thread; i < n; i += threads) {
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
      shares[i].n_nodes = min(shares[i].n_nodes, most_nodes / n_automatic);
      first += shares[i].n_nodes;
    }
    s.n_nodes = first;
  }
  __syncthreads();

  // What a node's draft is worth by itself, then along its path.
  const int32_t n_nodes = s.n_nodes;
  for (int32_t i = thread; i < n_nodes; i += threads) {
    const int32_t stream = stream_of(shares, n, i), node = i - shares[stream].first + 1;
    const TreeNodes nodes = args.nodes.from(args.plan[stream].first);
    const int32_t parent = nodes.parent[node];
    const double q = exp(static_cast<double>(nodes.weight[node]) - static_cast<double>(nodes.weight[parent]));
    gains[i] = spec::Calibration::accept_probability(tables.calibration[shares[stream].calibration], q);
    parents[i] = static_cast<uint16_t>(parent);
  }
  __syncthreads();
  for (int32_t i = thread; i < n; i += threads) {
    double* gain = gains + shares[i].first;
    double smallest = INFINITY;
    for (int32_t node = 0; node < shares[i].n_nodes; ++node) {
      const int32_t at = shares[i].first + node, parent = parents[at];
      const double value = (parent == 0 ? 1.0 : gain[parent - 1]) * gain[node];
      gain[node] = value;
      smallest = value < smallest ? value : smallest;
      least[at] = smallest;
    }
  }
  __syncthreads();
  uint16_t* taken = parents;               // nobody needs parents any more
  for (int32_t i = thread; i < n_nodes; i += threads) {
    const int32_t stream = stream_of(shares, n, i);
    int32_t place = i - shares[stream].first;
    for (int32_t other = 0; other < n; ++other)
      if (other != stream)
        place += nodes_before(least + shares[other].first, shares[other].n_nodes, least[i], other < stream);
    taken[place] = static_cast<uint16_t>(i);
  }
  __syncthreads();
  for (int32_t i = thread; i < n_nodes; i += threads) least[i] = gains[taken[i]];
  __syncthreads();
  running_sums(least, n_nodes, tables.n_roots, s.warp_sum);

  // The best number of nodes; of equals the least.
  const auto tokens_of = [&](int32_t n) { return n == 0 ? static_cast<double>(tables.n_roots) : least[n - 1]; };
  const auto seconds_of = [&](int32_t n) {
    return spec::CostTable::at(s.sizes, s.costs, s.base_rows + n);
  };
  const int32_t most = max(0, min(n_nodes, tables.most_rows - s.base_rows));
  double best = -INFINITY;
  int32_t best_n = 0;
  for (int32_t i = thread; i <= most; i += threads) {
    const double value = __dsub_rn(tokens_of(i), __dmul_rn(tables.lambda, seconds_of(i)));
    if (value > best) best = value, best_n = i;
  }
  s.best_value[thread] = best;
  s.best_n[thread] = best_n;
  __syncthreads();
  for (int32_t half = threads / 2; half > 0; half /= 2) {
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
  for (int32_t i = thread; i < s.best_n[0]; i += threads) atomicAdd(&shares[stream_of(shares, n, taken[i])].taken, 1);
  __syncthreads();
  for (int32_t i = thread; i < n; i += threads)
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
  const int64_t streams = args.n_streams.most, nodes = std::min<int64_t>(kStreamNodes * streams, kMaxNodes);
  CutLaunch launch{args, {}, {}, static_cast<int32_t>(nodes)};
  std::copy(spec::CostTable::kRows.begin(), spec::CostTable::kRows.end(), launch.sizes);
  std::copy(spec::Outlook::kNodes.begin(), spec::Outlook::kNodes.end(), launch.points);
  const auto shared = [&](int64_t n_nodes) {
    return sizeof(Shared) + static_cast<size_t>(n_nodes) * (2 * sizeof(double) + sizeof(uint16_t)) +
           static_cast<size_t>(streams) * sizeof(StreamShare);
  };
  unsigned threads = 4 * kWarp;
  while (threads < kMostThreads && threads < nodes) threads *= 2;
  const auto most = static_cast<int>(shared(kMaxNodes));   // recorded launches of other sizes keep to it
  check(cudaFuncSetAttribute(cut_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most), "cut_kernel");
  launch_overlapping("cut_kernel", cut_kernel, 1, threads, shared(nodes), stream_, launch);
}

}  // namespace kdt::cuda
