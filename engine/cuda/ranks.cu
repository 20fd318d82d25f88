// Parts of a model over ranks: a rank's rows of the embedding, the sum of partials, columns side by side.
#include "cuda/norm.cuh"
#include "cuda/rank_meeting.h"
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

// A block takes kThreads * kEach elements of a row.
constexpr int kEach = 4;

unsigned blocks_of(int64_t width) { return static_cast<unsigned>(divide_up(width, kThreads * kEach)); }

// One shot: every rank adds all columns of all partials. Two shots: rank r adds the columns [r * part, (r + 1) * part) and leaves
// their sums in its own partial, where after a second meeting all ranks read them: 2 / n of the bytes of one shot over the links,
// and the same additions.
struct Sum {
  LiveRows n;
  int n_ranks;
  int64_t width, part;                 // part: of two shots, a multiple of kChunk; 0: one shot
  RankPointers partial;
  bf16* out;
  bool accumulate;
  RowLayout out_rows;
};

__device__ inline const float* partial_of(const Sum& p, int rank, int64_t row) {
  return static_cast<const float*>(p.partial[rank]) + row * p.width;
}

// The first of two shots: this rank's columns, summed into `to`, its own partial.
__global__ void __launch_bounds__(kThreads) sum_part_kernel(const __grid_constant__ Sum p, float* to, int64_t first_column) {
  const int64_t row = blockIdx.x, d = first_column + blockIdx.y * int64_t{kThreads} + threadIdx.x;
  if (row >= p.n.get() || d >= p.width || d >= first_column + p.part) return;
  float sum = partial_of(p, 0, row)[d];
  for (int rank = 1; rank < p.n_ranks; ++rank) sum += partial_of(p, rank, row)[d];
  to[row * p.width + d] = sum;
}

__global__ void __launch_bounds__(kThreads) sum_kernel(const __grid_constant__ Sum p) {
  const int64_t row = blockIdx.x, first = blockIdx.y * int64_t{kThreads * kEach} + threadIdx.x;
  wait_for_previous();
  let_next_start();
  if (row >= p.n.get()) return;
  float sum[kEach]{};
  if (p.part > 0) {
#pragma unroll
    for (int i = 0; i < kEach; ++i)
      if (const int64_t d = first + i * kThreads; d < p.width) sum[i] = partial_of(p, static_cast<int>(d / p.part), row)[d];
  } else {
#pragma unroll 4
    for (int rank = 0; rank < p.n_ranks; ++rank) {
      const float* from = partial_of(p, rank, row);
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        const int64_t d = first + i * kThreads;
        const float value = d < p.width ? from[d] : 0.0f;
        sum[i] = rank == 0 ? value : sum[i] + value;
      }
    }
  }
  bf16* out = p.out + row_at(p.out_rows, row, p.width);
#pragma unroll
  for (int i = 0; i < kEach; ++i)
    if (const int64_t d = first + i * kThreads; d < p.width)
      out[d] = __float2bfloat16_rn(p.accumulate ? __bfloat162float(out[d]) + sum[i] : sum[i]);
}

struct SumNorm {
  Sum sum;
  Norm norm;                           // of sum.out
};

