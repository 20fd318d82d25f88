// The target's own tokens: adjustment, then greedy or the Gumbel-max draw from what top-k, top-p and min-p leave.
//
// Five launches, over (piece of a row, row) but where one block or warp has a row to itself:
//   adjust      (block a row; where a batch has any) penalties, bias and bans, into a copy of the row
//   best        the best key of every piece
//   weigh       rows cut by top-k or top-p: a histogram of the upper 11 key bits, of tokens or of probability
//   cut         (block a row) the last key that is kept
//   draw        the largest z + noise of every piece
//   choose      (warp a row) the token
// The next may start while one runs: it looks up what its row wants, then waits for the one before (device.cuh).
// Probability is counted in integers, exp(z - max) rounded to multiples of 2^-45: sums are exact and have no order.
// Rows go through in groups, which bounds the working memory.
#include <algorithm>

#include "cuda/vocabulary.cuh"

namespace kdt::cuda {
namespace {

constexpr int64_t kGroupRows = 256;
constexpr int kRowThreads = 1024;      // of a block that has a row to itself
constexpr int kWeighBits = 11, kWeighBins = 1 << kWeighBits;
constexpr int kCutBits = 10, kCutBins = 1 << kCutBits;
constexpr int kListed = 2048;          // tokens that one block sorts
constexpr int kMaxPath = 256;          // draft nodes above a row, and itself
constexpr int kMassBits = 45;          // after the point of a probability relative to the largest
constexpr int kLimbBits = 16, kLimbs = 3;   // of a mass in shared memory, where additions of 32 bits are fast
constexpr double kLeastNoise = -3.1301;     // no noise is less

// The best of one piece.
struct Drawn {
  double score;
  int32_t token;                       // -1: none
};

// Working memory of one group of rows.
struct SampleWork {
  uint64_t* best;                      // [rows, pieces] keys
  uint64_t* bins;                      // [rows, kWeighBins]
  uint64_t* last;                      // [rows] the least key that is kept
  Drawn* drawn;                        // [rows, pieces]
  float* adjusted;                     // [rows, vocab]

  static int64_t rows_of(int64_t rows) { return std::min(rows, kGroupRows); }
  static int64_t stride(int64_t vocab) { return divide_up(vocab, 4) * 4; }   // of a row, so that it is aligned
  static size_t bytes(int64_t rows, int64_t vocab) {
    const auto pieces = static_cast<size_t>(pieces_of(vocab));
    const size_t row = pieces * (sizeof(uint64_t) + sizeof(Drawn)) + (kWeighBins + 2) * sizeof(uint64_t);
    return static_cast<size_t>(rows_of(rows)) * (row + static_cast<size_t>(stride(vocab)) * sizeof(float));
  }
  SampleWork(void* work, int64_t rows, int64_t vocab) {
    const int64_t n = rows_of(rows), pieces = pieces_of(vocab);
    adjusted = static_cast<float*>(work);
    bins = reinterpret_cast<uint64_t*>(adjusted + n * stride(vocab));
    best = bins + n * kWeighBins;
    last = best + n * pieces;
    drawn = reinterpret_cast<Drawn*>(last + n);
  }
};

struct GroupArgs {
  Count n;
  int32_t first;                       // row of the group's first
  int32_t vocab, pieces;
  int mass_bits;
  const float* logits;
  const int32_t *token, *position, *stream, *parent;   // of Rows
  const Sampling* sampling;
  const LogitAdjust* adjust;           // null: none
  int64_t adjusted_stride;
  int32_t* chosen;                     // out, by row
  SampleWork work;
};

// One row of the group: its logits, adjusted, and how it is sampled. A row that is not live has none, and is greedy.
struct SampleRow {
  const float* x = nullptr;
  Sampling s;

