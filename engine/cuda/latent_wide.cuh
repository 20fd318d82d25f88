// The fold of latent attention on sm_90a for several queries of an item, of 512 + 64 dims: queries are the 64 rows of wgmma, so a
// warp has whole rows of scores, and their weights are an operand where they are. Items are those of 32 rows, a lane each, then
// those of the next 32.
//
// A block is three warpgroups. One brings queries and tiles of keys; the other two hold one half each of the value dims of all
// queries. Tiles go by turns: the first scores and weighs even tiles, the second odd ones, each while the other is busy; of a tile
// that is not its own a warpgroup takes the weights from shared memory. A tile's keys lie in one of two slots, in groups of 64
// dims [rows][64] as latent_fold.cuh has them; its weights take the place of the rotated keys, which its scores alone needed.
//
//   full      keys of a slot have come             scored    weights, m and keep of a slot's tile are there
//   empty     both are done with a slot            queries_full, queries_empty: the same of an item and its queries
//
// Sums have the bits of latent_fold.cuh's: the same sixteens of dims and keys in the same order.
#pragma once

#include "cuda/latent_plan.cuh"
#include "cuda/tensor_map.cuh"

namespace kdt::cuda {

constexpr int kWideDims = 576, kWideValueTiles = 32;  // of 16 dims
constexpr int kGroupThreads = 4 * kWarp, kWideThreads = 3 * kGroupThreads;
constexpr int kDimGroups = kWideDims / 64, kGroupBytes = kTile * 128;   // of a tile, or of the queries
constexpr int kSlotBytes = kDimGroups * kGroupBytes, kWeightsAt = kWideValueTiles / 4 * kGroupBytes;
constexpr int kDone = -1;                            // an item's tiles: there are no more items

struct WideFold {
  CUtensorMap pages, queries;           // [page][64 positions][dims], [row][head][dims]
  MlaFold fold;
};

struct WideTurns {
  uint64_t full[2], empty[2], scored[2], queries_full, queries_empty;
  float2 most_keep[2][kColumns];        // m after a slot's tile, and 2^(m before - m)
  float l[2][2][kColumns];              // by turns of items: of each warpgroup's tiles
};

struct WideShared : WideTurns {
  int32_t end[kColumns], column[kColumns];   // as in FoldShared
  int32_t begin, n_tiles, segment;      // of the item
  int32_t next[2];
};

struct WideMemory {
  SharedAddress slots;
  __device__ SharedAddress slot(int i) const { return slots + i * kSlotBytes; }
  __device__ SharedAddress weights(int i) const { return slot(i) + kWeightsAt; }
  __device__ SharedAddress queries() const { return slots + 2 * kSlotBytes; }
};
constexpr int64_t kWideBytes = 3 * kSlotBytes + static_cast<int64_t>(sizeof(WideShared));

// What a consumer has of its warp's sixteen queries: a thread has rows lane / 4 and 8 below, of 256 value dims.
class WideSums {
 public:
  // Begins a segment.
  __device__ WideSums(const int32_t* end, const int32_t* column) {
    row_ = threadIdx.x % kGroupThreads / kWarp * 16 + static_cast<int>(threadIdx.x) % kWarp / 4;
#pragma unroll
    for (int i = 0; i < 2; ++i) end_[i] = end[row_ + i * 8], column_[i] = column[row_ + i * 8];
  }

  // Begins a tile's scores; wgmma_wait, then weigh.
  __device__ void score(const WideMemory& memory, int slot) {
    wgmma_fence();
    const uint64_t query = wgmma_operand(memory.queries()), key = wgmma_operand(memory.slot(slot));
    wgmma_first(s_, query, key);
#pragma unroll
    for (int step = 1; step < kDimGroups * 4; ++step) {
      const int at = step / 4 * (kGroupBytes >> 4) + step % 4 * 2;   // 32 bytes a step
      wgmma<false>(s_, query + at, key + at);
    }
    wgmma_commit();
  }

