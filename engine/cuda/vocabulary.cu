// The best of a row and its log-sum-exp: top_k and logprobs. Exact: what a full sort would yield.
//
// top_k is two launches:
//   pick     a block a piece of a row: its log-sum-exp, and those of its tokens that may be among the k best of the row
//   finish   a block a row: sorts the best of those, merges the log-sum-exps
// logprobs, which are seldom wanted, have no working memory: one block a row does all of it.
#include <algorithm>

#include "cuda/vocabulary.cuh"

namespace kdt::cuda {
namespace {

constexpr int kBinBits = 11, kBins = 1 << kBinBits;
constexpr int kListed = 4096;         // tokens that one block sorts, at most
constexpr int kFewSorted = 128;       // so many are sorted sooner than narrowed down further
constexpr int kFewListed = 96;        // the same of a piece
constexpr int kFewCompared = 512;     // and so many are compared with one another sooner than sorted
constexpr int kRowThreads = 1024;     // of a block that has a row to itself
constexpr int kPickBlocks = 5;        // that share a multiprocessor

// Of one piece: sum of exp(x - max).
struct PieceSum {
  float max, sum;
};

// Places for keys that a piece lists: for its k best, and some more where that spares it a look at more bits.
int64_t room_of(int64_t k) {
  return std::min<int64_t>(kPiece, std::max<int64_t>(k <= kPieceThreads / 2 ? 3 * k : k + k / 4, kFewListed));
}

// Working memory of top_k.
struct RankWork {
  uint64_t* listed;                   // [rows, pieces, room]; 0 where there is none
  PieceSum* sums;                     // [rows, pieces]

  static size_t bytes(int64_t rows, int64_t vocab, int64_t k) {
    const size_t piece = static_cast<size_t>(room_of(k)) * sizeof(uint64_t) + sizeof(PieceSum);
    return static_cast<size_t>(rows * pieces_of(vocab)) * piece;
  }
  RankWork(void* work, int64_t rows, int64_t vocab, int64_t k)
      : listed(static_cast<uint64_t*>(work)),
        sums(reinterpret_cast<PieceSum*>(listed + rows * pieces_of(vocab) * room_of(k))) {}
};

struct RankArgs {
  Count n;
  int32_t vocab, k, pieces, room;
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
};

// A beginning of a row's order that holds its k best: keys whose upper bits, from `shift` on, are at least `prefix`.
struct Head {
  uint64_t prefix = 0;
  int shift = 64;
  uint32_t size, above = 0;           // keys in it; those whose upper bits are more than prefix

