// Absorbed multi-head latent attention, position-ordered, over pages and the scratch rows of draft nodes.
//
// Rows go through in passes of what the working memory holds, or of what suits the kernels, each of three:
//   absorb   q_nope through W_UK and q_pe rotated: a query of kv_lora + rope dims for every (row, head)
//   fold     a block takes items in turn: queries of one stream x one segment of its positions; leaves m, l and o / l
//   merge    the segments' means of every (row, head), and what comes of them through W_UV; of many rows two kernels
//
// There are two kinds of items. A stream's rows share the segments that lie in its pages as far as they see them. A draft
// node has segments of its own from that of `visible` on, where each of its ancestors is read from its scratch row, in the
// slot of its position. What a row sees of a segment are the same keys in the same slots either way, and so are its bits.
//
// Fold starts with absorb: rows and page tables were written long before, so a block knows its first item, and has asked for the
// pages it needs, when absorb has ended. It reads neither pages nor scratch until then: the kernel before absorb may write them.
#include "cuda/latent_few.cuh"
#include "cuda/latent_many.cuh"
#include "cuda/latent_means.cuh"
#include "cuda/latent_narrow.cuh"

namespace kdt::cuda {
namespace {

// Queries of a block for so many: the fewer, the sooner there is room for the next kernel's blocks beside it.
FoldShape shape_for(int64_t queries, int64_t query_dims, int64_t limit) {
  FoldShape shape = fold_shape(kTile * query_dims * 2, query_dims * 2, limit);
  while (shape.columns > 8 && queries <= shape.columns / 2) {
    shape.columns /= 2;
    shape.bytes -= shape.columns * query_dims * 2;
  }
  return shape;
}

template <int kM, int kRows, int kTiles>
void run_merge(cudaStream_t stream, const Merge& merge) {
  using Shape = MergeShape<kM, kRows, kTiles>;
  const auto kernel = merge_kernel<kM, kRows, kTiles>;
  const int64_t shared = Shape::bytes(merge.n_segments);
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared)), "merge_kernel");
  const dim3 grid(static_cast<unsigned>(divide_up(merge.v_head, Shape::kOutputs)), static_cast<unsigned>(merge.n_heads),
                  static_cast<unsigned>(divide_up(merge.pass.rows, kRows)));
  launch_overlapping("merge_kernel", kernel, grid, kSumThreads, static_cast<size_t>(shared), stream, merge);
}

template <int kM>
void run_fold(cudaStream_t stream, const MlaFold& fold, int64_t blocks, int64_t bytes) {
  check(cudaFuncSetAttribute(fold_kernel<kM>, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)),
        "fold_kernel");
  launch_overlapping("fold_kernel", fold_kernel<kM>, dim3(static_cast<unsigned>(blocks)), kFoldThreads,
                     static_cast<size_t>(bytes), stream, fold);
}

void merge_many(cudaStream_t stream, const MergeMany& many) {
  const Merge& merge = many.merge;
  const dim3 columns(static_cast<unsigned>(merge.n_heads), static_cast<unsigned>(merge.pass.rows));
  launch_overlapping("means_kernel", means_kernel, columns, kMeanThreads, means_bytes(merge.n_segments), stream, many);
  check(cudaFuncSetAttribute(project_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kProjectBytes), "project_kernel");
  const dim3 grid(static_cast<unsigned>(divide_up(merge.pass.rows, kProjectRows)), static_cast<unsigned>(merge.n_heads),
                  static_cast<unsigned>(divide_up(merge.v_head, kProjectOutputs)));
  launch_overlapping("project_kernel", project_kernel, grid, kProjectThreads, kProjectBytes, stream, many);
}

void run_wide(cudaStream_t stream, void (*kernel)(WideFold), const WideFold& fold, int64_t blocks, int64_t bytes) {
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)), "wide_fold_kernel");
  launch_overlapping("wide_fold_kernel", kernel, dim3(static_cast<unsigned>(blocks)), kWideThreads, static_cast<size_t>(bytes), stream,
                     fold);
}

// Rows of a pass of wide_fold_kernel: trees of up to so many nodes are sooner done by it than by many_fold_kernel.
constexpr int64_t kMostWideRows = 128;

// The most rows of a pass of many_fold_kernel, and what it keeps for each.
int64_t many_row_bytes(int64_t n_heads, int64_t max_context) {
  return n_heads * (kWideDims * 2 + (LatentSegments::count(max_context) + 1) * (8 + 2 * kMaxValueDims));
}
int64_t many_pass_rows(int64_t n_heads, int64_t max_context) {
  const int64_t rows = kWorkBytes / many_row_bytes(n_heads, max_context) / kWarp * kWarp;
  return std::clamp(rows, 2 * kLeastPassRows, kMostManyRows);
}

// The fewer rows, the fewer a block: more blocks have more of the means under way, and W_UV is read more often. What many rows
// attend to takes the place of their queries.
void merge_wide(cudaStream_t stream, const Merge& merge, bf16* queries, int64_t query_dims) {
  const int32_t n = merge.pass.rows;
  if (n <= 2) run_merge<4, 1, 1>(stream, merge);
  else if (n <= 8) run_merge<4, 1, 4>(stream, merge);
  else if (n <= 32) run_merge<4, 2, 4>(stream, merge);
  else if (n <= 64) run_merge<4, 4, 4>(stream, merge);
  else merge_many(stream, {merge, queries, static_cast<int32_t>(query_dims)});
}

}  // namespace

size_t CudaOps::attention_work_bytes(int64_t rows, int64_t n_heads, int64_t key_dims, int64_t max_context) const {
  const int64_t most = std::min(rows, pass_rows(n_heads, key_dims, max_context)) * work_row_bytes(n_heads, key_dims, max_context);
  const int64_t of_many = std::min(rows, many_pass_rows(n_heads, max_context)) * many_row_bytes(n_heads, max_context);
  return static_cast<size_t>(WorkPieces::kMost * WorkPieces::kAlign + std::max(most, key_dims == kWideDims ? of_many : 0));
}

