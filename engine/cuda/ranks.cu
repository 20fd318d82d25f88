// Parts of a model over ranks: a rank's rows of the embedding, the sum of partials, columns side by side.
#include "cuda/device.cuh"
#include "cuda/ranks.cuh"

namespace kdt::cuda {
namespace {

constexpr int kThreads = 256;

struct EmbedPart {
  LiveRows n;
  const int32_t* token;
  const bf16* table;
  int64_t hidden, first_token, n_tokens;
  float* partial;
};

__global__ void __launch_bounds__(kThreads) embed_part_kernel(const __grid_constant__ EmbedPart p) {
  const int64_t row = blockIdx.x;
  wait_for_previous();
  let_next_start();
  if (row >= p.n.get()) return;
  const int64_t token = p.token[row] - p.first_token;
  const bool here = token >= 0 && token < p.n_tokens;
  for (int64_t d = threadIdx.x; d < p.hidden; d += kThreads)
    p.partial[row * p.hidden + d] = here ? __bfloat162float(p.table[token * p.hidden + d]) : 0.0f;
}

struct Sum {
  LiveRows n;
  int64_t width;
  const float* partial;
  bf16* out;
  bool accumulate;
  RowLayout out_rows;
};

__global__ void __launch_bounds__(kThreads) sum_kernel(const __grid_constant__ Sum p) {
  const int64_t row = blockIdx.x;
  wait_for_previous();
  let_next_start();
  if (row >= p.n.get()) return;
  bf16* out = p.out + row_at(p.out_rows, row, p.width);
  for (int64_t d = threadIdx.x; d < p.width; d += kThreads) {
    const float sum = p.partial[row * p.width + d];
    out[d] = __float2bfloat16_rn(p.accumulate ? __bfloat162float(out[d]) + sum : sum);
  }
}

struct Gather {
  LiveRows n;
  int64_t width, rank, n_ranks;   // width in units of 2 bytes
  const uint16_t* part;
  uint16_t* out;
};

__global__ void __launch_bounds__(kThreads) gather_kernel(const __grid_constant__ Gather p) {
  const int64_t row = blockIdx.x;
  wait_for_previous();
  let_next_start();
  if (row >= p.n.get()) return;
  uint16_t* out = p.out + (row * p.n_ranks + p.rank) * p.width;
  for (int64_t d = threadIdx.x; d < p.width; d += kThreads) out[d] = p.part[row * p.width + d];
}

}  // namespace

void embed_part(cudaStream_t stream, const EmbedArgs& args) {
  const EmbedPart embed{LiveRows(args.rows.n), args.rows.token, static_cast<const bf16*>(args.table), args.hidden,
                        args.first_token, args.n_tokens, args.partial};
  launch_overlapping("embed_part_kernel", embed_part_kernel, dim3(static_cast<unsigned>(args.rows.n.most)), kThreads, 0,
                     stream, embed);
}

// This backend has no other ranks to meet: make_cuda_ops says so to whoever wants several.
void CudaOps::sum_ranks(const SumRanksArgs& args) {
  if (args.n.most == 0) return;
  const Sum sum{LiveRows(args.n), args.width, args.partial, static_cast<bf16*>(args.out), args.accumulate, args.out_rows};
  launch_overlapping("sum_kernel", sum_kernel, dim3(static_cast<unsigned>(args.n.most)), kThreads, 0, stream_, sum);
}

void CudaOps::gather_ranks(const GatherRanksArgs& args) {
  if (args.n.most == 0) return;
  const Gather gather{LiveRows(args.n), args.width * static_cast<int64_t>(args.element_bytes / sizeof(uint16_t)),
                      args.rank, args.n_ranks, static_cast<const uint16_t*>(args.part),
                      static_cast<uint16_t*>(args.out)};
  launch_overlapping("gather_kernel", gather_kernel, dim3(static_cast<unsigned>(args.n.most)), kThreads, 0, stream_, gather);
}

}  // namespace kdt::cuda
