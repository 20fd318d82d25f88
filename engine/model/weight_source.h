// Where a model's weights come from: a checkpoint or a shard (weights.h), or nowhere at all (synthetic_weights.h).
//
// Names are the checkpoint's; where a shard has several tensors in one, its name is given too.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "checkpoint/safetensors.h"
#include "ops/ops.h"

namespace kdt {

class WeightSource {
 public:
  virtual ~WeightSource() = default;

  struct Named {
    std::string name;
    int64_t n_out;
  };

  virtual std::string where() const = 0;   // a directory, for messages
  virtual const void* raw_bf16(const std::string& name, int64_t rows, int64_t columns) const = 0;
  // fp32 vectors: BF16 on disk (norms), or F32 (the router's bias).
  virtual Buffer vector(const std::string& name, int64_t n, DType dtype = DType::bf16) const = 0;
  // `fused`: of a shard, all of them one above the other.
  virtual Matrix matrix(const std::string& fused, std::span<const Named> stacked, int64_t n_in) const = 0;
  virtual Matrix matrix(const std::string& name, int64_t n_out, int64_t n_in) const = 0;
  // The slices [n_out, n_in / parts] of a matrix's columns.
  virtual std::vector<Matrix> column_slices(const std::string& name, int64_t n_out, int64_t n_in, int64_t parts) const = 0;
  virtual Matrix gate_up(const std::string& prefix, int64_t width, int64_t n_in) const = 0;
  // Every expert's gate_up [2 * width, hidden] and down [hidden, width]; `prefix` is the layer's `….mlp.experts.`.
  virtual void experts(const std::string& prefix, int64_t n_experts, int64_t width, int64_t hidden, int64_t group,
                       std::vector<Matrix>& gate_up, std::vector<Matrix>& down) const = 0;
  // kv_b_proj of the attention `prefix`, split by head: W_UK transposed to [kv_lora, nope] and W_UV [v_head, kv_lora].
  virtual void kv_b(const std::string& prefix, int64_t n_heads, int64_t nope, int64_t v_head, int64_t kv_lora,
                    std::vector<Matrix>& w_uk, std::vector<Matrix>& w_uv) const = 0;
};

}  // namespace kdt
