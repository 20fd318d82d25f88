#include "checkpoint/partition.h"

#include <cstdio>
#include <utility>

#include "base/error.h"
#include "checkpoint/int4_tiles.h"

namespace kdt {
namespace {

// Adds tensors in order of use. Rows and columns are those of a matrix [n_out, n_in].
class Builder {
 public:
  Builder(int64_t tp, bool draft) : tp_(tp), draft_(draft) {}

  struct Rows {
    std::string name;
    int64_t n_out;
  };

  // Each source's rows of a rank (all of them when not split), one source after the other.
  void rows(Part part, const std::string& name, const std::vector<Rows>& stacked, int64_t n_in, bool split) {
    ShardTensor& out = add(part, name, DType::bf16, split);
    int64_t total = 0;
    for (const Rows& from : stacked) {
      const int64_t n = split ? from.n_out / tp_ : from.n_out;
      out.sources.push_back({from.name, DType::bf16, {from.n_out, n_in}});
      out.boxes.push_back({out.sources.size() - 1, 0, split ? n * n_in : 0, {n, 1, n_in}, {n_in, n_in, 1}});
      total += n;
    }
    out.shape = {total, n_in};
  }

  void columns(Part part, const std::string& name, int64_t n_out, int64_t n_in) {
    ShardTensor& out = add(part, name, DType::bf16, true);
    const int64_t n = n_in / tp_;
    out.shape = {n_out, n};
    out.sources.push_back({name, DType::bf16, {n_out, n_in}});
    out.boxes.push_back({0, 0, n, {n_out, 1, n}, {n_in, n_in, 1}});
  }

  void vector(Part part, const std::string& name, int64_t n, DType dtype = DType::bf16) {
    ShardTensor& out = add(part, name, dtype, false);
    out.shape = {n};
    out.sources.push_back({name, dtype, {n}});
    out.boxes.push_back({0, 0, 0, {1, 1, n}, {n, n, 1}});
  }

  // kv_b_proj [heads * (nope + v_head), kv_lora] by head: the key rows transposed, and the value rows.
  void kv_b(const std::string& attn, const ModelConfig& c) {
    const int64_t head = (c.qk_nope_dim + c.v_head_dim) * c.kv_lora_rank, n = c.n_heads / tp_;
    const SourceTensor source = {attn + "kv_b_proj.weight", DType::bf16,
                                 {c.n_heads * (c.qk_nope_dim + c.v_head_dim), c.kv_lora_rank}};
    ShardTensor& keys = add(Part::attention, attn + "w_uk", DType::bf16, true);
    keys.shape = {n, c.kv_lora_rank, c.qk_nope_dim};
    keys.sources = {source};
    keys.boxes = {{0, 0, n * head, {n, c.kv_lora_rank, c.qk_nope_dim}, {head, 1, c.kv_lora_rank}}};
    ShardTensor& values = add(Part::attention, attn + "w_uv", DType::bf16, true);
    values.shape = {n, c.v_head_dim, c.kv_lora_rank};
    values.sources = {source};
    const int64_t first = c.qk_nope_dim * c.kv_lora_rank;
    values.boxes = {{0, first, n * head, {n, c.v_head_dim, c.kv_lora_rank}, {head, c.kv_lora_rank, 1}}};
  }

  // Tiles and scales of every expert's matrix [n_out, n_in] of a rank, from sources [source_out, source_in] each.
  void experts(const std::string& mlp, const std::string& name, const std::vector<std::string>& projections,
               int64_t source_out, int64_t source_in, const ExpertMatrix& matrix) {
    if (!fits_tiles(matrix.n_out, matrix.n_in))
      fail(Status::unsupported, mlp + "experts." + name + " of " + std::to_string(tp_) + " ranks",
           std::to_string(matrix.n_out) + " outputs, " + std::to_string(matrix.n_in) + " inputs",
           "multiples of " + std::to_string(kTileOutputs) + " and " + std::to_string(kTileGroup) + " (INT4 tiles)");
    const auto add_of = [&](const char* suffix, DType dtype, Transform transform, const char* source,
                            int64_t per_word) {
      ShardTensor& out = add(Part::experts, mlp + "experts." + name + suffix, dtype, true);
      out.transform = transform;
      out.experts = matrix;
      for (const std::string& projection : projections)
        out.sources.push_back({mlp + "experts.*." + projection + source, dtype, {source_out, source_in / per_word}});
      return &out;
    };
    add_of("", DType::i32, Transform::int4_tiles, ".weight_packed", 8)->shape = {
        matrix.n_experts, matrix.n_in / kTileInputs, matrix.n_out * 2};
    add_of("_scale", DType::bf16, Transform::int4_scales, ".weight_scale", kTileGroup)->shape = {
        matrix.n_experts, matrix.n_in / kTileGroup, matrix.n_out};
  }

