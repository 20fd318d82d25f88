// Absorbed multi-head latent attention, position-ordered, over pages and the scratch rows of draft nodes.
//
// Rows go through in passes of what the working memory holds, each of four kernels:
//   absorb   q_nope through W_UK and q_pe rotated: a query of kv_lora + rope dims for every (row, head). One block plans.
//   fold     a block takes items of the plan in turn: queries of one stream x one segment of its positions; leaves m, l, o
//   merge    the segments' sums of every (row, head)
//   project  through W_UV
//
// The plan has two kinds of spans. A stream's rows share the segments that lie in its pages as far as they see them. A draft
// node has segments of its own from that of `visible` on, where each of its ancestors is read from its scratch row, in the
// slot of its position. What a row sees of a segment are the same keys in the same slots either way, and so are its bits.
#include "cuda/attention.cuh"
#include "cuda/fold.cuh"

namespace kdt::cuda {
namespace {

constexpr int kMaxSpans = 2 * static_cast<int>(kMaxPassRows);
constexpr int kPlanThreads = kHeadThreads;
static_assert(kPlanThreads >= kMaxPassRows);

// Items [begin, end): item i is group (i - begin) % groups of the rows, of segment last - (i - begin) / groups.
struct Span {
  int32_t begin, end;
  int16_t first_row, n_rows;      // of the pass
  int16_t last, groups;           // groups 0: a draft node's own segments
};
static_assert(sizeof(Span) == 16);

struct Plan {
  int32_t n_items, n_spans;
  int32_t taken;                  // items that blocks have taken besides their first
  int32_t unused;
  Span span[kMaxSpans];
};
static_assert(sizeof(Plan) <= kPlanBytes);

// Rows of a pass.
struct Pass {
  LiveRows n;                     // of all rows
  int32_t first, rows;
  const int32_t *position, *stream, *parent, *visible;   // of all rows
  __device__ int live() const { return min(n.get() - first, rows); }
};

// The segments a row reads from pages, from the first on.
__device__ inline int paged_segments(const Pass& pass, int row) {
  return pass.parent[row] < 0 ? LatentSegments::of(pass.position[row]) + 1 : LatentSegments::of(pass.visible[row]);
}

// The sum of the values of threads up to this one.
__device__ int running_sum(int value, int* of_warps) {
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
#pragma unroll
  for (int step = 1; step < kWarp; step *= 2) {
    const int below = __shfl_up_sync(0xffffffffu, value, step);
    if (lane >= step) value += below;
  }
  __syncthreads();                // of_warps may be in use
  if (lane == kWarp - 1) of_warps[warp] = value;
  __syncthreads();
  for (int w = 0; w < warp; ++w) value += of_warps[w];
  return value;
}

// One block; a thread a row. group_rows: rows that fit one block of queries.
__device__ void make_plan(const Pass& pass, int group_rows, Plan* plan) {
  __shared__ int of_warps[kPlanThreads / kWarp], totals[2];
  __shared__ int run_begin[kMaxPassRows + 1], run_segments[kMaxPassRows];
  const int i = threadIdx.x, row = pass.first + i, live = pass.live();
  const bool here = i < live, draft = here && pass.parent[row] >= 0;
  const int own_first = draft ? LatentSegments::of(pass.visible[row]) : 0;
  const int own_last = draft ? LatentSegments::of(pass.position[row]) : -1;
  const int n_own = own_last - own_first + 1;

  // Draft nodes' spans first.
  const int own_span = running_sum(draft, of_warps), own_end = running_sum(n_own, of_warps);
  if (draft)
    plan->span[own_span - 1] = {own_end - n_own, own_end, static_cast<int16_t>(i), 1, static_cast<int16_t>(own_last),
                                0};
  // Then every run of rows of one stream.
  const bool begins = here && (i == 0 || pass.stream[row] != pass.stream[row - 1]);
  const int run = running_sum(begins, of_warps) - 1;
  if (i < kMaxPassRows) run_segments[i] = 0;
  if (i == kPlanThreads - 1) totals[0] = own_span, totals[1] = own_end, run_begin[run + 1] = max(live, 0);
  __syncthreads();
  if (begins) run_begin[run] = i;
  if (here) atomicMax(&run_segments[run], paged_segments(pass, row));
  __syncthreads();
  const int n_rows = begins ? run_begin[run + 1] - i : 0;
  const int groups = (n_rows + group_rows - 1) / group_rows, segments = begins ? run_segments[run] : 0;
  const int end = totals[1] + running_sum(groups * segments, of_warps);
  if (begins)
    plan->span[totals[0] + run] = {end - groups * segments, end, static_cast<int16_t>(i), static_cast<int16_t>(n_rows),
                                   static_cast<int16_t>(segments - 1), static_cast<int16_t>(groups)};
  if (i == kPlanThreads - 1) plan->n_items = end, plan->n_spans = totals[0] + run + 1, plan->taken = 0;
}

struct Absorb {
  Pass pass;
  HeadProduct product;            // of q_nope, to the latent part of queries
  const bf16* q_pe;               // of the pass's first row
  RopeTable rope;
  bf16* queries;                  // [rows][heads][query_dims]
  int32_t n_heads, kv_lora, query_dims, group_rows;
  Plan* plan;
};

// Grid: x plan, rotation, then tiles of W_UK; y heads; z chunks of rows.
__global__ void __launch_bounds__(kHeadThreads) absorb_kernel(const __grid_constant__ Absorb p) {
  const int head = blockIdx.y, first = blockIdx.z * kHeadRows;
  let_next_start();
  if (blockIdx.x > 1)
    return head_product(p.product, head, blockIdx.x - 2, first, [&] { return p.pass.live() - first; });
  wait_for_previous();
  if (blockIdx.x == 0) {
    if (head == 0 && first == 0) make_plan(p.pass, p.group_rows, p.plan);
    return;
  }
  const int n_rows = min(p.pass.live() - first, kHeadRows);
  const int half = static_cast<int>(p.rope.dim / 2), pairs = (p.query_dims - p.kv_lora + 1) / 2;   // the last are zeros
  for (int i = threadIdx.x; i < n_rows * pairs; i += kHeadThreads) {
    const int row = first + i / pairs, pair = i % pairs;
    float2 turned = make_float2(0.0f, 0.0f);
    if (pair < half) {
      const bf16* from = p.q_pe + row * p.product.x_row + head * p.product.x_head + 2 * pair;
      const int64_t at = static_cast<int64_t>(p.pass.position[p.pass.first + row]) * half + pair;
      turned = rotated(__bfloat162float(from[0]), __bfloat162float(from[1]), p.rope.cos[at], p.rope.sin[at]);
    }
    const int dim = p.kv_lora + 2 * pair;
    bf16* to = p.queries + (static_cast<int64_t>(row) * p.n_heads + head) * p.query_dims + dim;
    to[0] = __float2bfloat16_rn(turned.x);
    if (dim + 1 < p.query_dims) to[1] = __float2bfloat16_rn(turned.y);
  }
}

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
  Plan* plan;
  const bf16* queries;
  float* sums;                    // [rows][heads][segments][width]
  float2* extremes;               // [rows][heads][segments] m, l
  int32_t n_segments;
};

// What a block folds: the columns of rows [first, first + n), heads from first_head on, over positions [begin, end).
struct Item {
  int first, n, first_head, segment, begin, end;
  int own;                        // a draft node's position, or -1
};

// A block's part of shared memory, and how tiles come to it.
struct TileRing {
  FoldMemory memory;
  SharedAddress tiles;
  int tile_bytes, chunks;
  __device__ SharedAddress stage(int tile, int stages) const { return tiles + tile % stages * tile_bytes; }
};

__device__ void load_tile(const MlaFold& p, const TileRing& ring, const Item& item, int tile) {
  const int first = item.begin + tile * kTile, seen = min(item.end - first, kTile), row = p.pass.first + item.first;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int in_page = item.own < 0 ? seen : min(max(p.pass.visible[row] - first, 0), seen);
  const std::byte* page = p.pages;
  if (in_page > 0) page += p.streams[p.pass.stream[row]].page_table[first / kTile] * p.page_stride;
  // Lane i of a warp: the ancestor that is the warp's row i of the tile.
  int ancestor = 0;
  if (in_page < seen) {
    int node = row, slot = item.own - first;
    for (; slot >= seen; --slot) node = p.pass.parent[node];
    for (; slot >= in_page; --slot) {
      if (slot % kFoldWarps == warp && slot / kFoldWarps == lane) ancestor = node;
      node = p.pass.parent[node];
    }
  }
  const auto source = [&](int slot, int i) -> const std::byte* {
    const int64_t node = __shfl_sync(0xffffffffu, ancestor, i);
    if (slot >= seen) return nullptr;
    return slot < in_page ? page + slot * p.row_bytes : p.scratch + node * p.row_bytes;
  };
  copy_tile(ring.stage(tile, p.stages), ring.memory.key_row, ring.chunks, page, source);
}

template <int kQ, int kM>
__device__ void fold_item(const MlaFold& p, const TileRing& ring, FoldShared& shared, const Item& item) {
  const int n_tiles = static_cast<int>(divide_up(item.end - item.begin, kTile));
  copy_queries(ring.memory.queries, ring.memory.key_row, kQ * 8, p.queries, [&](int column) -> const std::byte* {
    const int64_t at = shared.column[column];
    return at < 0 ? nullptr : reinterpret_cast<const std::byte*>(p.queries + at * p.query_dims);
  });
  for (int t = 0; t < p.stages; ++t) {
    if (t < n_tiles) load_tile(p, ring, item, t);
    cp_async_commit();
  }
  Fold<kQ, kM> fold;
  for (int t = 0; t < n_tiles; ++t) {
    if (p.stages > 1) cp_async_wait<1>();
    else cp_async_wait<0>();
    __syncthreads();
    const SharedAddress keys = ring.stage(t, p.stages);
    fold.tile(ring.memory, shared, keys, keys, item.begin + t * kTile, p.scale, t % 2);
    __syncthreads();
    if (t + p.stages < n_tiles) load_tile(p, ring, item, t + p.stages);
    cp_async_commit();
  }
  fold.store(ring.memory, shared, n_tiles % 2, p.sums, p.extremes, p.n_segments, item.segment);
}

// What `row` of the pass sees of a segment, as the end of its positions; 0 where another item has them.
__device__ inline int seen_end(const MlaFold& p, int row, int segment, bool own) {
  row += p.pass.first;
  if (own) return p.pass.position[row] + 1;
  return segment < paged_segments(p.pass, row) ? min(p.pass.position[row] + 1, p.pass.visible[row]) : 0;
}

// Finds the span of an item and what is to be folded, and says so in shared memory. False: nothing. All threads agree.
__device__ bool find_item(const MlaFold& p, FoldShared& shared, int number, Item& item) {
  const int of_plan = number / p.head_blocks;
  for (int i = threadIdx.x; i < p.plan->n_spans; i += kFoldThreads) {
    const Span span = p.plan->span[i];
    if (of_plan < span.begin || of_plan >= span.end) continue;
    const int at = of_plan - span.begin, groups = max(static_cast<int>(span.groups), 1), group = at % groups;
    shared.item[0] = span.first_row + group * p.group_rows;
    shared.item[1] = span.groups == 0 ? 1 : min(p.group_rows, span.n_rows - group * p.group_rows);
    shared.item[2] = span.last - at / groups;
    shared.item[3] = span.groups == 0;
  }
  __syncthreads();
  const int lane = threadIdx.x % kWarp, first = shared.item[0], n = shared.item[1];
  item.segment = shared.item[2];
  const bool own = shared.item[3] != 0;
  // Every warp finds the rows that take part, the first and the last of them, and how far they see.
  const int end[2] = {lane < n ? seen_end(p, first + lane, item.segment, own) : 0,
                      lane + kWarp < n ? seen_end(p, first + lane + kWarp, item.segment, own) : 0};
  const uint64_t rows = __ballot_sync(0xffffffffu, end[0] > 0) |
                        static_cast<uint64_t>(__ballot_sync(0xffffffffu, end[1] > 0)) << kWarp;
  if (rows == 0) return false;
  const int lowest = __ffsll(static_cast<long long>(rows)) - 1;
  item.first = first + lowest;
  item.n = kWarp * 2 - __clzll(static_cast<long long>(rows)) - lowest;
  item.first_head = number % p.head_blocks * p.heads;
  item.begin = LatentSegments::begin(item.segment);
  item.end = min(LatentSegments::begin(item.segment + 1), __reduce_max_sync(0xffffffffu, max(end[0], end[1])));
  item.own = own ? p.pass.position[p.pass.first + item.first] : -1;
  if (threadIdx.x < kColumns) {
    const int column = threadIdx.x, row = item.first + column / p.heads, head = item.first_head + column % p.heads;
    const int seen = column < item.n * p.heads && head < p.n_heads ? seen_end(p, row, item.segment, own) : 0;
    shared.begin[column] = 0, shared.end[column] = seen;
    shared.column[column] = seen > 0 ? row * p.n_heads + head : -1;
  }
  begin_fold(shared);
  __syncthreads();
  return true;
}

template <int kM>
__global__ void __launch_bounds__(kFoldThreads, kM == 1 ? 2 : 1) fold_kernel(const __grid_constant__ MlaFold p) {
  extern __shared__ __align__(128) std::byte memory[];
  TileRing ring;
  ring.memory.key_row = ring.memory.value_row = p.query_dims * 2;
  ring.memory.dim_groups = p.query_dims / 64, ring.memory.value_tiles = p.value_tiles;
  ring.chunks = p.row_bytes / 16, ring.tile_bytes = kTile * ring.memory.key_row;
  ring.tiles = shared_address(memory);
  ring.memory.queries = ring.tiles + p.stages * ring.tile_bytes;
  ring.memory.weights = ring.memory.queries + p.columns * ring.memory.key_row;
  auto& shared = *reinterpret_cast<FoldShared*>(memory + (ring.memory.weights - ring.tiles) + kWeightsBytes);
  zero_padding(ring.tiles, p.stages * kTile, ring.memory.key_row, ring.chunks);
  let_next_start();
  wait_for_previous();

  const int n_items = p.plan->n_items * p.head_blocks;
  for (int number = blockIdx.x; number < n_items;) {
    const int next = threadIdx.x == 0 ? static_cast<int>(gridDim.x) + atomicAdd(&p.plan->taken, 1) : 0;
    Item item;
    if (find_item(p, shared, number, item)) {
      const int columns = item.n * p.heads;
      if (columns <= 8) fold_item<1, kM>(p, ring, shared, item);
      else if (columns <= 16) fold_item<2, kM>(p, ring, shared, item);
      else if (columns <= 32) fold_item<4, kM>(p, ring, shared, item);
      else fold_item<8, kM>(p, ring, shared, item);
    }
    if (threadIdx.x == 0) shared.item[4] = next;
    __syncthreads();
    number = shared.item[4];
  }
}

struct MlaMerge {
  Pass pass;
  int32_t n_heads, value_dims, value_stride, n_segments;
  const float* sums;
  const float2* extremes;
  bf16* attended;                 // [rows][heads][value_stride]
};

// A block a (row, head).
template <int kM>
__global__ void __launch_bounds__(kMergeThreads<kM>) merge_kernel(const __grid_constant__ MlaMerge p) {
  const int64_t column = blockIdx.x;
  const int row = blockIdx.x / p.n_heads;
  let_next_start();
  wait_for_previous();
  if (row >= p.pass.live()) return;
  const int end = LatentSegments::count(p.pass.position[p.pass.first + row] + 1);
  merge_segments<kM>(p.sums + column * p.n_segments * (128 * kM), p.extremes + column * p.n_segments, 0, end,
                     p.value_dims, p.value_stride, p.attended + column * p.value_stride);
}

struct Project {
  Pass pass;
  HeadProduct product;
};

__global__ void __launch_bounds__(kHeadThreads) project_kernel(const __grid_constant__ Project p) {
  const int first = blockIdx.z * kHeadRows;
  let_next_start();
  head_product(p.product, blockIdx.y, blockIdx.x, first, [&] { return p.pass.live() - first; });
}

template <int kM>
void fold_and_merge(cudaStream_t stream, const MlaFold& fold, const MlaMerge& merge, int64_t blocks, int64_t bytes) {
  check(cudaFuncSetAttribute(fold_kernel<kM>, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)),
        "fold_kernel");
  launch_overlapping("fold_kernel", fold_kernel<kM>, dim3(static_cast<unsigned>(blocks)), kFoldThreads,
                     static_cast<size_t>(bytes), stream, fold);
  const dim3 columns(static_cast<unsigned>(merge.pass.rows * merge.n_heads));
  launch_overlapping("merge_kernel", merge_kernel<kM>, columns, kMergeThreads<kM>,
                     static_cast<size_t>(merge_bytes<kM>(merge.n_segments)), stream, merge);
}

}  // namespace

