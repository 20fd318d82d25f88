#include "runtime/figures.h"

#include <algorithm>
#include <cstdio>

namespace kdt {
namespace {

constexpr FigureFamily kFamilies[] = {
    {"num_requests_running", FigureKind::gauge, "Requests that hold KV pages"},
    {"num_requests_waiting", FigureKind::gauge, "Requests that wait to be admitted"},
    {"kv_cache_usage_perc", FigureKind::gauge, "Part of the KV pages in use by streams, 0 to 1"},
    {"kv_cache_idle_perc", FigureKind::gauge, "Part of the KV pages kept for the prefix cache alone, 0 to 1"},
    {"cache_config_info", FigureKind::gauge, "Sizes of the KV cache, as labels"},
    {"startup_seconds", FigureKind::gauge, "Seconds of each phase of the start"},
    {"tensor_parallel_ranks", FigureKind::gauge, "Ranks that compute every round together"},
    {"prefix_cache_queries_total", FigureKind::counter, "Prompt tokens looked up in the prefix cache"},
    {"prefix_cache_hits_total", FigureKind::counter, "Prompt tokens found in the prefix cache"},
    {"num_preemptions_total", FigureKind::counter, "Times a stream lost its pages and was recomputed"},
    {"prompt_tokens_total", FigureKind::counter, "Prompt tokens computed, recomputed ones included"},
    {"prompt_tokens_cached_total", FigureKind::counter, "Prompt tokens taken from the prefix cache"},
    {"generation_tokens_total", FigureKind::counter, "Tokens of answers, counted every round"},
    {"request_success_total", FigureKind::counter, "Requests that ended, by reason"},
    {"rounds_total", FigureKind::counter, "Rounds run"},
    {"host_seconds_total", FigureKind::counter, "Seconds of rounds outside draft and pass: plan, emit, bookkeeping"},
    {"estimated_read_bytes_total", FigureKind::counter, "Weight bytes read by passes (of one rank), estimated for uniform routing"},
    {"spec_decode_num_drafts_total", FigureKind::counter, "Draft trees verified"},
    {"spec_decode_num_draft_tokens_total", FigureKind::counter, "Draft nodes verified"},
    {"spec_decode_num_accepted_tokens_total", FigureKind::counter, "Draft nodes accepted"},
    {"spec_decode_num_accepted_tokens_per_pos_total", FigureKind::counter, "Draft nodes accepted, by depth from 0"},
    {"spec_auto_expected_tokens_total", FigureKind::counter, "Draft nodes of mode auto that it expected to be accepted"},
    {"spec_auto_accepted_tokens_total", FigureKind::counter, "Draft nodes of mode auto that were accepted"},
    {"spec_tree_budget", FigureKind::gauge, "Draft nodes of a tree, mean of the last round that drafted"},
    {"spec_tree_nodes", FigureKind::histogram, "Draft nodes verified of a tree"},
    {"spec_distinct_experts", FigureKind::histogram, "Distinct experts of a layer in one pass, mean over layers, one pass in 512"},
    {"step_seconds", FigureKind::histogram, "Seconds of a round's stages"},
    {"iteration_tokens_total", FigureKind::histogram, "Prompt and generated tokens of a round"},
    {"time_to_first_token_seconds", FigureKind::histogram, "From submit to the first token"},
    {"inter_token_latency_seconds", FigureKind::histogram, "Between tokens of a request; a round's tokens share its time"},
    {"request_time_per_output_token_seconds", FigureKind::histogram, "Mean between the tokens of a request"},
    {"e2e_request_latency_seconds", FigureKind::histogram, "From submit to the end"},
    {"request_queue_time_seconds", FigureKind::histogram, "From submit until admitted"},
    {"request_inference_time_seconds", FigureKind::histogram, "From admitted to the end"},
    {"request_prefill_time_seconds", FigureKind::histogram, "From admitted to the first token"},
    {"request_decode_time_seconds", FigureKind::histogram, "From the first token to the end"},
    {"request_prompt_tokens", FigureKind::histogram, "Prompt tokens of a request"},
    {"request_generation_tokens", FigureKind::histogram, "Tokens handed out of a request"},
    {"request_params_max_tokens", FigureKind::histogram, "max_tokens of a request"},
};

constexpr double kSeconds[] = {0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300};
constexpr double kShort[] = {0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1};
constexpr double kTokens[] = {1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000, 262144};
constexpr double kNodes[] = {1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 128, 256, 512, 1024};
constexpr double kExperts[] = {4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384};

std::string number(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.10g", value);
  return text;
}

// vLLM's names of how a request ends.
constexpr std::array<const char*, kFinishes> kReasons = {"", "stop", "length", "abort", "error"};

}  // namespace

std::span<const FigureFamily> figure_families() { return kFamilies; }

void Histogram::observe(double value, double times) {
  const auto at = std::lower_bound(bounds_.begin(), bounds_.end(), value) - bounds_.begin();
  counts_[static_cast<size_t>(at)] += times;
  sum_ += value * times;
}

void Histogram::append(const std::string& name, const std::string& labels, std::vector<Figure>& out) const {
  double count = 0;
  for (size_t i = 0; i < counts_.size(); ++i) {
    count += counts_[i];
    const std::string bound = i < bounds_.size() ? number(bounds_[i]) : "+Inf";
    out.push_back({name + "_bucket{" + labels + (labels.empty() ? "" : ",") + "le=\"" + bound + "\"}", count});
  }
  const std::string suffix = labels.empty() ? "" : "{" + labels + "}";
  out.push_back({name + "_sum" + suffix, sum_});
  out.push_back({name + "_count" + suffix, count});
}

Figures::Figures()
    : first_token_(kSeconds), interval_(kShort), time_per_token_(kShort), latency_(kSeconds), queue_(kSeconds),
      inference_(kSeconds), prefill_(kSeconds), decode_(kSeconds), prompt_length_(kTokens), output_length_(kTokens),
      max_tokens_(kTokens), round_tokens_(kTokens), tree_nodes_(kNodes), distinct_experts_(kExperts),
      stage_(kStages, Histogram(kShort)) {}

void Figures::set_startup(double load_seconds, double measure_seconds, int64_t n_ranks) {
  std::lock_guard lock(mutex_);
  load_seconds_ = load_seconds;
  measure_seconds_ = measure_seconds;
  n_ranks_ = static_cast<double>(n_ranks);
}

void Figures::set_state(const StateFigures& state) {
  std::lock_guard lock(mutex_);
  state_ = state;
}

StateFigures Figures::state() const {
  std::lock_guard lock(mutex_);
  return state_;
}

void Figures::add_round(const RoundFigures& round) {
  std::lock_guard lock(mutex_);
  rounds_ += 1;
  host_seconds_ += round.host_seconds;
  prompt_tokens_ += static_cast<double>(round.prompt_tokens);
  generated_tokens_ += static_cast<double>(round.generated_tokens);
  drafts_ += static_cast<double>(round.drafts);
  draft_nodes_ += static_cast<double>(round.draft_nodes);
  accepted_ += static_cast<double>(round.accepted);
  auto_expected_ += round.auto_expected;
  auto_accepted_ += static_cast<double>(round.auto_accepted);
  read_bytes_ += round.read_bytes;
  if (round.drafts > 0) tree_budget_ = static_cast<double>(round.draft_nodes) / static_cast<double>(round.drafts);
  for (const int64_t nodes : round.nodes) tree_nodes_.observe(static_cast<double>(nodes));
  if (accepted_by_depth_.size() < round.accepted_by_depth.size()) accepted_by_depth_.resize(round.accepted_by_depth.size());
  for (size_t i = 0; i < round.accepted_by_depth.size(); ++i)
    accepted_by_depth_[i] += static_cast<double>(round.accepted_by_depth[i]);
  if (round.distinct_experts > 0) distinct_experts_.observe(round.distinct_experts);
  for (size_t i = 0; i < kStages; ++i)
    if (round.time.seconds[i] > 0) stage_[i].observe(round.time.seconds[i]);
  round_tokens_.observe(static_cast<double>(round.prompt_tokens + round.generated_tokens));
}

void Figures::add_admission(int64_t prompt_tokens, int64_t cached_tokens) {
  std::lock_guard lock(mutex_);
  cache_queries_ += static_cast<double>(prompt_tokens);
  cache_hits_ += static_cast<double>(cached_tokens);
  cached_tokens_ += static_cast<double>(cached_tokens);
}

void Figures::add_preemption() {
  std::lock_guard lock(mutex_);
  preemptions_ += 1;
}

void Figures::add_first_token(double seconds) {
  std::lock_guard lock(mutex_);
  first_token_.observe(seconds);
}

void Figures::add_token_interval(double seconds, int64_t times) {
  std::lock_guard lock(mutex_);
  interval_.observe(seconds, static_cast<double>(times));
}

void Figures::add_finished(const RequestSettings& settings, const Result& result) {
  std::lock_guard lock(mutex_);
  finished_[static_cast<size_t>(result.finish)] += 1;
  latency_.observe(result.total_seconds);
  queue_.observe(result.queue_seconds);
  inference_.observe(std::max(0.0, result.total_seconds - result.queue_seconds));
  if (result.first_token_seconds > 0) {
    prefill_.observe(std::max(0.0, result.first_token_seconds - result.queue_seconds));
    decode_.observe(std::max(0.0, result.total_seconds - result.first_token_seconds));
  }
  if (result.generated_tokens > 1)
    time_per_token_.observe(result.decode_seconds / static_cast<double>(result.generated_tokens - 1));
  prompt_length_.observe(static_cast<double>(result.prompt_tokens));
  output_length_.observe(static_cast<double>(result.generated_tokens));
  max_tokens_.observe(static_cast<double>(settings.max_tokens));
}

std::vector<Figure> Figures::read() const {
  std::lock_guard lock(mutex_);
  std::vector<Figure> out;
  const double n_pages = std::max<double>(1, static_cast<double>(state_.n_pages));
  out.push_back({"num_requests_running", static_cast<double>(state_.running)});
  out.push_back({"num_requests_waiting", static_cast<double>(state_.waiting)});
  out.push_back({"kv_cache_usage_perc", static_cast<double>(state_.pages_in_use) / n_pages});
  out.push_back({"kv_cache_idle_perc", static_cast<double>(state_.pages_idle) / n_pages});
  out.push_back({"cache_config_info{block_size=\"" + std::to_string(kPageTokens) + "\",num_blocks=\"" +
                     std::to_string(state_.n_pages) + "\"}", 1});
  out.push_back({"startup_seconds{phase=\"load\"}", load_seconds_});
  out.push_back({"startup_seconds{phase=\"measure\"}", measure_seconds_});
  out.push_back({"tensor_parallel_ranks", n_ranks_});
  const std::pair<const char*, double> counters[] = {
      {"prefix_cache_queries_total", cache_queries_},
      {"prefix_cache_hits_total", cache_hits_},
      {"num_preemptions_total", preemptions_},
      {"prompt_tokens_total", prompt_tokens_},
      {"prompt_tokens_cached_total", cached_tokens_},
      {"generation_tokens_total", generated_tokens_},
      {"rounds_total", rounds_},
      {"host_seconds_total", host_seconds_},
      {"estimated_read_bytes_total", read_bytes_},
      {"spec_decode_num_drafts_total", drafts_},
      {"spec_decode_num_draft_tokens_total", draft_nodes_},
      {"spec_decode_num_accepted_tokens_total", accepted_},
      {"spec_auto_expected_tokens_total", auto_expected_},
      {"spec_auto_accepted_tokens_total", auto_accepted_},
      {"spec_tree_budget", tree_budget_}};
  for (const auto& [name, value] : counters) out.push_back({name, value});
  for (size_t i = 1; i < kFinishes; ++i)
    out.push_back({"request_success_total{finished_reason=\"" + std::string(kReasons[i]) + "\"}", finished_[i]});
  for (size_t i = 0; i < accepted_by_depth_.size(); ++i)
    out.push_back({"spec_decode_num_accepted_tokens_per_pos_total{position=\"" + std::to_string(i) + "\"}",
                   accepted_by_depth_[i]});
  const std::pair<const char*, const Histogram*> histograms[] = {
      {"spec_tree_nodes", &tree_nodes_},
      {"spec_distinct_experts", &distinct_experts_},
      {"iteration_tokens_total", &round_tokens_},
      {"time_to_first_token_seconds", &first_token_},
      {"inter_token_latency_seconds", &interval_},
      {"request_time_per_output_token_seconds", &time_per_token_},
      {"e2e_request_latency_seconds", &latency_},
      {"request_queue_time_seconds", &queue_},
      {"request_inference_time_seconds", &inference_},
      {"request_prefill_time_seconds", &prefill_},
      {"request_decode_time_seconds", &decode_},
      {"request_prompt_tokens", &prompt_length_},
      {"request_generation_tokens", &output_length_},
      {"request_params_max_tokens", &max_tokens_}};
  for (const auto& [name, histogram] : histograms) histogram->append(name, "", out);
  for (size_t i = 0; i < kStages; ++i)
    stage_[i].append("step_seconds", "phase=\"" + std::string(kStageNames[i]) + "\"", out);
  return out;
}

}  // namespace kdt
