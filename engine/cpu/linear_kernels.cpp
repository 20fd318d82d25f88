// Matrix products from panels (checkpoint/cpu_packing.h): lanes are outputs, the sum over inputs is sequential.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/linear_kernels.cpp"
#include <hwy/foreach_target.h>  // must come before highway.h
#include <hwy/contrib/math/math-inl.h>
#include <hwy/highway.h>

#include <algorithm>

#include "checkpoint/cpu_packing.h"
#include "cpu/kernels.h"
#include "cpu/panel_sums-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kdt::cpu::HWY_NAMESPACE {

// Activation rows whose sums stay in registers: of BF16, of nibbles decoded beside them, of a decoded tile.
constexpr int kMaxBf16Rows = 5;
constexpr int kMaxInt4Rows = 6;
constexpr int kMaxTileRows = 6;
constexpr int kSingleRowPanels = kVectors < 8 ? 8 / kVectors : 1;   // enough sums to hide an FMA's latency
constexpr int64_t kRowChunk = 64;                                    // rows that go over a panel while it is in the cache

// Rows [first, first + n) of a job, prepared where the weight is INT4.
struct Chunk {
  int64_t first, n;
  const float* x[kRowChunk];
  float* tile;

  Chunk(const LinearJob& job, int64_t begin) : first(begin), n(std::min(job.n - begin, kRowChunk)), tile(job.scratch) {
    const Matrix& w = *job.weight;
    const int64_t floats = w.scales ? int4_row_floats(w.n_in, w.group_size) : 0;
    if (w.scales) n = std::min(n, std::max<int64_t>(1, kLinearScratch / floats));
    for (int64_t r = 0; r < n; ++r) {
      x[r] = job.x[first + r];
      if (!w.scales) continue;
      prepare_int4_row(x[r], w.n_in, w.group_size, tile);
      x[r] = tile;
      tile += floats;
    }
  }
};

template <int R, int P>
HWY_INLINE void sum_block(const float* const* x, const Panels& p, float* out) {
  if (p.scales) {
    std::fill_n(out, R * P * kPanelRows, 0.0f);
    if constexpr (R <= kMaxInt4Rows) sum_int4<R, P>(x, p, out);
  } else {
    sum_bf16<R, P>(x, p, out);
  }
}

// out [rows][16]
void sum_rows(const float* const* x, int rows, const Panels& p, float* out) {
  switch (rows) {
    case 1: return sum_block<1, 1>(x, p, out);
    case 2: return sum_block<2, 1>(x, p, out);
    case 3: return sum_block<3, 1>(x, p, out);
    case 4: return sum_block<4, 1>(x, p, out);
    case 5: return sum_block<5, 1>(x, p, out);
    default: return sum_block<6, 1>(x, p, out);
  }
}

void sum_tile_rows(const float* const* x, int rows, const Panels& p, int64_t g, const float* tile, float* out) {
  switch (rows) {
    case 1: return sum_tile<1>(x, p, g, tile, out);
    case 2: return sum_tile<2>(x, p, g, tile, out);
    case 3: return sum_tile<3>(x, p, g, tile, out);
    case 4: return sum_tile<4>(x, p, g, tile, out);
    case 5: return sum_tile<5>(x, p, g, tile, out);
    default: return sum_tile<6>(x, p, g, tile, out);
  }
}

// f(first, rows) for blocks of at most `most` rows, as even as can be: 8 is 4 + 4, not 6 + 2.
template <class G>
HWY_INLINE void for_each_block(int64_t n, int64_t most, const G& f) {
  int64_t first = 0;
  for (int64_t blocks = (n + most - 1) / most; blocks > 0; --blocks) {
    const int64_t rows = (n - first + blocks - 1) / blocks;
    f(first, static_cast<int>(rows));
    first += rows;
  }
}

constexpr int64_t kSums = std::max<int64_t>(kRowChunk, kSingleRowPanels) * kPanelRows;

