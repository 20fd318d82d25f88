// Absorbed multi-head latent attention, position-ordered, over pages and the scratch rows of draft nodes.
//
// Rows go through in passes of what the working memory holds, each of three kernels:
//   absorb   q_nope through W_UK and q_pe rotated: a query of kv_lora + rope dims for every (row, head)
//   fold     a block takes items in turn: queries of one stream x one segment of its positions; leaves m, l, o
//   merge    the segments' sums of every (row, head), and what comes of them through W_UV
//
// There are two kinds of items. A stream's rows share the segments that lie in its pages as far as they see them. A draft
// node has segments of its own from that of `visible` on, where each of its ancestors is read from its scratch row, in the
// slot of its position. What a row sees of a segment are the same keys in the same slots either way, and so are its bits.
//
// A block of fold knows its first item and fetches its keys while absorb still runs: pages and scratch were written by
// kernels before that, which have ended when it lets others start.
#include "cuda/attention.cuh"
#include "cuda/latent_plan.cuh"

namespace kdt::cuda {
namespace {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
template <int kQ, int kM>
using LatentFold = WgmmaFold<kQ, kM>;
#else
template <int kQ, int kM>
using LatentFold = Fold<kQ, kM>;
#endif

struct MlaFold {
  Pass pass;
  const StreamPages* streams;
  const std::byte* pages;
  int64_t page_stride;
  const std::byte* scratch;
  int32_t row_bytes;              // of a page and of scratch
  int32_t query_dims, value_tiles;
  int32_t n_heads, heads, head_blocks;   // heads of an item, and how many items make up all
  int32_t group_rows, columns, stages;
  float scale;                    // into powers of 2
  int32_t* taken;                 // items that blocks have taken besides their first: 0 when absorb has ended
  const bf16* queries;
  float* sums;                    // [rows][heads][segments][width]
  float2* extremes;               // [rows][heads][segments] m, l
  int32_t n_segments;
};

// A block's part of shared memory, and how tiles come to it.
struct TileRing {
  FoldMemory memory;
  SharedAddress tiles;
  int tile_bytes, chunks;
  __device__ SharedAddress stage(int tile, int stages) const { return stages > 1 && tile % 2 == 1 ? tiles + tile_bytes : tiles; }
};

// Pages of an item's tiles, lane i the i-th's.
__device__ inline int64_t pages_of(const Item& item) {
  const int tile = item.begin / kTile + static_cast<int>(threadIdx.x) % kWarp;
  return tile * kTile < min(item.end, item.visible) ? item.page_table[tile] : 0;
}

// Copies every eighth chunk of a row from `chunk` on, asynchronously: zeros, and nothing is read, unless `real`.
__device__ inline void copy_row(SharedAddress to, int rows, const void* row, int chunk, int chunks, bool real) {
  const std::byte* from = static_cast<const std::byte*>(row) + chunk * 16;
  const int group_bytes = latent_group_bytes(rows);
#pragma unroll 3
  for (int c = chunk; c < chunks; c += 8) {
    cp_async16(to, from, real);
    to += group_bytes, from += 128;
  }
}

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
             r < seen);
  }
}

template <int kQ>
__device__ void load_queries(const MlaFold& p, const TileRing& ring, const FoldShared& shared) {
  const int chunk = threadIdx.x % 8;
  for (int column = threadIdx.x / 8; column < kQ * 8; column += 32) {
    const int64_t at = shared.column[column];
    const bf16* from = p.queries + max(at, int64_t{0}) * p.query_dims;
    copy_row(latent_chunk(ring.memory.queries, kQ * 8, ring.memory.key_row, column, chunk), kQ * 8, from, chunk,
             ring.memory.key_row / 16, at >= 0);
  }
}

// The item's first tiles are on their way; queries are there when the kernel before has ended.
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
  fold.store(ring.memory, shared, n_tiles % 2, p.sums, p.extremes, p.n_segments, item.segment);
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
    int64_t pages = 0;
    if (found) {
      pages = pages_of(item);
      const int n_tiles = static_cast<int>(divide_up(item.end - item.begin, kTile));
      for (int t = 0; t < min(p.stages, n_tiles); ++t) load_tile(p, ring, item, pages, t);
    }
    if (!begun) {
      wait_for_previous();
      let_next_start();
      begun = true;
    }
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

// Queries of a block for so many: the fewer, the sooner there is room for the next kernel's blocks beside it.
FoldShape shape_for(int64_t queries, int64_t query_dims, int64_t limit) {
  FoldShape shape = fold_shape(kTile * query_dims * 2, query_dims * 2, limit);
  while (shape.columns > 8 && queries <= shape.columns / 2) {
    shape.columns /= 2;
    shape.bytes -= shape.columns * query_dims * 2;
  }
  return shape;
}