  std::vector<ShardTensor> take() { return std::move(tensors_); }

 private:
  ShardTensor& add(Part part, const std::string& name, DType dtype, bool split) {
    tensors_.push_back({(draft_ ? kDraftPrefix : "") + name, dtype, {}, draft_ ? Part::drafter : part,
                        Transform::copy, split && tp_ > 1, {}, {}, {}});
    return tensors_.back();
  }

  int64_t tp_;
  bool draft_;
  std::vector<ShardTensor> tensors_;
};

void check_divides(int64_t tp, int64_t value, const char* field) {
  if (value % tp != 0)
    fail(Status::invalid_argument, "tp", std::to_string(tp),
         std::string("a divisor of ") + field + ", " + std::to_string(value));
}

void add_layer(Builder& build, const ModelConfig& c, int64_t tp, int64_t index) {
  const std::string prefix = "model.layers." + std::to_string(index) + ".", attn = prefix + "self_attn.",
                    mlp = prefix + "mlp.";
  const int64_t q_head = c.qk_nope_dim + c.qk_rope_dim;
  build.vector(Part::norms, prefix + "input_layernorm.weight", c.hidden_size);
  build.rows(Part::attention, attn + "qkv_a_proj.weight",
             {{attn + "q_a_proj.weight", c.q_lora_rank}, {attn + "kv_a_proj_with_mqa.weight",
                                                          c.kv_lora_rank + c.qk_rope_dim}},
             c.hidden_size, false);
  build.vector(Part::norms, attn + "q_a_layernorm.weight", c.q_lora_rank);
  build.vector(Part::norms, attn + "kv_a_layernorm.weight", c.kv_lora_rank);
  build.rows(Part::attention, attn + "q_b_proj.weight", {{attn + "q_b_proj.weight", c.n_heads * q_head}}, c.q_lora_rank,
             true);
  build.kv_b(attn, c);
  build.columns(Part::attention, attn + "o_proj.weight", c.hidden_size, c.n_heads * c.v_head_dim);
  build.vector(Part::norms, prefix + "post_attention_layernorm.weight", c.hidden_size);
  const auto gate_up = [&](Part part, const std::string& at, int64_t width) {
    build.rows(part, at + "gate_up_proj.weight", {{at + "gate_proj.weight", width}, {at + "up_proj.weight", width}},
               c.hidden_size, true);
    build.columns(part, at + "down_proj.weight", c.hidden_size, width);
  };
  if (index < c.n_dense_layers) {
    gate_up(Part::dense_mlp, mlp, c.dense_width);
    return;
  }
  build.rows(Part::router, mlp + "gate.weight", {{mlp + "gate.weight", c.n_experts}}, c.hidden_size, false);
  build.vector(Part::router, mlp + "gate.e_score_correction_bias", c.n_experts, DType::f32);
  const int64_t width = c.expert_width / tp;
  build.experts(mlp, "w13", {"gate_proj", "up_proj"}, c.expert_width, c.hidden_size,
                {c.n_experts, 2 * width, c.hidden_size, true});
  build.experts(mlp, "w2", {"down_proj"}, c.hidden_size, c.expert_width, {c.n_experts, c.hidden_size, width, false});
  gate_up(Part::shared_expert, mlp + "shared_experts.", c.n_shared_experts * c.expert_width);
}

void add_drafter(Builder& build, const DraftConfig& c) {
  const int64_t q_dim = c.n_heads * c.head_dim, kv_dim = c.n_kv_heads * c.head_dim;
  const auto n_taps = static_cast<int64_t>(c.target_layer_ids.size());
  build.rows(Part::drafter, "fc.weight", {{"fc.weight", c.hidden_size}}, n_taps * c.hidden_size, true);
  build.vector(Part::drafter, "hidden_norm.weight", c.hidden_size);
  for (size_t i = 0; i < c.layers.size(); ++i) {
    const std::string prefix = "layers." + std::to_string(i) + ".", attn = prefix + "self_attn.", mlp = prefix + "mlp.";
    build.vector(Part::drafter, prefix + "input_layernorm.weight", c.hidden_size);
    build.rows(Part::drafter, attn + "q_proj.weight", {{attn + "q_proj.weight", q_dim}}, c.hidden_size, true);
    build.rows(Part::drafter, attn + "kv_proj.weight",
               {{attn + "k_proj.weight", kv_dim}, {attn + "v_proj.weight", kv_dim}}, c.hidden_size, true);
    build.vector(Part::drafter, attn + "q_norm.weight", c.head_dim);
    build.vector(Part::drafter, attn + "k_norm.weight", c.head_dim);
    build.columns(Part::drafter, attn + "o_proj.weight", c.hidden_size, q_dim);
    build.vector(Part::drafter, prefix + "post_attention_layernorm.weight", c.hidden_size);
    build.rows(Part::drafter, mlp + "gate_up_proj.weight",
               {{mlp + "gate_proj.weight", c.mlp_width}, {mlp + "up_proj.weight", c.mlp_width}}, c.hidden_size, true);
    build.columns(Part::drafter, mlp + "down_proj.weight", c.hidden_size, c.mlp_width);
  }
  build.vector(Part::drafter, "norm.weight", c.hidden_size);
}

}  // namespace

std::string rank_file_name(int64_t rank, int64_t tp) {
  char name[64];
  std::snprintf(name, sizeof name, "rank-%05d-of-%05d.safetensors", static_cast<int>(rank), static_cast<int>(tp));
  return name;
}

const char* part_name(Part part) {
  constexpr const char* kNames[] = {"embedding", "attention", "router",  "experts", "shared_expert",
                                    "dense_mlp", "norms",     "lm_head", "drafter"};
  return kNames[static_cast<size_t>(part)];
}

const char* transform_name(Transform transform) {
  constexpr const char* kNames[] = {"copy", "int4_tiles", "int4_scales"};
  return kNames[static_cast<size_t>(transform)];
}

int64_t ShardTensor::bytes() const {
  auto product = static_cast<int64_t>(dtype_size(dtype));
  for (int64_t dim : shape)
    if (__builtin_mul_overflow(product, dim, &product))
      fail(Status::unsupported, name, "more than 2^63 bytes", "a smaller tensor");
  return product;
}

int64_t Partition::rank_bytes() const {
  int64_t total = 0;
  for (const ShardTensor& tensor : tensors)
    if (__builtin_add_overflow(total, tensor.bytes(), &total))
      fail(Status::unsupported, tensor.name, "more than 2^63 bytes up to here", "a smaller model");
  return total;
}

ModelConfig rank_config(const ModelConfig& config, int64_t tp) {
  check_argument(tp >= 1 && tp <= kMaxRanks, "tp", std::to_string(tp), "1 to " + std::to_string(kMaxRanks));
  ModelConfig c = config;
  const auto divide = [tp](int64_t& value, const char* field) {
    check_divides(tp, value, field);
    value /= tp;
  };
  divide(c.vocab_size, "vocab_size");
  divide(c.n_heads, "num_attention_heads");
  divide(c.expert_width, "moe_intermediate_size");
  if (c.n_dense_layers > 0) divide(c.dense_width, "intermediate_size");
  return c;
}

DraftConfig rank_config(const DraftConfig& config, int64_t tp) {
  DraftConfig c = config;
  const auto divide = [tp](int64_t& value, const char* field) {
    check_divides(tp, value, field);
    value /= tp;
  };
  divide(c.n_heads, "the drafter's num_attention_heads");
  divide(c.n_kv_heads, "the drafter's num_key_value_heads");
  divide(c.mlp_width, "the drafter's intermediate_size");
  check_divides(tp, c.hidden_size, "the drafter's hidden_size");   // its fc by output
  return c;
}

Partition make_partition(const ModelConfig& c, const DraftConfig* draft, int64_t tp) {
  rank_config(c, tp);
  if (draft) rank_config(*draft, tp);
  Builder build(tp, false);
  build.rows(Part::embedding, "model.embed_tokens.weight", {{"model.embed_tokens.weight", c.vocab_size}}, c.hidden_size,
             true);
  for (int64_t i = 0; i < c.n_layers; ++i) add_layer(build, c, tp, i);
  build.vector(Part::norms, "model.norm.weight", c.hidden_size);
  build.rows(Part::lm_head, "lm_head.weight", {{"lm_head.weight", c.vocab_size}}, c.hidden_size, true);
  Partition out{tp, build.take()};
  if (draft) {
    Builder build_draft(tp, true);
    add_drafter(build_draft, *draft);
    for (ShardTensor& tensor : build_draft.take()) out.tensors.push_back(std::move(tensor));
  }
  out.rank_bytes();
  return out;
}

}  // namespace kdt
