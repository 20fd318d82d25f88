// manifest.json of a shard directory: what its files are and what they must hold. Hostile until read.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace kdt {

constexpr const char* kManifestName = "manifest.json";
constexpr const char* kShardDraftConfigName = "draft_config.json";   // the drafter's config.json in a shard directory

struct ShardManifest {
  using Checksums = std::map<std::string, std::string, std::less<>>;   // by name; 16 hexadecimal digits
  struct TextFile {
    int64_t bytes;
    std::string checksum;
  };
  struct Rank {
    std::string file;
    int64_t bytes;
    Checksums checksums;   // of tensors
  };
  std::map<std::string, TextFile, std::less<>> files;   // configs and tokenizer files, plain names
  std::vector<Rank> ranks;                              // tp of them
};

bool is_shard_directory(const std::string& directory);
// Error(io) where tools/shard_weights.py has begun and not ended.
void demand_no_unfinished_shards(const std::string& directory);
// Error(bad_file, or unsupported for another version or layout) naming the field.
ShardManifest parse_shard_manifest(const std::string& json, const std::string& file);
// Reads it, and compares the files it lists with their sizes and checksums.
ShardManifest load_shard_manifest(const std::string& directory);

}  // namespace kdt
