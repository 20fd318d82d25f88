// The C ABI of the shard format: INT4 tiles, what each rank holds, checksums.
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "capi/guard.h"
#include "checkpoint/checksum.h"
#include "checkpoint/int4_tiles.h"
#include "checkpoint/shard_maker.h"

using kdt::check_argument;
using kdt::capi::guarded;

struct kdt_sharding {
  kdt::ShardMaker maker;
  std::string json;
};

struct kdt_checksum {
  kdt::Checksum checksum;
};

namespace {

using Json = nlohmann::ordered_json;

std::string describe(const kdt::ShardMaker& maker) {
  const kdt::Partition& partition = maker.partition();
  Json tensors = Json::array(), files = Json::array();
  for (size_t i = 0; i < partition.tensors.size(); ++i) {
    const kdt::ShardTensor& tensor = partition.tensors[i];
    Json sources = Json::array();
    for (const kdt::SourceTensor& source : tensor.sources) sources.push_back(source.name);
    tensors.push_back({{"name", tensor.name},
                       {"dtype", kdt::dtype_name(tensor.dtype)},
                       {"shape", tensor.shape},
                       {"bytes", tensor.bytes()},
                       {"part", kdt::part_name(tensor.part)},
                       {"split", tensor.split},
                       {"transform", kdt::transform_name(tensor.transform)},
                       {"sources", sources},
                       {"pieces", maker.n_pieces(i)}});
  }
  for (int64_t rank = 0; rank < partition.tp; ++rank) files.push_back(kdt::rank_file_name(rank, partition.tp));
  const Json out = {{"format_version", kdt::kShardFormatVersion},
                    {"tp", partition.tp},
                    {"tile_layout", kdt::kTileLayout},
                    {"checksum", kdt::kChecksumName},
                    {"rank_bytes", partition.rank_bytes()},
                    {"largest_piece", maker.largest_piece()},
                    {"files", files},
                    {"source_files", maker.files()},
                    {"tensors", tensors}};
  return out.dump(-1, ' ', false, Json::error_handler_t::replace);
}

// Sizes of one INT4 matrix and its arrays, before anything is touched.
void check_matrix(int64_t n_out, int64_t n_in, int64_t n_words, int64_t n_scales,
                  std::initializer_list<const void*> arrays) {
  constexpr int64_t kMax = int64_t{1} << 31;
  check_argument(n_out > 0 && n_out < kMax && n_out % kdt::kTileOutputs == 0, "n_out", std::to_string(n_out),
                 "a multiple of 64");
  check_argument(n_in > 0 && n_in < kMax && n_in % kdt::kTileGroup == 0, "n_in", std::to_string(n_in),
                 "a multiple of 32");
  check_argument(n_words == n_out * n_in / 8, "n_words", std::to_string(n_words), std::to_string(n_out * n_in / 8));
  check_argument(n_scales == n_out * n_in / kdt::kTileGroup, "n_scales", std::to_string(n_scales),
                 std::to_string(n_out * n_in / kdt::kTileGroup));
  for (const void* array : arrays) check_argument(array != nullptr, "array", "NULL", "an array of the size given");
}

template <class Byte>
std::vector<Byte*> rows_of(Byte* first, int64_t n_rows, int64_t row_bytes) {
  std::vector<Byte*> rows;
  for (int64_t i = 0; i < n_rows; ++i) rows.push_back(first + i * row_bytes);
  return rows;
}

const std::byte* bytes_of(const void* p) { return static_cast<const std::byte*>(p); }
std::byte* bytes_of(void* p) { return static_cast<std::byte*>(p); }

kdt::ShardMaker& maker_of(kdt_sharding* sharding) {
  check_argument(sharding != nullptr, "sharding", "NULL", "a sharding");
  return sharding->maker;
}

// The pointers of every rank; the piece's size of a rank in *bytes.
template <class Byte, class Void>
std::vector<Byte*> ranks_of(const kdt::ShardMaker& maker, int64_t tensor, int64_t piece, Void* const* arrays,
                            int64_t* bytes) {
  check_argument(tensor >= 0, "tensor", std::to_string(tensor), "0 or more");
  *bytes = maker.piece_bytes(static_cast<size_t>(tensor), piece);
  check_argument(arrays != nullptr, "arrays", "NULL", "a pointer for each rank");
  std::vector<Byte*> out;
  for (int64_t rank = 0; rank < maker.partition().tp; ++rank) {
    check_argument(arrays[rank] != nullptr, "arrays[" + std::to_string(rank) + "]", "NULL", "memory of the size given");
    out.push_back(static_cast<Byte*>(arrays[rank]));
  }
  return out;
}

}  // namespace

