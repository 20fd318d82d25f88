// How the kernels of the experts find their work: up to 8 or 32 pairs (row, routing rank) of one expert.
// pair = row * k + rank.
#pragma once

#include <algorithm>

#include "cuda/device.cuh"

namespace kdt::cuda {

// With so few pairs no list is made: work item i is that of pair i, if the pair is the first, ninth … of its expert's.
constexpr int kScanPairs = 128;
constexpr int kScanTokens = 8;

// An item of the list: its weights, and how many pairs it has.
struct alignas(16) WorkItem {
  const std::byte *gate_up, *gate_up_scales, *down, *down_scales;
  int64_t count;
};

struct Routing {
  LiveRows n;
  int32_t k;
  const int32_t* expert;      // [n, k]
  const Matrix *gate_up, *down;   // [n_experts]
  // The list, in the order of experts, then of pairs; null where there is none.
  const int32_t* n_items;
  const WorkItem* items;
  const int32_t* pairs;       // [items][8 or 32]
};

// Brings a table of matrices to the L2 cache, by threads [0, n * sizeof(Matrix) / 128].
__device__ inline void prefetch_table(const Matrix* table, int n, int thread) {
  const std::byte* line = reinterpret_cast<const std::byte*>(table) + static_cast<int64_t>(thread) * 128;
  if (line < reinterpret_cast<const std::byte*>(table + n)) asm volatile("prefetch.global.L2 [%0];" :: "l"(line));
}

struct Work {
  const std::byte *weight, *scales;
  int count;                  // 0: nothing to do
};

// By a whole warp, which gets its own copy of the item's pairs in `slots` (shared memory, kTokens of them).
template <int kTokens>
__device__ inline Work find_work(const Routing& r, int item, bool down, int32_t* slots, int lane) {
  Work work{};
  if (r.items) {
    const int n_items = __ldcg(r.n_items);   // what lies past the last item is read, and not used
    const auto from = reinterpret_cast<const unsigned long long*>(r.items + item);
    const auto weight = __ldcg(from + (down ? 2 : 0)), scales = __ldcg(from + (down ? 3 : 1)), count = __ldcg(from + 4);
    const int pair = lane < kTokens ? __ldcg(r.pairs + static_cast<int64_t>(item) * kTokens + lane) : 0;
    if (item >= n_items) return work;
    if (lane < kTokens) slots[lane] = pair;
    work = {reinterpret_cast<const std::byte*>(weight), reinterpret_cast<const std::byte*>(scales),
            static_cast<int>(count)};
  } else {
    constexpr int kChunks = kScanPairs / kWarp;
    const int n_pairs = r.n.get() * r.k, most = r.n.most * r.k;   // choices past the live rows are read, and not used
    const int expert = __ldcg(r.expert + item);
    int choice[kChunks];
    bool same[kChunks];
    int before = 0, all = 0;                 // pairs of this expert
#pragma unroll
    for (int c = 0; c < kChunks; ++c) choice[c] = c * kWarp + lane < most ? __ldcg(r.expert + c * kWarp + lane) : -1;
    if (item >= n_pairs) return work;
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      same[c] = c * kWarp + lane < n_pairs && choice[c] == expert;
      before += __popc(__ballot_sync(0xffffffffu, same[c] && c * kWarp + lane < item));
      all += __popc(__ballot_sync(0xffffffffu, same[c]));
    }
    if (before % kScanTokens != 0) return work;
    int ordinal = 0;
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const unsigned together = __ballot_sync(0xffffffffu, same[c]);
      const int mine = ordinal + __popc(together & ((1u << lane) - 1)) - before;
      if (same[c] && mine >= 0 && mine < kScanTokens) slots[mine] = c * kWarp + lane;
      ordinal += __popc(together);
    }
    const Matrix* matrix = (down ? r.down : r.gate_up) + expert;
    work = {static_cast<const std::byte*>(matrix->data), static_cast<const std::byte*>(matrix->scales),
            min(all - before, kScanTokens)};
  }
  __syncwarp();
  return work;
}

// Makes the list, of items of up to `tokens` pairs.
struct ListArgs {
  LiveRows n;
  int32_t k, n_experts, tokens;
  const int32_t* expert;
  const Matrix *gate_up, *down;
  int32_t* n_items;             // and a zero after it
  WorkItem* items;
  int32_t* pairs;
};
void list_work(cudaStream_t stream, const ListArgs& args);
// The most items there can be.
constexpr int64_t most_items(int64_t n_pairs, int64_t n_experts, int64_t tokens) {
  return std::min(n_pairs, n_experts + n_pairs / tokens);
}

}  // namespace kdt::cuda
