#include "checkpoint/capacity.h"

#include <algorithm>
#include <cmath>

#include "base/error.h"

namespace kdt {
namespace {

constexpr int64_t kPage = 64, kKvElement = 2, kMostNodes = 64;
constexpr int64_t kContexts[] = {4096, 8192, 16384, 32768, 65536, 131072, 262144};
constexpr int64_t kMostMemory = int64_t{1} << 50;

int64_t tokens_in(int64_t bytes, int64_t token_bytes) { return bytes <= 0 ? 0 : bytes / token_bytes / kPage * kPage; }

int64_t bytes_of(const Capacity& capacity, Part part) {
  for (const auto& [of, bytes] : capacity.weights)
    if (of == part) return bytes;
  return 0;
}

}  // namespace

Capacity capacity_of(const ModelConfig& c, const DraftConfig* draft, const CapacityQuestion& question) {
  check_argument(question.gpu_memory > 0 && question.gpu_memory <= kMostMemory, "gpu_memory",
                 std::to_string(question.gpu_memory), "bytes, from 1 to 2^50");
  check_argument(question.reserve >= 0 && question.reserve <= kMostMemory, "reserve", std::to_string(question.reserve),
                 "bytes, from 0 to 2^50");
  check_argument(question.context >= 0 && question.context <= c.max_context, "context",
                 std::to_string(question.context),
                 "0 to the model's " + std::to_string(c.max_context));
  const Partition partition = make_partition(c, draft, question.tp);
  Capacity out;
  for (const ShardTensor& tensor : partition.tensors) {
    const auto same = [&](const auto& entry) { return entry.first == tensor.part; };
    auto found = std::find_if(out.weights.begin(), out.weights.end(), same);
    if (found == out.weights.end()) found = out.weights.insert(out.weights.end(), {tensor.part, 0});
    found->second += tensor.bytes();
  }
  out.weight_bytes = partition.rank_bytes();
  out.kv_token_bytes = c.n_layers * (c.kv_lora_rank + c.qk_rope_dim) * kKvElement;
  if (draft)
    out.draft_kv_token_bytes = static_cast<int64_t>(draft->layers.size()) * 2 * (draft->n_kv_heads / question.tp) *
                               draft->head_dim * kKvElement;
  out.free_bytes = question.gpu_memory - question.reserve - out.weight_bytes;
  out.kv_tokens = tokens_in(out.free_bytes, out.kv_token_bytes + out.draft_kv_token_bytes);
  out.kv_tokens_without_drafter = tokens_in(out.free_bytes + bytes_of(out, Part::drafter), out.kv_token_bytes);

  std::vector<int64_t> contexts;
  for (int64_t context : kContexts)
    if (context < c.max_context) contexts.push_back(context);
  contexts.push_back(c.max_context);
  for (int64_t context : contexts)
    out.streams.push_back({context, out.kv_tokens / ((context + kPage - 1) / kPage * kPage)});

  const double experts = static_cast<double>(bytes_of(out, Part::experts)) / static_cast<double>(c.n_experts);
  const double missed = 1 - static_cast<double>(c.n_experts_per_token) / static_cast<double>(c.n_experts);
  int64_t fixed = out.weight_bytes;
  for (Part part : {Part::experts, Part::embedding, Part::drafter}) fixed -= bytes_of(out, part);
  for (int64_t nodes = 1; nodes <= kMostNodes; nodes *= 2) {
    Capacity::Step step{nodes, static_cast<double>(c.n_experts) * (1 - std::pow(missed, static_cast<double>(nodes))), 0,
                        0, 0};
    step.expert_bytes = step.experts * experts;
    // Of the embedding its nodes' rows, of which a rank has its share.
    step.other_bytes = static_cast<double>(fixed) +
                       static_cast<double>(nodes * c.hidden_size * 2) / static_cast<double>(question.tp);
    step.kv_bytes = static_cast<double>(question.context * out.kv_token_bytes);
    out.steps.push_back(step);
  }
  if (draft) out.draft_bytes = bytes_of(out, Part::drafter) + bytes_of(out, Part::lm_head);
  return out;
}

}  // namespace kdt
