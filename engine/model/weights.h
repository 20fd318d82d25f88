// Reading a checkpoint's tensors, or those of a shard, into a backend: by name, checked and released one after
// the other.
//
// A shard's bytes are compared with its manifest's checksum as they are read.
#pragma once

#include <string>
#include <vector>

#include "checkpoint/checkpoint.h"
#include "model/weight_source.h"

namespace kdt {

class WeightReader final : public WeightSource {
 public:
  WeightReader(const Checkpoint& checkpoint, Ops& ops) : checkpoint_(checkpoint), ops_(ops) {}

  std::string where() const override { return checkpoint_.directory(); }
  const void* raw_bf16(const std::string& name, int64_t rows, int64_t columns) const override;
  Buffer vector(const std::string& name, int64_t n, DType dtype = DType::bf16) const override;
  Matrix matrix(const std::string& fused, std::span<const Named> stacked, int64_t n_in) const override;
  Matrix matrix(const std::string& name, int64_t n_out, int64_t n_in) const override;
  std::vector<Matrix> column_slices(const std::string& name, int64_t n_out, int64_t n_in, int64_t parts) const override;
  Matrix gate_up(const std::string& prefix, int64_t width, int64_t n_in) const override;
  void experts(const std::string& prefix, int64_t n_experts, int64_t width, int64_t hidden, int64_t group,
               std::vector<Matrix>& gate_up, std::vector<Matrix>& down) const override;
  void kv_b(const std::string& prefix, int64_t n_heads, int64_t nope, int64_t v_head, int64_t kv_lora,
            std::vector<Matrix>& w_uk, std::vector<Matrix>& w_uv) const override;

 private:
  struct Int4Tensors {
    const TensorView &packed, &scale;
    Int4Source source;
  };
  Int4Tensors int4_tensors(const std::string& prefix, int64_t n_out, int64_t n_in, int64_t group) const;
  Matrix int4(const std::string& prefix, int64_t n_out, int64_t n_in, int64_t group) const;
  Matrix int4_gate_up(const std::string& prefix, int64_t width, int64_t n_in, int64_t group) const;
  // Of a shard: hands every expert's tiles [n_out, n_in] to `upload`.
  template <class Upload>
  void tiled_experts(const std::string& name, int64_t n_experts, int64_t n_out, int64_t n_in, const Upload& upload) const;
  // The tensor, its checksum compared when it comes from a shard.
  const TensorView& require(const std::string& name, DType dtype, const std::vector<int64_t>& shape) const;

  const Checkpoint& checkpoint_;
  Ops& ops_;
};

}  // namespace kdt