  // What a tile from `first` on does to the queries' largest scores.
  __device__ void find_most(int first, float scale) {
    const int lane = threadIdx.x % kWarp;
    wgmma_begin(s_);
    if (__all_sync(0xffffffffu, first + kTile <= min(end_[0], end_[1]))) {
#pragma unroll
      for (int i = 0; i < 32; ++i) scaled_[i] = __fmul_rn(s_[i], scale);
    } else {
#pragma unroll
      for (int i = 0; i < 32; ++i) {
        const int key = i / 4 * 8 + i % 2, seen = end_[i % 4 / 2] - first - lane % 4 * 2;
        scaled_[i] = key < seen ? __fmul_rn(s_[i], scale) : -INFINITY;
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float top[4] = {scaled_[i * 2], scaled_[i * 2 + 1], scaled_[i * 2 + 4], scaled_[i * 2 + 5]};
#pragma unroll
      for (int j = 4; j < 16; ++j) top[j % 4] = fmaxf(top[j % 4], scaled_[j / 2 * 4 + i * 2 + j % 2]);
      top_[i] = fmaxf(fmaxf(top[0], top[1]), fmaxf(top[2], top[3]));
      top_[i] = fmaxf(top_[i], __shfl_xor_sync(0xffffffffu, top_[i], 1));
      top_[i] = fmaxf(top_[i], __shfl_xor_sync(0xffffffffu, top_[i], 2));
    }
  }

  // The tile's weights.
  __device__ void weigh(WideTurns& shared, int slot) {
    float base[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float before = most_[i];
      most_[i] = fmaxf(before, top_[i]);
      base[i] = most_[i] == -INFINITY ? 0.0f : most_[i];   // nothing seen yet: weights are 2^-inf, not NaN
      keep_[i] = before == most_[i] ? 1.0f : exp2_fast(before - most_[i]);
      if (threadIdx.x % 4 == 0) shared.most_keep[slot][row_ + i * 8] = make_float2(most_[i], keep_[i]);
    }
#pragma unroll
    for (int k = 0; k < kKeyGroups; ++k)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = k * 8 + i * 2;
        const __nv_bfloat162 p =
            __floats2bfloat162_rn(exp2_fast(scaled_[at] - base[i % 2]), exp2_fast(scaled_[at + 1] - base[i % 2]));
        p_[k][i] = *reinterpret_cast<const uint32_t*>(&p);
      }
    hold_weights();
  }

  // They are in shared memory for the other warpgroup.
  __device__ void show_weights(const WideMemory& memory, WideTurns& shared, int slot) {
    constexpr int kBarrier = 3;         // and 4
    const int lane = threadIdx.x % kWarp;
    meet(kBarrier + slot, kGroupThreads);   // all four warps' scores have read the keys that weights take the place of
    const SharedAddress to = memory.weights(slot) + (row_ / 16 * 16 + lane % 16) * 128;
#pragma unroll
    for (int k = 0; k < kKeyGroups; ++k) store_matrices(to + (((k * 2 + lane / 16) ^ (lane % 8)) << 4), p_[k]);
    fence_shared();
    __syncwarp();
    if (lane == 0) barrier_arrive(&shared.scored[slot]);
  }

