// Weights from nowhere, for rehearsals of a model that is not at hand: random, of a size that keeps activations finite, each
// tensor in memory of its own. Norms are 1 and biases 0.
//
// All are cut from one pool of random numbers, each tensor from another place of it: what a step takes depends on how many
// bytes there are, not on what they say. The pool lies where the backend copies from fastest.
#pragma once

#include "model/weight_source.h"

namespace kdt {

class SyntheticWeights final : public WeightSource {
 public:
  SyntheticWeights(Ops& ops, std::string where);

  std::string where() const override { return where_; }
  const void* raw_bf16(const std::string& name, int64_t rows, int64_t columns) const override;
  Buffer vector(const std::string& name, int64_t n, DType dtype) const override;
  Matrix matrix(const std::string& fused, std::span<const Named> stacked, int64_t n_in) const override;
  Matrix matrix(const std::string& name, int64_t n_out, int64_t n_in) const override;
  std::vector<Matrix> column_slices(const std::string& name, int64_t n_out, int64_t n_in, int64_t parts) const override;
  Matrix gate_up(const std::string& prefix, int64_t width, int64_t n_in) const override;
  // Error(unsupported) unless experts are whole tiles in groups of 32.
  void experts(const std::string& prefix, int64_t n_experts, int64_t width, int64_t hidden, int64_t group,
               std::vector<Matrix>& gate_up, std::vector<Matrix>& down) const override;
  void kv_b(const std::string& prefix, int64_t n_heads, int64_t nope, int64_t v_head, int64_t kv_lora,
            std::vector<Matrix>& w_uk, std::vector<Matrix>& w_uv) const override;

 private:
  // Random numbers of one kind; each call begins behind the one before, until there are too few left.
  struct Pool {
    Exchange memory;
    mutable size_t next = 0;
    const std::byte* take(size_t bytes) const;
  };
  Matrix bf16_matrix(int64_t n_out, int64_t n_in) const;
  TileSource tiles(int64_t n_out, int64_t n_in) const;

  Ops& ops_;
  std::string where_;
  Pool values_, nibbles_, scales_;   // bf16 of weights; bytes; bf16 of scales
};

}  // namespace kdt
