#include "rehearsal/rehearsal_plan.h"

#include <algorithm>

#include "base/error.h"

namespace kdt {

int64_t largest(const std::vector<int64_t>& values) {
  return values.empty() ? 0 : *std::max_element(values.begin(), values.end());
}

bool prefills(int64_t tokens, int64_t chunk, const std::vector<int64_t>& chunks) {
  return chunk <= tokens || chunk == *std::min_element(chunks.begin(), chunks.end());
}

void check_plan(const RehearsalPlan& plan, const ModelConfig& model) {
  check_argument(plan.rank >= 0 && plan.rank < plan.tp, "rank", std::to_string(plan.rank),
                 "0 to " + std::to_string(plan.tp - 1) + ", one of tp");
  check_argument(plan.layers >= 0 && plan.layers <= plan.model.n_layers, "layers", std::to_string(plan.layers),
                 "0 to the model's " + std::to_string(plan.model.n_layers));
  check_argument(plan.draft || plan.round_nodes.empty(), "round_nodes", std::to_string(plan.round_nodes.size()) + " of them",
                 "none, since there is no drafter");
  check_argument(model.n_layers > model.n_dense_layers || plan.routed, "layers", std::to_string(model.n_layers),
                 "more than the " + std::to_string(model.n_dense_layers) + " without experts");
}

std::vector<int64_t> leave_out(std::vector<int64_t>& lengths, const char* field, int64_t most) {
  if (lengths.empty()) return {};
  const auto too_long = std::stable_partition(lengths.begin(), lengths.end(), [most](int64_t length) { return length <= most; });
  check_argument(too_long != lengths.begin(), field, std::to_string(lengths.front()),
                 "at most " + std::to_string(most) + ": nodes and a block follow in the model's context");
  std::vector<int64_t> out(too_long, lengths.end());
  lengths.erase(too_long, lengths.end());
  return out;
}

int64_t measurements(const RehearsalPlan& plan) {
  const size_t cells = plan.streams.size() * plan.prefixes.size();
  auto n = static_cast<int64_t>(cells * (plan.nodes.size() + plan.round_nodes.size()) + plan.op_nodes.size());
  const auto trees = std::count_if(plan.nodes.begin(), plan.nodes.end(), [](int64_t nodes) { return nodes > 1; });
  n += trees * static_cast<int64_t>(plan.overlaps.size() - 1);
  for (const int64_t tokens : plan.prompts)
    for (const int64_t chunk : plan.chunks) n += prefills(tokens, chunk, plan.chunks);
  return n;
}

}  // namespace kdt