  __device__ uint64_t upper(uint64_t key) const { return shift < 64 ? key >> shift : 0; }
  __device__ bool has(uint64_t key) const { return upper(key) >= prefix; }
  __device__ bool ends_with(uint64_t key) const { return upper(key) == prefix; }
  __device__ Head narrowed(int bits, const Bin<uint32_t>& at) const {
    Head next;
    next.prefix = prefix << bits | at.bin;
    next.shift = shift - bits;
    next.above = above + at.above;
    next.size = next.above + at.inside;
    return next;
  }
};

// The head of keys that holds their k best, narrowed down until it is no larger than `most`, at the latest by all bits.
// for_keys(f) calls f with every key of this thread; `bins` are kBins of the block's.
template <int kThreads, class ForKeys>
__device__ Head narrow(Head head, uint32_t k, uint32_t most, const ForKeys& for_keys, uint32_t* bins,
                       BinScratch<uint32_t>& scratch) {
  while (head.size > most) {
    const int bits = min(kBinBits, head.shift), shift = head.shift - bits;
    for (int i = threadIdx.x; i < kBins; i += kThreads) bins[i] = 0;
    __syncthreads();
    for_keys([&](uint64_t key) {
      if (head.ends_with(key)) atomicAdd(&bins[key >> shift & ((1u << bits) - 1)], 1u);
    });
    __syncthreads();
    const auto count = [bins](int bin) { return bins[bin]; };
    head = head.narrowed(bits, find_bin<kThreads, kBins>(k - head.above, count, scratch));
  }
  return head;
}

__global__ void __launch_bounds__(kPieceThreads, kPickBlocks) pick_kernel(RankArgs args) {
  const int32_t row = blockIdx.y, begin = static_cast<int32_t>(blockIdx.x) * kPiece, end = min(begin + kPiece, args.vocab);
  wait_for_previous();
  let_next_start();
  if (row >= live_rows(args.n)) return;
  __shared__ BinScratch<uint32_t> scratch;
  __shared__ uint32_t bins[kBins];
  __shared__ float partial[kPieceThreads / kWarp];
  const RankedRow ranked(args, row);
  float x[kLoads];
  load_elements<kPieceThreads>(x, ranked.x, begin, end);
  for (int i = threadIdx.x; i < kBins; i += kPieceThreads) bins[i] = 0;
  float own_max = -INFINITY;
#pragma unroll
  for (int j = 0; j < kLoads; ++j) {
    const int32_t token = element<kPieceThreads>(begin, j);
    x[j] = token < end ? ranked.value(token, x[j]) : -INFINITY;
    own_max = fmaxf(own_max, x[j]);
  }
  const float max_of_all = block_maximum<kPieceThreads>(own_max, partial);
  float sum = 0;
  if (max_of_all > -INFINITY) {
#pragma unroll
    for (int j = 0; j < kLoads; ++j) sum += expf(x[j] - max_of_all);
  }
  sum = block_sum<kPieceThreads>(sum, partial);

  uint32_t key[kLoads];               // 0 where there is no token
#pragma unroll
  for (int j = 0; j < kLoads; ++j) key[j] = element<kPieceThreads>(begin, j) < end ? order_key(x[j]) : 0;
  // Few are looked at: those no less than the lower end of the bin that holds the k-th of the threads' best.
  uint32_t least = 1;
  if (args.k <= kPieceThreads) {
    constexpr int kShift = 32 - kBinBits;
    atomicAdd(&bins[order_key(own_max) >> kShift], 1u);
    __syncthreads();
    const auto count = [&](int bin) { return bins[bin]; };
    least = max(least, find_bin<kPieceThreads, kBins>(static_cast<uint32_t>(args.k), count, scratch).bin << kShift);
  }
  const auto for_keys = [&](auto&& each) {
#pragma unroll
    for (int j = 0; j < kLoads; ++j)
      if (key[j] >= least) each(static_cast<uint64_t>(key[j]) << 32 | ~static_cast<uint32_t>(element<kPieceThreads>(begin, j)));
  };
  // What is in the head, and how much of it threads before this one have.
  Head head;
  const auto before_own = [&] {
    uint32_t own = 0;
    for_keys([&](uint64_t token_key) { own += head.has(token_key); });
    return sum_before<kPieceThreads>(own, scratch.warps, head.size);
  };
  uint32_t at = before_own();
  if (head.size > static_cast<uint32_t>(args.room)) {
    const uint32_t wanted = min(static_cast<uint32_t>(args.k), static_cast<uint32_t>(end - begin));
    head = narrow<kPieceThreads>(head, wanted, args.room, for_keys, bins, scratch);
    at = before_own();
  }
  const int64_t piece = static_cast<int64_t>(row) * args.pieces + blockIdx.x;
  if (threadIdx.x == 0) args.work.sums[piece] = {max_of_all, sum};
  uint64_t* listed = args.work.listed + piece * args.room;
  for_keys([&](uint64_t token_key) {
    if (head.has(token_key)) listed[at++] = token_key;
  });
  for (uint32_t i = head.size + threadIdx.x; i < static_cast<uint32_t>(args.room); i += kPieceThreads) listed[i] = 0;
}

__device__ inline float log_probability(float value, float log_sum) {
  return value == -INFINITY ? value : value - log_sum;
}

// The k best of no more than n keys, as for_keys of narrow: sorted and written, by a block of kRowThreads.
template <class ForKeys>
__device__ void write_best(int32_t n, int32_t k, const ForKeys& for_keys, float log_sum, int32_t* token, float* log_q) {
  __shared__ BinScratch<uint32_t> scratch;
  __shared__ uint64_t listed[kListed];
  __shared__ uint32_t n_listed;
  const int most = min(kListed, max(kFewSorted, 2 * power_above(k)));
  Head head;
  head.size = n;
  head = narrow<kRowThreads>(head, k, most, for_keys, reinterpret_cast<uint32_t*>(listed), scratch);
  if (threadIdx.x == 0) n_listed = 0;
  __syncthreads();
  for_keys([&](uint64_t key) {
    if (head.has(key)) listed[atomicAdd(&n_listed, 1u)] = key;
  });
  __syncthreads();
  const int size = static_cast<int>(n_listed), sorted = max(kWarp, power_above(size));
  for (int i = size + static_cast<int>(threadIdx.x); i < sorted; i += kRowThreads) listed[i] = 0;
  __syncthreads();
  const auto write = [&](int place, uint64_t key) {
    token[place] = token_of(key);
    log_q[place] = log_probability(logit_of(key), log_sum);
  };
  if (sorted <= kFewCompared) {       // a key's place is the number of larger ones
    const int threads = kRowThreads / sorted, own = threadIdx.x / threads;
    int larger = 0;
    for (int i = threadIdx.x % threads; i < size; i += threads) larger += listed[i] > listed[own];
    for (int step = 1; step < min(threads, kWarp); step *= 2) larger += __shfl_xor_sync(kAllLanes, larger, step);
    if (threadIdx.x % threads == 0 && own < size && larger < k) write(larger, listed[own]);
    return;
  }
  sort_keys<kRowThreads>(listed, sorted);
  for (int i = threadIdx.x; i < k; i += kRowThreads) write(i, listed[i]);
}

__global__ void __launch_bounds__(kRowThreads) finish_kernel(RankArgs args) {
  const int32_t row = blockIdx.x;
  wait_for_previous();
  let_next_start();
  if (row >= live_rows(args.n)) return;
  // The log-sum-exp, by every warp: pieces ascend within a lane.
  const int64_t first = static_cast<int64_t>(row) * args.pieces;
  const PieceSum* sums = args.work.sums + first;
  const int lane = threadIdx.x % kWarp;
  float max = -INFINITY, sum = 0;
  for (int32_t i = lane; i < args.pieces; i += kWarp) max = fmaxf(max, sums[i].max);
  max = warp_max(max);
  if (max > -INFINITY)
    for (int32_t i = lane; i < args.pieces; i += kWarp) sum += sums[i].sum * expf(sums[i].max - max);
  const float log_sum = max > -INFINITY ? max + logf(warp_sum(sum)) : max;

  const uint64_t* listed = args.work.listed + first * args.room;
  const int32_t places = args.pieces * args.room;
  const auto for_keys = [&](auto&& each) {
    constexpr int kBatch = 4;         // on their way at once
    for (int32_t begin = threadIdx.x; begin < places; begin += kBatch * kRowThreads) {
      uint64_t key[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) key[i] = begin + i * kRowThreads < places ? listed[begin + i * kRowThreads] : 0;
#pragma unroll
      for (int i = 0; i < kBatch; ++i)
        if (key[i] != 0) each(key[i]);
    }
  };
  const int64_t to = static_cast<int64_t>(row) * args.k;
  write_best(places, args.k, for_keys, log_sum, args.token + to, args.log_q + to);
}

__global__ void __launch_bounds__(kRowThreads) logprobs_kernel(LogprobArgs args) {
  const int32_t i = blockIdx.x;
  wait_for_previous();
  let_next_start();
  if (i >= live_rows(args.n) || args.token[i] < 0) return;
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
  const auto for_keys = [&](auto&& each) {
    for_elements<kRowThreads, kLoads>(row.x, 0, vocab, [&](int32_t token, float x) {
      each(rank_key(rankable(x), static_cast<uint32_t>(token)));
    });
  };
  const int64_t to = static_cast<int64_t>(i) * k;
  write_best(vocab, k, for_keys, log_sum, args.top_token + to, args.top_logprob + to);
}

}  // namespace

void CudaOps::top_k(const TopKArgs& args) {
  if (args.n.most == 0 || args.k == 0) return;
  const RankArgs rank{args.n,
                      static_cast<int32_t>(args.vocab),
                      static_cast<int32_t>(args.k),
                      pieces_of(args.vocab),
                      static_cast<int32_t>(room_of(args.k)),
                      args.logits,
                      args.sampling,
                      static_cast<int32_t>(args.depths),
                      args.position,
                      args.token,
                      args.log_q,
                      RankWork(args.work, args.n.most, args.vocab, args.k)};
  const auto rows = static_cast<unsigned>(args.n.most);
  const dim3 pieces(static_cast<unsigned>(rank.pieces), rows);
  launch_overlapping("pick_kernel", pick_kernel, pieces, kPieceThreads, 0, stream_, rank);
  launch_overlapping("finish_kernel", finish_kernel, rows, kRowThreads, 0, stream_, rank);
}

void CudaOps::logprobs(const LogprobArgs& args) {
  if (args.n.most == 0) return;
  const auto rows = static_cast<unsigned>(args.n.most);
  launch_overlapping("logprobs_kernel", logprobs_kernel, rows, kRowThreads, 0, stream_, args);
}

size_t CudaOps::vocabulary_work_bytes(int64_t rows, int64_t vocab, int64_t k) const {
  return std::max(k > 0 ? RankWork::bytes(rows, vocab, k) : 0, sample_work_bytes(rows, vocab));
}

}  // namespace kdt::cuda