extern "C" {

kdt_status kdt_int4_to_tiles(const uint32_t* packed, const uint16_t* scales, int64_t n_out, int64_t n_in,
                             uint32_t* tiles, uint16_t* tile_scales, int64_t n_words, int64_t n_scales) {
  return guarded([&] {
    check_matrix(n_out, n_in, n_words, n_scales, {packed, scales, tiles, tile_scales});
    kdt::int4_to_tiles(rows_of(bytes_of(packed), n_out, n_in / 2), n_in, bytes_of(tiles));
    const int64_t n_groups = n_in / kdt::kTileGroup;
    kdt::scales_to_tiles(rows_of(bytes_of(scales), n_out, n_groups * 2), n_groups, bytes_of(tile_scales));
  });
}

kdt_status kdt_tiles_to_int4(const uint32_t* tiles, const uint16_t* tile_scales, int64_t n_out, int64_t n_in,
                             uint32_t* packed, uint16_t* scales, int64_t n_words, int64_t n_scales) {
  return guarded([&] {
    check_matrix(n_out, n_in, n_words, n_scales, {packed, scales, tiles, tile_scales});
    kdt::tiles_to_int4(bytes_of(tiles), n_in, rows_of(bytes_of(packed), n_out, n_in / 2));
    const int64_t n_groups = n_in / kdt::kTileGroup;
    kdt::tiles_to_scales(bytes_of(tile_scales), n_groups, rows_of(bytes_of(scales), n_out, n_groups * 2));
  });
}

kdt_status kdt_sharding_create(const char* model_path, const char* draft_path, int32_t tp, kdt_sharding** out) {
  return guarded([&] {
    check_argument(out != nullptr, "out", "NULL", "a place for the handle");
    *out = nullptr;
    check_argument(model_path != nullptr && *model_path != 0, "model_path", "empty", "a checkpoint directory");
    check_argument(draft_path == nullptr || *draft_path != 0, "draft_path", "empty", "a drafter's directory or NULL");
    std::unique_ptr<kdt_sharding> sharding(new kdt_sharding{{model_path, draft_path ? draft_path : "", tp}, {}});
    sharding->json = describe(sharding->maker);
    *out = sharding.release();
  });
}

const char* kdt_sharding_json(kdt_sharding* sharding) { return sharding ? sharding->json.c_str() : ""; }

kdt_status kdt_sharding_make(kdt_sharding* sharding, int64_t tensor, int64_t piece, void* const* out, int64_t capacity,
                             int64_t* n) {
  return guarded([&] {
    const kdt::ShardMaker& maker = maker_of(sharding);
    check_argument(n != nullptr, "n", "NULL", "a place for the count");
    const auto ranks = ranks_of<std::byte>(maker, tensor, piece, out, n);
    if (*n > capacity)
      kdt::fail(kdt::Status::buffer_too_small, "capacity", std::to_string(capacity), "at least " + std::to_string(*n));
    maker.make(static_cast<size_t>(tensor), piece, ranks);
  });
}

kdt_status kdt_sharding_compare(kdt_sharding* sharding, int64_t tensor, int64_t piece, const void* const* made,
                                int64_t bytes) {
  return guarded([&] {
    const kdt::ShardMaker& maker = maker_of(sharding);
    int64_t n = 0;
    const auto ranks = ranks_of<const std::byte>(maker, tensor, piece, made, &n);
    check_argument(bytes == n, "bytes", std::to_string(bytes), std::to_string(n));
    maker.compare(static_cast<size_t>(tensor), piece, ranks);
  });
}

void kdt_sharding_destroy(kdt_sharding* sharding) { delete sharding; }

kdt_status kdt_checksum_create(kdt_checksum** out) {
  return guarded([&] {
    check_argument(out != nullptr, "out", "NULL", "a place for the handle");
    *out = new kdt_checksum;
  });
}

kdt_status kdt_checksum_update(kdt_checksum* checksum, const void* bytes, int64_t n_bytes) {
  return guarded([&] {
    check_argument(checksum != nullptr, "checksum", "NULL", "a checksum");
    check_argument(n_bytes >= 0, "n_bytes", std::to_string(n_bytes), "0 or more");
    check_argument(bytes != nullptr || n_bytes == 0, "bytes", "NULL", "memory of the size given");
    checksum->checksum.update(bytes, static_cast<size_t>(n_bytes));
  });
}

kdt_status kdt_checksum_value(kdt_checksum* checksum, uint64_t* value) {
  return guarded([&] {
    check_argument(checksum != nullptr && value != nullptr, "checksum", "NULL", "a checksum and a place for its value");
    *value = checksum->checksum.value();
  });
}

void kdt_checksum_destroy(kdt_checksum* checksum) { delete checksum; }

}  // extern "C"
