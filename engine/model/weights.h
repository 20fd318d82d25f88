// Reading a checkpoint's tensors, or those of a shard, into a backend: by name, checked and released one after
// the other.
//
// Names are the checkpoint's; where a shard has several of them in one tensor, its name is given too. A shard's bytes
// are compared with its manifest's checksum as they are read.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "checkpoint/checkpoint.h"
#include "ops/ops.h"

namespace kdt {

class WeightReader {
 public:
  WeightReader(const Checkpoint& checkpoint, Ops& ops) : checkpoint_(checkpoint), ops_(ops) {}

  struct Named {
    std::string name;
    int64_t n_out;
  };

  const void* raw_bf16(const std::string& name, int64_t rows, int64_t columns);
  // fp32 vectors: BF16 on disk (norms), or F32 (the router's bias).
  Buffer vector(const std::string& name, int64_t n, DType dtype = DType::bf16);
  // `fused`: of a shard, all of them one above the other.
  Matrix matrix(const std::string& fused, std::span<const Named> stacked, int64_t n_in);
  Matrix matrix(const std::string& name, int64_t n_out, int64_t n_in);
  // The slices [n_out, n_in / parts] of a matrix's columns.
  std::vector<Matrix> column_slices(const std::string& name, int64_t n_out, int64_t n_in, int64_t parts);
  Matrix gate_up(const std::string& prefix, int64_t width, int64_t n_in);
  // Every expert's gate_up [2 * width, hidden] and down [hidden, width]; `prefix` is the layer's `….mlp.experts.`.
  void experts(const std::string& prefix, int64_t n_experts, int64_t width, int64_t hidden, int64_t group,
               std::vector<Matrix>& gate_up, std::vector<Matrix>& down);
  // kv_b_proj of the attention `prefix`, split by head: W_UK transposed to [kv_lora, nope] and W_UV [v_head, kv_lora].
  void kv_b(const std::string& prefix, int64_t n_heads, int64_t nope, int64_t v_head, int64_t kv_lora,
            std::vector<Matrix>& w_uk, std::vector<Matrix>& w_uv);

 private:
  struct Int4Tensors {
    const TensorView &packed, &scale;
    Int4Source source;
  };
  Int4Tensors int4_tensors(const std::string& prefix, int64_t n_out, int64_t n_in, int64_t group);
  Matrix int4(const std::string& prefix, int64_t n_out, int64_t n_in, int64_t group);
  Matrix int4_gate_up(const std::string& prefix, int64_t width, int64_t n_in, int64_t group);
  // Of a shard: takes every expert's tiles [n_out, n_in] back to a checkpoint's form and hands that to `upload`.
  template <class Upload>
  void tiled_experts(const std::string& name, int64_t n_experts, int64_t n_out, int64_t n_in, const Upload& upload);
  // The tensor, its checksum compared when it comes from a shard.
  const TensorView& require(const std::string& name, DType dtype, const std::vector<int64_t>& shape);

  const Checkpoint& checkpoint_;
  Ops& ops_;
};

}  // namespace kdt
