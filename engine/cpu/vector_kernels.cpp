// Row-wise kernels: norms, activations, the combination of experts, and statistics and noise over the vocabulary.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/vector_kernels.cpp"
#include <hwy/foreach_target.h>  // must come before highway.h
#include <hwy/contrib/math/math-inl.h>
#include <hwy/highway.h>

#include <cmath>
#include <limits>

#include "base/philox.h"
#include "cpu/kernels.h"

HWY_BEFORE_NAMESPACE();
namespace kdt::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using F = hn::CappedTag<float, 16>;
constexpr int64_t kLanes = static_cast<int64_t>(hn::MaxLanes(F()));
constexpr float kMinusInf = -std::numeric_limits<float>::infinity();

// The last vector of a row: lanes past the end are zero.
HWY_INLINE hn::Vec<F> load_tail(const float* x, int64_t n) {
  const F f;
  HWY_ALIGN float lanes[kLanes] = {};
  for (int64_t i = 0; i < n; ++i) lanes[i] = x[i];
  return hn::Load(f, lanes);
}

HWY_INLINE void store_tail(hn::Vec<F> v, float* x, int64_t n) {
  HWY_ALIGN float lanes[kLanes];
  hn::Store(v, F(), lanes);
  for (int64_t i = 0; i < n; ++i) x[i] = lanes[i];
}

// f(vector of x, of y) over a row, tails as whole vectors: an element's value never depends on where in a vector it is.
template <class G>
HWY_INLINE void map_row(int64_t n, const float* x, const float* y, float* out, const G& g) {
  const F f;
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) hn::StoreU(g(hn::LoadU(f, x + i), hn::LoadU(f, y + i)), f, out + i);
  if (i < n) store_tail(g(load_tail(x + i, n - i), load_tail(y + i, n - i)), out + i, n - i);
}

void rms_norm_row_impl(const float* x, int64_t width, const float* weight, float eps, float* out) {
  const F f;
  auto sum = hn::Zero(f);
  int64_t i = 0;
  for (; i + kLanes <= width; i += kLanes) {
    const auto v = hn::LoadU(f, x + i);
    sum = hn::MulAdd(v, v, sum);
  }
  if (i < width) {
    const auto v = load_tail(x + i, width - i);
    sum = hn::MulAdd(v, v, sum);
  }
  const float mean = hn::GetLane(hn::SumOfLanes(f, sum)) / static_cast<float>(width);
  const auto scale = hn::Set(f, 1.0f / std::sqrt(mean + eps));
  map_row(width, x, weight, out, [&](auto v, auto w) { return hn::Mul(hn::Mul(v, scale), w); });
}

void sigmoid_row_impl(float* x, int64_t n) {
  const F f;
  const auto one = hn::Set(f, 1.0f);
  map_row(n, x, x, x, [&](auto v, auto) { return hn::Div(one, hn::Add(one, hn::Exp(f, hn::Neg(v)))); });
}

void combine_row_impl(const float* y, int64_t y_stride, const float* weight, int64_t k, const float* shared, int64_t n,
                      float* out) {
  const F f;
  int64_t c = 0;
  for (; c + kLanes <= n; c += kLanes) {
    auto sum = hn::Zero(f);
    for (int64_t i = 0; i < k; ++i) sum = hn::MulAdd(hn::Set(f, weight[i]), hn::LoadU(f, y + i * y_stride + c), sum);
    hn::StoreU(hn::Add(hn::LoadU(f, out + c), hn::Add(sum, hn::LoadU(f, shared + c))), f, out + c);
  }
  if (c < n) {
    auto sum = hn::Zero(f);
    for (int64_t i = 0; i < k; ++i) sum = hn::MulAdd(hn::Set(f, weight[i]), load_tail(y + i * y_stride + c, n - c), sum);
    store_tail(hn::Add(load_tail(out + c, n - c), hn::Add(sum, load_tail(shared + c, n - c))), out + c, n - c);
  }
}

HWY_INLINE hn::Vec<F> nan_as_minus_inf(hn::Vec<F> v) {
  const F f;
  return hn::IfThenElse(hn::Eq(v, v), v, hn::Set(f, kMinusInf));
}

