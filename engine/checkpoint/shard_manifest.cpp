#include "checkpoint/shard_manifest.h"

#include <algorithm>

#include "base/error.h"
#include "base/file.h"
#include "checkpoint/checksum.h"
#include "checkpoint/config_limits.h"
#include "checkpoint/int4_tiles.h"
#include "checkpoint/json_fields.h"
#include "checkpoint/partition.h"

namespace kdt {
namespace {

constexpr const char* kShardJournalName = "sharding.journal";   // of tools/shard_weights.py, until it is done
constexpr size_t kMaxManifestBytes = 100'000'000;
constexpr size_t kMaxTextBytes = 100'000'000;

std::string checksum_field(const Fields& fields, const std::string& key) {
  const std::string value = fields.text(key);
  const auto hexadecimal = [](char c) { return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f'); };
  if (value.size() != 16 || !std::all_of(value.begin(), value.end(), hexadecimal))
    fields.refuse(Status::bad_file, key, "16 hexadecimal digits");
  return value;
}

void exactly(const Fields& manifest, const char* key, const char* value) {
  if (manifest.text(key) != value) manifest.refuse(Status::unsupported, key, value);
}

ShardManifest::Rank parse_rank(const Fields& fields, int64_t rank, int64_t tp) {
  ShardManifest::Rank out;
  out.file = fields.text("file");
  if (out.file != rank_file_name(rank, tp)) fields.refuse(Status::bad_file, "file", rank_file_name(rank, tp));
  out.bytes = fields.integer("bytes", 1, INT64_MAX);
  const Fields checksums = fields.object("checksums");
  for (const std::string& tensor : checksums.keys()) out.checksums[tensor] = checksum_field(checksums, tensor);
  return out;
}

}  // namespace

bool is_shard_directory(const std::string& directory) { return file_exists(directory + "/" + kManifestName); }

void demand_no_unfinished_shards(const std::string& directory) {
  if (!is_shard_directory(directory) && file_exists(directory + "/" + kShardJournalName))
    fail(Status::io, directory, "unfinished shards",
         "finished ones: tools/shard_weights.py with the same arguments as before goes on with them");
}

ShardManifest parse_shard_manifest(const std::string& json, const std::string& file) {
  const auto document = parse_json_object(json, file);
  const Fields manifest(document, file);
  exactly(manifest, "format", "kdtree-shards");
  if (manifest.integer("format_version", 0, INT64_MAX) != kShardFormatVersion)
    manifest.refuse(Status::unsupported, "format_version", std::to_string(kShardFormatVersion));
  exactly(manifest, "tile_layout", kTileLayout);
  exactly(manifest, "checksum", kChecksumName);
  exactly(manifest, "config", kConfigName);
  if (manifest.has("draft_config")) exactly(manifest, "draft_config", kShardDraftConfigName);
  const int64_t tp = manifest.integer("tp", 1, kMaxRanks);
  ShardManifest out;
  const Fields files = manifest.object("files");
  for (const std::string& name : files.keys()) {
    const bool plain = !name.empty() && name[0] != '.' &&
                       name.find_first_of(std::string_view("/\\\0", 3)) == std::string::npos;
    if (!plain) files.refuse(Status::bad_file, name, "the plain name of a file in the same directory");
    const Fields entry = files.object(name);
    out.files[name] = {entry.integer("bytes", 0, static_cast<int64_t>(kMaxTextBytes)),
                       checksum_field(entry, "checksum")};
  }
  if (out.files.count(kConfigName) == 0) files.refuse(Status::bad_file, kConfigName, "its bytes and checksum");
  if (!manifest.is_list("ranks") || document["ranks"].size() != static_cast<size_t>(tp))
    manifest.refuse(Status::bad_file, "ranks", "a list of " + std::to_string(tp) + ", as tp says");
  for (int64_t rank = 0; rank < tp; ++rank) {
    const auto& entry = document["ranks"][static_cast<size_t>(rank)];
    const std::string path = "ranks." + std::to_string(rank);
    if (!entry.is_object())
      fail(Status::bad_file, file + ": " + path, "no object", "an object of file, bytes and checksums");
    out.ranks.push_back(parse_rank(Fields(entry, file, path), rank, tp));
  }
  return out;
}

ShardManifest load_shard_manifest(const std::string& directory) {
  const std::string path = directory + "/" + kManifestName;
  ShardManifest out = parse_shard_manifest(read_text_file(path, kMaxManifestBytes), path);
  for (const auto& [name, expected] : out.files) {
    const std::string text_path = directory + "/" + name, text = read_text_file(text_path, kMaxTextBytes);
    const auto differs = [&text_path](const std::string& found, const std::string& wanted) {
      fail(Status::bad_file, text_path, found, wanted + ", as " + kManifestName + " says");
    };
    if (static_cast<int64_t>(text.size()) != expected.bytes)
      differs(std::to_string(text.size()) + " bytes", std::to_string(expected.bytes));
    const std::string checksum = checksum_of(text.data(), text.size());
    if (checksum != expected.checksum) differs("checksum " + checksum, expected.checksum);
  }
  return out;
}

}  // namespace kdt
