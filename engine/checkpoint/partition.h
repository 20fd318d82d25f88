// What one tensor-parallel rank holds: the tensors of its shard, in order of use, and where each comes from.
//
// Split: embedding and lm_head by vocabulary, attention by heads, experts, shared experts and dense layers by width
// (rows of gate and up, columns of down), the drafter's fc by output. Replicated: norms, q_a | kv_a, router and its
// bias. Shapes are the same on every rank. docs/shard_format.md has the table.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "checkpoint/config.h"
#include "checkpoint/safetensors.h"

namespace kdt {

constexpr int64_t kShardFormatVersion = 1;   // of manifest.json
constexpr int64_t kMaxRanks = 64;
// "rank-00000-of-00008.safetensors"
std::string rank_file_name(int64_t rank, int64_t tp);
constexpr const char* kDraftPrefix = "draft.";   // of the drafter's tensors in a shard

// Which rank's part of a model, of how many.
struct RankSlice {
  int64_t rank = 0, tp = 1;
  bool alone() const { return tp == 1; }
};

// The widths of one rank's part: heads, vocabulary and widths over tp. Error(invalid_argument) naming tp and the field when
// it does not divide.
ModelConfig rank_config(const ModelConfig& config, int64_t tp);
DraftConfig rank_config(const DraftConfig& config, int64_t tp);

// What a tensor is read for: the rows of a table of memory and traffic.
enum class Part { embedding, attention, router, experts, shared_expert, dense_mlp, norms, lm_head, drafter };
const char* part_name(Part part);

enum class Transform { copy, int4_tiles, int4_scales };
const char* transform_name(Transform transform);

// A tensor of the checkpoint as it must be there. In the name of experts' tensors `*` stands for the expert.
struct SourceTensor {
  std::string name;
  DType dtype;
  std::vector<int64_t> shape;
};

// out[i][j][k] = source[first + rank * rank_step + i * stride[0] + j * stride[1] + k * stride[2]]; all in elements.
struct Box {
  size_t source;   // index into ShardTensor::sources
  int64_t first = 0, rank_step = 0;
  std::array<int64_t, 3> extent, stride;
};

// Of each expert: the sources' rows, one under the other, [n_out, n_in] on a rank. `by_rows`: a rank has the rows from
// rank * n_out / n_sources on; else the inputs from rank * n_in on.
struct ExpertMatrix {
  int64_t n_experts = 0, n_out = 0, n_in = 0;
  bool by_rows = false;
};

struct ShardTensor {
  std::string name;
  DType dtype;
  std::vector<int64_t> shape;    // of one rank
  Part part;
  Transform transform = Transform::copy;
  bool split = false;            // ranks differ
  std::vector<SourceTensor> sources;
  std::vector<Box> boxes;        // of a copy: the tensor is their outputs, one after the other
  ExpertMatrix experts = {};     // of the INT4 transforms: the tensor is one matrix an expert

  int64_t bytes() const;
};

struct Partition {
  int64_t tp;
  std::vector<ShardTensor> tensors;

  int64_t rank_bytes() const;
};

// `draft` may be null. Error(invalid_argument) naming tp and the config's field when it does not divide;
// Error(unsupported) when a rank's experts are not whole tiles.
Partition make_partition(const ModelConfig& config, const DraftConfig* draft, int64_t tp);

}  // namespace kdt