  // Begins to add the values of the tile that was weighed, by its weights in registers.
  __device__ void add_own(const WideMemory& memory, int slot, int group) {
    rescale();
    const uint64_t value = values(memory, slot, group);
    wgmma_begin(o_);
    hold_weights();
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kKeyGroups; ++k) wgmma_across(o_, p_[k], value + k * (16 * 128 >> 4));
    wgmma_commit();
#pragma unroll
    for (int k = 0; k < kKeyGroups; ++k) mma(l_, p_[k], {0x3f803f80u, 0x3f803f80u});
  }
  // The same of a tile that the other warpgroup weighed.
  __device__ void add_other(const WideMemory& memory, const WideTurns& shared, int slot, int group) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float2 of_row = shared.most_keep[slot][row_ + i * 8];
      most_[i] = of_row.x, keep_[i] = of_row.y;
    }
    rescale();
    const uint64_t value = values(memory, slot, group), weight = wgmma_operand(memory.weights(slot));
    wgmma_begin(o_);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kKeyGroups; ++k) wgmma_across(o_, weight + k * 2, value + k * (16 * 128 >> 4));
    wgmma_commit();
  }
  __device__ void wait_own() {
    wgmma_wait();
    wgmma_begin(o_);
    hold_weights();
  }
  __device__ void wait_other() {
    wgmma_wait();
    wgmma_begin(o_);
  }

  // The warpgroup's part of l, for both to take: after the segment's last tile has begun to be added.
  __device__ void show_l(WideTurns& shared, int group, int turn) const {
    if (threadIdx.x % 4 == 0) shared.l[turn][group][row_] = l_[0], shared.l[turn][group][row_ + 8] = l_[2];
  }
  // o / l as fp16, and m, l: the sum of both's.
  __device__ void store_means(const WideTurns& shared, uint16_t* means, float2* extremes, int n_segments, int segment,
                              int group, int turn) const {
    const int lane = threadIdx.x % kWarp;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (column_[i] < 0) continue;
      const int64_t at = static_cast<int64_t>(column_[i]) * n_segments + segment;
      const float l = __fadd_rn(shared.l[turn][0][row_ + i * 8], shared.l[turn][1][row_ + i * 8]), by = __frcp_rn(l);
      if (group == 0 && lane % 4 == 0) extremes[at] = make_float2(most_[i], l);
      uint16_t* to = means + at * kMaxValueDims + group * 256 + lane % 4 * 8;
      const auto two = [&](int e) { return two_halves(__fmul_rn(o_[e], by), __fmul_rn(o_[e + 1], by)); };
#pragma unroll
      for (int e = i * 2; e < 128; e += 16)                    // of 32 dims: a line of 64 bytes a query
        *reinterpret_cast<uint4*>(to + e / 16 * 32) = make_uint4(two(e), two(e + 4), two(e + 8), two(e + 12));
    }
  }

 private:
  __device__ static uint64_t values(const WideMemory& memory, int slot, int group) {
    return wgmma_operand(memory.slot(slot) + group * 4 * kGroupBytes, kGroupBytes);
  }
  __device__ void hold_weights() {
#pragma unroll
    for (int k = 0; k < kKeyGroups; ++k)
#pragma unroll
      for (int i = 0; i < 4; ++i) asm volatile("" : "+r"(p_[k][i]) :: "memory");
  }
  __device__ void rescale() {
    if (!__any_sync(0xffffffffu, keep_[0] != 1.0f || keep_[1] != 1.0f)) return;   // times 1 changes no bit
#pragma unroll
    for (int i = 0; i < 128; ++i) o_[i] = __fmul_rn(o_[i], keep_[i % 4 / 2]);
#pragma unroll
    for (int i = 0; i < 4; ++i) l_[i] = __fmul_rn(l_[i], keep_[i / 2]);
  }

  float o_[128] = {};
  float s_[32], scaled_[32], top_[2];
  uint32_t p_[kKeyGroups][4];
  float l_[4] = {};                     // of the warpgroup's own tiles
  float most_[2] = {-INFINITY, -INFINITY}, keep_[2];
  int row_, end_[2], column_[2];
};

__device__ inline void leave(uint64_t* barrier) {
  __syncwarp();
  if (threadIdx.x % kWarp == 0) barrier_arrive(barrier);
}

// The warpgroups that fold. used[slot]: tiles that have gone through it.
template <int kGroup>
__device__ void consume(const MlaFold& p, const WideMemory& memory, WideShared& shared) {
  int used[2] = {};
  for (int number = 0;; ++number) {
    barrier_wait(&shared.queries_full, number % 2);
    const int n_tiles = shared.n_tiles, segment = shared.segment;
    if (n_tiles == kDone) return;
    int first = shared.begin;
    WideSums sums(shared.end, shared.column);
    if (kGroup == 1 && n_tiles == 1) leave(&shared.queries_empty);
    for (int t = 0; t < n_tiles; t += 2, first += 2 * kTile) {
      const bool two = t + 1 < n_tiles;
      if constexpr (kGroup == 0) {
        barrier_wait(&shared.full[0], used[0] % 2);
        sums.score(memory, 0);
        wgmma_wait();
        if (t + 2 >= n_tiles) leave(&shared.queries_empty);
        sums.find_most(first, p.scale);
        sums.weigh(shared, 0);
        sums.show_weights(memory, shared, 0);
        sums.add_own(memory, 0, 0);
        sums.wait_own();
        leave(&shared.empty[0]);
        if (two) {
          barrier_wait(&shared.scored[1], used[1] % 2);
          barrier_wait(&shared.full[1], used[1] % 2);
          sums.add_other(memory, shared, 1, 0);
          sums.wait_other();
          leave(&shared.empty[1]);
        }
      } else if (two) {
        barrier_wait(&shared.full[1], used[1] % 2);
        sums.score(memory, 1);
        barrier_wait(&shared.scored[0], used[0] % 2);
        barrier_wait(&shared.full[0], used[0] % 2);
        wgmma_wait();
        if (t + 3 >= n_tiles) leave(&shared.queries_empty);
        sums.add_other(memory, shared, 0, 1);
        sums.find_most(first + kTile, p.scale);
        sums.weigh(shared, 1);
        sums.wait_other();
        leave(&shared.empty[0]);
        sums.show_weights(memory, shared, 1);
        sums.add_own(memory, 1, 1);
        sums.wait_own();
        leave(&shared.empty[1]);
      } else {
        barrier_wait(&shared.scored[0], used[0] % 2);
        barrier_wait(&shared.full[0], used[0] % 2);
        sums.add_other(memory, shared, 0, 1);
        sums.wait_other();
        leave(&shared.empty[0]);
      }
      ++used[0], used[1] += two;
    }
    constexpr int kBarrier = 1;
    sums.show_l(shared, kGroup, number % 2);
    meet(kBarrier, 2 * kGroupThreads);
    sums.store_means(shared, p.means, p.extremes, p.n_segments, segment, kGroup, number % 2);
  }
}

