// The target: Kimi K2's DeepSeek-V3 architecture (MLA, one or more dense layers, mixture of experts), over ops.
//
// One forward pass serves prefill, plain decoding and tree verification alike; every row's arithmetic is the same
// whoever else is in the pass.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "checkpoint/config.h"
#include "checkpoint/partition.h"
#include "model/rank_parts.h"
#include "model/rope_table.h"
#include "model/weight_source.h"
#include "ops/ops.h"

namespace kdt {

// Where the latent KV lives: a page holds its 64 tokens' part of every layer, one after the other.
struct LatentCache {
  void* pages;
  size_t page_stride, layer_page_bytes;
  void* scratch;                // [layers] scratch rows of layer_scratch_bytes
  size_t layer_scratch_bytes;
};

struct ForwardArgs {
  Rows rows;
  const StreamPages* streams;
  LatentCache cache;
  Count n_logits = 0;                 // rows whose logits are wanted
  const int32_t* logits_row = nullptr;   // [n_logits] row indices
  float* logits = nullptr;            // out [n_logits, vocab]
  Act* taps = nullptr;                // out [n_taps, rows capacity, hidden]: outputs of the tapped layers; null: none
  int64_t tap_stride = 0;             // elements from one tap to the next
  int32_t* distinct_experts = nullptr;   // out [layers], of layers that have experts; null: not counted
  // For tests, one entry a layer (null in dense layers): where the router's choice is copied. Normally empty; waits.
  std::span<int32_t* const> chosen_experts = {};
};

class Kimi {
 public:
  // Loads the weights and sizes buffers for `max_rows` rows a pass; `taps`: layers whose output the drafter reads. With several
  // ranks the weights are the rank's shard, and the backend one that meets the other ranks.
  Kimi(Ops& ops, const ModelConfig& config, const WeightSource& read, int64_t max_rows, int64_t max_context,
       std::vector<int64_t> taps, RankSlice slice = {});

  void forward(const ForwardArgs& args);
  const ModelConfig& config() const { return config_; }   // of the whole model
  const RankSlice& slice() const { return parts_.slice(); }
  // What the drafter shares with its target; `parts` and `norm`: its own.
  void embed(const Rows& rows, Act* out, RankParts& parts, NextNorm norm);
  const Matrix& lm_head() const { return lm_head_; }

 private:
  struct Layer {
    Buffer input_norm, q_norm, kv_norm, post_norm;
    Matrix qkv_a, q_b, o;            // qkv_a: q_a rows, then kv_a rows
    MatrixGroup w_uk, w_uv;          // by head
    // Dense layers
    Matrix gate_up, down;
    // Mixture of experts
    bool moe = false;
    Matrix gate;
    Buffer bias;
    MatrixGroup expert_gate_up, expert_down;
    Matrix shared_gate_up, shared_down;
  };

  // From h_, the norm of x_, to x_ and the norm that is read next.
  void attention(const ForwardArgs& args, const Layer& layer, int64_t index);
  void feed_forward(const ForwardArgs& args, const Layer& layer, int64_t index);
  NextNorm norm_for_layer(size_t index) const;   // past the last layer none
  NextNorm next_norm(const Buffer& weight) const;

  Ops& ops_;
  ModelConfig config_, local_;       // of the whole model; with the rank's own widths
  RankParts parts_;
  int64_t max_context_;
  std::vector<int64_t> taps_;
  RopeTables rope_;
  float score_scale_;
  const void* embedding_;
  Matrix lm_head_;
  Buffer final_norm_;
  std::vector<Layer> layers_;
  // Activations of one pass, [max_rows, …]
  Buffer x_, h_, qkv_a_, q_lora_, q_, attention_, mlp_, router_scores_, expert_, expert_weight_, experts_scratch_,
      attention_work_;
};

}  // namespace kdt
