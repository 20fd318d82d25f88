// The best of a row and its log-sum-exp: top_k and logprobs. Exact: what a full sort would yield.
//
// top_k is four launches, each over (piece of a row, row) but the last:
//   rank     the log-sum-exp of every piece, and a histogram of the upper 11 bits of all order keys
//   refine   where the bins that hold the k best hold too much for one block: the next 11 bits of the last of them
//   collect  the tokens of those bins, in any order
//   finish   one block a row: sorts them, merges the log-sum-exps
// The next may start while one runs; it waits before it touches what that writes (device.cuh).
// Rows that are equal in 22 bits beyond that are narrowed down by the last block alone, over the whole row.
// logprobs, which are seldom wanted, have no working memory: one block a row does all of it.
#include <algorithm>

#include "cuda/vocabulary.cuh"

namespace kdt::cuda {
namespace {

constexpr int kBinBits = 11, kBins = 1 << kBinBits;
constexpr int kListed = 4096;         // tokens that one block sorts
constexpr int kRowThreads = 1024;     // of a block that has a row to itself
constexpr int kFirstShift = 64 - kBinBits, kSecondShift = kFirstShift - kBinBits;

// Of one piece: sum of exp(x - max).
struct PieceSum {
  float max, sum;
};

// Working memory of top_k. What must be zero at first comes first.
struct RankWork {
  uint32_t* bins;                     // [rows, 2, kBins]
  uint32_t* n_listed;                 // [rows]
  uint64_t* listed;                   // [rows, kListed]
  PieceSum* sums;                     // [rows, pieces]

  static size_t zero_bytes(int64_t rows) { return static_cast<size_t>(divide_up(rows * (2 * kBins + 1), 4)) * 16; }
  static size_t bytes(int64_t rows, int64_t vocab) {
    const size_t row = kListed * sizeof(uint64_t) + static_cast<size_t>(pieces_of(vocab)) * sizeof(PieceSum);
    return zero_bytes(rows) + static_cast<size_t>(rows) * row;
  }
  RankWork(void* work, int64_t rows)
      : bins(static_cast<uint32_t*>(work)), n_listed(bins + rows * 2 * kBins),
        listed(reinterpret_cast<uint64_t*>(static_cast<std::byte*>(work) + zero_bytes(rows))),
        sums(reinterpret_cast<PieceSum*>(listed + rows * kListed)) {}
};

struct RankArgs {
  Count n;
  int32_t vocab, k, pieces;
  const float* logits;
  const Sampling* sampling;           // null: by the logits as they are
  int32_t depths;
  const int32_t* position;
  int32_t* token;                     // out [n, k]
  float* log_q;
  RankWork work;
};

// One row: its logits, and what they are ranked by.
struct RankedRow {
  const float* x;
  double weight = 0;                  // of the noise
  uint64_t seed = 0;
  uint32_t choice = 0, position = 0;

  __device__ explicit RankedRow(const float* logits) : x(logits) {}
  __device__ RankedRow(const RankArgs& args, int32_t i) : x(args.logits + static_cast<int64_t>(i) * args.vocab) {
    if (!args.sampling) return;
    const Sampling& s = args.sampling[i / args.depths];
    if (!(s.temperature > 0)) return;
    weight = s.temperature * (i % args.depths == 0 ? 1.0 : kDeepNoise);
    seed = s.seed;
    choice = s.choice;
    position = static_cast<uint32_t>(args.position[i]);
  }
  __device__ float noisy(float logit, double noise) const {
    return static_cast<float>(__dadd_rn(static_cast<double>(logit), __dmul_rn(weight, noise)));
  }
  // The value that `token` is ranked by; NaN is -inf.
  __device__ float value(int32_t token, float logit) const {
    if (!(weight > 0)) return rankable(logit);
    return rankable(noisy(logit, noise_of(noise_bits(seed, choice, position, static_cast<uint32_t>(token)))));
  }
  // The same, or -inf where it is surely less than `least`: no noise exceeds its bound, and rounding is monotone.
  __device__ float value_from(float least, int32_t token, float logit) const {
    if (!(weight > 0)) return rankable(logit);
    if (noisy(logit, kMostNoise) < least) return -INFINITY;
    const uint32_t bits = noise_bits(seed, choice, position, static_cast<uint32_t>(token));
    if (noisy(logit, gumbel_bound(bits)) < least) return -INFINITY;
    return rankable(noisy(logit, noise_of(bits)));
  }
};

// A beginning of a row's order that holds its k best: keys whose upper bits, from `shift` on, are at least `prefix`.
struct Head {
  uint64_t prefix = 0;
  int shift = 64;
  uint32_t size, above = 0;           // keys in it; those whose upper bits are more than prefix

