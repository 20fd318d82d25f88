// Matrix products from panels (checkpoint/cpu_packing.h): lanes are outputs, the sum over inputs is sequential.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/linear_kernels.cpp"
#include <hwy/foreach_target.h>  // must come before highway.h
#include <hwy/contrib/math/math-inl.h>
#include <hwy/cache_control.h>
#include <hwy/highway.h>

#include <algorithm>

#include "base/bf16.h"
#include "checkpoint/cpu_packing.h"
#include "cpu/kernels.h"

HWY_BEFORE_NAMESPACE();
namespace kdt::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using F = hn::CappedTag<float, 16>;
using U = hn::RebindToUnsigned<F>;
using I = hn::RebindToSigned<F>;
constexpr int kLanes = static_cast<int>(hn::MaxLanes(F()));
constexpr int kVectors = static_cast<int>(kPanelRows) / kLanes;   // of one panel
// Activation rows whose sums stay in registers: of a decoded panel, of BF16, and while nibbles are decoded beside them.
constexpr int kMaxRows = 6;
constexpr int kMaxBf16Rows = 5;
constexpr int kMaxInt4Rows = 4;
// A panel is read line after line, once; the hardware's prefetchers stop at every page.
constexpr int64_t kPrefetchWords = 32 * kPanelRows;
constexpr int64_t kDequantRows = 12;                              // from here a panel is decoded once, to memory

