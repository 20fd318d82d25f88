#include "checkpoint/checkpoint.h"

#include <filesystem>

#include "base/error.h"
#include "checkpoint/json_fields.h"
#include "checkpoint/partition.h"

namespace kdt {
namespace {

constexpr size_t kMaxIndexBytes = 100'000'000;
constexpr const char* kIndexName = "model.safetensors.index.json";
constexpr const char* kSingleName = "model.safetensors";

using WeightMap = std::map<std::string, std::string, std::less<>>;  // tensor -> file name in the directory

// A name that stays in the directory: an index may come from anywhere.
bool is_plain_name(const std::string& name) {
  return !name.empty() && name.find('/') == std::string::npos && name.find('\\') == std::string::npos &&
         name.find('\0') == std::string::npos && name != "." && name.find("..") == std::string::npos;
}

WeightMap read_index(const std::string& path) {
  const auto json = parse_json_object(read_text_file(path, kMaxIndexBytes), path);
  const Fields weight_map = Fields(json, path).object("weight_map");
  WeightMap out;
  for (const std::string& tensor : weight_map.keys()) {
    const std::string file = weight_map.text(tensor);
    if (!is_plain_name(file)) {
      weight_map.refuse(Status::bad_file, tensor, "the plain name of a file in the same directory");
    }
    out[tensor] = file;
  }
  if (out.empty()) fail(Status::bad_file, path + ": weight_map", "empty", "tensors and their files");
  return out;
}

bool starts_with(std::string_view text, std::string_view start) { return text.substr(0, start.size()) == start; }

std::string spelled(DType dtype, const std::vector<int64_t>& shape) {
  std::string out = std::string(dtype_name(dtype)) + " [";
  for (size_t i = 0; i < shape.size(); ++i) out += (i > 0 ? ", " : "") + std::to_string(shape[i]);
  return out + "]";
}

}  // namespace

Checkpoint Checkpoint::open(const std::string& directory, const LoadOptions& options) {
  Checkpoint out = is_shard_directory(directory) ? open_shard(directory, false, options)
                                                 : open_with_prefix(directory, "language_model.");
  out.start(options);
  return out;
}

Checkpoint Checkpoint::open_draft(const std::string& directory, const LoadOptions& options) {
  Checkpoint out = is_shard_directory(directory) ? open_shard(directory, true, options)
                                                 : open_with_prefix(directory, "model.");
  out.start(options);
  return out;
}

Checkpoint Checkpoint::of_tensors(const std::string& directory, std::shared_ptr<const RankTensors> tensors,
                                  const LoadOptions& options) {
  constexpr std::string_view kDraft = kDraftPrefix;
  Checkpoint out;
  out.directory_ = directory;
  out.made_ = std::move(tensors);
  for (const TensorView& view : out.made_->tensors)
    out.by_name_[starts_with(view.name, kDraft) ? view.name.substr(kDraft.size()) : view.name] = &view;
  out.start(options);
  return out;
}

void Checkpoint::start(const LoadOptions& options) {
  options_ = options;
  if (options.progress) options.progress->total += static_cast<int64_t>(bytes());
  if (!manifest_ || by_name_.empty()) return;
  // The drafter's tensors lie behind the target's: what this part holds is one range of the file.
  uint64_t begin = UINT64_MAX, end = 0;
  for (const auto& [name, view] : by_name_) {
    begin = std::min(begin, view->offset);
    end = std::max(end, view->offset + view->bytes);
  }
  files_.front().read_ahead(options.mode, begin, end);
}

Checkpoint Checkpoint::open_shard(const std::string& directory, bool draft, const LoadOptions& options) {
  Checkpoint out;
  out.directory_ = directory;
  out.manifest_ = load_shard_manifest(directory);
  const auto tp = static_cast<int64_t>(out.manifest_->ranks.size());
  if (tp != options.tp)
    fail(Status::unsupported, directory + "/" + kManifestName + ": tp", std::to_string(tp),
         std::to_string(options.tp) + ", the ranks of this engine; start with --tp " + std::to_string(tp) + ", in Python tp=" +
             std::to_string(tp));
  const ShardManifest::Rank& rank = out.manifest_->ranks[static_cast<size_t>(options.rank)];
  const std::string path = directory + "/" + rank.file;
  if (!file_exists(path))
    fail(Status::io, path, "no such file", std::string("the file that ") + kManifestName + " names");
  out.files_.push_back(SafetensorsFile::open(path));
  const SafetensorsFile& file = out.files_.front();
  const auto expect = [&](const std::string& subject, const std::string& found, const std::string& wanted) {
    if (found != wanted) fail(Status::bad_file, path + subject, found, wanted + ", as " + kManifestName + " says");
  };
  expect("", std::to_string(file.bytes()) + " bytes", std::to_string(rank.bytes) + " bytes");
  const std::map<std::string, std::string> of_rank = {{"rank", std::to_string(options.rank)},
                                                      {"tp", std::to_string(tp)}};
  for (const auto& [key, wanted] : of_rank) {
    const auto found = file.metadata().find(key);
    expect(": __metadata__." + key, found == file.metadata().end() ? "absent" : found->second, wanted);
  }
  for (const auto& [name, checksum] : rank.checksums)
    if (file.tensors().count(name) == 0) expect(": " + name, "absent", "the tensor");
  constexpr std::string_view kDraft = kDraftPrefix;
  for (const auto& [full_name, view] : file.tensors()) {
    if (rank.checksums.count(full_name) == 0) expect(": " + full_name, "a tensor without a checksum", "one");
    const bool of_draft = starts_with(full_name, kDraft);
    if (of_draft == draft) out.by_name_[full_name.substr(draft ? kDraft.size() : 0)] = &view;
    else ++out.skipped_;
  }
  return out;
}

void Checkpoint::check_sum(const TensorView& tensor, const std::string& checksum) const {
  const auto& expected = manifest_->ranks[static_cast<size_t>(options_.rank)].checksums;
  const auto found = expected.find(tensor.name);
  if (found == expected.end() || found->second != checksum)
    fail(Status::bad_file, tensor.file + ": " + tensor.name, "checksum " + checksum,
         (found == expected.end() ? "one" : found->second) + ", as " + kManifestName + " says");
}

Checkpoint Checkpoint::open_with_prefix(const std::string& directory, std::string_view optional_prefix) {
  std::error_code error;
  if (!std::filesystem::is_directory(directory, error)) {
    fail(Status::io, directory, "no such directory", "a checkpoint directory");
  }
  Checkpoint out;
  out.directory_ = directory;
  const std::string index = directory + "/" + kIndexName;
  const bool indexed = file_exists(index);
  const WeightMap weight_map = indexed ? read_index(index) : WeightMap{};
  if (!indexed && !file_exists(directory + "/" + kSingleName)) {
    fail(Status::io, directory, "no weights", std::string(kIndexName) + " or " + kSingleName + " in it");
  }

  std::map<std::string, size_t> numbers;  // file name -> its place in files_
  if (!indexed) numbers[kSingleName] = 0;
  for (const auto& [tensor, file] : weight_map) numbers[file] = 0;
  for (auto& [file, number] : numbers) {
    number = out.files_.size();
    const std::string path = directory + "/" + file;
    if (indexed && !file_exists(path)) {
      fail(Status::io, path, "no such file", std::string("the file that ") + kIndexName + " names");
    }
    out.files_.push_back(SafetensorsFile::open(path));
  }
  for (const auto& [tensor, file] : weight_map) {
    if (out.files_[numbers[file]].tensors().count(tensor) == 0) {
      fail(Status::bad_file, directory + "/" + file + ": " + tensor, "absent",
           std::string("the tensor, as ") + kIndexName + " says");
    }
  }

  for (const SafetensorsFile& file : out.files_) {
    for (const auto& [full_name, view] : file.tensors()) {
      std::string_view name = full_name;
      if (starts_with(name, optional_prefix)) name.remove_prefix(optional_prefix.size());
      if (starts_with(name, "vision_tower.") || starts_with(name, "mm_projector.")) {
        ++out.skipped_;
        continue;
      }
      const auto [place, is_new] = out.by_name_.try_emplace(std::string(name), &view);
      if (!is_new) {
        fail(Status::bad_file, view.file + ": " + full_name, "duplicate",
             "one tensor of that name; another is in " + place->second->file);
      }
    }
  }
  return out;
}

bool Checkpoint::has(std::string_view name) const { return by_name_.find(name) != by_name_.end(); }

std::vector<std::string> Checkpoint::names() const {
  std::vector<std::string> out;
  for (const auto& [name, view] : by_name_) out.push_back(name);
  return out;
}

const TensorView& Checkpoint::require(std::string_view name, DType dtype, const std::vector<int64_t>& shape) const {
  const std::string expected = "a tensor of " + spelled(dtype, shape);
  const auto it = by_name_.find(name);
  if (it == by_name_.end()) fail(Status::bad_file, directory_ + ": " + std::string(name), "absent", expected);
  const TensorView& view = *it->second;
  if (view.dtype != dtype || view.shape != shape) {
    fail(Status::bad_file, view.file + ": " + view.name, spelled(view.dtype, view.shape), expected);
  }
  return view;
}

// A view of another file is no business of a file's release, so each is asked: a few pointer comparisons.
void Checkpoint::await(const TensorView& tensor) const {
  for (const SafetensorsFile& file : files_) file.await(tensor);
}

void Checkpoint::release(const TensorView& tensor) const {
  for (const SafetensorsFile& file : files_) file.release(tensor);
  if (options_.progress) options_.progress->done += static_cast<int64_t>(tensor.bytes);
}

size_t Checkpoint::bytes() const {
  size_t total = 0;
  for (const auto& [name, view] : by_name_) total += view->bytes;
  return total;
}

}  // namespace kdt