  __device__ uint64_t upper(uint64_t key) const { return shift < 64 ? key >> shift : 0; }
  __device__ bool has(uint64_t key) const { return upper(key) >= prefix; }
  __device__ bool ends_with(uint64_t key) const { return upper(key) == prefix; }
  // No token of it has a smaller value. NaN, of which nothing is less, where it holds -inf.
  __device__ float least() const { return logit_of(shift < 64 ? prefix << shift : 0); }
  __device__ Head narrowed(int bits, const Bin<uint32_t>& at) const {
    Head next;
    next.prefix = prefix << bits | at.bin;
    next.shift = shift - bits;
    next.above = above + at.above;
    next.size = next.above + at.inside;
    return next;
  }
};

// From the histogram of the first level and, if that is not enough, of the second: as far as all pieces work together.
template <int kThreads>
__device__ Head narrowed_by(const uint32_t* bins, const Head& head, int32_t k, BinScratch<uint32_t>& scratch) {
  const auto count = [bins](int bin) { return bins[bin]; };
  return head.narrowed(kBinBits, find_bin<kThreads, kBins>(static_cast<uint32_t>(k) - head.above, count, scratch));
}

template <int kThreads>
__device__ Head joint_head(const RankArgs& args, int32_t row, int levels, BinScratch<uint32_t>& scratch) {
  const uint32_t* bins = args.work.bins + static_cast<int64_t>(row) * 2 * kBins;
  Head head;
  head.size = static_cast<uint32_t>(args.vocab);
  for (int level = 0; level < levels && head.size > kListed; ++level)
    head = narrowed_by<kThreads>(bins + level * kBins, head, args.k, scratch);
  return head;
}

__global__ void __launch_bounds__(kPieceThreads) rank_kernel(RankArgs args) {
  const int32_t row = blockIdx.y, piece = blockIdx.x, begin = piece * kPiece;
  let_next_start();
  if (row >= live_rows(args.n)) return;
  __shared__ uint32_t bins[kBins];
  __shared__ float partial[kPieceThreads / kWarp];
  const RankedRow ranked(args, row);
  float x[kLoads];
  load_elements<kPieceThreads>(x, ranked.x, begin, args.vocab);
  for (int i = threadIdx.x; i < kBins; i += kPieceThreads) bins[i] = 0;
  __syncthreads();
  float max = -INFINITY;
#pragma unroll
  for (int j = 0; j < kLoads; ++j) {
    const int32_t token = element<kPieceThreads>(begin, j);
    if (token < args.vocab) {
      x[j] = ranked.value(token, x[j]);
      atomicAdd(&bins[order_key(x[j]) >> (32 - kBinBits)], 1u);
    } else {
      x[j] = -INFINITY;
    }
    max = fmaxf(max, x[j]);
  }
  max = block_maximum<kPieceThreads>(max, partial);
  float sum = 0;
  if (max > -INFINITY) {
#pragma unroll
    for (int j = 0; j < kLoads; ++j) sum += expf(x[j] - max);
  }
  sum = block_sum<kPieceThreads>(sum, partial);
  if (threadIdx.x == 0) args.work.sums[static_cast<int64_t>(row) * args.pieces + piece] = {max, sum};
  uint32_t* to = args.work.bins + static_cast<int64_t>(row) * 2 * kBins;
  for (int i = threadIdx.x; i < kBins; i += kPieceThreads)
    if (bins[i] > 0) atomicAdd(&to[i], bins[i]);
}

__global__ void __launch_bounds__(kPieceThreads) refine_kernel(RankArgs args) {
  const int32_t row = blockIdx.y, begin = static_cast<int32_t>(blockIdx.x) * kPiece;
  wait_for_previous();
  let_next_start();
  if (row >= live_rows(args.n)) return;
  __shared__ BinScratch<uint32_t> scratch;
  __shared__ uint32_t bins[kBins];
  const Head head = joint_head<kPieceThreads>(args, row, 1, scratch);
  if (head.size <= kListed) return;
  for (int i = threadIdx.x; i < kBins; i += kPieceThreads) bins[i] = 0;
  const RankedRow ranked(args, row);
  float x[kLoads];
  load_elements<kPieceThreads>(x, ranked.x, begin, args.vocab);
  __syncthreads();
#pragma unroll
  for (int j = 0; j < kLoads; ++j) {
    const int32_t token = element<kPieceThreads>(begin, j);
    if (token >= args.vocab) continue;
    const uint64_t key = rank_key(ranked.value_from(head.least(), token, x[j]), static_cast<uint32_t>(token));
    if (head.ends_with(key)) atomicAdd(&bins[key >> kSecondShift & (kBins - 1)], 1u);
  }
  __syncthreads();
  uint32_t* to = args.work.bins + (static_cast<int64_t>(row) * 2 + 1) * kBins;
  for (int i = threadIdx.x; i < kBins; i += kPieceThreads)
    if (bins[i] > 0) atomicAdd(&to[i], bins[i]);
}

__global__ void __launch_bounds__(kPieceThreads) collect_kernel(RankArgs args) {
  const int32_t row = blockIdx.y, begin = static_cast<int32_t>(blockIdx.x) * kPiece;
  __shared__ BinScratch<uint32_t> scratch;
  const bool live = row < live_rows(args.n);
  float x[kLoads];
  if (live) load_elements<kPieceThreads>(x, args.logits + static_cast<int64_t>(row) * args.vocab, begin, args.vocab);
  wait_for_previous();
  let_next_start();
  if (!live) return;
  const RankedRow ranked(args, row);
  const Head head = joint_head<kPieceThreads>(args, row, 2, scratch);
  if (head.size > kListed) return;
  uint64_t* listed = args.work.listed + static_cast<int64_t>(row) * kListed;
#pragma unroll
  for (int j = 0; j < kLoads; ++j) {
    const int32_t token = element<kPieceThreads>(begin, j);
    if (token >= args.vocab) continue;
    const uint64_t key = rank_key(ranked.value_from(head.least(), token, x[j]), static_cast<uint32_t>(token));
    if (head.has(key)) listed[atomicAdd(&args.work.n_listed[row], 1u)] = key;
  }
}

// For a block with a row to itself: narrows the head down until it fits, at the latest by all bits, and lists it.
// Returns its size.
template <int kBatch>
__device__ int list_head(const RankedRow& ranked, int32_t vocab, int32_t k, Head head, uint64_t* listed,
                         BinScratch<uint32_t>& scratch) {
  __shared__ uint32_t n_listed;
  auto* bins = reinterpret_cast<uint32_t*>(listed);
  while (head.size > kListed) {
    const int bits = min(kBinBits, head.shift), shift = head.shift - bits;
    for (int i = threadIdx.x; i < kBins; i += kRowThreads) bins[i] = 0;
    __syncthreads();
    for_elements<kRowThreads, kBatch>(ranked.x, 0, vocab, [&](int32_t token, float logit) {
      const uint64_t key = rank_key(ranked.value_from(head.least(), token, logit), static_cast<uint32_t>(token));
      if (head.ends_with(key)) atomicAdd(&bins[key >> shift & ((1u << bits) - 1)], 1u);
    });
    __syncthreads();
    const auto count = [bins](int bin) { return bins[bin]; };
    head = head.narrowed(bits, find_bin<kRowThreads, kBins>(static_cast<uint32_t>(k) - head.above, count, scratch));
  }
  if (threadIdx.x == 0) n_listed = 0;
  __syncthreads();
  for_elements<kRowThreads, kBatch>(ranked.x, 0, vocab, [&](int32_t token, float logit) {
    const uint64_t key = rank_key(ranked.value_from(head.least(), token, logit), static_cast<uint32_t>(token));
    if (head.has(key)) listed[atomicAdd(&n_listed, 1u)] = key;
  });
  __syncthreads();
  return static_cast<int>(head.size);
}

__device__ inline float log_probability(float value, float log_sum) {
  return value == -INFINITY ? value : value - log_sum;
}

// Sorts what is listed and writes the k best.
__device__ void write_best(uint64_t* listed, int size, int32_t k, float log_sum, int32_t* token, float* log_q) {
  const int sorted = power_above(size);
  for (int i = size + static_cast<int>(threadIdx.x); i < sorted; i += kRowThreads) listed[i] = 0;
  __syncthreads();
  sort_keys<kRowThreads>(listed, sorted);
  for (int i = threadIdx.x; i < k; i += kRowThreads) {
    token[i] = token_of(listed[i]);
    log_q[i] = log_probability(logit_of(listed[i]), log_sum);
  }
}

__global__ void __launch_bounds__(kRowThreads) finish_kernel(RankArgs args) {
  const int32_t row = blockIdx.x;
  wait_for_previous();
  let_next_start();
  if (row >= live_rows(args.n)) return;
  __shared__ BinScratch<uint32_t> scratch;
  __shared__ uint64_t listed[kListed];
  // The log-sum-exp, by every warp: pieces ascend within a lane.
  const PieceSum* sums = args.work.sums + static_cast<int64_t>(row) * args.pieces;
  const int lane = threadIdx.x % kWarp;
  float max = -INFINITY, sum = 0;
  for (int32_t i = lane; i < args.pieces; i += kWarp) max = fmaxf(max, sums[i].max);
  max = warp_max(max);
  if (max > -INFINITY)
    for (int32_t i = lane; i < args.pieces; i += kWarp) sum += sums[i].sum * expf(sums[i].max - max);
  const float log_sum = max > -INFINITY ? max + logf(warp_sum(sum)) : max;

  const Head head = joint_head<kRowThreads>(args, row, 2, scratch);
  int size = static_cast<int>(head.size);
  if (size > kListed) {
    size = list_head<4>(RankedRow(args, row), args.vocab, args.k, head, listed, scratch);
  } else {
    const uint64_t* from = args.work.listed + static_cast<int64_t>(row) * kListed;
    for (int i = threadIdx.x; i < size; i += kRowThreads) listed[i] = from[i];
  }
  const int64_t to = static_cast<int64_t>(row) * args.k;
  write_best(listed, size, args.k, log_sum, args.token + to, args.log_q + to);
}

__global__ void __launch_bounds__(kRowThreads) logprobs_kernel(LogprobArgs args) {
  const int32_t i = blockIdx.x;
  wait_for_previous();
  let_next_start();
  if (i >= live_rows(args.n) || args.token[i] < 0) return;
  __shared__ BinScratch<uint32_t> scratch;
  __shared__ uint64_t listed[kListed];
  __shared__ float partial[kRowThreads / kWarp];
  const auto vocab = static_cast<int32_t>(args.vocab), k = static_cast<int32_t>(args.n_top);
  const RankedRow row(args.logits + static_cast<int64_t>(args.row[i]) * args.vocab);
  float max = -INFINITY, sum = 0;
  for_elements<kRowThreads, kLoads>(row.x, 0, vocab, [&](int32_t, float x) { max = fmaxf(max, rankable(x)); });
  max = block_maximum<kRowThreads>(max, partial);
  if (max > -INFINITY)
    for_elements<kRowThreads, kLoads>(row.x, 0, vocab, [&](int32_t, float x) { sum += expf(rankable(x) - max); });
  sum = block_sum<kRowThreads>(sum, partial);
  const float log_sum = max > -INFINITY ? max + logf(sum) : max;
  if (threadIdx.x == 0) args.logprob[i] = log_probability(rankable(row.x[args.token[i]]), log_sum);
  if (k == 0) return;
  Head head;
  head.size = static_cast<uint32_t>(vocab);
  const int size = list_head<kLoads>(row, vocab, k, head, listed, scratch);
  const int64_t to = static_cast<int64_t>(i) * k;
  write_best(listed, size, k, log_sum, args.top_token + to, args.top_logprob + to);
}

}  // namespace

void CudaOps::top_k(const TopKArgs& args) {
  if (args.n.most == 0 || args.k == 0) return;
  const RankArgs rank{args.n,
                      static_cast<int32_t>(args.vocab),
                      static_cast<int32_t>(args.k),
                      pieces_of(args.vocab),
                      args.logits,
                      args.sampling,
                      static_cast<int32_t>(args.depths),
                      args.position,
                      args.token,
                      args.log_q,
                      RankWork(args.work, args.n.most)};
  const auto rows = static_cast<unsigned>(args.n.most);
  const dim3 pieces(static_cast<unsigned>(rank.pieces), rows);
  check(cudaMemsetAsync(args.work, 0, RankWork::zero_bytes(args.n.most), stream_), "cudaMemsetAsync");
  rank_kernel<<<pieces, kPieceThreads, 0, stream_>>>(rank);
  launched("rank_kernel");
  if (args.vocab > kListed) launch_overlapping("refine_kernel", refine_kernel, pieces, kPieceThreads, 0, stream_, rank);
  launch_overlapping("collect_kernel", collect_kernel, pieces, kPieceThreads, 0, stream_, rank);
  launch_overlapping("finish_kernel", finish_kernel, rows, kRowThreads, 0, stream_, rank);
}

void CudaOps::logprobs(const LogprobArgs& args) {
  if (args.n.most == 0) return;
  const auto rows = static_cast<unsigned>(args.n.most);
  launch_overlapping("logprobs_kernel", logprobs_kernel, rows, kRowThreads, 0, stream_, args);
}

size_t CudaOps::vocabulary_work_bytes(int64_t rows, int64_t vocab, int64_t) const {
  return std::max(RankWork::bytes(rows, vocab), sample_work_bytes(rows, vocab));
}

}  // namespace kdt::cuda
