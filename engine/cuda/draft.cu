// The drafter's attention: context keys and values in pages, and every stream's block that looks at them and at itself.
//
//   prepare  queries, keys and values of the blocks: norm, rotation, rows padded as the fold wants them
//   fold     queries of one stream and kv head x one segment: of the context, in the borders of DraftSegments, or the
//            block itself, whose tiles of 64 count from its start and which comes after all segments of the context
//   merge    the segments' sums of every query
#include "cuda/fold.cuh"

#include <cmath>

namespace kdt::cuda {
namespace {

constexpr int kRowWarps = 4;     // of a block of the kernels that take a warp a head

// A head's vector x [dim], normalised unless norm is null, and rotated in halves; to `out`, zeros up to `padded`. A warp.
__device__ void write_head(const bf16* x, int dim, const float* norm, float eps, const RopeTable& rope, int64_t position,
                           bf16* out, int padded) {
  const int lane = threadIdx.x % kWarp;
  if (norm == nullptr) {
    for (int d = lane; d < padded; d += kWarp) out[d] = d < dim ? x[d] : __float2bfloat16_rn(0.0f);
    return;
  }
  float sum = 0;
  for (int d = lane; d < dim; d += kWarp) {
    const float v = __bfloat162float(x[d]);
    sum = fmaf(v, v, sum);
  }
  const float scale = rsqrtf(__fadd_rn(__fdiv_rn(warp_sum(sum), static_cast<float>(dim)), eps));
  const int half = dim / 2;
  for (int i = lane; i < half; i += kWarp) {
    const float a = __fmul_rn(__fmul_rn(__bfloat162float(x[i]), scale), norm[i]);
    const float b = __fmul_rn(__fmul_rn(__bfloat162float(x[i + half]), scale), norm[i + half]);
    const float2 turned = rotated(a, b, rope.cos[position * half + i], rope.sin[position * half + i]);
    out[i] = __float2bfloat16_rn(turned.x);
    out[i + half] = __float2bfloat16_rn(turned.y);
  }
  for (int d = 2 * half + lane; d < padded; d += kWarp) out[d] = __float2bfloat16_rn(0.0f);
}

struct DraftContext {
  LiveRows n;
  const int32_t *position, *stream;
  const StreamPages* streams;
  const bf16* kv;
  const float* k_norm;
  float eps;
  RopeTable rope;
  int32_t n_kv_heads, head_dim, stride;
  std::byte* pages;
  int64_t page_stride;
};

// A warp a (row, key or value head).
__global__ void __launch_bounds__(kRowWarps * kWarp) draft_context_kernel(const __grid_constant__ DraftContext p) {
  const int64_t unit = static_cast<int64_t>(blockIdx.x) * kRowWarps + threadIdx.x / kWarp;
  const int64_t row = unit / (2 * p.n_kv_heads);
  const int head = static_cast<int>(unit % (2 * p.n_kv_heads));     // keys, then values, as in kv and in a page
  wait_for_previous();
  let_next_start();
  if (row >= p.n.get()) return;
  const int64_t position = p.position[row], page = p.streams[p.stream[row]].page_table[position / kTile];
  bf16* to = reinterpret_cast<bf16*>(p.pages + page * p.page_stride) + (head * kTile + position % kTile) * p.stride;
  const float* norm = head < p.n_kv_heads ? p.k_norm : nullptr;
  write_head(p.kv + unit * p.head_dim, p.head_dim, norm, p.eps, p.rope, position, to, p.stride);
}

// The blocks of streams [first_stream, first_stream + n_streams).
struct Blocks {
  LiveRows n;                     // of all streams
  int32_t first_stream, n_streams;
  int32_t block, first_query, n_queries;
  const int32_t* start;           // of all streams
  int32_t n_heads, n_kv_heads, head_dim, dims;   // dims: padded
  int32_t window;
  __device__ int live() const { return min(n.get() - first_stream, n_streams); }
  __host__ __device__ int per_kv() const { return n_heads / n_kv_heads; }
  __host__ __device__ int columns() const { return n_queries * per_kv(); }   // queries of a kv head: by row, then by head
  // The first position that a column's query sees, of a block that starts at `at`.
  __device__ int first_seen(int at, int column) const {
    return window > 0 ? max(0, at + first_query + column / per_kv() - window + 1) : 0;
  }
};

struct Prepare {
  Blocks blocks;
  const bf16* qkv;                // of the first stream
  const float *q_norm, *k_norm;
  float eps;
  RopeTable rope;
  bf16* queries;                  // [streams][kv_heads][columns][dims]
  bf16* kv;                       // [streams][2 * kv_heads][block][dims]: keys, then values
};

// A warp a (row, head of queries, keys or values).
__global__ void __launch_bounds__(kRowWarps * kWarp) prepare_kernel(const __grid_constant__ Prepare p) {
  const Blocks& b = p.blocks;
  const int64_t unit = static_cast<int64_t>(blockIdx.x) * kRowWarps + threadIdx.x / kWarp;
  const int n_heads = b.n_heads + 2 * b.n_kv_heads, head = static_cast<int>(unit % n_heads);
  const int stream = static_cast<int>(unit / n_heads / b.block), row = static_cast<int>(unit / n_heads % b.block);
  wait_for_previous();
  let_next_start();
  if (stream >= b.live()) return;
  const int64_t position = b.start[b.first_stream + stream] + row;
  const float* norm = p.q_norm;
  bf16* to;
  if (head < b.n_heads) {
    const int query = row - b.first_query, kv_head = head / b.per_kv();
    if (query < 0 || query >= b.n_queries) return;
    const int column = query * b.per_kv() + head % b.per_kv();
    to = p.queries + ((static_cast<int64_t>(stream) * b.n_kv_heads + kv_head) * b.columns() + column) * b.dims;
  } else {
    const int of_kv = head - b.n_heads;
    norm = of_kv < b.n_kv_heads ? p.k_norm : nullptr;
    to = p.kv + ((static_cast<int64_t>(stream) * 2 * b.n_kv_heads + of_kv) * b.block + row) * b.dims;
  }
  write_head(p.qkv + unit * b.head_dim, b.head_dim, norm, p.eps, p.rope, position, to, b.dims);
}

struct DraftFold {
  Blocks blocks;
  const StreamPages* streams;
  const std::byte* pages;
  int64_t page_stride;
  const bf16 *queries, *kv;
  int32_t row_bytes;              // of a page
  int32_t value_tiles, columns, stages;
  float scale;                    // into powers of 2
  float* sums;                    // [streams][kv_heads][columns][segments][width]
  float2* extremes;
  int32_t n_segments;
};

// Tile `tile` of keys and values at `first`, of which slots [skip, seen) are wanted.
__device__ void load_tile(const DraftFold& p, SharedAddress to, int64_t stream, int kv_head, bool of_block, int first,
                          int skip, int seen) {
  const Blocks& b = p.blocks;
  const int chunks = p.row_bytes / 16, key_row = b.dims * 2;
  const int64_t head_bytes = static_cast<int64_t>(of_block ? b.block : kTile) * (of_block ? key_row : p.row_bytes);
  const int from_row = of_block ? key_row : p.row_bytes;
  const std::byte* keys;
  if (of_block)
    keys = reinterpret_cast<const std::byte*>(p.kv) + stream * 2 * b.n_kv_heads * head_bytes +
           static_cast<int64_t>(first - b.start[b.first_stream + stream]) * key_row;
  else
    keys = p.pages + p.streams[b.first_stream + stream].page_table[first / kTile] * p.page_stride;
  keys += kv_head * head_bytes;
  const std::byte* values = keys + b.n_kv_heads * head_bytes;
  const auto rows_of = [&](const std::byte* base) {
    return [=](int slot, int) { return slot >= skip && slot < seen ? base + slot * from_row : nullptr; };
  };
  copy_tile(to, key_row, chunks, keys, rows_of(keys));
  copy_tile(to + kTile * key_row, key_row, chunks, values, rows_of(values));
}

template <int kQ, int kM>
__device__ void fold_segment(const DraftFold& p, const FoldMemory& memory, SharedAddress tiles, FoldShared& shared,
                             int64_t stream, int kv_head, int segment, bool of_block, int begin, int end, int seen_from) {
  const int key_row = p.blocks.dims * 2, tile_bytes = 2 * kTile * key_row;
  const int n_tiles = (end - begin + kTile - 1) / kTile;
  const auto load = [&](int t) {
    const int first = begin + t * kTile;
    load_tile(p, tiles + t % p.stages * tile_bytes, stream, kv_head, of_block, first, seen_from - first, end - first);
  };
  for (int t = 0; t < p.stages; ++t) {
    if (t < n_tiles) load(t);
    cp_async_commit();
  }
  Fold<kQ, kM> fold;
  for (int t = 0; t < n_tiles; ++t) {
    if (p.stages > 1) cp_async_wait<1>();
    else cp_async_wait<0>();
    __syncthreads();
    const SharedAddress keys = tiles + t % p.stages * tile_bytes;
    fold.tile(memory, shared, keys, keys + kTile * key_row, begin + t * kTile, p.scale, t % 2);
    __syncthreads();
    if (t + p.stages < n_tiles) load(t + p.stages);
    cp_async_commit();
  }
  fold.store(memory, shared, n_tiles % 2, p.sums, p.extremes, p.n_segments, segment);
}

// Grid: x blocks that share out the segments, y (kv head, columns), z stream.
template <int kM>
__global__ void __launch_bounds__(kFoldThreads, kM == 1 ? 2 : 1) draft_fold_kernel(const __grid_constant__ DraftFold p) {
  extern __shared__ __align__(128) std::byte shared_memory[];
  const Blocks& b = p.blocks;
  const int64_t stream = blockIdx.z;
  const int key_row = b.dims * 2, tile_rows = p.stages * 2 * kTile;
  FoldMemory memory;
  memory.key_row = memory.value_row = key_row;
  memory.dim_groups = b.dims / 64, memory.value_tiles = p.value_tiles;
  const SharedAddress tiles = shared_address(shared_memory);
  memory.queries = tiles + tile_rows * key_row;
  memory.weights = memory.queries + p.columns * key_row;
  auto& shared = *reinterpret_cast<FoldShared*>(shared_memory + (memory.weights - tiles) + kWeightsBytes);
  zero_padding(tiles, tile_rows, key_row, p.row_bytes / 16);
  wait_for_previous();
  let_next_start();
  if (stream >= b.live()) return;

  const int kv_head = blockIdx.y % b.n_kv_heads, first_column = blockIdx.y / b.n_kv_heads * p.columns;
  const int n_columns = min(p.columns, b.columns() - first_column), start = b.start[b.first_stream + stream];
  const int seen_from = b.first_seen(start, first_column), of_context = DraftSegments::count(start);
  const int64_t first_sums = (stream * b.n_kv_heads + kv_head) * b.columns() + first_column;
  const auto fill = [&](int n) {
    copy_queries(memory.queries, key_row, n, p.queries, [&](int column) {
      const bf16* query = column < n_columns ? p.queries + (first_sums + column) * b.dims : nullptr;
      return reinterpret_cast<const std::byte*>(query);
    });
  };
  fill(n_columns <= 8 ? 8 : n_columns <= 16 ? 16 : n_columns <= 32 ? 32 : kColumns);

  const int first_segment = seen_from < start ? DraftSegments::of(seen_from) : of_context;
  for (int segment = first_segment + blockIdx.x; segment <= of_context; segment += gridDim.x) {
    const bool of_block = segment == of_context;
    const int begin = of_block ? start : max(DraftSegments::begin(segment), seen_from / kTile * kTile);
    const int end = of_block ? start + b.block : min(DraftSegments::begin(segment + 1), start);
    __syncthreads();               // the sums of the segment before are stored
    if (threadIdx.x < kColumns) {
      const int column = threadIdx.x;
      const bool there = column < n_columns;
      shared.begin[column] = there ? b.first_seen(start, first_column + column) : 0;
      shared.end[column] = there ? end : 0;
      shared.column[column] = there ? static_cast<int>(first_sums) + column : -1;
    }
    begin_fold(shared);
    const auto run = [&](auto tiles_of_queries) {
      constexpr int kQ = decltype(tiles_of_queries)::value;
      fold_segment<kQ, kM>(p, memory, tiles, shared, stream, kv_head, segment, of_block, begin, end, seen_from);
    };
    if (n_columns <= 8) run(std::integral_constant<int, 1>());
    else if (n_columns <= 16) run(std::integral_constant<int, 2>());
    else if (n_columns <= 32) run(std::integral_constant<int, 4>());
    else run(std::integral_constant<int, 8>());
  }
}

struct DraftMerge {
  Blocks blocks;
  const float* sums;
  const float2* extremes;
  int32_t n_segments;
  bf16* out;                      // of the first stream
};

// A block a query of a kv head.
template <int kM>
__global__ void __launch_bounds__(kMergeThreads<kM>) draft_merge_kernel(const __grid_constant__ DraftMerge p) {
  const Blocks& b = p.blocks;
  const int64_t query = blockIdx.x, stream = query / b.columns() / b.n_kv_heads;
  wait_for_previous();
  let_next_start();
  if (stream >= b.live()) return;
  const int column = static_cast<int>(query % b.columns()), kv_head = static_cast<int>(query / b.columns() % b.n_kv_heads);
  const int start = b.start[b.first_stream + stream], seen_from = b.first_seen(start, column);
  const int of_context = DraftSegments::count(start);
  const int first = seen_from < start ? DraftSegments::of(seen_from) : of_context;
  const int64_t row = stream * b.block + b.first_query + column / b.per_kv();
  const int64_t head = kv_head * b.per_kv() + column % b.per_kv();
  merge_segments<kM>(p.sums + query * p.n_segments * (128 * kM), p.extremes + query * p.n_segments, first,
                     of_context + 1, b.head_dim, b.head_dim, p.out + (row * b.n_heads + head) * b.head_dim);
}

template <int kM>
void fold_and_merge(cudaStream_t stream, const DraftFold& fold, const DraftMerge& merge, dim3 grid, int64_t bytes) {
  const auto shared = static_cast<size_t>(bytes);
  check(cudaFuncSetAttribute(draft_fold_kernel<kM>, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)),
        "draft_fold_kernel");
  launch_overlapping("draft_fold_kernel", draft_fold_kernel<kM>, grid, kFoldThreads, shared, stream, fold);
  const dim3 queries(static_cast<unsigned>(merge.blocks.n_streams * merge.blocks.n_kv_heads * merge.blocks.columns()));
  launch_overlapping("draft_merge_kernel", draft_merge_kernel<kM>, queries, kMergeThreads<kM>,
                     static_cast<size_t>(merge_bytes<kM>(merge.n_segments)), stream, merge);
}

}  // namespace