// Sums of R rows × P panels over BF16 inputs: out[r][P * 16].
template <int R, int P>
HWY_INLINE void sum_bf16(const float* const* x, const uint32_t* w, int64_t panel_stride, int64_t n_in, float* out) {
  const F f;
  const U u;
  constexpr int V = P * kVectors;
  hn::Vec<F> sum[R][V];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
    for (int v = 0; v < V; ++v) sum[r][v] = hn::Zero(f);
  const auto high = hn::Set(u, 0xffff0000u);
  const int64_t n_pairs = n_in / 2;
  for (int64_t k = 0; k < n_pairs; ++k) {
    const uint32_t* row = w + k * kPanelRows;
    for (int p = 0; p < P; ++p) hwy::Prefetch(row + p * panel_stride + kPrefetchWords);
    hn::Vec<F> even[V], odd[V];
#pragma GCC unroll 16
    for (int v = 0; v < V; ++v)
      even[v] = hn::BitCast(f, hn::ShiftLeft<16>(hn::Load(u, row + v / kVectors * panel_stride + v % kVectors * kLanes)));
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const auto a = hn::Set(f, x[r][2 * k]);
#pragma GCC unroll 16
      for (int v = 0; v < V; ++v) sum[r][v] = hn::MulAdd(a, even[v], sum[r][v]);
    }
#pragma GCC unroll 16
    for (int v = 0; v < V; ++v)
      odd[v] = hn::BitCast(f, hn::And(hn::Load(u, row + v / kVectors * panel_stride + v % kVectors * kLanes), high));
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const auto a = hn::Set(f, x[r][2 * k + 1]);
#pragma GCC unroll 16
      for (int v = 0; v < V; ++v) sum[r][v] = hn::MulAdd(a, odd[v], sum[r][v]);
    }
  }
  if (n_in % 2) {
    const uint32_t* row = w + n_pairs * kPanelRows;
    for (int v = 0; v < V; ++v) {
      const auto last =
          hn::BitCast(f, hn::ShiftLeft<16>(hn::Load(u, row + v / kVectors * panel_stride + v % kVectors * kLanes)));
      for (int r = 0; r < R; ++r) sum[r][v] = hn::MulAdd(hn::Set(f, x[r][n_in - 1]), last, sum[r][v]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
    for (int v = 0; v < V; ++v) hn::StoreU(sum[r][v], f, out + r * P * kPanelRows + v * kLanes);
}

// The i-th nibble of each word as (nibble - 8), exact.
template <int i, class VU>
HWY_INLINE hn::Vec<F> nibble(VU words) {
  const F f;
  const I s;
  return hn::ConvertTo(f, hn::ShiftRight<28>(hn::BitCast(s, hn::ShiftLeft<28 - 4 * i>(words))));
}

HWY_INLINE hn::Vec<F> scale_vector(const bf16* scales) {
  const F f;
  const hn::Rebind<uint16_t, F> h;
  return hn::BitCast(f, hn::ShiftLeft<16>(hn::PromoteTo(U(), hn::LoadU(h, scales))));
}

template <int i, int R, int V>
HWY_INLINE void add_nibbles(const float* const* x, int64_t k, const hn::Vec<U>* words, const hn::Vec<F>* scale,
                            hn::Vec<F> (*sum)[V]) {
  const F f;
  hn::Vec<F> w[V];
#pragma GCC unroll 16
  for (int v = 0; v < V; ++v) w[v] = hn::Mul(nibble<i>(words[v]), scale[v]);
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    const auto a = hn::Set(f, x[r][k + i]);
#pragma GCC unroll 16
    for (int v = 0; v < V; ++v) sum[r][v] = hn::MulAdd(a, w[v], sum[r][v]);
  }
}

// Sums of R rows × P panels over INT4 inputs; the weight (nibble - 8) * scale is exact in fp32.
template <int R, int P>
HWY_INLINE void sum_int4(const float* const* x, const uint32_t* w, int64_t panel_stride, const bf16* scales,
                         int64_t scale_stride, int64_t n_in, int64_t group, float* out) {
  const F f;
  const U u;
  constexpr int V = P * kVectors;
  hn::Vec<F> sum[R][V];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
    for (int v = 0; v < V; ++v) sum[r][v] = hn::Zero(f);
  for (int64_t g = 0; g * group < n_in; ++g) {
    hn::Vec<F> scale[V];
#pragma GCC unroll 16
    for (int v = 0; v < V; ++v)
      scale[v] = scale_vector(scales + v / kVectors * scale_stride + g * kPanelRows + v % kVectors * kLanes);
    for (int64_t k = g * group; k < (g + 1) * group; k += 8) {
      hn::Vec<U> words[V];
      for (int p = 0; p < P; ++p) hwy::Prefetch(w + p * panel_stride + k / 8 * kPanelRows + kPrefetchWords);
#pragma GCC unroll 16
      for (int v = 0; v < V; ++v)
        words[v] = hn::Load(u, w + v / kVectors * panel_stride + k / 8 * kPanelRows + v % kVectors * kLanes);
      add_nibbles<0, R, V>(x, k, words, scale, sum);
      add_nibbles<1, R, V>(x, k, words, scale, sum);
      add_nibbles<2, R, V>(x, k, words, scale, sum);
      add_nibbles<3, R, V>(x, k, words, scale, sum);
      add_nibbles<4, R, V>(x, k, words, scale, sum);
      add_nibbles<5, R, V>(x, k, words, scale, sum);
      add_nibbles<6, R, V>(x, k, words, scale, sum);
      add_nibbles<7, R, V>(x, k, words, scale, sum);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
    for (int v = 0; v < V; ++v) hn::StoreU(sum[r][v], f, out + r * P * kPanelRows + v * kLanes);
}

// Sums of R rows over one decoded panel [n_in][16].
template <int R>
HWY_INLINE void sum_f32(const float* const* x, const float* w, int64_t n_in, float* out) {
  const F f;
  constexpr int V = kVectors;
  hn::Vec<F> sum[R][V];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
    for (int v = 0; v < V; ++v) sum[r][v] = hn::Zero(f);
  for (int64_t k = 0; k < n_in; ++k) {
    hn::Vec<F> row[V];
#pragma GCC unroll 16
    for (int v = 0; v < V; ++v) row[v] = hn::Load(f, w + k * kPanelRows + v * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const auto a = hn::Set(f, x[r][k]);
#pragma GCC unroll 16
      for (int v = 0; v < V; ++v) sum[r][v] = hn::MulAdd(a, row[v], sum[r][v]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
    for (int v = 0; v < V; ++v) hn::StoreU(sum[r][v], f, out + r * kPanelRows + v * kLanes);
}

template <int i>
HWY_INLINE void decode_nibbles(hn::Vec<U> words, hn::Vec<F> scale, float* to) {
  hn::Store(hn::Mul(nibble<i>(words), scale), F(), to + i * kPanelRows);
}

void decode_int4_panel(const uint32_t* w, const bf16* scales, int64_t n_in, int64_t group, float* panel) {
  const U u;
  for (int64_t k = 0; k < n_in; k += 8) {
    for (int v = 0; v < kVectors; ++v) {
      const auto scale = scale_vector(scales + k / group * kPanelRows + v * kLanes);
      const auto words = hn::Load(u, w + k / 8 * kPanelRows + v * kLanes);
      float* to = panel + k * kPanelRows + v * kLanes;
      decode_nibbles<0>(words, scale, to);
      decode_nibbles<1>(words, scale, to);
      decode_nibbles<2>(words, scale, to);
      decode_nibbles<3>(words, scale, to);
      decode_nibbles<4>(words, scale, to);
      decode_nibbles<5>(words, scale, to);
      decode_nibbles<6>(words, scale, to);
      decode_nibbles<7>(words, scale, to);
    }
  }
}

// One panel group of a weight, whatever its layout.
struct Panels {
  const uint32_t* words;
  const bf16* scales;      // null: BF16
  const float* decoded;    // not null: this panel in fp32
  int64_t word_stride, scale_stride, n_in, group;
};

Panels panels_at(const Matrix& weight, int64_t panel) {
  Panels p{};
  p.n_in = weight.n_in;
  p.group = weight.group_size;
  if (weight.scales) {
    p.word_stride = int4_panel_words(weight.n_in);
    p.scale_stride = int4_panel_scales(weight.n_in, weight.group_size);
    p.scales = static_cast<const bf16*>(weight.scales) + panel * p.scale_stride;
  } else {
    p.word_stride = bf16_panel_words(weight.n_in);
  }
  p.words = static_cast<const uint32_t*>(weight.data) + panel * p.word_stride;
  return p;
}

template <int R, int P>
HWY_INLINE void sum_block(const float* const* x, const Panels& p, float* out) {
  if constexpr (P == 1) {
    if (p.decoded) return sum_f32<R>(x, p.decoded, p.n_in, out);
  }
  if constexpr (R <= kMaxInt4Rows && P <= 2) {
    if (p.scales) return sum_int4<R, P>(x, p.words, p.word_stride, p.scales, p.scale_stride, p.n_in, p.group, out);
  }
  sum_bf16<R, P>(x, p.words, p.word_stride, p.n_in, out);
}

// out [rows][n_panels * 16]
template <int P>
void sum_rows(const float* const* x, int rows, const Panels& p, float* out) {
  switch (rows) {
    case 1: return sum_block<1, P>(x, p, out);
    case 2:
      if constexpr (P <= 2) return sum_block<2, P>(x, p, out);
      break;
    case 3:
      if constexpr (P == 1) return sum_block<3, P>(x, p, out);
      break;
    case 4:
      if constexpr (P == 1) return sum_block<4, P>(x, p, out);
      break;
    case 5:
      if constexpr (P == 1) return sum_block<5, P>(x, p, out);
      break;
    case 6:
      if constexpr (P == 1) return sum_block<6, P>(x, p, out);
      break;
  }
}

// Calls use(first row, rows, sums [rows][16]) for every block of rows of panel `panel`, or of several panels at once when
// there are few rows: use gets one panel at a time either way. Returns how many panels were done.
template <class Use>
int64_t for_each_block(const LinearJob& job, int64_t panel, int64_t panel_end, const Use& use) {
  Panels p = panels_at(*job.weight, panel);
  HWY_ALIGN float sums[kMaxRows * 4 * kPanelRows];
  const float* x[kMaxRows];
  if (job.n <= 2) {
    for (int r = 0; r < job.n; ++r) x[r] = job.x[r];
    const int rows = static_cast<int>(job.n);
    int64_t n = std::min<int64_t>(panel_end - panel, (p.scales || rows > 1) ? 2 : 4);
    if (n == 3) n = 2;
    if (n == 4) sum_rows<4>(x, rows, p, sums);
    else if (n == 2) sum_rows<2>(x, rows, p, sums);
    else sum_rows<1>(x, rows, p, sums);
    for (int64_t i = 0; i < n; ++i)
      for (int r = 0; r < rows; ++r) use(panel + i, r, 1, sums + (r * n + i) * kPanelRows);
    return n;
  }
  if (p.scales && job.n >= kDequantRows) {
    decode_int4_panel(p.words, p.scales, p.n_in, p.group, job.panel);
    p.decoded = job.panel;
  }
  const int64_t most = p.decoded ? kMaxRows : p.scales ? kMaxInt4Rows : kMaxBf16Rows;
  int64_t blocks = (job.n + most - 1) / most;
  for (int64_t first = 0; blocks > 0; --blocks) {
    const int rows = static_cast<int>((job.n - first + blocks - 1) / blocks);   // even blocks: 8 is 4 + 4, not 6 + 2
    for (int r = 0; r < rows; ++r) x[r] = job.x[first + r];
    sum_rows<1>(x, rows, p, sums);
    use(panel, first, rows, sums);
    first += rows;
  }
  return 1;
}

void linear_panels_impl(const LinearJob& job) {
  const F f;
  const int64_t n_out = job.weight->n_out;
  const auto store = [&](int64_t panel, int64_t first, int rows, const float* sums) {
    const int64_t column = panel * kPanelRows;
    const int64_t valid = std::min(kPanelRows, n_out - column);
    for (int r = 0; r < rows; ++r, sums += kPanelRows) {
      float* out = job.out[first + r] + column;
      if (valid == kPanelRows) {
        for (int v = 0; v < kVectors; ++v) {
          auto y = hn::LoadU(f, sums + v * kLanes);
          if (job.accumulate) y = hn::Add(hn::LoadU(f, out + v * kLanes), y);
          hn::StoreU(y, f, out + v * kLanes);
        }
      } else {
        for (int64_t c = 0; c < valid; ++c) out[c] = job.accumulate ? out[c] + sums[c] : sums[c];
      }
    }
  };
  for (int64_t panel = job.panel_begin; panel < job.panel_end;) panel += for_each_block(job, panel, job.panel_end, store);
}

void gated_panels_impl(const LinearJob& job, int64_t width) {
  const F f;
  const int64_t up_offset = n_panels(width);
  const auto one = hn::Set(f, 1.0f);
  // The gate's sums wait in the output; the panel of `up` with the same columns follows at once, on the same thread.
  const auto keep_gate = [&](int64_t panel, int64_t first, int rows, const float* sums) {
    const int64_t column = panel * kPanelRows, valid = std::min(kPanelRows, width - column);
    for (int r = 0; r < rows; ++r) std::copy_n(sums + r * kPanelRows, valid, job.out[first + r] + column);
  };
  const auto finish = [&](int64_t panel, int64_t first, int rows, const float* sums) {
    const int64_t column = (panel - up_offset) * kPanelRows, valid = std::min(kPanelRows, width - column);
    HWY_ALIGN float gate[kPanelRows] = {};
    for (int r = 0; r < rows; ++r) {
      float* out = job.out[first + r] + column;
      std::copy_n(out, valid, gate);
      for (int v = 0; v < kVectors; ++v) {
        const auto g = hn::Load(f, gate + v * kLanes);
        const auto up = hn::LoadU(f, sums + r * kPanelRows + v * kLanes);
        const auto silu = hn::Div(g, hn::Add(one, hn::Exp(f, hn::Neg(g))));
        hn::Store(hn::Mul(silu, up), f, gate + v * kLanes);
      }
      std::copy_n(gate, valid, out);
    }
  };
  for (int64_t panel = job.panel_begin; panel < job.panel_end;) {
    const int64_t done = for_each_block(job, panel, job.panel_end, keep_gate);
    for (int64_t up = panel; up < panel + done;)
      up += for_each_block(job, up + up_offset, panel + done + up_offset, finish);
    panel += done;
  }
}

}  // namespace kdt::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kdt::cpu {
HWY_EXPORT(linear_panels_impl);
HWY_EXPORT(gated_panels_impl);

void linear_panels(const LinearJob& job) { HWY_DYNAMIC_DISPATCH(linear_panels_impl)(job); }
void gated_panels(const LinearJob& job, int64_t width) { HWY_DYNAMIC_DISPATCH(gated_panels_impl)(job, width); }

}  // namespace kdt::cpu
#endif
