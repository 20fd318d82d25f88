#include "throughput_log.h"

#include <spdlog/fmt/fmt.h>

#include <algorithm>
#include <string>

namespace kdt {
namespace {

double share(double part, double whole) { return whole > 0 ? part / whole : 0; }

std::string depth_series(int depth) {
  return fmt::format("spec_decode_num_accepted_tokens_per_pos_total{{position=\"{}\"}}", depth);
}

}  // namespace

ThroughputLog::ThroughputLog(kdt_engine* engine, ServeLog& log)
    : engine_(engine), log_(log), last_(Figures::read(engine)), last_time_(std::chrono::steady_clock::now()) {}

void ThroughputLog::write() {
  const auto time = std::chrono::steady_clock::now();
  Figures now = Figures::read(engine_);
  const double seconds = std::max(1e-3, std::chrono::duration<double>(time - last_time_).count());
  const double prompt = since(now, "prompt_tokens_total") / seconds;
  const double generation = since(now, "generation_tokens_total") / seconds;
  const double running = now.at("num_requests_running");
  const double waiting = now.at("num_requests_waiting");
  if (prompt > 0 || generation > 0 || running > 0 || waiting > 0) {
    const double usage = 100 * now.at("kv_cache_usage_perc");
    const double hits = 100 * share(since(now, "prefix_cache_hits_total"), since(now, "prefix_cache_queries_total"));
    log_.info(fmt::format("Engine 000: Avg prompt throughput: {:.1f} tokens/s, Avg generation throughput: {:.1f} "
                          "tokens/s, Running: {:.0f} reqs, Waiting: {:.0f} reqs, KV cache usage: {:.1f}%, Prefix cache "
                          "hit rate: {:.1f}%",
                          prompt, generation, running, waiting, usage, hits),
              {{"prompt_tokens_per_second", prompt},
               {"generation_tokens_per_second", generation},
               {"running", running},
               {"waiting", waiting},
               {"kv_cache_usage_percent", usage},
               {"prefix_cache_hit_percent", hits}});
    write_speculation(now, seconds);
  }
  last_ = std::move(now);
  last_time_ = time;
}

void ThroughputLog::write_speculation(const Figures& now, double seconds) {
  const double drafts = since(now, "spec_decode_num_drafts_total");
  if (drafts <= 0) return;
  const double drafted = since(now, "spec_decode_num_draft_tokens_total");
  const double accepted = since(now, "spec_decode_num_accepted_tokens_total");
  std::string rates;
  ServeLog::Fields by_depth = ServeLog::Fields::array();
  const auto has = [&](const std::string& name) {
    return std::any_of(now.names.begin(), now.names.end(), [&](const char* each) { return name == each; });
  };
  // A depth has its series once it was accepted; the first is told even before.
  for (int depth = 0; depth == 0 || has(depth_series(depth)); ++depth) {
    const double rate = share(since(now, depth_series(depth).c_str()), drafts);
    rates += fmt::format("{}{:.3f}", depth == 0 ? "" : ", ", rate);
    by_depth.push_back(rate);
  }
  // The bonus token counts, as everywhere.
  const double length = 1 + accepted / drafts;
  const double rate = 100 * share(accepted, drafted);
  log_.info(fmt::format("SpecDecoding metrics: Mean acceptance length: {:.2f}, Accepted throughput: {:.2f} tokens/s, "
                        "Drafted throughput: {:.2f} tokens/s, Accepted: {:.0f} tokens, Drafted: {:.0f} tokens, "
                        "Per-position acceptance rate: {}, Avg Draft acceptance rate: {:.1f}%",
                        length, accepted / seconds, drafted / seconds, accepted, drafted, rates, rate),
            {{"mean_acceptance_length", length},
             {"accepted_tokens", accepted},
             {"drafted_tokens", drafted},
             {"acceptance_by_depth", by_depth},
             {"draft_acceptance_percent", rate}});
}

}  // namespace kdt