  __device__ static SampleRow of(const GroupArgs& args, int32_t at) {
    const int32_t i = args.first + at;
    SampleRow row;
    if (i >= live_rows(args.n)) return row;
    const int32_t stream = args.stream[i];
    row.s = args.sampling[stream];
    row.x = args.adjust && args.adjust[stream].changes() ? args.work.adjusted + at * args.adjusted_stride
                                                         : args.logits + static_cast<int64_t>(i) * args.vocab;
    return row;
  }
  __device__ bool drawn() const { return s.temperature > 0; }
  __device__ bool cut_k(int32_t vocab) const { return s.top_k > 0 && s.top_k < vocab; }
  __device__ bool cut_p() const { return s.top_p < 1; }
  __device__ bool cut(int32_t vocab) const { return drawn() && (cut_k(vocab) || cut_p()); }
  __device__ double z(float logit) const { return static_cast<double>(rankable(logit)) / s.temperature; }
};

// exp(z - most) in units of 2^-bits, rounded to nearest. One body, so that two kernels weigh a token alike.
__device__ __noinline__ uint64_t mass_of(double z, double most, int bits) {
  const double below = z - most;
  if (below < -0.6931471805599453 * (bits + 2)) return 0;
  return __double2ull_rn(exp(below) * static_cast<double>(1ull << bits));
}

// The best key of a row, by every warp alone.
__device__ uint64_t best_of(const GroupArgs& args, int32_t at) {
  const uint64_t* best = args.work.best + static_cast<int64_t>(at) * args.pieces;
  uint64_t key = 0;
  for (int i = threadIdx.x % kWarp; i < args.pieces; i += kWarp) key = larger(key, best[i]);
  return warp_largest(key);
}

__global__ void __launch_bounds__(kRowThreads) adjust_kernel(GroupArgs args) {
  const int32_t at = blockIdx.x, row = args.first + at;
  wait_for_previous();
  let_next_start();
  if (row >= live_rows(args.n)) return;
  const LogitAdjust& a = args.adjust[args.stream[row]];
  if (!a.changes()) return;
  __shared__ int32_t path[kMaxPath];
  __shared__ bool in_history[kMaxPath];
  __shared__ int32_t n_path;
  // The last thread walks to the root while the others copy.
  if (threadIdx.x == kRowThreads - 1) {
    int32_t n = 0;
    for (int32_t i = row; n < kMaxPath && args.parent[i] >= 0; i = args.parent[i]) {
      in_history[n] = false;
      path[n++] = args.token[i];
    }
    n_path = n;
  }
  const float* x = args.logits + static_cast<int64_t>(row) * args.vocab;
  float* out = args.work.adjusted + at * args.adjusted_stride;
  for_elements<kRowThreads, kLoads>(x, 0, args.vocab, [out](int32_t i, float logit) { out[i] = rankable(logit); });
  __syncthreads();

  const auto penalise = [&](int32_t token, int32_t count) {
    float v = out[token];
    if (a.repetition != 1) v = v > 0 ? v / a.repetition : v * a.repetition;
    if (count > 0) v = __fsub_rn(v, __fadd_rn(__fmul_rn(a.frequency, static_cast<float>(count)), a.presence));
    out[token] = v;
  };
  if (a.penalises()) {
    for (int64_t i = threadIdx.x; i < a.n_seen; i += kRowThreads) {
      const int32_t token = a.seen[i];
      int32_t count = a.seen_count[i];
      for (int32_t p = 0; p < n_path; ++p)
        if (path[p] == token) {
          ++count;
          in_history[p] = true;
        }
      penalise(token, count);
    }
    __syncthreads();
    for (int32_t p = threadIdx.x; p < n_path; p += kRowThreads) {
      bool first = !in_history[p];
      int32_t count = 0;
      for (int32_t i = 0; i < n_path; ++i) {
        if (path[i] != path[p]) continue;
        ++count;
        first = first && i >= p;
      }
      if (first) penalise(path[p], count);
    }
    __syncthreads();
  }
  for (int64_t i = threadIdx.x; i < a.n_bias; i += kRowThreads) out[a.bias_token[i]] += a.bias[i];
  __syncthreads();
  if (args.position[row] + 1 >= a.banned_until) return;
  for (int64_t i = threadIdx.x; i < a.n_banned; i += kRowThreads) out[a.banned[i]] = -INFINITY;
}

__global__ void __launch_bounds__(kPieceThreads) best_kernel(GroupArgs args) {
  const int32_t at = blockIdx.y, piece = blockIdx.x, begin = piece * kPiece;
  wait_for_previous();
  let_next_start();
  const SampleRow row = SampleRow::of(args, at);
  if (!row.x) return;
  __shared__ uint64_t shared[kPieceThreads / kWarp];
  float x[kLoads];
  load_elements<kPieceThreads>(x, row.x, begin, args.vocab);
  uint64_t best = 0;
#pragma unroll
  for (int j = 0; j < kLoads; ++j) {
    const int32_t token = element<kPieceThreads>(begin, j);
    if (token < args.vocab) best = larger(best, rank_key(x[j], static_cast<uint32_t>(token)));
  }
  best = block_largest<kPieceThreads>(best, shared);
  if (threadIdx.x == 0) args.work.best[static_cast<int64_t>(at) * args.pieces + piece] = best;
  if (!row.cut(args.vocab)) return;
  uint64_t* bins = args.work.bins + static_cast<int64_t>(at) * kWeighBins;
  for (int i = piece * kPieceThreads + static_cast<int>(threadIdx.x); i < kWeighBins; i += args.pieces * kPieceThreads)
    bins[i] = 0;
}

// Adds a weight to a bin in shared memory.
template <int kBins>
__device__ inline void add_weight(uint32_t* limbs, uint32_t bin, uint64_t weight) {
#pragma unroll
  for (int i = 0; i < kLimbs; ++i) {
    const uint32_t limb = static_cast<uint32_t>(weight >> (i * kLimbBits)) & ((1u << kLimbBits) - 1);
    if (limb > 0) atomicAdd(&limbs[i * kBins + bin], limb);
  }
}

template <int kBins>
__device__ inline uint64_t weight_of(const uint32_t* limbs, int bin) {
  uint64_t weight = 0;
#pragma unroll
  for (int i = 0; i < kLimbs; ++i) weight += static_cast<uint64_t>(limbs[i * kBins + bin]) << (i * kLimbBits);
  return weight;
}

__global__ void __launch_bounds__(kPieceThreads) weigh_kernel(GroupArgs args) {
  const int32_t at = blockIdx.y, begin = static_cast<int32_t>(blockIdx.x) * kPiece;
  const SampleRow row = SampleRow::of(args, at);
  wait_for_previous();
  let_next_start();
  if (!row.cut(args.vocab)) return;
  __shared__ uint32_t limbs[kLimbs * kWeighBins];
  for (int i = threadIdx.x; i < kLimbs * kWeighBins; i += kPieceThreads) limbs[i] = 0;
  const double most = row.z(logit_of(best_of(args, at)));
  if (isinf(most)) return;
  const bool by_count = row.cut_k(args.vocab);
  __syncthreads();
  for_elements<kPieceThreads, 4>(row.x, begin, min(begin + kPiece, args.vocab), [&](int32_t, float logit) {
    const uint64_t weight = by_count ? 1 : mass_of(row.z(logit), most, args.mass_bits);
    add_weight<kWeighBins>(limbs, order_key(logit) >> (32 - kWeighBits), weight);
  });
  __syncthreads();
  auto* bins = reinterpret_cast<unsigned long long*>(args.work.bins + static_cast<int64_t>(at) * kWeighBins);
  for (int i = threadIdx.x; i < kWeighBins; i += kPieceThreads)
    if (const uint64_t weight = weight_of<kWeighBins>(limbs, i); weight > 0) atomicAdd(&bins[i], weight);
}

// Where the head of a row ends, whose tokens together weigh `need`: among keys >= floor with key >> shift == prefix; the
// keys before those weigh `above`.
struct Search {
  uint64_t floor, need, above, prefix;
  int shift;
  bool by_count;
};

struct CutScratch {
  uint32_t limbs[kLimbs * kCutBins];
  uint64_t sums[kCutBins];
  uint64_t listed[kListed];
  BinScratch<uint64_t> bins;
  uint32_t n_listed;
  uint64_t found;
};

// How much probability top_p of a total is: the least integer that reaches it.
__device__ inline uint64_t part_of(double top_p, uint64_t total) {
  return larger(__double2ull_ru(__dmul_rn(top_p, static_cast<double>(total))), 1);
}

// The key of the last token of the head. need 0: by top-p of what is there.
__device__ uint64_t last_of_head(const GroupArgs& args, const SampleRow& row, double most, Search find,
                                 CutScratch& shared) {
  const auto weight = [&](uint64_t key) {
    return find.by_count ? 1 : mass_of(row.z(logit_of(key)), most, args.mass_bits);
  };
  while (true) {
    const int bits = min(kCutBits, find.shift), shift = find.shift - bits;
    for (int i = threadIdx.x; i < kCutBins; i += kRowThreads) shared.sums[i] = 0;
    if (threadIdx.x == 0) shared.n_listed = 0;
    // Limbs have room for so many tokens at once.
    constexpr int32_t kStretch = 1 << kLimbBits;
    constexpr int kBatch = 8;
    static_assert(kStretch % (kBatch * kRowThreads) == 0 && kCutBins == kRowThreads);
    for (int32_t begin = 0; begin < args.vocab; begin += kStretch) {
      for (int i = threadIdx.x; i < kLimbs * kCutBins; i += kRowThreads) shared.limbs[i] = 0;
      __syncthreads();
      const int32_t end = min(begin + kStretch, args.vocab);
      for_elements<kRowThreads, kBatch>(row.x, begin, end, [&](int32_t token, float logit) {
        const uint64_t key = rank_key(logit, static_cast<uint32_t>(token));
        if (key < find.floor || (find.shift < 64 && key >> find.shift != find.prefix)) return;
        add_weight<kCutBins>(shared.limbs, static_cast<uint32_t>(key >> shift) & ((1u << bits) - 1), weight(key));
        if (*static_cast<volatile uint32_t*>(&shared.n_listed) > kListed) return;   // too many, no matter how many
        if (const uint32_t place = atomicAdd(&shared.n_listed, 1u); place < kListed) shared.listed[place] = key;
      });
      __syncthreads();
      shared.sums[threadIdx.x] += weight_of<kCutBins>(shared.limbs, threadIdx.x);
    }
    __syncthreads();
    const uint32_t n = shared.n_listed;
    if (find.need == 0) {
      uint64_t total;
      sum_before<kRowThreads>(shared.sums[threadIdx.x], shared.bins.warps, total);
      find.need = part_of(row.s.top_p, total);
    }
    if (n <= kListed) break;
    const auto sum = [&](int bin) { return shared.sums[bin]; };
    const Bin<uint64_t> end = find_bin<kRowThreads, kCutBins>(find.need - find.above, sum, shared.bins);
    find.above += end.above;
    find.prefix = (find.shift < 64 ? find.prefix << bits : 0) | end.bin;
    find.shift = shift;
    if (find.shift == 0) return find.prefix;
  }
  // Few are left: in order, with sums from the first on.
  const auto n = static_cast<int>(shared.n_listed);
  const int sorted = power_above(n);
  __syncthreads();
  for (int i = n + static_cast<int>(threadIdx.x); i < sorted; i += kRowThreads) shared.listed[i] = 0;
  __syncthreads();
  sort_keys<kRowThreads>(shared.listed, sorted);
  constexpr int kPer = kListed / kRowThreads;
  uint64_t own[kPer], sum = 0, total;
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    const int place = static_cast<int>(threadIdx.x) * kPer + i;
    own[i] = place < n ? weight(shared.listed[place]) : 0;
    sum += own[i];
  }
  uint64_t before = find.above + sum_before<kRowThreads>(sum, shared.bins.warps, total);
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    if (before < find.need && find.need <= before + own[i])
      shared.found = shared.listed[static_cast<int>(threadIdx.x) * kPer + i];
    before += own[i];
  }
  __syncthreads();
  return shared.found;
}