// A block a row: its sums, then their norm. With one partial it leaves room for the next kernel's blocks beside it.
template <bool kOne>
__global__ void __maxnreg__(kOne ? 48 : 64) sum_norm_kernel(const __grid_constant__ SumNorm p) {
  const Sum& s = p.sum;
  const int64_t row = blockIdx.x;
  const auto before = [&] {
    const bool live = row < s.n.get();
    wait_for_previous();
    let_next_start();
    return live;
  };
  norm_row(p.norm, row, blockDim.x, before, [&](float (&v)[kChunk], int i) {
    const int width = p.norm.width;
    float sum[kChunk];
    const auto load_partial = [&](float (&to)[kChunk], int rank) {
      const float* partial = partial_of(s, rank, row);
      load_chunk(to, partial, i, width, aligned16(partial));
    };
    const bool summed = kOne || s.part > 0;
    load_partial(sum, !kOne && s.part > 0 ? static_cast<int>(i * int64_t{kChunk} / s.part) : 0);
    if constexpr (!kOne) {
#pragma unroll 4
      for (int rank = 1; !summed && rank < s.n_ranks; ++rank) {
        load_partial(v, rank);
#pragma unroll
        for (int j = 0; j < kChunk; ++j) sum[j] += v[j];
      }
    }
    bf16* out = s.out + row_at(s.out_rows, row, s.width);
    const bool out_aligned = aligned16(out);
    if (s.accumulate) {
      load_chunk(v, out, i, width, out_aligned);
#pragma unroll
      for (int j = 0; j < kChunk; ++j) sum[j] = v[j] + sum[j];
    }
    store_chunk(sum, out, i, width, out_aligned);
#pragma unroll
    for (int j = 0; j < kChunk; ++j) v[j] = __bfloat162float(__float2bfloat16_rn(sum[j]));
  });
}

struct Gather {
  LiveRows n;
  int64_t width, row_width, first_column;   // columns of rank blockIdx.z begin at first_column + blockIdx.z * width
  RankPointers part;
  void* out;
};

// T: as wide as an element.
template <class T>
__global__ void __launch_bounds__(kThreads) gather_kernel(const __grid_constant__ Gather p) {
  const int64_t row = blockIdx.x, first = blockIdx.y * int64_t{kThreads * kEach} + threadIdx.x;
  wait_for_previous();
  let_next_start();
  if (row >= p.n.get()) return;
  const T* from = static_cast<const T*>(p.part[blockIdx.z]) + row * p.width;
  T* to = static_cast<T*>(p.out) + row * p.row_width + p.first_column + blockIdx.z * p.width;
#pragma unroll
  for (int i = 0; i < kEach; ++i)
    if (const int64_t d = first + i * kThreads; d < p.width) to[d] = from[d];
}

// A kernel behind a meeting waits for several streams, and so for their ends; any other overlaps the one before.
template <class Args>
void launch_met(const char* name, void (*kernel)(Args), dim3 grid, unsigned threads, bool met, cudaStream_t stream,
                const Args& args) {
  if (!met) return launch_overlapping(name, kernel, grid, threads, 0, stream, args);
  kernel<<<grid, threads, 0, stream>>>(args);
  launched(name);
}

__global__ void pause_kernel(const __grid_constant__ int64_t nanoseconds) {
  wait_for_previous();
  let_next_start();
  const auto now = [] {
    int64_t time;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(time));
    return time;
  };
  for (const int64_t end = now() + nanoseconds; now() < end;) {}
}

}  // namespace

void embed_part(cudaStream_t stream, const EmbedArgs& args) {
  const EmbedPart embed{LiveRows(args.rows.n), args.rows.token, static_cast<const bf16*>(args.table), args.hidden,
                        args.first_token, args.n_tokens, args.partial};
  launch_overlapping("embed_part_kernel", embed_part_kernel, dim3(static_cast<unsigned>(args.rows.n.most)), kThreads, 0,
                     stream, embed);
}