size_t CudaOps::attention_work_bytes(int64_t rows, int64_t n_heads, int64_t key_dims, int64_t max_context) const {
  const int64_t most = std::min(rows, pass_rows(n_heads, key_dims, max_context));
  return static_cast<size_t>(kPlanBytes + WorkPieces::kMost * WorkPieces::kAlign +
                             most * work_row_bytes(n_heads, key_dims, max_context));
}

void CudaOps::mla_attention(const MlaAttentionArgs& args) {
  const Rows& rows = args.rows;
  if (rows.n.most == 0) return;
  const int64_t heads = args.n_heads, head_dim = args.nope + args.rope.dim, key_dims = args.kv_lora + args.rope.dim;
  const int64_t query_dims = padded_dims(key_dims), value_stride = round_up(args.kv_lora, 16);
  check_argument(args.kv_lora <= kMaxValueDims, "kv_lora_rank", std::to_string(args.kv_lora), "at most 512 on a GPU");
  const FoldShape shape = fold_shape(kTile * query_dims * 2, query_dims * 2, static_cast<int64_t>(shared_limit_));
  const int64_t head_blocks = divide_up(heads, shape.columns), item_heads = divide_up(heads, head_blocks);
  const int64_t group_rows = shape.columns / item_heads;
  const int64_t n_segments = LatentSegments::count(args.max_context);
  const bool small = args.kv_lora <= kSmallValueDims;
  const int64_t at_once = std::min(rows.n.most, pass_rows(heads, key_dims, args.max_context));

  WorkPieces work(args.work);
  auto* plan = work.take<Plan>(1);
  auto* queries = work.take<bf16>(at_once * heads * query_dims);
  auto* attended = work.take<bf16>(at_once * heads * value_stride);
  auto* extremes = work.take<float2>(at_once * heads * n_segments);
  auto* sums = work.take<float>(at_once * heads * n_segments * (small ? kSmallValueDims : kMaxValueDims));
  const auto n32 = [](int64_t value) { return static_cast<int32_t>(value); };

  for (int64_t first = 0; first < rows.n.most; first += at_once) {
    const int64_t n = std::min(at_once, rows.n.most - first);
    const Pass pass{LiveRows(rows.n), n32(first), n32(n), rows.position, rows.stream, rows.parent, rows.visible};
    const auto* q = static_cast<const bf16*>(args.q) + first * heads * head_dim;
    const auto chunks = static_cast<unsigned>(divide_up(n, kHeadRows)), n_heads = static_cast<unsigned>(heads);

    const HeadProduct through_uk(args.w_uk, {q, heads * head_dim, head_dim}, {queries, heads * query_dims, query_dims});
    const Absorb absorb{pass, through_uk, q + args.nope, args.rope, queries, n32(heads), n32(args.kv_lora),
                        n32(query_dims), n32(group_rows), plan};
    const dim3 absorb_grid(static_cast<unsigned>(2 + tiles_of(args.kv_lora)), n_heads, chunks);
    launch_overlapping("absorb_kernel", absorb_kernel, absorb_grid, kHeadThreads, 0, stream_, absorb);

    const MlaFold fold{pass, args.streams, static_cast<const std::byte*>(args.pages),
                       static_cast<int64_t>(args.page_stride), static_cast<const std::byte*>(args.scratch),
                       n32(row_stride(key_dims) * 2), n32(query_dims), n32(value_stride / 16), n32(heads),
                       n32(item_heads), n32(head_blocks), n32(group_rows), shape.columns, shape.stages,
                       static_cast<float>(args.scale * kLog2E), plan, queries, sums, extremes, n32(n_segments)};
    const MlaMerge merge{pass, n32(heads), n32(args.kv_lora), n32(value_stride), n32(n_segments), sums, extremes,
                         attended};
    const int64_t a_multiprocessor = 2 * (shape.bytes + 1024) <= static_cast<int64_t>(shared_limit_) ? 2 : 1;
    const int64_t blocks = std::min(n_sms_ * a_multiprocessor, n * n_segments * head_blocks);
    if (small) fold_and_merge<1>(stream_, fold, merge, blocks, shape.bytes);
    else fold_and_merge<4>(stream_, fold, merge, blocks, shape.bytes);

    auto* out = static_cast<bf16*>(args.out) + first * heads * args.v_head;
    const Project project{pass, HeadProduct(args.w_uv, {attended, heads * value_stride, value_stride},
                                            {out, heads * args.v_head, args.v_head})};
    const dim3 project_grid(static_cast<unsigned>(tiles_of(args.v_head)), n_heads, chunks);
    launch_overlapping("project_kernel", project_kernel, project_grid, kHeadThreads, 0, stream_, project);
  }
}

}  // namespace kdt::cuda