// The warpgroup that brings keys and queries: one thread by the copy engine, but for tiles that are not a whole page. Of those a
// thread copies every eighth chunk of every sixteenth row.
class Bringer {
 public:
  __device__ Bringer(const WideFold& p, const WideMemory& memory, WideShared& shared) : p_(p), memory_(memory), shared_(shared) {}

  // Rows of items begin at this one of the pass from here on.
  __device__ void rows_from(int first_row) { first_row_ = first_row; }

  __device__ void tile(const Item& item, int64_t pages, int t) {
    const int slot = t % 2, first = item.begin + t * kTile, seen = min(item.end - first, kTile);
    const int in_page = min(max(item.visible - first, 0), seen);
    const int64_t page = __shfl_sync(0xffffffffu, pages, t);
    const int before = slot == 0 ? used_[0] : used_[1];
    if (before > 0) barrier_wait(&shared_.empty[slot], (before - 1) % 2);
    used_[0] += slot == 0, used_[1] += slot;
    uint64_t* full = &shared_.full[slot];
    if (in_page < kTile) {
      copy(item, page, slot, first, seen, in_page);
      barrier_arrive(full);
    } else if (thread() != (1 + slot) * kWarp) {               // other warps than that of the queries
      barrier_arrive(full);
    } else {
      barrier_arrive(full, kSlotBytes);
#pragma unroll
      for (int group = 0; group < kDimGroups; ++group)
        bring_box(memory_.slot(slot) + group * kGroupBytes, p_.pages, group * 64, 0, static_cast<int>(page), full);
    }
    if (const int later = thread() - t; later == 2 && item.begin + thread() * kTile < min(item.end, item.visible))
      ask_for(p_.fold.pages + pages * p_.fold.page_stride, kTile * p_.fold.row_bytes);
  }

  // end(row) is what a row of the item sees. All lanes call it alike.
  template <class F>
  __device__ void queries(const Item& item, int n_tiles, const F& end) {
    const MlaFold& p = p_.fold;
    if (items_ > 0) barrier_wait(&shared_.queries_empty, (items_ - 1) % 2);
    ++items_;
    const int column = thread() % kColumns, row = item.first + column / p.heads;
    const int head = p.heads * item.head_block + column % p.heads, sees = end(row);
    const bool seen = column < item.n * p.heads && head < p.n_heads && sees > 0;
    shared_.end[column] = seen ? sees : 0, shared_.column[column] = seen ? (first_row_ + row) * p.n_heads + head : -1;
    if (thread() > 0) return barrier_arrive(&shared_.queries_full);
    shared_.begin = item.begin, shared_.n_tiles = n_tiles, shared_.segment = item.segment;
    barrier_arrive(&shared_.queries_full, kDimGroups * p.heads * p.group_rows * 128);
#pragma unroll
    for (int group = 0; group < kDimGroups; ++group)
      bring_box(memory_.queries() + group * kGroupBytes, p_.queries, group * 64, p.heads * item.head_block,
                first_row_ + item.first, &shared_.queries_full);
  }
  __device__ void done() {
    if (items_ > 0) barrier_wait(&shared_.queries_empty, (items_ - 1) % 2);
    if (thread() == 0) shared_.n_tiles = kDone;
    barrier_arrive(&shared_.queries_full);
  }

  // The block's next item.
  __device__ int next() {
    constexpr int kBarrier = 2;
    int32_t& shared = shared_.next[turn_++ % 2];
    if (thread() == 0) shared = static_cast<int>(gridDim.x) + atomicAdd(p_.fold.taken, 1);
    meet(kBarrier, kGroupThreads);
    return shared;
  }