void CudaOps::mla_attention(const MlaAttentionArgs& args) {
  const Rows& rows = args.rows;
  if (rows.n.most == 0) return;
  const int64_t heads = args.n_heads, head_dim = args.nope + args.rope.dim, key_dims = args.kv_lora + args.rope.dim;
  const int64_t query_dims = padded_dims(key_dims), value_tiles = divide_up(args.kv_lora, 16);
  check_argument(args.kv_lora <= kMaxValueDims, "kv_lora_rank", std::to_string(args.kv_lora), "at most 512 on a GPU");
  const bool small = args.kv_lora <= kSmallValueDims;
  const bool hopper = key_dims == kWideDims && value_tiles == kWideValueTiles && is_hopper("wide_fold_kernel", wide_fold_kernel) &&
                      std::max(kWideBytes, kManyBytes) <= static_cast<int64_t>(shared_limit_);
  const bool many = hopper && rows.n.most > kMostWideRows;
  int64_t at_once = std::min(rows.n.most, pass_rows(heads, key_dims, args.max_context));
  if (many) {                     // passes alike
    const int64_t passes = divide_up(rows.n.most, many_pass_rows(heads, args.max_context));
    at_once = std::min(rows.n.most, round_up(divide_up(rows.n.most, passes), kWarp));
  }
  const bool few = at_once * heads <= kFewColumns;   // a tile takes less time with eight queries
  const FoldShape shape = hopper ? FoldShape{few ? kFewColumns : kColumns, 2, many ? kManyBytes : kWideBytes}
                                 : shape_for(at_once * heads, query_dims, static_cast<int64_t>(shared_limit_));
  const int64_t head_blocks = divide_up(heads, shape.columns), item_heads = divide_up(heads, head_blocks);
  const int64_t group_rows = shape.columns / item_heads;
  const int64_t n_segments = LatentSegments::count(args.max_context);

  WorkPieces work(args.work);
  auto* taken = work.take<int32_t>(1);
  auto* queries = work.take<bf16>(at_once * heads * query_dims);
  auto* extremes = work.take<float2>(at_once * heads * n_segments);
  auto* means = work.take<uint16_t>(at_once * heads * n_segments * (small ? kSmallValueDims : kMaxValueDims));
  const auto n32 = [](int64_t value) { return static_cast<int32_t>(value); };

  for (int64_t first = 0; first < rows.n.most; first += at_once) {
    const int64_t n = std::min(at_once, rows.n.most - first);
    const Pass pass{LiveRows(rows.n), n32(first), n32(n), rows.position, rows.stream, rows.parent, rows.visible};
    const auto* q = static_cast<const bf16*>(args.q) + first * heads * head_dim;
    const bool aligned = args.nope % kStepInputs == 0 && head_dim % 4 == 0 && reinterpret_cast<uintptr_t>(q) % 8 == 0;
    const Absorb absorb{pass, args.w_uk.device, q, args.rope, queries, n32(heads), n32(args.nope), n32(args.kv_lora),
                        n32(query_dims), aligned, taken};
    const int64_t absorb_groups = n > 64 ? 2 : 1;
    const dim3 grid(static_cast<unsigned>(divide_up(tiles_of(args.kv_lora), kAbsorbWarps) + 1), static_cast<unsigned>(heads),
                    static_cast<unsigned>(divide_up(n, absorb_groups * 8)));
    launch_overlapping("absorb_kernel", absorb_groups == 1 ? absorb_kernel<1> : absorb_kernel<2>, grid, kAbsorbThreads, 0,
                       stream_, absorb);

    const MlaFold fold{pass, args.streams, static_cast<const std::byte*>(args.pages),
                       static_cast<int64_t>(args.page_stride), static_cast<const std::byte*>(args.scratch),
                       n32(row_stride(key_dims) * 2), n32(query_dims), n32(value_tiles), n32(heads), n32(item_heads),
                       n32(head_blocks), n32(group_rows), shape.columns, shape.stages,
                       static_cast<float>(args.scale * kLog2E), taken, queries, means, extremes, n32(n_segments)};
    const Merge merge{pass, n32(heads), n32(args.kv_lora), n32(n_segments), means, extremes, args.w_uv.device,
                      n32(args.v_head), static_cast<bf16*>(args.out) + first * heads * args.v_head};
    const int64_t a_multiprocessor = 2 * (shape.bytes + 1024) <= static_cast<int64_t>(shared_limit_) ? 2 : 1;
    const int64_t blocks = std::min(n_sms_ * a_multiprocessor, n * n_segments * head_blocks);
    if (hopper) {
      const int64_t query_bytes = query_dims * 2;
      const WideFold wide_fold{
          tensor_map(args.pages, {key_dims, kTile, int64_t{1} << 31}, {fold.row_bytes, fold.page_stride}, {kTile, 1}),
          tensor_map(queries, {query_dims, heads, n}, {query_bytes, heads * query_bytes}, {item_heads, group_rows}), fold};
      const auto kernel = many ? many_fold_kernel : few ? few_fold_kernel : wide_fold_kernel;
      run_wide(stream_, kernel, wide_fold, blocks, shape.bytes);
    } else if (small) {
      run_fold<1>(stream_, fold, blocks, shape.bytes);
    } else {
      run_fold<4>(stream_, fold, blocks, shape.bytes);
    }
    if (small) run_merge<1, 4, 1>(stream_, merge);
    else merge_wide(stream_, merge, queries, query_dims);
  }
}

}  // namespace kdt::cuda