__global__ void __launch_bounds__(kRowThreads) cut_kernel(GroupArgs args) {
  const int32_t at = blockIdx.x;
  const SampleRow row = SampleRow::of(args, at);
  wait_for_previous();
  let_next_start();
  if (!row.cut(args.vocab)) return;
  const double most = row.z(logit_of(best_of(args, at)));
  if (isinf(most)) return;
  __shared__ CutScratch shared;
  const bool by_count = row.cut_k(args.vocab);
  const uint64_t* bins = args.work.bins + static_cast<int64_t>(at) * kWeighBins;
  const auto weight = [bins](int bin) { return bins[bin]; };
  uint64_t need = static_cast<uint64_t>(row.s.top_k);
  if (!by_count) {
    uint64_t sum = 0, total;
    for (int i = threadIdx.x; i < kWeighBins; i += kRowThreads) sum += bins[i];
    sum_before<kRowThreads>(sum, shared.bins.warps, total);
    need = part_of(row.s.top_p, total);
  }
  const Bin<uint64_t> end = find_bin<kRowThreads, kWeighBins>(need, weight, shared.bins);
  uint64_t last = last_of_head(args, row, most, {0, need, end.above, end.bin, 64 - kWeighBits, by_count}, shared);
  __syncthreads();
  if (by_count && row.cut_p()) last = last_of_head(args, row, most, {last, 0, 0, 0, 64, false}, shared);
  if (threadIdx.x == 0) args.work.last[at] = last;
}

