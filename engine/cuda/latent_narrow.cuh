// The fold of latent attention by items of up to 64 queries, on any card: eight warps that copy, score and add by turns.
#pragma once

#include "cuda/latent_plan.cuh"

namespace kdt::cuda {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
template <int kQ, int kM>
using LatentFold = WgmmaFold<kQ, kM>;
#else
template <int kQ, int kM>
using LatentFold = Fold<kQ, kM>;
#endif

// A block's part of shared memory, and how tiles come to it.
struct TileRing {
  FoldMemory memory;
  SharedAddress tiles;
  int tile_bytes, chunks;
  __device__ SharedAddress stage(int tile, int stages) const { return stages > 1 && tile % 2 == 1 ? tiles + tile_bytes : tiles; }
};

__device__ void load_tile(const MlaFold& p, const TileRing& ring, const Item& item, int64_t pages, int tile) {
  const int first = item.begin + tile * kTile, seen = min(item.end - first, kTile), row = p.pass.first + item.first;
  const int in_page = min(max(item.visible - first, 0), seen);
  const std::byte* page = p.pages + __shfl_sync(0xffffffffu, pages, tile) * p.page_stride;
  // Eight threads a row, 32 rows at a time: which node the row is of, where it is not in a page.
  const int chunk = threadIdx.x % 8, slot = threadIdx.x / 8;
  int node[2] = {};
  if (in_page < seen) {
    int ancestor = row, at = item.own - first;
    for (; at >= seen; --at) ancestor = p.pass.parent[ancestor];
    for (; at >= in_page; --at) {
      if (at == slot) node[0] = ancestor;
      if (at == slot + 32) node[1] = ancestor;
      ancestor = p.pass.parent[ancestor];
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int r = slot + half * 32;
    const std::byte* from = r < in_page ? page + r * p.row_bytes : p.scratch + static_cast<int64_t>(node[half]) * p.row_bytes;
    copy_row(latent_chunk(ring.stage(tile, p.stages), kTile, ring.memory.key_row, r, chunk), kTile, from, chunk, ring.chunks,
             r < seen ? ring.chunks : 0);
  }
}

template <int kQ>
__device__ void load_queries(const MlaFold& p, const TileRing& ring, const FoldShared& shared) {
  const int chunk = threadIdx.x % 8;
  for (int column = threadIdx.x / 8; column < kQ * 8; column += 32) {
    const int64_t at = shared.column[column];
    const bf16* from = p.queries + max(at, int64_t{0}) * p.query_dims;
    copy_row(latent_chunk(ring.memory.queries, kQ * 8, ring.memory.key_row, column, chunk), kQ * 8, from, chunk,
             ring.memory.key_row / 16, at >= 0 ? ring.memory.key_row / 16 : 0);
  }
}

// The item's first tiles are on their way.
template <int kQ, int kM>
__device__ void fold_item(const MlaFold& p, const TileRing& ring, FoldShared& shared, const Item& item, int64_t pages) {
  const int n_tiles = static_cast<int>(divide_up(item.end - item.begin, kTile));
  load_queries<kQ>(p, ring, shared);
  cp_async_commit();
  cp_async_commit();             // empty: from now on a group a tile
  LatentFold<kQ, kM> fold;
  for (int t = 0; t < n_tiles; ++t) {
    if (p.stages > 1) cp_async_wait<1>();
    else cp_async_wait<0>();
    fence_shared();
    __syncthreads();
    const SharedAddress keys = ring.stage(t, p.stages);
    const int first = item.begin + t * kTile;
    if constexpr (kHasWgmma) fold.tile(ring.memory, shared, keys, first, p.scale, t % 2);
    else fold.tile(ring.memory, shared, keys, keys, first, p.scale, t % 2);
    __syncthreads();
    if (t + p.stages < n_tiles) load_tile(p, ring, item, pages, t + p.stages);
    cp_async_commit();
  }
  fold.store_means(ring.memory, shared, n_tiles % 2, p.means, p.extremes, p.n_segments, item.segment);
}

// The item's columns, for queries whose row sees up to seen(row).
template <class F>
__device__ void set_columns(const MlaFold& p, FoldShared& shared, const Item& item, const F& seen) {
  if (threadIdx.x < kColumns) {
    const int column = threadIdx.x, row = item.first + column / p.heads, head = p.heads * item.head_block + column % p.heads;
    const int end = seen(row), sees = column < item.n * p.heads && head < p.n_heads ? end : 0;
    shared.begin[column] = 0, shared.end[column] = sees;
    shared.column[column] = sees > 0 ? row * p.n_heads + head : -1;
  }
  begin_fold(shared);
}

template <int kM>
__global__ void __launch_bounds__(kFoldThreads, kM == 1 ? 2 : 1) fold_kernel(const __grid_constant__ MlaFold p) {
  extern __shared__ __align__(1024) std::byte memory[];
  TileRing ring;
  ring.memory.key_row = ring.memory.value_row = p.query_dims * 2;
  ring.memory.dim_groups = p.query_dims / 64, ring.memory.value_tiles = p.value_tiles;
  ring.chunks = p.row_bytes / 16, ring.tile_bytes = kTile * ring.memory.key_row;
  ring.tiles = shared_address(memory);
  ring.memory.queries = ring.tiles + p.stages * ring.tile_bytes;
  ring.memory.weights = ring.memory.queries + p.columns * ring.memory.key_row;
  std::byte* behind = memory + (ring.memory.weights - ring.tiles);
  auto& shared = *reinterpret_cast<FoldShared*>(behind + kWeightsBytes);
  for (int row = threadIdx.x; row < p.stages * kTile; row += kFoldThreads)
    for (int c = ring.chunks; c < ring.memory.key_row / 16; ++c)
      store_zeros(latent_chunk(ring.stage(row / kTile, p.stages), kTile, ring.memory.key_row, row % kTile, c));

  // Where a warp's lanes are rows enough every warp plans on its own, and none waits for another.
  const bool few = p.pass.rows <= kWarp;
  LanePlan of_lane{};
  Plan plan;
  if (few) of_lane = plan_of_lane(p.pass, p.group_rows, p.streams), plan = of_lane.plan;
  else plan = make_plan(p.pass, p.group_rows, *reinterpret_cast<PlanShared*>(behind));
  const int n_items = plan.n_items * p.head_blocks;
  bool begun = false;             // the kernel before has ended
  for (int number = blockIdx.x; number < n_items;) {
    Item item;
    item.head_block = number % p.head_blocks;
    bool found;
    if (few) {
      int end;                    // of the lane's row
      found = find_item(of_lane, p.group_rows, number / p.head_blocks, item, end);
      if (found && threadIdx.x < kColumns)
        set_columns(p, shared, item, [&](int row) { return __shfl_sync(0xffffffffu, end, row % kWarp); });
    } else {
      found = find_item(p.pass, plan, p.group_rows, p.streams, number / p.head_blocks, shared.item, item);
      if (found)
        set_columns(p, shared, item, [&](int row) { return row < item.first + item.n ? seen_end(p.pass, row, item) : 0; });
    }
    const int64_t pages = found ? pages_of(item) : 0;
    if (!begun) {
      if (found && threadIdx.x < kWarp) ask_for_pages(p, item, pages);
      wait_for_previous();
      let_next_start();
      begun = true;
    }
    if (found)
      for (int t = 0; t < min(p.stages, static_cast<int>(divide_up(item.end - item.begin, kTile))); ++t)
        load_tile(p, ring, item, pages, t);
    __syncthreads();              // the item's columns are set, and its number has been read
    const int next = threadIdx.x == 0 ? static_cast<int>(gridDim.x) + atomicAdd(p.taken, 1) : 0;
    if (found) {
      const int columns = item.n * p.heads;
      if (columns <= 8) fold_item<1, kM>(p, ring, shared, item, pages);
      else if (columns <= 16) fold_item<2, kM>(p, ring, shared, item, pages);
      else if (columns <= 32) fold_item<4, kM>(p, ring, shared, item, pages);
      else fold_item<8, kM>(p, ring, shared, item, pages);
    }
    if (threadIdx.x == 0) shared.item[4] = next;
    __syncthreads();
    number = shared.item[4];
  }
  if (!begun) wait_for_previous();
}

}  // namespace kdt::cuda
