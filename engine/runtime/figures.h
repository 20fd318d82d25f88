// The running figures behind every metrics page: counters, gauges and histograms under vLLM's names, and a few of our own.
//
// The decode thread writes once a round, readers copy at any time.
#pragma once

#include <array>
#include <cstdint>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "base/stage.h"
#include "runtime/request.h"

namespace kdt {

enum class FigureKind { counter, gauge, histogram };

struct FigureFamily {
  const char* name;    // Prometheus, without prefix
  FigureKind kind;
  const char* help;
};
std::span<const FigureFamily> figure_families();

struct Figure {
  std::string series;  // `request_success_total{finished_reason="stop"}`
  double value;
};

class Histogram {
 public:
  explicit Histogram(std::span<const double> bounds) : bounds_(bounds), counts_(bounds.size() + 1) {}
  void observe(double value, double times = 1);
  // Appends `name_bucket{labels,le="…"}`, `name_sum` and `name_count`.
  void append(const std::string& name, const std::string& labels, std::vector<Figure>& out) const;

 private:
  std::span<const double> bounds_;
  std::vector<double> counts_;
  double sum_ = 0;
};

// What one round did.
struct RoundFigures {
  StageSeconds time;
  double host_seconds = 0;             // plan, emit and bookkeeping: all that is neither draft nor pass
  int64_t prompt_tokens = 0, generated_tokens = 0;
  int64_t decode_streams = 0, drafts = 0, draft_nodes = 0, accepted = 0;
  double auto_expected = 0;            // draft nodes of mode auto that were to be accepted, by its calibration
  int64_t auto_accepted = 0;           // and that were
  std::vector<int64_t> nodes;          // of each tree verified
  std::vector<int64_t> accepted_by_depth;
  double distinct_experts = 0;         // of a layer, mean; 0: not counted in this round
  double read_bytes = 0;               // estimate
};

struct StateFigures {
  int64_t running = 0, waiting = 0, pages_in_use = 0, pages_idle = 0, n_pages = 0;
};

class Figures {
 public:
  Figures();

  void set_startup(double load_seconds, double measure_seconds, int64_t n_ranks);
  void set_state(const StateFigures& state);
  void add_round(const RoundFigures& round);
  void add_admission(int64_t prompt_tokens, int64_t cached_tokens);
  void add_preemption();
  void add_first_token(double seconds);
  void add_token_interval(double seconds, int64_t times);
  void add_finished(const RequestSettings& settings, const Result& result);

  StateFigures state() const;
  std::vector<Figure> read() const;

 private:
  mutable std::mutex mutex_;
  StateFigures state_;
  double load_seconds_ = 0, measure_seconds_ = 0, n_ranks_ = 1;
  double rounds_ = 0, host_seconds_ = 0, prompt_tokens_ = 0, cached_tokens_ = 0, generated_tokens_ = 0, drafts_ = 0,
         draft_nodes_ = 0, accepted_ = 0, read_bytes_ = 0, cache_queries_ = 0, cache_hits_ = 0, preemptions_ = 0,
         tree_budget_ = 0, auto_expected_ = 0, auto_accepted_ = 0;
  std::array<double, kFinishes> finished_{};
  std::vector<double> accepted_by_depth_;
  Histogram first_token_, interval_, time_per_token_, latency_, queue_, inference_, prefill_, decode_, prompt_length_,
      output_length_, max_tokens_, round_tokens_, tree_nodes_, distinct_experts_;
  std::vector<Histogram> stage_;       // by Stage
};

}  // namespace kdt
