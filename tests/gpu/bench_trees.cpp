// How long the first CUDA device takes from the drafter's logits in its memory to rows that the target can verify: top-k,
// build, rows; one graph, replayed.
//
//   bench_trees [--json]
//
// A vocabulary of 163,840, blocks of 7 and 15 drafted tokens, as many candidates as the budget. Logits are normal with a
// deviation of 4.7: the best token of a row has a third of its probability, as a mean. Rows are made of a few, from
// another token on.
#include <algorithm>
#include <array>
#include <cstdio>
#include <cstring>
#include <exception>
#include <random>
#include <vector>

#include "bench.h"
#include "cuda/cuda_ops.h"

namespace {

using namespace kdt;

constexpr int64_t kVocab = 163840, kMostDepths = 15, kMostStreams = 64, kMostBudget = 1024;

class TreeBench {
 public:
  explicit TreeBench(Ops& ops) : ops_(ops) {
    logits_ = space(std::max(bench::kRotate, kMostStreams * kMostDepths * kVocab * 4 + bench::kRotate));
    std::mt19937 random(1);
    std::normal_distribution<float> of(0, 4.7f);
    std::vector<float> values(static_cast<size_t>(16 * kVocab + 977));   // a row later begins elsewhere
    for (float& v : values) v = of(random);
    const size_t bytes = values.size() * sizeof(float);
    for (size_t at = 0; at < logits_->bytes(); at += bytes)
      ops_.copy_in(*logits_, at, values.data(), std::min(bytes, logits_->bytes() - at));
    work_ = space(static_cast<int64_t>(ops_.vocabulary_work_bytes(kMostStreams * kMostDepths, kVocab, kMostBudget)));
    token_ = space(kMostStreams * kMostDepths * kMostBudget * 4);
    log_q_ = space(kMostStreams * kMostDepths * kMostBudget * 4);
    plan_ = space(kMostStreams * static_cast<int64_t>(sizeof(StreamPlan)));
    counts_ = space(sizeof(RoundCounts));
    const RoundCounts none{};
    ops_.copy_in(*counts_, 0, &none, sizeof none);
    for (auto& column : columns_) column = space(kMostStreams * (kMostBudget + 1) * 4);
    n_nodes_ = space(kMostStreams * 4);
    live_ = space(3 * 4);
  }

  // Seconds of top-k alone, of build alone, and of all three.
  std::array<double, 3> measure(int64_t depths, int64_t budget, int64_t streams) {
    std::vector<StreamPlan> plan(static_cast<size_t>(streams));
    for (int64_t i = 0; i < streams; ++i) {
      StreamPlan& p = plan[static_cast<size_t>(i)];
      p.first = static_cast<int32_t>(i * (budget + 1));
      p.budget = static_cast<int32_t>(budget);
      p.draft = static_cast<int32_t>(i);
      p.depths = static_cast<int32_t>(depths);
      p.calibration = -1;
    }
    ops_.copy_in(*plan_, 0, plan.data(), plan.size() * sizeof(StreamPlan));
    const int64_t rows = streams * depths, bytes = rows * kVocab * 4, turns = std::max<int64_t>(bench::kRotate / bytes, 1);
    const auto top_k = [&](int64_t i) {
      const auto* logits = reinterpret_cast<const float*>(logits_->as<std::byte>() + i % turns * bytes);
      ops_.top_k({rows, kVocab, budget, logits, nullptr, depths, nullptr, work_->data(), token_->as<int32_t>(),
                  log_q_->as<float>()});
    };
    const TreeNodes nodes{column(0), column(1), column(2), columns_[3]->as<float>()};
    const auto build = [&] {
      ops_.build_trees({streams, plan_->as<StreamPlan>(), depths, budget, token_->as<int32_t>(), log_q_->as<float>(), nodes,
                        n_nodes_->as<int32_t>()});
    };
    const auto lay_rows = [&] {
      auto* live = live_->as<int32_t>();
      ops_.lay_rows({streams, plan_->as<StreamPlan>(), counts_->as<RoundCounts>(), nodes, n_nodes_->as<int32_t>(), column(4),
                     column(5), column(6), column(7), column(8), column(9), column(10), column(11), column(12), column(13),
                     column(14), live, live + 1, live + 2});
    };
    const double top = median(turns, top_k), all = median(turns, [&](int64_t i) { top_k(i), build(), lay_rows(); });
    return {top, median(turns, [&](int64_t) { build(); }), all};
  }

 private:
  Buffer* space(int64_t bytes) { return memory_.emplace_back(std::make_unique<Buffer>(ops_.allocate(static_cast<size_t>(bytes)))).get(); }
  int32_t* column(size_t i) { return columns_[i]->as<int32_t>(); }

  template <class F>
  double median(int64_t turns, const F& f) {
    return bench::median_seconds(ops_, ++n_keys_, std::clamp<int64_t>(turns, 4, 24), f);
  }

  Ops& ops_;
  std::vector<std::unique_ptr<Buffer>> memory_;
  Buffer *logits_, *work_, *token_, *log_q_, *plan_, *counts_, *n_nodes_, *live_;
  std::array<Buffer*, 15> columns_;
  int64_t n_keys_ = 0;
};

}  // namespace

int main(int argc, char** argv) {
  try {
    const bool json = argc > 1 && std::strcmp(argv[1], "--json") == 0;
    const auto ops = make_cuda_ops(0);
    if (!json)
      std::printf("%s, medians of %lld graph replays, us\n\n%6s %7s %7s %9s %9s %9s\n", cuda_devices().front().name.c_str(),
                  static_cast<long long>(bench::kReplays), "depth", "budget", "streams", "top-k", "build", "all");
    TreeBench bench(*ops);
    const char* separator = "[";
    for (int64_t streams : {1, 8, 32, 64})
      for (int64_t depths : {int64_t{7}, kMostDepths})
        for (int64_t budget : {16, 32, 64, 128, 256, 512, 1024}) {
          const auto [top, build, all] = bench.measure(depths, budget, streams);
          if (json)
            std::printf("%s{\"depth\":%lld,\"budget\":%lld,\"streams\":%lld,\"top_k_us\":%.2f,\"build_us\":%.2f,\"all_us\":%.2f}",
                        separator, static_cast<long long>(depths), static_cast<long long>(budget),
                        static_cast<long long>(streams), top * 1e6, build * 1e6, all * 1e6);
          else
            std::printf("%6lld %7lld %7lld %9.2f %9.2f %9.2f\n", static_cast<long long>(depths), static_cast<long long>(budget),
                        static_cast<long long>(streams), top * 1e6, build * 1e6, all * 1e6);
          separator = ",\n";
          std::fflush(stdout);
        }
    if (json) std::puts("]");
    return 0;
  } catch (const std::exception& e) {
    std::fprintf(stderr, "error: %s\n", e.what());
    return 1;
  }
}
