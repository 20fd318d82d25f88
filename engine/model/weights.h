// Reading a checkpoint's tensors into a backend, by name, checked and released one after the other.
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
  Matrix matrix(std::span<const Named> stacked, int64_t n_in);
  Matrix matrix(const std::string& name, int64_t n_out, int64_t n_in);
  // The slices [n_out, n_in / parts] of a matrix's columns.
  std::vector<Matrix> column_slices(const std::string& name, int64_t n_out, int64_t n_in, int64_t parts);
  Matrix gate_up(const std::string& prefix, int64_t width, int64_t n_in);
  Matrix int4(const std::string& prefix, int64_t n_out, int64_t n_in, int64_t group);
  Matrix int4_gate_up(const std::string& prefix, int64_t width, int64_t n_in, int64_t group);
  // kv_b_proj split by head: W_UK transposed to [kv_lora, nope] and W_UV [v_head, kv_lora].
  void kv_b(const std::string& name, int64_t n_heads, int64_t nope, int64_t v_head, int64_t kv_lora,
            std::vector<Matrix>& w_uk, std::vector<Matrix>& w_uv);

 private:
  struct Int4Tensors {
    const TensorView &packed, &scale;
    Int4Source source;
  };
  Int4Tensors int4_tensors(const std::string& prefix, int64_t n_out, int64_t n_in, int64_t group);

  const Checkpoint& checkpoint_;
  Ops& ops_;
};

}  // namespace kdt
