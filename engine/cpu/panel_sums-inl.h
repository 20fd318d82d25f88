// Sums of a few activation rows over weight panels (checkpoint/cpu_packing.h), for every instruction set.
//
// Lanes are outputs. Each output element is one sum over the inputs in ascending order, whatever the rows and panels
// taken at once, and whether nibbles are decoded in registers or to a tile.
#if defined(KDT_CPU_PANEL_SUMS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KDT_CPU_PANEL_SUMS_INL_H_
#undef KDT_CPU_PANEL_SUMS_INL_H_
#else
#define KDT_CPU_PANEL_SUMS_INL_H_
#endif

#include <hwy/cache_control.h>
#include <hwy/highway.h>

#include "base/bf16.h"
#include "checkpoint/cpu_packing.h"
#include "ops/types.h"

HWY_BEFORE_NAMESPACE();
namespace kdt::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using F = hn::CappedTag<float, 16>;
using U = hn::RebindToUnsigned<F>;
using I = hn::RebindToSigned<F>;
constexpr int kLanes = static_cast<int>(hn::MaxLanes(F()));
constexpr int kVectors = static_cast<int>(kPanelRows) / kLanes;   // of one panel
// Weights are read line after line, once; the hardware's prefetchers stop at every page.
constexpr int64_t kPrefetchWords = 32 * kPanelRows;

// Panels that follow each other in a weight.
struct Panels {
  const uint32_t* words;
  const bf16* scales;      // null: BF16
  int64_t word_stride, scale_stride, n_in, group;

  Panels(const Matrix& weight, int64_t panel)
      : scales(nullptr), scale_stride(0), n_in(weight.n_in), group(weight.group_size) {
    word_stride = weight.scales ? int4_panel_words(n_in) : bf16_panel_words(n_in);
    words = static_cast<const uint32_t*>(weight.data) + panel * word_stride;
    if (weight.scales) {
      scale_stride = int4_panel_scales(n_in, group);
      scales = static_cast<const bf16*>(weight.scales) + panel * scale_stride;
    }
  }
  // Vector v of the 16 · P outputs.
  const uint32_t* word(int v) const { return words + v / kVectors * word_stride + v % kVectors * kLanes; }
  // How far ahead of a word to prefetch while P panels are read side by side: in the panel, or in those after the P.
  template <int P>
  int64_t prefetch_words() const { return word_stride > kPrefetchWords ? kPrefetchWords : P * word_stride; }
  const bf16* scale(int v) const { return scales + v / kVectors * scale_stride + v % kVectors * kLanes; }
};

// Where vector v of row r goes: out is [panels][rows][16].
template <int R>
HWY_INLINE float* sum_at(float* out, int r, int v) {
  return out + (v / kVectors * R + r) * kPanelRows + v % kVectors * kLanes;
}

// sum[r][v] += x[r][k] · weight(v)
template <int R, int V, class W>
HWY_INLINE void add_weights(const float* const* x, int64_t k, const W& weight, hn::Vec<F> (*sum)[V]) {
  const F f;
  if constexpr (V >= R) {   // which of the two waits in registers
    hn::Vec<F> a[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) a[r] = hn::Set(f, x[r][k]);
#pragma GCC unroll 16
    for (int v = 0; v < V; ++v) {
      const auto w = weight(v);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) sum[r][v] = hn::MulAdd(a[r], w, sum[r][v]);
    }
  } else {
    hn::Vec<F> w[V];
#pragma GCC unroll 16
    for (int v = 0; v < V; ++v) w[v] = weight(v);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const auto a = hn::Set(f, x[r][k]);
#pragma GCC unroll 16
      for (int v = 0; v < V; ++v) sum[r][v] = hn::MulAdd(a, w[v], sum[r][v]);
    }
  }
}

