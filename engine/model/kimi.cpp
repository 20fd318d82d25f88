#include "model/kimi.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#include "base/error.h"

namespace kdt {
namespace {

constexpr int64_t kMaxKeyDims = 8192;     // kv_lora_rank + qk_rope_head_dim, for the backends' working memory
constexpr int64_t kMaxVocab = 1 << 20;

void check_supported(const ModelConfig& c, const std::string& directory) {
  const std::string file = directory + "/config.json";
  const int64_t key_dims = c.kv_lora_rank + c.qk_rope_dim;
  if (key_dims > kMaxKeyDims)
    fail(Status::unsupported, file + ": kv_lora_rank + qk_rope_head_dim", std::to_string(key_dims),
         "at most " + std::to_string(kMaxKeyDims));
  if (c.vocab_size > kMaxVocab)
    fail(Status::unsupported, file + ": vocab_size", std::to_string(c.vocab_size), "at most " + std::to_string(kMaxVocab));
}

}  // namespace

Kimi::Kimi(Ops& ops, const ModelConfig& config, const WeightSource& read, int64_t max_rows, int64_t max_context,
           std::vector<int64_t> taps, RankSlice slice)
    : ops_(ops), config_(config), local_(rank_config(config, slice.tp)),
      parts_(ops, slice, max_rows, config.hidden_size, max_rows, config.vocab_size), max_context_(max_context),
      taps_(std::move(taps)), rope_(ops, config.qk_rope_dim, config.rope_theta, config.yarn, max_context) {
  const ModelConfig& c = local_;
  check_supported(config_, read.where());
  const double mscale = c.yarn && c.yarn->mscale_all_dim != 0 ? yarn_mscale(c.yarn->factor, c.yarn->mscale_all_dim) : 1.0;
  score_scale_ = static_cast<float>(mscale * mscale / std::sqrt(static_cast<double>(c.qk_nope_dim + c.qk_rope_dim)));

  const int64_t q_dim = c.n_heads * (c.qk_nope_dim + c.qk_rope_dim), kv_a = c.kv_lora_rank + c.qk_rope_dim;
  embedding_ = read.raw_bf16("model.embed_tokens.weight", c.vocab_size, c.hidden_size);
  for (int64_t i = 0; i < c.n_layers; ++i) {
    const std::string prefix = "model.layers." + std::to_string(i) + ".", attn = prefix + "self_attn.",
                      mlp = prefix + "mlp.";
    Layer layer;
    layer.input_norm = read.vector(prefix + "input_layernorm.weight", c.hidden_size);
    const std::array<WeightSource::Named, 2> qkv_a{{{attn + "q_a_proj.weight", c.q_lora_rank},
                                                    {attn + "kv_a_proj_with_mqa.weight", kv_a}}};
    layer.qkv_a = read.matrix(attn + "qkv_a_proj.weight", qkv_a, c.hidden_size);
    layer.q_norm = read.vector(attn + "q_a_layernorm.weight", c.q_lora_rank);
    layer.kv_norm = read.vector(attn + "kv_a_layernorm.weight", c.kv_lora_rank);
    layer.q_b = read.matrix(attn + "q_b_proj.weight", q_dim, c.q_lora_rank);
    std::vector<Matrix> w_uk, w_uv;
    read.kv_b(attn, c.n_heads, c.qk_nope_dim, c.v_head_dim, c.kv_lora_rank, w_uk, w_uv);
    layer.w_uk = ops.group(w_uk);
    layer.w_uv = ops.group(w_uv);
    layer.o = read.matrix(attn + "o_proj.weight", c.hidden_size, c.n_heads * c.v_head_dim);
    layer.post_norm = read.vector(prefix + "post_attention_layernorm.weight", c.hidden_size);
    layer.moe = i >= c.n_dense_layers;
    if (layer.moe) {
      const int64_t shared_width = c.n_shared_experts * c.expert_width;
      layer.gate = read.matrix(mlp + "gate.weight", c.n_experts, c.hidden_size);
      layer.bias = read.vector(mlp + "gate.e_score_correction_bias", c.n_experts, DType::f32);
      std::vector<Matrix> gate_up, down;
      read.experts(mlp + "experts.", c.n_experts, c.expert_width, c.hidden_size, c.quant_group_size, gate_up, down);
      layer.expert_gate_up = ops.group(gate_up);
      layer.expert_down = ops.group(down);
      layer.shared_gate_up = read.gate_up(mlp + "shared_experts.", shared_width, c.hidden_size);
      layer.shared_down = read.matrix(mlp + "shared_experts.down_proj.weight", c.hidden_size, shared_width);
    } else {
      layer.gate_up = read.gate_up(mlp, c.dense_width, c.hidden_size);
      layer.down = read.matrix(mlp + "down_proj.weight", c.hidden_size, c.dense_width);
    }
    layers_.push_back(std::move(layer));
  }
  final_norm_ = read.vector("model.norm.weight", c.hidden_size);
  lm_head_ = read.matrix("lm_head.weight", c.vocab_size, c.hidden_size);

  const auto rows = [&](int64_t width) { return ops.allocate(static_cast<size_t>(max_rows * width) * ops.activation_bytes()); };
  x_ = rows(c.hidden_size);
  h_ = rows(c.hidden_size);
  qkv_a_ = rows(c.q_lora_rank + kv_a);
  q_lora_ = rows(c.q_lora_rank);
  q_ = rows(q_dim);
  attention_ = rows(c.n_heads * c.v_head_dim);
  mlp_ = rows(c.dense_width);
  const auto words = [&](int64_t width) { return ops.allocate(static_cast<size_t>(max_rows * width) * 4); };
  router_scores_ = words(c.n_experts);
  expert_ = words(c.n_experts_per_token);
  expert_weight_ = words(c.n_experts_per_token);
  attention_work_ = ops.allocate(ops.attention_work_bytes(max_rows, c.n_heads, kv_a, max_context));
  experts_scratch_ = ops.allocate(ops.experts_scratch_bytes(max_rows, c.n_experts_per_token, c.n_experts, c.expert_width,
                                                            c.n_shared_experts * c.expert_width, c.hidden_size));
}

void Kimi::embed(const Rows& rows, Act* out, RankParts& parts, NextNorm norm) {
  ops_.embed({rows, embedding_, local_.hidden_size, out, parts.partial(), slice().rank * local_.vocab_size, local_.vocab_size});
  parts.sum(rows.n, out, false, norm);
}

NextNorm Kimi::norm_for_layer(size_t index) const {
  return index < layers_.size() ? next_norm(layers_[index].input_norm) : NextNorm{};
}

NextNorm Kimi::next_norm(const Buffer& weight) const {
  return {weight.as<float>(), static_cast<float>(config_.rms_norm_eps), h_.data()};
}

void Kimi::forward(const ForwardArgs& args) {
  const ModelConfig& c = local_;
  embed(args.rows, x_.data(), parts_, norm_for_layer(0));
  size_t tap = 0;
  for (int64_t i = 0; i < c.n_layers; ++i) {
    const Layer& layer = layers_[static_cast<size_t>(i)];
    attention(args, layer, i);
    feed_forward(args, layer, i);
    if (args.taps && tap < taps_.size() && taps_[tap] == i) {
      auto* to = static_cast<std::byte*>(args.taps) + tap * static_cast<size_t>(args.tap_stride) * ops_.activation_bytes();
      ops_.copy({args.rows.n, c.hidden_size, x_.data(), to});
      ++tap;
    }
  }
  if (args.n_logits.most == 0) return;
  ops_.rms_norm({args.n_logits, c.hidden_size, x_.data(), final_norm_.as<float>(), static_cast<float>(c.rms_norm_eps),
                 h_.data(), {0, args.logits_row}});
  parts_.logits(args.n_logits, h_.data(), lm_head_, args.logits);
}

void Kimi::attention(const ForwardArgs& args, const Layer& layer, int64_t index) {
  const ModelConfig& c = local_;
  const Count n = args.rows.n;
  const int64_t qkv_width = c.q_lora_rank + c.kv_lora_rank + c.qk_rope_dim;
  const auto eps = static_cast<float>(c.rms_norm_eps);
  auto* pages = static_cast<std::byte*>(args.cache.pages) + static_cast<size_t>(index) * args.cache.layer_page_bytes;
  auto* scratch = static_cast<std::byte*>(args.cache.scratch) + static_cast<size_t>(index) * args.cache.layer_scratch_bytes;
  const auto* kv = qkv_a_.as<std::byte>() + static_cast<size_t>(c.q_lora_rank) * ops_.activation_bytes();

  ops_.linear({n, h_.data(), &layer.qkv_a, qkv_a_.data()});
  ops_.latent_write({args.rows, args.streams, kv, qkv_width, layer.kv_norm.as<float>(), eps, rope_.view(), c.kv_lora_rank,
                     pages, args.cache.page_stride, scratch, qkv_a_.data(), layer.q_norm.as<float>(), &layer.q_b,
                     q_lora_.data(), q_.data()});
  ops_.mla_attention({args.rows, args.streams, q_.data(), layer.w_uk, layer.w_uv, c.n_heads, c.qk_nope_dim,
                      c.kv_lora_rank, c.v_head_dim, rope_.view(), score_scale_, pages, args.cache.page_stride, scratch,
                      max_context_, attention_work_.data(), attention_.data()});
  ops_.linear({n, attention_.data(), &layer.o, x_.data(), true, {}, {}, parts_.partial()});
  parts_.sum(n, x_.data(), true, next_norm(layer.post_norm));
}

void Kimi::feed_forward(const ForwardArgs& args, const Layer& layer, int64_t index) {
  const ModelConfig& c = local_;
  const Count n = args.rows.n;
  const NextNorm next = norm_for_layer(static_cast<size_t>(index) + 1);
  if (!layer.moe) {
    ops_.mlp({n, h_.data(), &layer.gate_up, &layer.down, mlp_.data(), x_.data(), nullptr, parts_.partial()});
    parts_.sum(n, x_.data(), true, next);
    return;
  }
  ops_.route({n, h_.data(), &layer.gate, layer.bias.as<float>(), c.n_experts, c.n_experts_per_token, c.norm_topk_prob,
              static_cast<float>(c.routed_scaling_factor), router_scores_.as<float>(), expert_.as<int32_t>(),
              expert_weight_.as<float>()});
  if (!args.chosen_experts.empty())
    ops_.copy_out(expert_, 0, args.chosen_experts[static_cast<size_t>(index)],
                  static_cast<size_t>(n.now() * c.n_experts_per_token) * sizeof(int32_t));
  if (args.distinct_experts)
    ops_.count_experts({n, c.n_experts, c.n_experts_per_token, expert_.as<int32_t>(), args.distinct_experts + index});
  ops_.experts({n, c.hidden_size, h_.data(), expert_.as<int32_t>(), expert_weight_.as<float>(), c.n_experts,
                c.n_experts_per_token, layer.expert_gate_up, layer.expert_down, c.expert_width,
                &layer.shared_gate_up, &layer.shared_down, experts_scratch_.data(), x_.data(), parts_.partial()});
  parts_.sum(n, x_.data(), true, next);
}

}  // namespace kdt