RowStats row_stats_impl(const float* x, int64_t n) {
  const F f;
  auto most = hn::Set(f, kMinusInf);
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) most = hn::Max(most, nan_as_minus_inf(hn::LoadU(f, x + i)));
  float max = hn::GetLane(hn::MaxOfLanes(f, most));
  for (int64_t j = i; j < n; ++j)
    if (x[j] > max) max = x[j];
  if (max == kMinusInf) return {max, max};
  const auto base = hn::Set(f, max);
  auto sum = hn::Zero(f);
  for (i = 0; i + kLanes <= n; i += kLanes)
    sum = hn::Add(sum, hn::Exp(f, hn::Sub(nan_as_minus_inf(hn::LoadU(f, x + i)), base)));
  if (i < n) {
    const auto p = hn::Exp(f, hn::Sub(nan_as_minus_inf(load_tail(x + i, n - i)), base));
    sum = hn::Add(sum, hn::IfThenElseZero(hn::FirstN(f, static_cast<size_t>(n - i)), p));
  }
  return {max, max + std::log(hn::GetLane(hn::SumOfLanes(f, sum)))};
}

int32_t argmax_row_impl(const float* x, int64_t n) {
  const F f;
  auto most = hn::Set(f, kMinusInf);
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) most = hn::Max(most, nan_as_minus_inf(hn::LoadU(f, x + i)));
  float max = hn::GetLane(hn::MaxOfLanes(f, most));
  for (int64_t j = i; j < n; ++j)
    if (x[j] > max) max = x[j];
  for (int64_t j = 0; j < n; ++j)
    if (x[j] == max) return static_cast<int32_t>(j);
  return 0;
}

using D = hn::CappedTag<double, 8>;
using U64 = hn::RebindToUnsigned<D>;
constexpr int64_t kDoubles = static_cast<int64_t>(hn::MaxLanes(D()));

// noise_bits() of base/philox.h, one token id a 64-bit lane (32-bit values in the low halves).
HWY_INLINE hn::Vec<U64> philox_bits(uint64_t seed, uint32_t choice, uint32_t position, hn::Vec<U64> token) {
  const U64 u;
  const hn::Repartition<uint32_t, U64> u32;
  const auto low = hn::Set(u, 0xffffffffull);
  const auto m0 = hn::BitCast(u32, hn::Set(u, static_cast<uint64_t>(kPhiloxM0)));
  const auto m1 = hn::BitCast(u32, hn::Set(u, static_cast<uint64_t>(kPhiloxM1)));
  auto c0 = hn::Set(u, static_cast<uint64_t>(choice));
  auto c1 = hn::Set(u, static_cast<uint64_t>(position));
  auto c2 = token;
  auto c3 = hn::Set(u, static_cast<uint64_t>(NoisePurpose::sample));
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const auto product0 = hn::MulEven(m0, hn::BitCast(u32, c0));
    const auto product1 = hn::MulEven(m1, hn::BitCast(u32, c2));
    const auto next0 = hn::Xor(hn::Xor(hn::ShiftRight<32>(product1), c1), hn::Set(u, static_cast<uint64_t>(k0)));
    const auto next2 = hn::Xor(hn::Xor(hn::ShiftRight<32>(product0), c3), hn::Set(u, static_cast<uint64_t>(k1)));
    c0 = next0;
    c1 = hn::And(product1, low);
    c2 = next2;
    c3 = hn::And(product0, low);
    k0 += kPhiloxW0;
    k1 += kPhiloxW1;
  }
  return c0;
}

// A 32-bit value in a 64-bit lane as a double: exact, by way of the exponent of 2⁵².
HWY_INLINE hn::Vec<D> to_double(hn::Vec<U64> bits) {
  const D d;
  const U64 u;
  return hn::Sub(hn::BitCast(d, hn::Or(bits, hn::Set(u, 0x4330000000000000ull))), hn::Set(d, 0x1p52));
}

HWY_INLINE hn::Vec<D> gumbel_of(hn::Vec<U64> bits) {
  const D d;
  const auto u = hn::Mul(hn::Add(to_double(bits), hn::Set(d, 0.5)), hn::Set(d, 0x1p-32));
  return hn::Neg(hn::Log(d, hn::Neg(hn::Log(d, u))));
}

// No noise is larger than this: -log(v) with v = 1 - u >= a power of two below it, from the bits alone.
HWY_INLINE hn::Vec<D> gumbel_bound(hn::Vec<U64> bits) {
  const D d;
  const U64 u;
  const auto rest = hn::Sub(hn::Set(d, 0x1p32), hn::Add(to_double(bits), hn::Set(d, 0.5)));   // 2³² (1 - u), exact
  const auto exponent = hn::Sub(to_double(hn::ShiftRight<52>(hn::BitCast(u, rest))), hn::Set(d, 1023.0));
  return hn::Mul(hn::Sub(hn::Set(d, 32.0), exponent), hn::Set(d, 0.6931471805599454));   // ln 2, rounded up
}

