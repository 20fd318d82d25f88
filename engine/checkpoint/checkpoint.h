// A Hugging Face checkpoint directory: `model.safetensors.index.json` with its shards, or one `model.safetensors`.
//
// Names are those of K2-Thinking (`model.layers.0…`): the wrapper prefix `language_model.` of K2.5/K2.6 is taken off,
// and vision tensors (`vision_tower.*`, `mm_projector.*`) are skipped. The drafter's optional `model.` prefix is taken
// off by `open_draft`. Every tensor of the files is kept, named in the index or not; one name in two files is an error.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/safetensors.h"

namespace kdt {

class Checkpoint {
 public:
  static Checkpoint open(const std::string& directory);
  static Checkpoint open_draft(const std::string& directory);

  bool has(std::string_view name) const;
  // The tensor of that name; Error(bad_file) naming file, tensor, found and expected unless dtype and shape are as
  // given.
  const TensorView& require(std::string_view name, DType dtype, const std::vector<int64_t>& shape) const;
  void release(const TensorView& tensor) const;

  const std::string& directory() const { return directory_; }
  size_t tensor_count() const { return by_name_.size(); }
  size_t bytes() const;              // of all tensors kept (vision skipped)
  size_t skipped_tensors() const { return skipped_; }

 private:
  static Checkpoint open_with_prefix(const std::string& directory, std::string_view optional_prefix);

  std::string directory_;
  std::vector<SafetensorsFile> files_;
  std::map<std::string, const TensorView*, std::less<>> by_name_;  // into files_
  size_t skipped_ = 0;
};

}  // namespace kdt
