// Computes the tensors of every rank's shard from a checkpoint, piece by piece, within a few tens of megabytes.
//
// A piece is a few megabytes of a rank's tensor (or one expert's matrix); its pieces one after the other are the
// tensor. Sources are read, not mapped: a piece that was read leaves nothing behind, and a file that shrinks is an error.
// Thread-safe: pieces may be made from many threads at once.
#pragma once

#include <memory>
#include <mutex>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "checkpoint/checkpoint.h"
#include "checkpoint/partition.h"

namespace kdt {

class ShardMaker {
 public:
  // `draft_directory` may be empty. Every tensor is checked by name, dtype and shape; one that no shard would hold
  // (besides weight_shape and vision) is an Error(unsupported).
  ShardMaker(const std::string& directory, const std::string& draft_directory, int64_t tp);
  ~ShardMaker();

  const Partition& partition() const { return partition_; }
  int64_t n_pieces(size_t tensor) const;
  int64_t piece_bytes(size_t tensor, int64_t piece) const;   // of one rank
  int64_t largest_piece() const { return largest_piece_; }
  std::vector<std::string> files() const;                    // the source's safetensors files, ascending

  // The piece of every rank: out[rank] has piece_bytes(), or is null where nobody wants it.
  void make(size_t tensor, int64_t piece, std::span<std::byte* const> out) const;
  // Error(bad_file) naming rank, tensor and place where a piece is not what the checkpoint says. INT4 is taken back to
  // the checkpoint's form for it.
  void compare(size_t tensor, int64_t piece, std::span<const std::byte* const> made) const;

 private:
  struct Piece {
    size_t box;            // of a copy
    int64_t begin, end;    // along its first extent; of INT4: the expert
  };
  struct Tensor {
    std::vector<const TensorView*> sources;   // as ShardTensor has them; of INT4 one after the other for each expert
    std::vector<Piece> pieces;
  };
  class Scratch;

  Tensor resolve(const ShardTensor& tensor, std::set<std::string>& used) const;
  void check_all_used(const Checkpoint& checkpoint, const std::set<std::string>& used) const;
  const Piece& piece_at(size_t tensor, int64_t piece) const;
  void read(const TensorView& source, int64_t begin, int64_t bytes, std::byte* to) const;
  void make_copy(size_t tensor, const Piece& piece, std::span<std::byte* const> out) const;
  void make_int4(size_t tensor, const Piece& piece, std::span<std::byte* const> out) const;
  void compare_copy(size_t tensor, int64_t piece, std::span<const std::byte* const> made) const;
  void compare_int4(size_t tensor, const Piece& piece, std::span<const std::byte* const> made) const;
  // The sources of an expert, one after the other: the rank's rows of each, or, where ranks have columns, all rows.
  const std::byte* read_expert(size_t tensor, const Piece& piece, size_t rank, Scratch& scratch) const;

  ModelConfig config_;
  std::unique_ptr<DraftConfig> draft_config_;
  Partition partition_;
  Checkpoint checkpoint_;
  std::unique_ptr<Checkpoint> draft_;
  std::vector<Tensor> tensors_;
  int64_t largest_piece_ = 0;
  mutable std::mutex mutex_;
  mutable std::map<std::string, int, std::less<>> descriptors_;   // by path, opened when first read
  mutable std::vector<std::vector<std::byte>> buffers_;           // that no thread uses now
};

}  // namespace kdt
