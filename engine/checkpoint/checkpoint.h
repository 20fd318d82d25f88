// A Hugging Face checkpoint directory: `model.safetensors.index.json` with its files, or one `model.safetensors`; or a
// shard directory (manifest.json, docs/shard_format.md), of which one rank's file is opened.
//
// Names are those of K2-Thinking (`model.layers.0…`): the wrapper prefix `language_model.` of K2.5/K2.6 is taken off,
// and vision tensors (`vision_tower.*`, `mm_projector.*`) are skipped. The drafter's optional `model.` prefix is taken
// off by `open_draft`. Every tensor of the files is kept, named in the index or not; one name in two files is an error.
// Of shards the names are those of partition.h, without `draft.`, and the two functions keep their own part.
#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/safetensors.h"
#include "checkpoint/shard_manifest.h"

namespace kdt {

// Bytes of the tensors that were opened, and of those that were used and released. Read by any thread.
struct LoadProgress {
  std::atomic<int64_t> done{0}, total{0};
};

struct LoadOptions {
  // Of shards; a checkpoint is mapped and read as it is used.
  ReadMode mode = ReadMode::mapped;
  bool checksums = true;
  int64_t rank = 0, tp = 1;             // whose file is opened, of how many
  LoadProgress* progress = nullptr;     // outlives the checkpoint
};

// The tensors of a rank's shard, made in memory (rank_slices.h).
struct RankTensors {
  std::vector<std::byte> memory;
  std::vector<TensorView> tensors;      // into memory
};

class Checkpoint {
 public:
  static Checkpoint open(const std::string& directory, const LoadOptions& options = {});
  static Checkpoint open_draft(const std::string& directory, const LoadOptions& options = {});
  // Tensors that were made as a shard has them; checksums there are none.
  static Checkpoint of_tensors(const std::string& directory, std::shared_ptr<const RankTensors> tensors,
                               const LoadOptions& options);

  // Whether tensors are those of a shard.
  bool sharded() const { return manifest_.has_value() || made_; }
  bool has(std::string_view name) const;
  std::vector<std::string> names() const;   // of the tensors kept, ascending
  // The tensor of that name; Error(bad_file) naming file, tensor, found and expected unless dtype and shape are as
  // given.
  const TensorView& require(std::string_view name, DType dtype, const std::vector<int64_t>& shape) const;
  // Before a tensor of a shard, or a part of it, is read, and after.
  void await(const TensorView& tensor) const;
  void release(const TensorView& tensor) const;
  // Whether tensors come with checksums that are to be compared.
  bool checks_sums() const { return manifest_.has_value() && options_.checksums; }
  // Error(bad_file) unless `checksum`, the tensor's, is the manifest's.
  void check_sum(const TensorView& tensor, const std::string& checksum) const;

  const std::string& directory() const { return directory_; }
  size_t tensor_count() const { return by_name_.size(); }
  size_t bytes() const;              // of all tensors kept (vision skipped)
  size_t skipped_tensors() const { return skipped_; }

 private:
  static Checkpoint open_with_prefix(const std::string& directory, std::string_view optional_prefix);
  static Checkpoint open_shard(const std::string& directory, bool draft, const LoadOptions& options);
  void start(const LoadOptions& options);

  std::string directory_;
  std::vector<SafetensorsFile> files_;
  std::map<std::string, const TensorView*, std::less<>> by_name_;  // into files_
  size_t skipped_ = 0;
  std::optional<ShardManifest> manifest_;
  std::shared_ptr<const RankTensors> made_;
  LoadOptions options_;
};

}  // namespace kdt