int32_t gumbel_argmax_impl(const double* z, const int32_t* id, int64_t n, uint64_t seed, uint32_t choice,
                           uint32_t position) {
  const D d;
  const U64 u;
  constexpr double kNone = -std::numeric_limits<double>::infinity();
  double best = kNone;
  int32_t winner = -1;
  HWY_ALIGN uint64_t token[kDoubles];
  HWY_ALIGN double value[kDoubles];
  for (int64_t i = 0; i < n; i += kDoubles) {
    const int64_t m = n - i < kDoubles ? n - i : kDoubles;
    for (int64_t j = 0; j < kDoubles; ++j) {
      token[j] = j < m ? static_cast<uint32_t>(id ? id[i + j] : static_cast<int32_t>(i + j)) : 0;
      value[j] = j < m ? z[i + j] : kNone;
    }
    const auto bits = philox_bits(seed, choice, position, hn::Load(u, token));
    const auto logit = hn::Load(d, value);
    // Most tokens cannot win, and need no logarithm to say so.
    if (hn::AllFalse(d, hn::Ge(hn::Add(logit, gumbel_bound(bits)), hn::Set(d, best))) && winner >= 0) continue;
    hn::Store(hn::Add(logit, gumbel_of(bits)), d, value);
    for (int64_t j = 0; j < m; ++j) {
      if (value[j] > best) {
        best = value[j];
        winner = static_cast<int32_t>(i + j);
      }
    }
  }
  return winner < 0 ? 0 : winner;
}

void add_noise_impl(const float* x, double weight, int64_t n, uint64_t seed, uint32_t choice, uint32_t position,
                    float* out) {
  const D d;
  const U64 u;
  HWY_ALIGN double noise[kDoubles];
  for (int64_t i = 0; i < n; i += kDoubles) {
    const auto token = hn::Iota(u, static_cast<uint64_t>(i));
    hn::Store(gumbel_of(philox_bits(seed, choice, position, token)), d, noise);
    for (int64_t j = 0; j < kDoubles && i + j < n; ++j)
      out[i + j] = static_cast<float>(static_cast<double>(x[i + j]) + weight * noise[j]);
  }
}

}  // namespace kdt::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kdt::cpu {
HWY_EXPORT(rms_norm_row_impl);
HWY_EXPORT(sigmoid_row_impl);
HWY_EXPORT(combine_row_impl);
HWY_EXPORT(row_stats_impl);
HWY_EXPORT(argmax_row_impl);
HWY_EXPORT(gumbel_argmax_impl);
HWY_EXPORT(add_noise_impl);

void rms_norm_row(const float* x, int64_t width, const float* weight, float eps, float* out) {
  HWY_DYNAMIC_DISPATCH(rms_norm_row_impl)(x, width, weight, eps, out);
}
void sigmoid_row(float* x, int64_t n) { HWY_DYNAMIC_DISPATCH(sigmoid_row_impl)(x, n); }
void combine_row(const float* y, int64_t y_stride, const float* weight, int64_t k, const float* shared, int64_t n,
                 float* out) {
  HWY_DYNAMIC_DISPATCH(combine_row_impl)(y, y_stride, weight, k, shared, n, out);
}
RowStats row_stats(const float* x, int64_t n) { return HWY_DYNAMIC_DISPATCH(row_stats_impl)(x, n); }
int32_t argmax_row(const float* x, int64_t n) { return HWY_DYNAMIC_DISPATCH(argmax_row_impl)(x, n); }
int32_t gumbel_argmax(const double* z, const int32_t* id, int64_t n, uint64_t seed, uint32_t choice, uint32_t position) {
  return HWY_DYNAMIC_DISPATCH(gumbel_argmax_impl)(z, id, n, seed, choice, position);
}
void add_noise(const float* x, double weight, int64_t n, uint64_t seed, uint32_t choice, uint32_t position, float* out) {
  HWY_DYNAMIC_DISPATCH(add_noise_impl)(x, weight, n, seed, choice, position, out);
}

}  // namespace kdt::cpu
#endif
