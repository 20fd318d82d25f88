// What fits on a GPU, and the least that a step must read, from the configs alone: no weights are touched.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/partition.h"

namespace kdt {

struct CapacityQuestion {
  int64_t tp = 1;
  int64_t gpu_memory = 0;    // bytes of one GPU
  int64_t reserve = 0;       // bytes for all but weights and KV: CUDA context, graphs, activations, scratch rows
  int64_t context = 0;       // tokens of the stream whose KV a step reads
};

// KV of a GPU is BF16: the latent and k_pe of every layer, on every rank; the drafter's keys and values by heads.
struct Capacity {
  std::vector<std::pair<Part, int64_t>> weights;   // bytes of a rank, parts that there are
  int64_t weight_bytes = 0;
  int64_t kv_token_bytes = 0, draft_kv_token_bytes = 0;   // of a rank
  int64_t free_bytes = 0;              // for KV; negative: the weights do not fit
  int64_t kv_tokens = 0;               // whole pages of 64, all streams together
  int64_t kv_tokens_without_drafter = 0;
  struct Streams {
    int64_t context, streams;
  };
  std::vector<Streams> streams;        // how many of a context fit
  struct Step {
    int64_t nodes;
    double experts;                    // distinct ones a layer, expected when routing is uniform
    double expert_bytes, other_bytes, kv_bytes;   // read by a rank
    double bytes() const { return expert_bytes + other_bytes + kv_bytes; }
  };
  std::vector<Step> steps;             // 1, 2, 4 … 64 nodes
  int64_t draft_bytes = 0;             // read by a draft: the drafter and lm_head; 0 without a drafter
};

// Errors as make_partition's.
Capacity capacity_of(const ModelConfig& config, const DraftConfig* draft, const CapacityQuestion& question);

}  // namespace kdt