__device__ inline bool better(const Drawn& a, const Drawn& b) {
  return a.score > b.score || (a.score == b.score && a.token < b.token);
}

__device__ inline Drawn best_of_warp(Drawn best) {
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) {
    const Drawn other{__shfl_xor_sync(kAllLanes, best.score, step), __shfl_xor_sync(kAllLanes, best.token, step)};
    if (better(other, best)) best = other;
  }
  return best;
}

__global__ void __launch_bounds__(kPieceThreads) draw_kernel(GroupArgs args) {
  const int32_t at = blockIdx.y, piece = blockIdx.x, begin = piece * kPiece;
  const SampleRow row = SampleRow::of(args, at);
  wait_for_previous();
  let_next_start();
  if (!row.drawn()) return;
  __shared__ Drawn drawn[kPieceThreads / kWarp];
  const double most = row.z(logit_of(best_of(args, at)));
  if (isinf(most)) return;
  const uint64_t last = row.cut(args.vocab) ? args.work.last[at] : 0;
  const auto position = static_cast<uint32_t>(args.position[args.first + at]) + 1;
  Drawn best{-INFINITY, -1};
  double least = most + kLeastNoise;   // the best token's score at least: what cannot reach it needs no logarithm
  for_elements<kPieceThreads, 4>(row.x, begin, min(begin + kPiece, args.vocab), [&](int32_t token, float logit) {
    if (rank_key(logit, static_cast<uint32_t>(token)) < last) return;
    const double z = row.z(logit);
    if (__dadd_rn(z, kMostNoise) < least) return;
    const uint32_t bits = noise_bits(row.s.seed, row.s.choice, position, static_cast<uint32_t>(token));
    if (__dadd_rn(z, gumbel_bound(bits)) < least) return;
    if (row.s.min_p > 0 && exp(z - most) < row.s.min_p) return;
    const Drawn candidate{__dadd_rn(z, noise_of(bits)), token};
    if (candidate.score > best.score) best = candidate;   // tokens ascend: of equal ones the first
    least = fmax(least, best.score);
  });
  best = best_of_warp(best);
  if (threadIdx.x % kWarp == 0) drawn[threadIdx.x / kWarp] = best;
  __syncthreads();
  if (threadIdx.x > 0) return;
  for (int i = 1; i < kPieceThreads / kWarp; ++i)
    if (better(drawn[i], best)) best = drawn[i];
  args.work.drawn[static_cast<int64_t>(at) * args.pieces + piece] = best;
}

