// Attention of a few queries over tiles of 64 keys, folded one after the other into a running softmax.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/attention_kernels.cpp"
#include <hwy/foreach_target.h>  // must come before highway.h
#include <hwy/contrib/math/math-inl.h>
#include <hwy/highway.h>

#include <algorithm>
#include <limits>

#include "cpu/kernels.h"

HWY_BEFORE_NAMESPACE();
namespace kdt::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using F = hn::CappedTag<float, 16>;
constexpr int kLanes = static_cast<int>(hn::MaxLanes(F()));
constexpr int kBlock = 16;                   // keys, or value columns, whose sums stay in registers
constexpr int kVectors = kBlock / kLanes;
constexpr float kMinusInf = -std::numeric_limits<float>::infinity();

// A score is the same wherever its key lies: a page, or the block made of a draft node's ancestors.
template <int Q>
void scores(const float* q, int64_t q_stride, int64_t dk, const float* keys, int64_t n, float scale, float* s,
            int64_t s_stride) {
  const F f;
  const auto factor = hn::Set(f, scale);
  for (int64_t t = 0; t < n; t += kBlock) {
    hn::Vec<F> sum[Q][kVectors];
#pragma GCC unroll 4
    for (int i = 0; i < Q; ++i)
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) sum[i][v] = hn::Zero(f);
    for (int64_t d = 0; d < dk; ++d) {
      const float* key = keys + t * dk + d * kKeyBlock;
      hn::Vec<F> k[kVectors];
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) k[v] = hn::Load(f, key + v * kLanes);
#pragma GCC unroll 4
      for (int i = 0; i < Q; ++i) {
        const auto a = hn::Set(f, q[i * q_stride + d]);
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) sum[i][v] = hn::MulAdd(a, k[v], sum[i][v]);
      }
    }
#pragma GCC unroll 4
    for (int i = 0; i < Q; ++i)
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) hn::StoreU(hn::Mul(sum[i][v], factor), f, s + i * s_stride + t + v * kLanes);
  }
}

// Turns the scores of one query into weights exp(s - m), updates m and l, and returns what o has to be multiplied by.
float softmax_tile(float* s, int64_t lo, int64_t hi, float& m, float& l) {
  const F f;
  // Vectors that hold a seen slot; weights of the others are zero and add nothing.
  const int64_t begin = lo / kLanes * kLanes, end = (hi + kLanes - 1) / kLanes * kLanes;
  std::fill(s + begin, s + lo, kMinusInf);
  std::fill(s + hi, s + end, kMinusInf);
  auto most = hn::Set(f, kMinusInf);
  for (int64_t t = begin; t < end; t += kLanes) most = hn::Max(most, hn::Load(f, s + t));
  const float new_m = std::max(m, hn::GetLane(hn::MaxOfLanes(f, most)));
  const auto base = hn::Set(f, new_m);
  auto sum = hn::Zero(f);
  for (int64_t t = begin; t < end; t += kLanes) {
    const auto p = hn::Exp(f, hn::Sub(hn::Load(f, s + t), base));   // 0 for -inf
    hn::Store(p, f, s + t);
    sum = hn::Add(sum, p);
  }
  std::fill(s, s + begin, 0.0f);
  std::fill(s + end, s + kPageTokens, 0.0f);
  const float keep = m == kMinusInf ? 0.0f : hn::GetLane(hn::Exp(f, hn::Set(f, m - new_m)));
  m = new_m;
  l = l * keep + hn::GetLane(hn::SumOfLanes(f, sum));
  return keep;
}

void softmax_queries(float* s, int64_t n_queries, const int64_t* lo, const int64_t* hi, int64_t dv,
                     const AttentionState& state) {
  const F f;
  for (int64_t i = 0; i < n_queries; ++i, s += kPageTokens) {
    if (lo[i] >= hi[i]) {   // nothing of this tile is seen: the state stays as it is
      std::fill(s, s + kPageTokens, 0.0f);
      continue;
    }
    const auto keep = hn::Set(f, softmax_tile(s, lo[i], hi[i], state.m[i], state.l[i]));
    float* o = state.o + i * dv;
    for (int64_t d = 0; d < dv; d += kLanes) hn::Store(hn::Mul(hn::Load(f, o + d), keep), f, o + d);
  }
}

template <int Q>
void add_values(const float* s, const float* const* v, int64_t begin, int64_t end, int64_t dv, float* o) {
  const F f;
  for (int64_t d = 0; d < dv; d += kBlock) {
    hn::Vec<F> sum[Q][kVectors];
#pragma GCC unroll 4
    for (int i = 0; i < Q; ++i)
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j) sum[i][j] = hn::Load(f, o + i * dv + d + j * kLanes);
    for (int64_t t = begin; t < end; ++t) {
      hn::Vec<F> value[kVectors];
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j) value[j] = hn::LoadU(f, v[t] + d + j * kLanes);
#pragma GCC unroll 4
      for (int i = 0; i < Q; ++i) {
        const auto p = hn::Set(f, s[i * kPageTokens + t]);
#pragma GCC unroll 4
        for (int j = 0; j < kVectors; ++j) sum[i][j] = hn::MulAdd(p, value[j], sum[i][j]);
      }
    }
#pragma GCC unroll 4
    for (int i = 0; i < Q; ++i)
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j) hn::Store(sum[i][j], f, o + i * dv + d + j * kLanes);
  }
}

void attention_scores_impl(const float* q, int64_t q_stride, int64_t n_queries, int64_t dk, const float* keys, int64_t n,
                           float scale, float* s, int64_t s_stride) {
  switch (n_queries) {
    case 1: return scores<1>(q, q_stride, dk, keys, n, scale, s, s_stride);
    case 2: return scores<2>(q, q_stride, dk, keys, n, scale, s, s_stride);
    case 3: return scores<3>(q, q_stride, dk, keys, n, scale, s, s_stride);
    default: return scores<4>(q, q_stride, dk, keys, n, scale, s, s_stride);
  }
}

void attention_values_impl(const float* s, int64_t n_queries, const float* const* v, int64_t begin, int64_t end,
                           int64_t dv, float* o) {
  switch (n_queries) {
    case 1: return add_values<1>(s, v, begin, end, dv, o);
    case 2: return add_values<2>(s, v, begin, end, dv, o);
    case 3: return add_values<3>(s, v, begin, end, dv, o);
    default: return add_values<4>(s, v, begin, end, dv, o);
  }
}

}  // namespace kdt::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kdt::cpu {
HWY_EXPORT(attention_scores_impl);
HWY_EXPORT(softmax_queries);
HWY_EXPORT(attention_values_impl);

void attention_scores(const float* q, int64_t q_stride, int64_t n_queries, int64_t dk, const float* keys, int64_t n,
                      float scale, float* s, int64_t s_stride) {
  HWY_DYNAMIC_DISPATCH(attention_scores_impl)(q, q_stride, n_queries, dk, keys, n, scale, s, s_stride);
}
void attention_softmax(float* s, int64_t n_queries, const int64_t* lo, const int64_t* hi, int64_t dv,
                       const AttentionState& state) {
  HWY_DYNAMIC_DISPATCH(softmax_queries)(s, n_queries, lo, hi, dv, state);
}
void attention_values(const float* s, int64_t n_queries, const float* const* v, int64_t begin, int64_t end, int64_t dv,
                      float* o) {
  HWY_DYNAMIC_DISPATCH(attention_values_impl)(s, n_queries, v, begin, end, dv, o);
}

}  // namespace kdt::cpu
#endif