// A chunk's sums over the panel, or over some of the `most` panels from there when there are few rows: sums is
// [panels][rows][16]. Returns how many panels were done, an even number or 1.
int64_t sum_panels(const Matrix& weight, const Chunk& chunk, int64_t panel, int64_t most, float* sums) {
  const Panels p(weight, panel);
  const int rows = static_cast<int>(chunk.n);
  if (rows == 1 && most >= kSingleRowPanels) {
    sum_block<1, kSingleRowPanels>(chunk.x, p, sums);
    return kSingleRowPanels;
  }
  if (rows <= 2 && most >= 2) {
    if (rows == 1) sum_block<1, 2>(chunk.x, p, sums);
    else sum_block<2, 2>(chunk.x, p, sums);
    return 2;
  }
  if (p.scales && rows > kMaxInt4Rows) {
    std::fill_n(sums, rows * kPanelRows, 0.0f);
    for (int64_t g = 0; g * p.group < p.n_in; ++g) {
      decode_int4_tile(p, g, chunk.tile);
      for_each_block(rows, kMaxTileRows, [&](int64_t first, int n) {
        sum_tile_rows(chunk.x + first, n, p, g, chunk.tile, sums + first * kPanelRows);
      });
    }
  } else {
    for_each_block(rows, p.scales ? kMaxInt4Rows : kMaxBf16Rows, [&](int64_t first, int n) {
      sum_rows(chunk.x + first, n, p, sums + first * kPanelRows);
    });
  }
  return 1;
}

void linear_panels_impl(const LinearJob& job) {
  const F f;
  const int64_t n_out = job.weight->n_out;
  HWY_ALIGN float sums[kSums];
  const auto store = [&](const Chunk& chunk, int64_t panel, const float* from) HWY_ATTR {
    const int64_t column = panel * kPanelRows;
    const int64_t valid = std::min(kPanelRows, n_out - column);
    for (int64_t r = 0; r < chunk.n; ++r, from += kPanelRows) {
      float* out = job.out[chunk.first + r] + column;
      if (valid == kPanelRows) {
        for (int v = 0; v < kVectors; ++v) {
          auto y = hn::Load(f, from + v * kLanes);
          if (job.accumulate) y = hn::Add(hn::LoadU(f, out + v * kLanes), y);
          hn::StoreU(y, f, out + v * kLanes);
        }
      } else {
        for (int64_t c = 0; c < valid; ++c) out[c] = job.accumulate ? out[c] + from[c] : from[c];
      }
    }
  };
  for (int64_t first = 0; first < job.n;) {
    const Chunk chunk(job, first);
    first += chunk.n;
    for (int64_t panel = job.panel_begin; panel < job.panel_end;) {
      const int64_t done = sum_panels(*job.weight, chunk, panel, job.panel_end - panel, sums);
      for (int64_t i = 0; i < done; ++i) store(chunk, panel + i, sums + i * chunk.n * kPanelRows);
      panel += done;
    }
  }
}

void gated_panels_impl(const LinearJob& job, int64_t width) {
  const F f;
  const auto one = hn::Set(f, 1.0f);
  HWY_ALIGN float sums[2 * kSums];
  const auto store = [&](const Chunk& chunk, int64_t pair, const float* gate, const float* up) HWY_ATTR {
    const int64_t column = pair * kPanelRows, valid = std::min(kPanelRows, width - column);
    HWY_ALIGN float result[kPanelRows];
    for (int64_t r = 0; r < chunk.n; ++r) {
      for (int v = 0; v < kVectors; ++v) {
        const int64_t at = r * kPanelRows + v * kLanes;
        const auto g = hn::Load(f, gate + at);
        const auto silu = hn::Div(g, hn::Add(one, hn::Exp(f, hn::Neg(g))));
        hn::Store(hn::Mul(silu, hn::Load(f, up + at)), f, result + v * kLanes);
      }
      std::copy_n(result, valid, job.out[chunk.first + r] + column);
    }
  };
  for (int64_t first = 0; first < job.n;) {
    const Chunk chunk(job, first);
    first += chunk.n;
    for (int64_t panel = 2 * job.panel_begin; panel < 2 * job.panel_end;) {
      int64_t done = 0;
      do {   // a gate and its up at least
        done += sum_panels(*job.weight, chunk, panel + done, 2 * job.panel_end - panel - done,
                           sums + done * chunk.n * kPanelRows);
      } while (done < 2);
      for (int64_t i = 0; i < done; i += 2)
        store(chunk, (panel + i) / 2, sums + i * chunk.n * kPanelRows, sums + (i + 1) * chunk.n * kPanelRows);
      panel += done;
    }
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