 private:
  __device__ static int thread() { return threadIdx.x % kGroupThreads; }

  __device__ void copy(const Item& item, int64_t page, int slot, int first, int seen, int in_page) const {
    const MlaFold& p = p_.fold;
    int node[4] = {};                   // of the thread's rows, where they are not in a page
    if (in_page < seen) {
      int ancestor = p.pass.first + first_row_ + item.first, at = item.own - first;
      for (; at >= seen; --at) ancestor = p.pass.parent[ancestor];
      for (; at >= in_page; --at) {
#pragma unroll
        for (int i = 0; i < 4; ++i)
          if (at == row_ + i * 16) node[i] = ancestor;
        ancestor = p.pass.parent[ancestor];
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int r = row_ + i * 16;
      const std::byte* from = r < in_page ? p.pages + page * p.page_stride + r * p.row_bytes
                                          : p.scratch + static_cast<int64_t>(node[i]) * p.row_bytes;
      copy_row(latent_chunk(memory_.slot(slot), kTile, 0, r, chunk_), kTile, from, chunk_, kDimGroups * 8,
               r < seen ? kDimGroups * 8 : 0);
    }
    cp_async_commit();
    cp_async_wait<0>();
    fence_shared();
  }

  const WideFold& p_;
  const WideMemory& memory_;
  WideShared& shared_;
  const int chunk_ = thread() % 8, row_ = thread() / 8;
  int used_[2] = {}, items_ = 0, turn_ = 0, first_row_ = 0;
};

__device__ inline void bring(const WideFold& wide, const WideMemory& memory, WideShared& shared) {
  const MlaFold& p = wide.fold;
  Bringer bringer(wide, memory, shared);
  bool begun = false;             // the kernel before has ended
  const auto begin = [&] {
    wait_for_previous();
    let_next_start();
    begun = true;
  };
  int number = blockIdx.x, before = 0;   // items of earlier rows
  for (int first_row = 0; first_row < p.pass.rows; first_row += kWarp) {
    Pass pass = p.pass;
    pass.first += first_row, pass.rows = min(kWarp, p.pass.rows - first_row);
    const LanePlan plan = plan_of_lane(pass, p.group_rows, p.streams);
    const int n_items = plan.plan.n_items * p.head_blocks;
    bringer.rows_from(first_row);
    for (; number < before + n_items; number = bringer.next()) {
      Item item;
      const int of_rows = number - before;
      item.head_block = of_rows % p.head_blocks;
      int end = 0;                // of the lane's row
      const bool found = find_item(plan, p.group_rows, of_rows / p.head_blocks, item, end);
      const int n_tiles = found ? static_cast<int>(divide_up(item.end - item.begin, kTile)) : 0;
      const int64_t pages = found ? pages_of(item) : 0;
      if (!begun) {
        if (found && threadIdx.x < kWarp) ask_for_pages(p, item, pages);
        begin();
      }
      if (!found) continue;
      bringer.queries(item, n_tiles, [&](int row) { return __shfl_sync(0xffffffffu, end, row % kWarp); });
      for (int t = 0; t < n_tiles; ++t) bringer.tile(item, pages, t);
    }
    before += n_items;
  }
  if (!begun) begin();
  bringer.done();
}

__device__ inline void begin_turns(WideShared& shared) {
  if (threadIdx.x == 0) {
    for (int i = 0; i < 2; ++i) {
      barrier_init(&shared.full[i], kGroupThreads);
      barrier_init(&shared.empty[i], 8);
      barrier_init(&shared.scored[i], 4);
    }
    barrier_init(&shared.queries_full, kGroupThreads);
    barrier_init(&shared.queries_empty, 8);
    fence_shared();               // for the copy engine
  }
  __syncthreads();
}

__global__ void __launch_bounds__(kWideThreads, 1) wide_fold_kernel(const __grid_constant__ WideFold wide) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) std::byte memory_bytes[];
  const MlaFold& p = wide.fold;
  const WideMemory memory{shared_address(memory_bytes)};
  auto& shared = *reinterpret_cast<WideShared*>(memory_bytes + 3 * kSlotBytes);
  begin_turns(shared);
  const int group = warpgroup();
  if (group == 0) {
    give_registers<72>();
    bring(wide, memory, shared);
  } else {
    take_registers<216>();
    if (group == 1) consume<0>(p, memory, shared);
    else consume<1>(p, memory, shared);
  }
#endif
}

}  // namespace kdt::cuda
