// The router and the mixture of experts on the CPU.
#include <algorithm>
#include <cstring>

#include "checkpoint/cpu_packing.h"
#include "cpu/cpu_backend.h"
#include "cpu/kernels.h"

namespace kdt::cpu {
namespace {

// Where things lie in ExpertsArgs::scratch. A "pair" is one (row, routing rank): pair = row * k + rank.
struct ExpertsScratch {
  int32_t* first;        // [n_experts + 1] an expert's pairs are pairs[first[e] .. first[e + 1])
  int32_t* pairs;        // [rows * k], by expert, then by row
  int32_t* row_of_pair;  // [rows * k], parallel to `pairs`
  float* hidden;         // [rows * k][width] silu(gate) * up
  float* shared_hidden;  // [rows][shared width]
  float* out;            // [rows * k][hidden] each expert's own output
  float* shared_out;     // [rows][hidden]
  size_t bytes;

  ExpertsScratch(void* base, int64_t rows, int64_t k, int64_t n_experts, int64_t width, int64_t shared_width,
                 int64_t hidden_size)
      : bytes(0) {
    const auto at = reinterpret_cast<uintptr_t>(base);   // a number: null, when only `bytes` is asked for
    const auto take = [&](auto*& pointer, int64_t count) {
      using T = std::remove_reference_t<decltype(*pointer)>;
      pointer = reinterpret_cast<T*>(at + bytes);
      bytes += static_cast<size_t>(round_up(count * static_cast<int64_t>(sizeof(T)), 64));
    };
    take(first, n_experts + 1);
    take(pairs, rows * k);
    take(row_of_pair, rows * k);
    take(hidden, rows * k * width);
    take(shared_hidden, rows * shared_width);
    take(out, rows * k * hidden_size);
    take(shared_out, rows * hidden_size);
  }
};

// Counting sort of the pairs by expert; rows stay in order.
void group_by_expert(const ExpertsArgs& args, int64_t n, const ExpertsScratch& s) {
  const int64_t n_pairs = n * args.k;
  std::memset(s.first, 0, sizeof(int32_t) * static_cast<size_t>(args.n_experts + 1));
  for (int64_t i = 0; i < n_pairs; ++i) ++s.first[args.expert[i] + 1];
  for (int64_t e = 0; e < args.n_experts; ++e) s.first[e + 1] += s.first[e];
  for (int64_t i = 0; i < n_pairs; ++i) {
    const int32_t slot = s.first[args.expert[i]]++;
    s.pairs[slot] = static_cast<int32_t>(i);
    s.row_of_pair[slot] = static_cast<int32_t>(i / args.k);
  }
  for (int64_t e = args.n_experts; e > 0; --e) s.first[e] = s.first[e - 1];
  s.first[0] = 0;
}

}  // namespace

void CpuOps::route(const RouteArgs& args) {
  linear({args.n, args.x, args.gate, args.scores});
  for_rows(args.n.now(), 8, [&](int64_t i, int) {
    float* score = args.scores + i * args.n_experts;
    sigmoid_row(score, args.n_experts);
    int32_t* expert = args.expert + i * args.k;
    float* weight = args.weight + i * args.k;
    float sum = 0;
    for (int64_t rank = 0; rank < args.k; ++rank) {
      int32_t best = -1;
      float best_value = 0;
      for (int32_t e = 0; e < args.n_experts; ++e) {
        const float value = score[e] + args.bias[e];
        if ((best >= 0 && !(value > best_value)) || std::find(expert, expert + rank, e) != expert + rank) continue;
        best = e;
        best_value = value;
      }
      expert[rank] = best;
      weight[rank] = score[best];
      sum += weight[rank];
    }
    for (int64_t rank = 0; rank < args.k; ++rank)
      weight[rank] = (args.normalise ? weight[rank] / (sum + 1e-20f) : weight[rank]) * args.scaling;
  });
}

size_t CpuOps::experts_scratch_bytes(int64_t rows, int64_t k, int64_t n_experts, int64_t width, int64_t shared_width,
                                     int64_t hidden) const {
  return ExpertsScratch(nullptr, rows, k, n_experts, width, shared_width, hidden).bytes;
}

// Threads share out columns, never experts: the work of each is the same whatever the routing.
void CpuOps::experts(const ExpertsArgs& args) {
  const int64_t n_rows = args.n.now();
  if (n_rows == 0) return;
  const int64_t shared_width = args.shared_down->n_in;
  const ExpertsScratch s(args.scratch, n_rows, args.k, args.n_experts, args.width, shared_width, args.hidden);
  const auto* x = static_cast<const float*>(args.x);
  group_by_expert(args, n_rows, s);
  pool_.run([&](int t) {
    const auto share = pool_.share(n_panels(args.width), t);
    for (int64_t e = 0; e < args.n_experts; ++e) {
      const int32_t first = s.first[e], n = s.first[e + 1] - first;
      if (n == 0) continue;
      gated_panels({{x, args.hidden, s.row_of_pair + first}, n, &args.gate_up.host[e], share.begin, share.end,
                    {s.hidden, args.width, s.pairs + first}, false, scratch(t)}, args.width);
    }
    const auto shared = pool_.share(n_panels(shared_width), t);
    gated_panels({{x, args.hidden}, n_rows, args.shared_gate_up, shared.begin, shared.end,
                  {s.shared_hidden, shared_width}, false, scratch(t)}, shared_width);
  });
  pool_.run([&](int t) {
    const auto share = pool_.share(n_panels(args.hidden), t);
    for (int64_t e = 0; e < args.n_experts; ++e) {
      const int32_t first = s.first[e], n = s.first[e + 1] - first;
      if (n == 0) continue;
      linear_panels({{s.hidden, args.width, s.pairs + first}, n, &args.down.host[e], share.begin, share.end,
                     {s.out, args.hidden, s.pairs + first}, false, scratch(t)});
    }
    linear_panels({{s.shared_hidden, shared_width}, n_rows, args.shared_down, share.begin, share.end,
                   {s.shared_out, args.hidden}, false, scratch(t)});
    const int64_t begin = share.begin * kPanelRows, end = std::min(share.end * kPanelRows, args.hidden);
    if (begin >= end) return;
    for (int64_t i = 0; i < n_rows; ++i) {
      float* out = (args.partial ? args.partial : static_cast<float*>(args.out)) + i * args.hidden + begin;
      if (args.partial) std::fill_n(out, end - begin, 0.0f);
      combine_row(s.out + i * args.k * args.hidden + begin, args.hidden, args.weight + i * args.k, args.k,
                  s.shared_out + i * args.hidden + begin, end - begin, out);
    }
  });
}

}  // namespace kdt::cpu