void CudaOps::sum_ranks(const SumRanksArgs& args) {
  if (ranks_) ranks_->meet(stream_, RankMeeting::Way::all);
  if (args.n.most == 0) return;
  const bool two_shots = ranks_ && args.n.most * args.width >= two_shots_from_;
  const Sum sum{LiveRows(args.n), ranks_ ? ranks_->size() : 1, args.width,
                two_shots ? divide_up(divide_up(args.width, ranks_->size()), kChunk) * kChunk : 0,
                ranks_ ? ranks_->everyones(args.partial) : RankPointers{args.partial}, static_cast<bf16*>(args.out),
                args.accumulate, args.out_rows};
  if (two_shots) {
    const dim3 grid(static_cast<unsigned>(args.n.most), static_cast<unsigned>(divide_up(sum.part, kThreads)));
    sum_part_kernel<<<grid, kThreads, 0, stream_>>>(sum, args.partial, ranks_->rank() * sum.part);
    launched("sum_part_kernel");
    ranks_->meet(stream_, RankMeeting::Way::all);
  }
  const auto n = static_cast<unsigned>(args.n.most);
  if (!args.norm_weight)
    return launch_met("sum_kernel", sum_kernel, dim3(n, blocks_of(args.width)), kThreads, ranks_ != nullptr, stream_, sum);
  const Norm norm{sum.n, static_cast<int32_t>(args.width), args.eps, sum.out, args.out_rows, args.norm_weight,
                  static_cast<bf16*>(args.norm_out), args.out_rows};
  launch_met("sum_norm_kernel", ranks_ ? sum_norm_kernel<false> : sum_norm_kernel<true>, dim3(n),
             static_cast<unsigned>(norm_threads(args.width)), ranks_ != nullptr, stream_, SumNorm{sum, norm});
}

void CudaOps::gather_ranks(const GatherRanksArgs& args) {
  if (ranks_) ranks_->meet(stream_, RankMeeting::Way::all);
  if (args.n.most == 0) return;
  const Gather gather{LiveRows(args.n), args.width, args.n_ranks * args.width, ranks_ ? 0 : args.rank * args.width,
                      ranks_ ? ranks_->everyones(args.part) : RankPointers{args.part}, args.out};
  const dim3 grid(static_cast<unsigned>(args.n.most), blocks_of(args.width), ranks_ ? static_cast<unsigned>(args.n_ranks) : 1);
  launch_met("gather_kernel", args.element_bytes == 4 ? gather_kernel<uint32_t> : gather_kernel<uint16_t>, grid,
             kThreads, ranks_ != nullptr, stream_, gather);
}

void CudaOps::choose_sums(RankSums sums) {
  if (!ranks_ || sums == RankSums::one_shot) return;
  if (sums == RankSums::two_shots) two_shots_from_ = 0;
  else if (sums == RankSums::measured || ranks_->apart()) measure_sums();
}

// Sums of as many rows as a round may have, in chains that are recorded, both ways: from where two shots are faster, rank 0 says.
void CudaOps::measure_sums() {
  constexpr int64_t kWidth = 7168, kMostRows = 128, kSums = 8;
  constexpr int kReplays = 5;
  const Buffer partials[] = {allocate_for_ranks(kMostRows * kWidth * sizeof(float)),
                             allocate_for_ranks(kMostRows * kWidth * sizeof(float))};
  const Buffer out = allocate(kMostRows * kWidth * sizeof(bf16));
  const auto seconds = [&](int64_t rows, bool two_shots) {
    two_shots_from_ = two_shots ? 0 : kNever;
    const SubmitKey key{-1, rows, two_shots};
    double fastest = 0;
    for (int i = 0; i <= kReplays; ++i) {
      submit(&key, [&] {
        for (int64_t s = 0; s < kSums; ++s)
          sum_ranks({rows, kWidth, partials[s % 2].as<float>(), out.data(), true, {}, nullptr, 0, nullptr});
        mark(Stage::verify);
      });
      const double taken = wait()[Stage::verify];
      fastest = i == 0 ? taken : std::min(fastest, taken);
    }
    forget(key);
    return fastest;
  };
  int64_t from = kNever;
  for (int64_t rows = kMostRows; rows >= 1; rows /= 2) {
    const double one = seconds(rows, false), two = seconds(rows, true);
    if (!ranks_->of_first(two < one)) break;
    from = rows * kWidth;
  }
  two_shots_from_ = from;
}

void CudaOps::pause(double seconds) {
  launch_overlapping("pause_kernel", pause_kernel, dim3(1), 1, 0, stream_, static_cast<int64_t>(seconds * 1e9));
}

}  // namespace kdt::cuda
