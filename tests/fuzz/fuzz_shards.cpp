// manifest.json of a shard directory, and the partition of whatever a config.json asks for: a kdt::Error, or what
// adds up.
#include <cstdlib>
#include <string>

#include "base/error.h"
#include "checkpoint/capacity.h"
#include "checkpoint/shard_manifest.h"

namespace {

void check_manifest(const std::string& text) {
  try {
    const kdt::ShardManifest manifest = kdt::parse_shard_manifest(text, "fuzz/manifest.json");
    if (manifest.ranks.empty() || manifest.ranks.size() > static_cast<size_t>(kdt::kMaxRanks)) std::abort();
    for (size_t i = 0; i < manifest.ranks.size(); ++i) {
      const auto& rank = manifest.ranks[i];
      const auto tp = static_cast<int64_t>(manifest.ranks.size());
      if (rank.file != kdt::rank_file_name(static_cast<int64_t>(i), tp)) std::abort();
      for (const auto& [tensor, checksum] : rank.checksums)
        if (rank.bytes < 1 || checksum.size() != 16) std::abort();
    }
    for (const auto& [name, file] : manifest.files)
      if (file.bytes < 0 || name.find('/') != std::string::npos) std::abort();
  } catch (const kdt::Error&) {
  }
}

void check_partition(const std::string& text) {
  try {
    const kdt::ModelConfig config = kdt::parse_model_config(text, "", "fuzz/config.json");
    if (config.n_layers > 64) return;   // only to be quick
    const int64_t whole = kdt::make_partition(config, nullptr, 1).rank_bytes();
    for (int64_t tp : {2, 3, 8}) {
      const kdt::Partition part = kdt::make_partition(config, nullptr, tp);
      int64_t total = 0;
      for (const auto& tensor : part.tensors) total += tensor.bytes() * (tensor.split ? tp : 1);
      if (total != whole) std::abort();
    }
    kdt::capacity_of(config, nullptr, {1, int64_t{1} << 40, 0, 0});
  } catch (const kdt::Error&) {
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string text(reinterpret_cast<const char*>(data), size);
  check_manifest(text);
  check_partition(text);
  return 0;
}