template <int R, int P>
HWY_INLINE void sum_bf16(const float* const* x, const Panels& p, float* out) {
  const F f;
  const U u;
  constexpr int V = P * kVectors;
  hn::Vec<F> sum[R][V];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
    for (int v = 0; v < V; ++v) sum[r][v] = hn::Zero(f);
  const auto high = hn::Set(u, 0xffff0000u);
  const int64_t n_pairs = p.n_in / 2, ahead = p.prefetch_words<P>();
  for (int64_t k = 0; k < n_pairs; ++k) {
    const int64_t at = k * kPanelRows;
    for (int i = 0; i < P; ++i) hwy::Prefetch(p.words + at + i * p.word_stride + ahead);
    const auto words = [&](int v) HWY_ATTR { return hn::Load(u, p.word(v) + at); };
    const auto even = [&](int v) HWY_ATTR { return hn::BitCast(f, hn::ShiftLeft<16>(words(v))); };
    const auto odd = [&](int v) HWY_ATTR { return hn::BitCast(f, hn::And(words(v), high)); };
    add_weights<R, V>(x, 2 * k, even, sum);
    add_weights<R, V>(x, 2 * k + 1, odd, sum);
  }
  if (p.n_in % 2) {
    for (int v = 0; v < V; ++v) {
      const auto last = hn::BitCast(f, hn::ShiftLeft<16>(hn::Load(u, p.word(v) + n_pairs * kPanelRows)));
      for (int r = 0; r < R; ++r) sum[r][v] = hn::MulAdd(hn::Set(f, x[r][p.n_in - 1]), last, sum[r][v]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
    for (int v = 0; v < V; ++v) hn::StoreU(sum[r][v], f, sum_at<R>(out, r, v));
}

// INT4. A group's part of a sum is  -8 Σ x_k + Σ x_k n_k  with nibbles n in 0..15, and then  sum += scale · part.  A
// nibble is not shifted down but masked, which leaves n · 16^i, and x has been multiplied by 16^-i to make up for it:
// both exact.
constexpr int kNibbles = 8;

template <int i>
HWY_INLINE hn::Vec<F> nibble(hn::Vec<U> words) {
  const U u;
  hn::Vec<U> bits;
  if constexpr (i + 1 < kNibbles) bits = hn::And(words, hn::Set(u, 0xfu << (4 * i)));
  else bits = hn::ShiftRight<28>(words);   // masked it would be negative
  return hn::ConvertTo(F(), hn::BitCast(I(), bits));
}

// 16^-i for input i of a word, but 1 for the last, whose nibble is shifted.
HWY_INLINE const float* nibble_units() {
  HWY_ALIGN static constexpr float units[16] = {1, 0x1p-4f, 0x1p-8f, 0x1p-12f, 0x1p-16f, 0x1p-20f, 0x1p-24f, 1,
                                                1, 0x1p-4f, 0x1p-8f, 0x1p-12f, 0x1p-16f, 0x1p-20f, 0x1p-24f, 1};
  return units;
}

constexpr int64_t int4_row_floats(int64_t n_in, int64_t group) { return (n_in + n_in / group + 15) / 16 * 16; }

// out: x in the nibbles' units [n_in], then -8 Σ x of every group [n_in / group].
void prepare_int4_row(const float* x, int64_t n_in, int64_t group, float* out) {
  const F f;
  const float* units = nibble_units();
  for (int64_t begin = 0; begin < n_in; begin += group) {
    auto sums = hn::Zero(f);
    int64_t k = begin;
    for (; k + kLanes <= begin + group; k += kLanes) {
      const auto v = hn::LoadU(f, x + k);
      hn::StoreU(hn::Mul(v, hn::LoadU(f, units + k % kNibbles)), f, out + k);
      sums = hn::Add(sums, v);
    }
    float sum = hn::GetLane(hn::SumOfLanes(f, sums));
    for (; k < begin + group; ++k) {
      out[k] = x[k] * units[k % kNibbles];
      sum += x[k];
    }
    out[n_in + begin / group] = -8.0f * sum;
  }
}

HWY_INLINE hn::Vec<F> load_scales(const bf16* scales) {
  const hn::Rebind<uint16_t, F> h;
  return hn::BitCast(F(), hn::ShiftLeft<16>(hn::PromoteTo(U(), hn::LoadU(h, scales))));
}

// sum += scale · part, for group g.
template <int R, int V>
HWY_INLINE void add_group(const Panels& p, int64_t g, hn::Vec<F> (*part)[V], float* out) {
  const F f;
#pragma GCC unroll 16
  for (int v = 0; v < V; ++v) {
    const auto scale = load_scales(p.scale(v) + g * kPanelRows);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      float* sum = sum_at<R>(out, r, v);
      hn::Store(hn::MulAdd(part[r][v], scale, hn::Load(f, sum)), f, sum);
    }
  }
}

template <int i, int R, int V>
HWY_INLINE void add_nibbles(const float* const* x, int64_t k, const Panels& p, hn::Vec<F> (*part)[V]) {
  const int64_t at = k / kNibbles * kPanelRows;
  add_weights<R, V>(x, k + i, [&](int v) HWY_ATTR { return nibble<i>(hn::Load(U(), p.word(v) + at)); }, part);
}

// x are prepared rows; out is aligned and zero.
template <int R, int P>
HWY_INLINE void sum_int4(const float* const* x, const Panels& p, float* out) {
  const F f;
  constexpr int V = P * kVectors;
  const int64_t ahead = p.prefetch_words<P>();
  for (int64_t g = 0; g * p.group < p.n_in; ++g) {
    hn::Vec<F> part[R][V];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const auto offset = hn::Set(f, x[r][p.n_in + g]);
#pragma GCC unroll 16
      for (int v = 0; v < V; ++v) part[r][v] = offset;
    }
    for (int64_t k = g * p.group; k < (g + 1) * p.group; k += kNibbles) {
      for (int i = 0; i < P; ++i)
        hwy::Prefetch(p.words + k / kNibbles * kPanelRows + i * p.word_stride + ahead);
      add_nibbles<0, R, V>(x, k, p, part);
      add_nibbles<1, R, V>(x, k, p, part);
      add_nibbles<2, R, V>(x, k, p, part);
      add_nibbles<3, R, V>(x, k, p, part);
      add_nibbles<4, R, V>(x, k, p, part);
      add_nibbles<5, R, V>(x, k, p, part);
      add_nibbles<6, R, V>(x, k, p, part);
      add_nibbles<7, R, V>(x, k, p, part);
    }
    add_group<R, V>(p, g, part, out);
  }
}

template <int i>
HWY_INLINE void decode_nibbles(hn::Vec<U> words, float* to) {
  hn::Store(nibble<i>(words), F(), to + i * kPanelRows);
}

// One group of one panel: tile is [group][16], in the nibbles' units.
HWY_INLINE void decode_int4_tile(const Panels& p, int64_t g, float* tile) {
  const U u;
  for (int64_t k = 0; k < p.group; k += kNibbles) {
    for (int v = 0; v < kVectors; ++v) {
      const auto words = hn::Load(u, p.word(v) + (g * p.group + k) / kNibbles * kPanelRows);
      float* to = tile + k * kPanelRows + v * kLanes;
      decode_nibbles<0>(words, to);
      decode_nibbles<1>(words, to);
      decode_nibbles<2>(words, to);
      decode_nibbles<3>(words, to);
      decode_nibbles<4>(words, to);
      decode_nibbles<5>(words, to);
      decode_nibbles<6>(words, to);
      decode_nibbles<7>(words, to);
    }
  }
}

// As one group of sum_int4<R, 1>, from its tile.
template <int R>
HWY_INLINE void sum_tile(const float* const* x, const Panels& p, int64_t g, const float* tile, float* out) {
  const F f;
  constexpr int V = kVectors;
  hn::Vec<F> part[R][V];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    const auto offset = hn::Set(f, x[r][p.n_in + g]);
#pragma GCC unroll 16
    for (int v = 0; v < V; ++v) part[r][v] = offset;
  }
  for (int64_t k = 0; k < p.group; ++k) {
    const auto weight = [&](int v) HWY_ATTR { return hn::Load(f, tile + k * kPanelRows + v * kLanes); };
    add_weights<R, V>(x, g * p.group + k, weight, part);
  }
  add_group<R, V>(p, g, part, out);
}

}  // namespace kdt::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
