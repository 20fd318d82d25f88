#include "model/dflash.h"

#include <array>
#include <numeric>

#include "base/error.h"

namespace kdt {

DFlash::DFlash(Ops& ops, const DraftConfig& config, const WeightSource& read, Kimi& target, int64_t max_rows,
               int64_t max_context, int64_t max_streams)
    : ops_(ops), config_(config), local_(kdt::rank_config(config, target.slice().tp)), target_(target),
      parts_(ops, target.slice(), max_streams * config.block_size, config.hidden_size,
             max_streams * (config.block_size - 1), target.config().vocab_size),
      max_context_(max_context), rope_(ops, config.head_dim, config.rope_theta, config.yarn, max_context + config.block_size) {
  const DraftConfig& c = local_;
  const int64_t n_taps = static_cast<int64_t>(c.target_layer_ids.size());
  const int64_t q_dim = c.n_heads * c.head_dim, kv_dim = c.n_kv_heads * c.head_dim;
  fc_ = read.column_slices("fc.weight", c.hidden_size / target.slice().tp, n_taps * c.hidden_size, n_taps);
  hidden_norm_ = read.vector("hidden_norm.weight", c.hidden_size);
  norm_ = read.vector("norm.weight", c.hidden_size);
  for (size_t i = 0; i < c.layers.size(); ++i) {
    const std::string prefix = "layers." + std::to_string(i) + ".", attn = prefix + "self_attn.", mlp = prefix + "mlp.";
    Layer layer;
    layer.window = c.layers[i].window;
    layer.input_norm = read.vector(prefix + "input_layernorm.weight", c.hidden_size);
    layer.post_norm = read.vector(prefix + "post_attention_layernorm.weight", c.hidden_size);
    layer.q_norm = read.vector(attn + "q_norm.weight", c.head_dim);
    layer.k_norm = read.vector(attn + "k_norm.weight", c.head_dim);
    layer.q = read.matrix(attn + "q_proj.weight", q_dim, c.hidden_size);
    const std::array<WeightSource::Named, 2> kv{{{attn + "k_proj.weight", kv_dim}, {attn + "v_proj.weight", kv_dim}}};
    layer.kv = read.matrix(attn + "kv_proj.weight", kv, c.hidden_size);
    layer.o = read.matrix(attn + "o_proj.weight", c.hidden_size, q_dim);
    layer.gate_up = read.gate_up(mlp, c.mlp_width, c.hidden_size);
    layer.down = read.matrix(mlp + "down_proj.weight", c.hidden_size, c.mlp_width);
    layers_.push_back(std::move(layer));
  }
  const auto acts = [&](int64_t n) { return ops.allocate(static_cast<size_t>(n) * ops.activation_bytes()); };
  feature_ = acts(max_rows * c.hidden_size);
  if (!target.slice().alone())
    feature_part_ = ops.allocate_for_ranks(static_cast<size_t>(max_rows * c.hidden_size / target.slice().tp) *
                                           ops.activation_bytes());
  context_kv_ = acts(max_rows * 2 * kv_dim);
  const int64_t n_rows = max_streams * c.block_size;
  x_ = acts(n_rows * c.hidden_size);
  h_ = acts(n_rows * c.hidden_size);
  qkv_ = acts(n_rows * (q_dim + 2 * kv_dim));
  attention_ = acts(n_rows * q_dim);
  mlp_ = acts(n_rows * c.mlp_width);
  std::vector<int32_t> rows(static_cast<size_t>(n_rows));
  std::iota(rows.begin(), rows.end(), 0);
  every_row_ = ops.allocate(rows.size() * sizeof(int32_t));
  ops.copy_in(every_row_, 0, rows.data(), rows.size() * sizeof(int32_t));
  attention_work_ = ops.allocate(ops.attention_work_bytes(n_rows, c.n_heads, c.head_dim, max_context));
}

void DFlash::commit(const Rows& rows, const int32_t* tap_row, const Act* taps, int64_t tap_stride,
                    const StreamPages* streams, const DraftCache& cache) {
  const DraftConfig& c = local_;
  const RankSlice& slice = target_.slice();
  const auto eps = static_cast<float>(c.rms_norm_eps);
  Act* feature = slice.alone() ? feature_.data() : feature_part_.data();
  for (size_t k = 0; k < fc_.size(); ++k) {
    const auto* h = static_cast<const std::byte*>(taps) + k * static_cast<size_t>(tap_stride) * ops_.activation_bytes();
    ops_.linear({rows.n, h, &fc_[k], feature, k > 0, {0, tap_row}});
  }
  if (!slice.alone())
    ops_.gather_ranks({rows.n, c.hidden_size / slice.tp, ops_.activation_bytes(), feature, slice.rank, slice.tp,
                       feature_.data()});
  ops_.rms_norm({rows.n, c.hidden_size, feature_.data(), hidden_norm_.as<float>(), eps, feature_.data()});
  for (size_t i = 0; i < layers_.size(); ++i) {
    const Layer& layer = layers_[i];
    ops_.linear({rows.n, feature_.data(), &layer.kv, context_kv_.data()});
    ops_.draft_context({rows, streams, context_kv_.data(), layer.k_norm.as<float>(), eps, rope_.view(), c.n_kv_heads,
                        c.head_dim, static_cast<std::byte*>(cache.pages) + i * cache.layer_page_bytes, cache.page_stride});
  }
}

void DFlash::propose(const DraftBlocks& blocks, const DraftCache& cache, float* logits) {
  const DraftConfig& c = local_;
  const auto eps = static_cast<float>(c.rms_norm_eps);
  const int64_t q_dim = c.n_heads * c.head_dim, kv_dim = c.n_kv_heads * c.head_dim, qkv_width = q_dim + 2 * kv_dim;
  auto* kv = qkv_.as<std::byte>() + static_cast<size_t>(q_dim) * ops_.activation_bytes();
  const auto norm = [&](const Buffer& weight) { return NextNorm{weight.as<float>(), eps, h_.data()}; };
  target_.embed({blocks.n_rows, blocks.token, nullptr, nullptr, nullptr, nullptr}, x_.data(), parts_,
                norm(layers_[0].input_norm));
  for (size_t i = 0; i < layers_.size(); ++i) {
    const Layer& layer = layers_[i];
    // Past the last layer's keys and values only the candidates' positions matter.
    const bool last = i + 1 == layers_.size();
    const Count n = last ? blocks.n_candidates : blocks.n_rows;
    const RowLayout rows{0, last ? blocks.row : every_row_.as<int32_t>()};
    ops_.linear({n, h_.data(), &layer.q, qkv_.data(), false, rows, {qkv_width, rows.index}});
    ops_.linear({blocks.n_rows, h_.data(), &layer.kv, kv, false, {}, {qkv_width}});
    ops_.draft_attention({blocks.n_streams, c.block_size, blocks.start, blocks.streams, qkv_.data(),
                          layer.q_norm.as<float>(), layer.k_norm.as<float>(), eps, rope_.view(), c.n_heads, c.n_kv_heads,
                          c.head_dim, layer.window, last ? 1 : 0, last ? blocks.depths : c.block_size,
                          static_cast<std::byte*>(cache.pages) + i * cache.layer_page_bytes, cache.page_stride,
                          max_context_, attention_work_.data(), attention_.data()});
    ops_.linear({n, attention_.data(), &layer.o, x_.data(), true, rows, rows, parts_.partial()});
    parts_.sum(n, x_.data(), true, norm(layer.post_norm), rows.index);
    ops_.mlp({n, h_.data(), &layer.gate_up, &layer.down, mlp_.data(), x_.data(), rows.index, parts_.partial()});
    parts_.sum(n, x_.data(), true, last ? NextNorm{} : norm(layers_[i + 1].input_norm), rows.index);
  }
  ops_.rms_norm({blocks.n_candidates, c.hidden_size, x_.data(), norm_.as<float>(), eps, h_.data(), {0, blocks.row}});
  parts_.logits(blocks.n_candidates, h_.data(), target_.lm_head(), logits);
}

}  // namespace kdt
