// Over the vocabulary: the drafter's candidates and the target's own sample.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "cpu/cpu_backend.h"
#include "cpu/kernels.h"

namespace kdt::cpu {
namespace {

constexpr float kMinusInf = -std::numeric_limits<float>::infinity();
constexpr int64_t kInsertionRanks = 128;   // more candidates than this are sorted, fewer are inserted one by one

float as_rankable(float value) { return std::isnan(value) ? kMinusInf : value; }

// The k best of x[0..n): value descending, then id ascending.
void best_of_row(const float* x, int64_t n, int64_t k, int32_t* id, float* value, int32_t* order) {
  if (k > kInsertionRanks) {
    std::iota(order, order + n, 0);
    std::partial_sort(order, order + k, order + n, [&](int32_t a, int32_t b) {
      const float va = as_rankable(x[a]), vb = as_rankable(x[b]);
      return va != vb ? va > vb : a < b;
    });
    for (int64_t i = 0; i < k; ++i) {
      id[i] = order[i];
      value[i] = as_rankable(x[order[i]]);
    }
    return;
  }
  int64_t count = 0;
  for (int64_t i = 0; i < n; ++i) {
    const float v = as_rankable(x[i]);
    if (count == k && !(v > value[k - 1])) continue;
    int64_t at = count < k ? count++ : k - 1;
    for (; at > 0 && v > value[at - 1]; --at) {
      value[at] = value[at - 1];
      id[at] = id[at - 1];
    }
    value[at] = v;
    id[at] = static_cast<int32_t>(i);
  }
}

// Candidates of one row for the Gumbel-max draw, in a thread's scratch.
struct Candidates {
  double* z;       // [vocab] logit / T of the kept tokens
  int32_t* id;     // [vocab]
  int64_t n;
};

// Sorts z descending (ties: lower id) as far as `far`.
void sort_head(Candidates& c, const double* z, int64_t far) {
  const auto before = [z](int32_t a, int32_t b) { return z[a] != z[b] ? z[a] > z[b] : a < b; };
  if (far < c.n) std::nth_element(c.id, c.id + far, c.id + c.n, before);
  std::sort(c.id, c.id + far, before);
}

// Temperature → top-k → top-p → min-p → Gumbel-max. `all` is [vocab], `c` holds what is kept.
int32_t sample_row(const float* logits, int64_t vocab, const Sampling& s, uint32_t position, double* all, Candidates c) {
  double most = -std::numeric_limits<double>::infinity();
  for (int64_t i = 0; i < vocab; ++i) {
    all[i] = static_cast<double>(as_rankable(logits[i])) / s.temperature;
    most = std::max(most, all[i]);
  }
  const bool cut_k = s.top_k > 0 && s.top_k < vocab, cut_p = s.top_p < 1, cut_min = s.min_p > 0;
  if (std::isinf(most)) return argmax_row(logits, vocab);
  if (!cut_k && !cut_p && !cut_min) return gumbel_argmax(all, nullptr, vocab, s.seed, s.choice, position);

  std::iota(c.id, c.id + vocab, 0);
  c.n = vocab;
  if (cut_k) {
    sort_head(c, all, s.top_k);
    c.n = s.top_k;
  }
  if (cut_p) {
    double total = 0;
    for (int64_t i = 0; i < c.n; ++i) total += std::exp(all[c.id[i]] - most);
    double sum = 0;
    int64_t kept = 0, sorted = cut_k ? c.n : 0;
    while (kept < c.n) {
      if (kept == sorted) {   // sorting a little more each time: most nuclei are small
        sorted = std::min<int64_t>(c.n, std::max<int64_t>(64, 4 * sorted));
        sort_head(c, all, sorted);
      }
      sum += std::exp(all[c.id[kept++]] - most);
      if (sum >= s.top_p * total) break;
    }
    c.n = kept;
  }
  if (cut_min) {
    const auto end = std::remove_if(c.id, c.id + c.n, [&](int32_t i) { return std::exp(all[i] - most) < s.min_p; });
    c.n = end - c.id;
  }
  std::sort(c.id, c.id + c.n);
  for (int64_t i = 0; i < c.n; ++i) c.z[i] = all[c.id[i]];
  return c.id[gumbel_argmax(c.z, c.id, c.n, s.seed, s.choice, position)];
}

// The logits of one row as its request wants them: `out` [vocab]. Every token's value is its own function of its count.
void adjust_row(const float* logits, int64_t vocab, const LogitAdjust& a, const Rows& rows, int64_t row, float* out) {
  std::transform(logits, logits + vocab, out, as_rankable);
  const auto is_node = [&](int64_t i) { return rows.parent[i] >= 0; };
  const auto in_path = [&](int32_t token) {
    int32_t count = 0;
    for (int64_t i = row; is_node(i); i = rows.parent[i]) count += rows.token[i] == token;
    return count;
  };
  const auto penalise = [&](int32_t token, int32_t count) {
    float& x = out[token];
    if (a.repetition != 1) x = x > 0 ? x / a.repetition : x * a.repetition;
    if (count > 0) x -= a.frequency * static_cast<float>(count) + a.presence;
  };
  if (a.penalises()) {
    for (int64_t i = 0; i < a.n_seen; ++i) penalise(a.seen[i], a.seen_count[i] + in_path(a.seen[i]));
    const auto in_history = [&](int32_t token) { return std::find(a.seen, a.seen + a.n_seen, token) != a.seen + a.n_seen; };
    for (int64_t i = row; is_node(i); i = rows.parent[i]) {
      const int32_t token = rows.token[i];
      bool later = false;   // met already, nearer to the row
      for (int64_t j = row; j != i; j = rows.parent[j]) later |= rows.token[j] == token;
      if (!later && !in_history(token)) penalise(token, in_path(token));
    }
  }
  for (int64_t i = 0; i < a.n_bias; ++i) out[a.bias_token[i]] += a.bias[i];
  if (rows.position[row] + 1 < a.banned_until)
    for (int64_t i = 0; i < a.n_banned; ++i) out[a.banned[i]] = kMinusInf;
}

}  // namespace

void CpuOps::top_k(const TopKArgs& args) {
  for_rows(args.n.now(), 2, [&](int64_t i, int t) {
    const float* x = args.logits + i * args.vocab;
    float* noisy = scratch(t);
    auto* order = reinterpret_cast<int32_t*>(noisy + args.vocab);
    const Sampling* sampling = args.sampling ? &args.sampling[i / args.depths] : nullptr;
    if (sampling && sampling->temperature > 0) {
      const double weight = sampling->temperature * (i % args.depths == 0 ? 1.0 : kDeepNoise);
      add_noise(x, weight, args.vocab, sampling->seed, sampling->choice, static_cast<uint32_t>(args.position[i]), noisy);
      x = noisy;
    }
    int32_t* id = args.token + i * args.k;
    float* value = args.log_q + i * args.k;
    best_of_row(x, args.vocab, args.k, id, value, order);
    const float log_sum = row_stats(x, args.vocab).log_sum_exp;
    for (int64_t j = 0; j < args.k; ++j) value[j] = value[j] == kMinusInf ? kMinusInf : value[j] - log_sum;
  });
}

void CpuOps::sample(const SampleArgs& args) {
  for_rows(args.rows.n.now(), 2, [&](int64_t i, int t) {
    const float* logits = args.logits + i * args.vocab;
    const int32_t stream = args.rows.stream[i];
    const Sampling& sampling = args.sampling[stream];
    auto* all = reinterpret_cast<double*>(scratch(t));
    Candidates c{all + args.vocab, reinterpret_cast<int32_t*>(all + 2 * args.vocab), 0};
    if (args.adjust && args.adjust[stream].changes()) {
      auto* adjusted = reinterpret_cast<float*>(c.id + args.vocab);
      adjust_row(logits, args.vocab, args.adjust[stream], args.rows, i, adjusted);
      logits = adjusted;
    }
    if (sampling.temperature <= 0) {
      args.token[i] = argmax_row(logits, args.vocab);
      return;
    }
    args.token[i] = sample_row(logits, args.vocab, sampling, static_cast<uint32_t>(args.rows.position[i]) + 1, all, c);
  });
}

void CpuOps::logprobs(const LogprobArgs& args) {
  for_rows(args.n.now(), 2, [&](int64_t i, int t) {
    if (args.token[i] < 0) return;
    const float* x = args.logits + args.row[i] * args.vocab;
    int32_t* id = args.top_token + i * args.n_top;
    float* value = args.top_logprob + i * args.n_top;
    const float log_sum = row_stats(x, args.vocab).log_sum_exp;
    const auto from_logit = [log_sum](float logit) { return logit == kMinusInf ? kMinusInf : logit - log_sum; };
    args.logprob[i] = from_logit(as_rankable(x[args.token[i]]));
    if (args.n_top > 0) best_of_row(x, args.vocab, args.n_top, id, value, reinterpret_cast<int32_t*>(scratch(t)));
    for (int64_t j = 0; j < args.n_top; ++j) value[j] = from_logit(value[j]);
  });
}

}  // namespace kdt::cpu
