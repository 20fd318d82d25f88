// The CPU kernels: plain functions over fp32 rows, compiled for every instruction set and chosen at run time.
//
// Each output element is one sum in one fixed order, so results do not depend on how rows and panels are shared out.
#pragma once

#include <cstdint>

#include "ops/types.h"

namespace kdt::cpu {

// Rows at base + row(i) * stride, row(i) = index ? index[i] : i.
template <class T>
struct RowSet {
  T* base;
  int64_t stride;
  const int32_t* index = nullptr;
  T* operator[](int64_t i) const { return base + (index ? index[i] : i) * stride; }
};

constexpr int64_t kLinearScratch = 6 << 20;      // floats that prepared INT4 rows may take, but for one of any width

// out[r][c] (+)= Σ_k x[r][k] · w[c][k] for n rows and the columns of panels [panel_begin, panel_end).
struct LinearJob {
  RowSet<const float> x;
  int64_t n;
  const Matrix* weight;       // BF16 or INT4 panels
  int64_t panel_begin, panel_end;
  RowSet<float> out;
  bool accumulate;
  float* scratch;             // for INT4: prepared rows, and the decoded group of a panel
};
void linear_panels(const LinearJob& job);

// out[r][c] = silu(gate_c · x[r]) * (up_c · x[r]) for the columns of panels [panel_begin, panel_end) of `width`. Gate and
// up panels take turns in the weight.
void gated_panels(const LinearJob& job, int64_t width);

// Attention over one tile of up to 64 keys, folded into the running softmax of a few queries.
struct AttentionState {
  float* m;                   // [queries] running maximum, -inf at first
  float* l;                   // [queries] running sum
  float* o;                   // [queries][dv stride] running, unnormalised output
};
// Keys lie in blocks of 16, transposed: [blocks][dk][16], so that lanes are keys.
constexpr int64_t kKeyBlock = 16;
// s[q][t] = scale · Σ_d q[q][d] · key t's d, for t < n rounded up to 16 and up to 4 queries; each score is one sequential
// sum over d.
void attention_scores(const float* q, int64_t q_stride, int64_t n_queries, int64_t dk, const float* keys, int64_t n,
                      float scale, float* s, int64_t s_stride);
// Turns slots [lo[q], hi[q]) of scores s [n_queries][64] into weights, the others into zeros, and scales the state's o to
// the new maximum. dv is a multiple of 16.
void attention_softmax(float* s, int64_t n_queries, const int64_t* lo, const int64_t* hi, int64_t dv,
                       const AttentionState& state);
// o[q] += Σ_t s[q][t] · v[t], ascending over [begin, end). A few value rows a call stay in the first-level cache for all
// queries that go over them.
constexpr int64_t kValueRows = 16;
void attention_values(const float* s, int64_t n_queries, const float* const* v, int64_t begin, int64_t end, int64_t dv,
                      float* o);

void rms_norm_row(const float* x, int64_t width, const float* weight, float eps, float* out);
// x[i] = 1 / (1 + exp(-x[i]))
void sigmoid_row(float* x, int64_t n);
// out = Σ_k weight[k] · y[k] (ascending k) + shared + out; y rows at y + k * y_stride.
void combine_row(const float* y, int64_t y_stride, const float* weight, int64_t k, const float* shared, int64_t n,
                 float* out);

// Largest value (NaN as -inf) and log Σ exp of a row.
struct RowStats {
  float max;
  float log_sum_exp;
};
RowStats row_stats(const float* x, int64_t n);
// Lowest index of the largest value; NaN never wins unless all are NaN (then 0).
int32_t argmax_row(const float* x, int64_t n);

// The Gumbel-max winner among tokens with z[i] > -inf: argmax z[i] + noise(seed, choice, position, id[i]); id null: i.
// Ties go to the lower i. NaN counts as -inf.
int32_t gumbel_argmax(const double* z, const int32_t* id, int64_t n, uint64_t seed, uint32_t choice, uint32_t position);
// out[i] = x[i] + weight * noise(seed, choice, position, i), in double, rounded to float.
void add_noise(const float* x, double weight, int64_t n, uint64_t seed, uint32_t choice, uint32_t position, float* out);

}  // namespace kdt::cpu