size_t CudaOps::draft_page_bytes(int64_t n_kv_heads, int64_t head_dim) const {
  return static_cast<size_t>(2 * n_kv_heads * kTile * row_stride(head_dim) * 2);
}

void CudaOps::draft_context(const DraftContextArgs& args) {
  const Rows& rows = args.rows;
  if (rows.n.most == 0) return;
  const DraftContext context{LiveRows(rows.n), rows.position, rows.stream, args.streams, static_cast<const bf16*>(args.kv),
                             args.k_norm, args.eps, args.rope, static_cast<int32_t>(args.n_kv_heads),
                             static_cast<int32_t>(args.head_dim), static_cast<int32_t>(row_stride(args.head_dim)),
                             static_cast<std::byte*>(args.pages), static_cast<int64_t>(args.page_stride)};
  const dim3 blocks(static_cast<unsigned>(divide_up(rows.n.most * 2 * args.n_kv_heads, kRowWarps)));
  launch_overlapping("draft_context_kernel", draft_context_kernel, blocks, kRowWarps * kWarp, 0, stream_, context);
}

void CudaOps::draft_attention(const DraftAttentionArgs& args) {
  if (args.n_streams.most == 0 || args.n_queries == 0) return;
  const int64_t heads = args.n_heads, kv_heads = args.n_kv_heads, dim = args.head_dim, dims = padded_dims(dim);
  check_argument(dim <= kMaxDraftDims, "head_dim", std::to_string(dim), "at most 256 on a GPU");
  const bool small = dim <= kSmallValueDims;
  const FoldShape shape = fold_shape(2 * kTile * dims * 2, dims * 2, static_cast<int64_t>(shared_limit_));
  const int64_t n_segments = DraftSegments::count(args.max_context) + 1, columns = args.n_queries * (heads / kv_heads);
  const int64_t rows_at_once = pass_rows(heads, dim, args.max_context);
  check_argument(args.block <= rows_at_once, "block_size", std::to_string(args.block),
                 "at most " + std::to_string(rows_at_once) + " on a GPU");
  const int64_t at_once = std::min(args.n_streams.most, rows_at_once / args.block);
  const auto n32 = [](int64_t value) { return static_cast<int32_t>(value); };

  WorkPieces work(args.work);
  auto* queries = work.take<bf16>(at_once * kv_heads * columns * dims);
  auto* kv = work.take<bf16>(at_once * 2 * kv_heads * args.block * dims);
  auto* extremes = work.take<float2>(at_once * kv_heads * columns * n_segments);
  auto* sums = work.take<float>(at_once * kv_heads * columns * n_segments * (small ? kSmallValueDims : kMaxDraftDims));
  const int64_t row_width = (heads + 2 * kv_heads) * dim;

  for (int64_t first = 0; first < args.n_streams.most; first += at_once) {
    const int64_t n = std::min(at_once, args.n_streams.most - first);
    const Blocks blocks{LiveRows(args.n_streams), n32(first), n32(n), n32(args.block), n32(args.first_query),
                        n32(args.n_queries), args.start, n32(heads), n32(kv_heads), n32(dim), n32(dims), n32(args.window)};
    const Prepare prepare{blocks, static_cast<const bf16*>(args.qkv) + first * args.block * row_width, args.q_norm,
                          args.k_norm, args.eps, args.rope, queries, kv};
    const dim3 units(static_cast<unsigned>(divide_up(n * args.block * (heads + 2 * kv_heads), kRowWarps)));
    launch_overlapping("prepare_kernel", prepare_kernel, units, kRowWarps * kWarp, 0, stream_, prepare);

    const DraftFold fold{blocks, args.streams, static_cast<const std::byte*>(args.pages),
                         static_cast<int64_t>(args.page_stride), queries, kv, n32(row_stride(dim) * 2),
                         n32(divide_up(dim, 16)), shape.columns, shape.stages,
                         static_cast<float>(kLog2E / std::sqrt(static_cast<double>(dim))), sums, extremes,
                         n32(n_segments)};
    const DraftMerge merge{blocks, sums, extremes, n32(n_segments),
                           static_cast<bf16*>(args.out) + first * args.block * heads * dim};
    const int64_t of_stream = kv_heads * divide_up(columns, shape.columns);
    const int64_t sharing = std::clamp<int64_t>(divide_up(2 * n_sms_, of_stream * n), 1, n_segments);
    const dim3 grid(static_cast<unsigned>(sharing), static_cast<unsigned>(of_stream), static_cast<unsigned>(n));
    if (small) fold_and_merge<1>(stream_, fold, merge, grid, shape.bytes);
    else fold_and_merge<2>(stream_, fold, merge, grid, shape.bytes);
  }
}

}  // namespace kdt::cuda