// A block of one warp a row.
__global__ void __launch_bounds__(kWarp) choose_kernel(GroupArgs args) {
  const int32_t at = blockIdx.x;
  const SampleRow row = SampleRow::of(args, at);
  wait_for_previous();
  let_next_start();
  if (!row.x) return;
  const uint64_t best = best_of(args, at);
  int32_t chosen = token_of(best);
  if (row.drawn() && !isinf(row.z(logit_of(best)))) {
    const Drawn* pieces = args.work.drawn + static_cast<int64_t>(at) * args.pieces;
    Drawn drawn{-INFINITY, -1};
    for (int i = threadIdx.x; i < args.pieces; i += kWarp)
      if (better(pieces[i], drawn)) drawn = pieces[i];
    drawn = best_of_warp(drawn);
    if (drawn.token >= 0) chosen = drawn.token;
  }
  if (threadIdx.x == 0) args.chosen[args.first + at] = chosen;
}

}  // namespace

size_t sample_work_bytes(int64_t rows, int64_t vocab) { return SampleWork::bytes(rows, vocab); }

void CudaOps::sample(const SampleArgs& args) {
  const int64_t most = args.rows.n.most;
  int mass_bits = kMassBits;           // of all tokens together a mass of less than 2^63
  while (mass_bits > 0 && args.vocab > int64_t{1} << (63 - mass_bits)) --mass_bits;
  GroupArgs group{args.rows.n,
                  0,
                  static_cast<int32_t>(args.vocab),
                  pieces_of(args.vocab),
                  mass_bits,
                  args.logits,
                  args.rows.token,
                  args.rows.position,
                  args.rows.stream,
                  args.rows.parent,
                  args.sampling,
                  args.adjust,
                  SampleWork::stride(args.vocab),
                  args.token,
                  SampleWork(args.work, most, args.vocab)};
  for (int64_t first = 0; first < most; first += kGroupRows) {
    group.first = static_cast<int32_t>(first);
    const auto rows = static_cast<unsigned>(SampleWork::rows_of(most - first));
    const dim3 pieces(static_cast<unsigned>(group.pieces), rows);
    const auto queue = [&](const char* name, void (*kernel)(GroupArgs), dim3 grid, unsigned threads) {
      launch_overlapping(name, kernel, grid, threads, 0, stream_, group);
    };
    if (args.adjust) queue("adjust_kernel", adjust_kernel, rows, kRowThreads);
    queue("best_kernel", best_kernel, pieces, kPieceThreads);
    queue("weigh_kernel", weigh_kernel, pieces, kPieceThreads);
    queue("cut_kernel", cut_kernel, rows, kRowThreads);
    queue("draw_kernel", draw_kernel, pieces, kPieceThreads);
    queue("choose_kernel", choose_kernel, rows, kWarp);
  }
}

}  // namespace kdt::cuda