template <int kM>
void fold_and_merge(cudaStream_t stream, const MlaFold& fold, const Merge& merge, int64_t blocks, int64_t bytes) {
  check(cudaFuncSetAttribute(fold_kernel<kM>, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)),
        "fold_kernel");
  launch_overlapping("fold_kernel", fold_kernel<kM>, dim3(static_cast<unsigned>(blocks)), kFoldThreads,
                     static_cast<size_t>(bytes), stream, fold);
  const auto run = [&](auto kernel, auto shape, unsigned blocks_of_head) {
    const int64_t shared = merge_shared<decltype(shape)>(merge.rows, merge.n_segments);
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared)), "merge_kernel");
    const dim3 grid(blocks_of_head, static_cast<unsigned>(merge.n_heads),
                    static_cast<unsigned>(divide_up(merge.pass.rows, merge.rows)));
    launch_overlapping("merge_kernel", kernel, grid, kSumThreads, static_cast<size_t>(shared), stream, merge, blocks_of_head);
  };
  if (has_clusters("merge_kernel", merge_kernel<kM, 8>)) run(merge_kernel<kM, 8>, MergeShape<kM, 8>(), 8);
  else run(merge_kernel<kM, 1>, MergeShape<kM, 1>(), 1);
}

}  // namespace

size_t CudaOps::attention_work_bytes(int64_t rows, int64_t n_heads, int64_t key_dims, int64_t max_context) const {
  const int64_t most = std::min(rows, pass_rows(n_heads, key_dims, max_context));
  return static_cast<size_t>(WorkPieces::kMost * WorkPieces::kAlign + most * work_row_bytes(n_heads, key_dims, max_context));
}

void CudaOps::mla_attention(const MlaAttentionArgs& args) {
  const Rows& rows = args.rows;
  if (rows.n.most == 0) return;
  const int64_t heads = args.n_heads, head_dim = args.nope + args.rope.dim, key_dims = args.kv_lora + args.rope.dim;
  const int64_t query_dims = padded_dims(key_dims), value_tiles = divide_up(args.kv_lora, 16);
  check_argument(args.kv_lora <= kMaxValueDims, "kv_lora_rank", std::to_string(args.kv_lora), "at most 512 on a GPU");
  const int64_t at_once = std::min(rows.n.most, pass_rows(heads, key_dims, args.max_context));
  const FoldShape shape = shape_for(at_once * heads, query_dims, static_cast<int64_t>(shared_limit_));
  const int64_t head_blocks = divide_up(heads, shape.columns), item_heads = divide_up(heads, head_blocks);
  const int64_t group_rows = shape.columns / item_heads;
  const int64_t n_segments = LatentSegments::count(args.max_context);
  const bool small = args.kv_lora <= kSmallValueDims;

  WorkPieces work(args.work);
  auto* taken = work.take<int32_t>(1);
  auto* queries = work.take<bf16>(at_once * heads * query_dims);
  auto* extremes = work.take<float2>(at_once * heads * n_segments);
  auto* sums = work.take<float>(at_once * heads * n_segments * (small ? kSmallValueDims : kMaxValueDims));
  const auto n32 = [](int64_t value) { return static_cast<int32_t>(value); };

  for (int64_t first = 0; first < rows.n.most; first += at_once) {
    const int64_t n = std::min(at_once, rows.n.most - first);
    const Pass pass{LiveRows(rows.n), n32(first), n32(n), rows.position, rows.stream, rows.parent, rows.visible};
    const auto* q = static_cast<const bf16*>(args.q) + first * heads * head_dim;
    const bool aligned = args.nope % kStepInputs == 0 && head_dim % 4 == 0 && reinterpret_cast<uintptr_t>(q) % 8 == 0;
    const Absorb absorb{pass, args.w_uk.device, q, args.rope, queries, n32(heads), n32(args.nope), n32(args.kv_lora),
                        n32(query_dims), aligned, taken};
    const dim3 grid(static_cast<unsigned>(divide_up(tiles_of(args.kv_lora), kAbsorbWarps) + 1), static_cast<unsigned>(heads),
                    static_cast<unsigned>(divide_up(n, kAbsorbRows)));
    launch_overlapping("absorb_kernel", absorb_kernel, grid, kAbsorbThreads, 0, stream_, absorb);

    const MlaFold fold{pass, args.streams, static_cast<const std::byte*>(args.pages),
                       static_cast<int64_t>(args.page_stride), static_cast<const std::byte*>(args.scratch),
                       n32(row_stride(key_dims) * 2), n32(query_dims), n32(value_tiles), n32(heads), n32(item_heads),
                       n32(head_blocks), n32(group_rows), shape.columns, shape.stages,
                       static_cast<float>(args.scale * kLog2E), taken, queries, sums, extremes, n32(n_segments)};
    // The fewer rows, the fewer a block: more blocks have more of the sums under way.
    const int32_t merge_rows = n <= 2 ? 1 : n <= 16 ? 2 : n <= 64 ? 4 : kMergeRows;
    const Merge merge{pass, n32(heads), n32(args.kv_lora), n32(n_segments), merge_rows, sums, extremes, args.w_uv.device,
                      n32(args.v_head), static_cast<bf16*>(args.out) + first * heads * args.v_head};
    const int64_t a_multiprocessor = 2 * (shape.bytes + 1024) <= static_cast<int64_t>(shared_limit_) ? 2 : 1;
    const int64_t blocks = std::min(n_sms_ * a_multiprocessor, n * n_segments * head_blocks);
    if (small) fold_and_merge<1>(stream_, fold, merge, blocks, shape.bytes);
    else fold_and_merge<4>(stream_, fold, merge, blocks, shape.bytes);
  }
}

}  // namespace kdt::cuda
