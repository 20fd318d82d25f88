// The shard format: INT4 tiles, what a rank holds, checksums, and pieces made from the bundled pair.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <doctest/doctest.h>

#include <array>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <random>
#include <set>

#include "base/bf16.h"
#include "base/error.h"
#include "checkpoint/checksum.h"
#include "checkpoint/int4_tiles.h"
#include "checkpoint/shard_maker.h"

using namespace kdt;
namespace fs = std::filesystem;

namespace {

std::string models() {
  const char* root = std::getenv("KDTREE_SOURCE_ROOT");
  return std::string(root != nullptr ? root : ".") + "/models/";
}

using Bytes = std::vector<std::byte>;

Bytes random_bytes(int64_t n, uint32_t seed) {
  std::mt19937 random(seed);
  Bytes out(static_cast<size_t>(n));
  for (std::byte& byte : out) byte = static_cast<std::byte>(random());
  return out;
}

template <class Byte>
std::vector<Byte*> rows_of(Byte* first, int64_t n, int64_t bytes) {
  std::vector<Byte*> rows;
  for (int64_t i = 0; i < n; ++i) rows.push_back(first + i * bytes);
  return rows;
}

// The stored nibble of output n and input k.
int nibble(const Bytes& packed, int64_t n_in, int64_t n, int64_t k) {
  return std::to_integer<int>(packed[static_cast<size_t>(n * n_in / 2 + k / 2)]) >> (k % 2 * 4) & 15;
}

template <typename Call>
std::string message_of(const Call& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

struct TempDir {
  TempDir() {
    std::string pattern = (fs::temp_directory_path() / "kdtree-test-XXXXXX").string();
    path = mkdtemp(pattern.data());
  }
  ~TempDir() { fs::remove_all(path); }
  std::string path;
};

// A copy of the bundled model, whole files, that a test may damage.
void copy_model(const std::string& to) {
  for (const auto& entry : fs::directory_iterator(models() + "tiny-k2"))
    fs::copy(entry.path(), to + "/" + entry.path().filename().string());
}

struct Made {
  std::vector<Bytes> ranks;
  std::vector<std::byte*> out() {
    std::vector<std::byte*> p;
    for (Bytes& bytes : ranks) p.push_back(bytes.data());
    return p;
  }
  std::vector<const std::byte*> in() const {
    std::vector<const std::byte*> p;
    for (const Bytes& bytes : ranks) p.push_back(bytes.data());
    return p;
  }
};

Made make(const ShardMaker& maker, size_t tensor, int64_t piece) {
  Made made;
  const auto bytes = static_cast<size_t>(maker.piece_bytes(tensor, piece));
  made.ranks.assign(static_cast<size_t>(maker.partition().tp), Bytes(bytes));
  maker.make(tensor, piece, made.out());
  return made;
}

size_t index_of(const Partition& partition, const std::string& name) {
  for (size_t i = 0; i < partition.tensors.size(); ++i)
    if (partition.tensors[i].name == name) return i;
  FAIL("no tensor " << name);
  return 0;
}

}  // namespace

TEST_CASE("every nibble lies where mma.m16n8k16 wants it") {
  constexpr int64_t n_out = 128, n_in = 64;
  const Bytes packed = random_bytes(n_out * n_in / 2, 1);
  Bytes tiles(packed.size());
  int4_to_tiles(rows_of(packed.data(), n_out, n_in / 2), n_in, tiles.data());
  for (int64_t kt = 0; kt < n_in / 16; ++kt)
    for (int64_t nt = 0; nt < n_out / 64; ++nt)
      for (int64_t lane = 0; lane < 32; ++lane)
        for (int64_t quad = 0; quad < 4; ++quad) {
          uint32_t word;
          std::memcpy(&word, tiles.data() + ((kt * (n_out / 64) + nt) * 128 + lane * 4 + quad) * 4, 4);
          const int64_t n = nt * 64 + quad * 16 + lane / 4, k = kt * 16 + lane % 4 * 2;
          const std::array<std::array<int64_t, 2>, 8> order{
              {{n, k}, {n, k + 8}, {n + 8, k}, {n + 8, k + 8}, {n, k + 1}, {n, k + 9}, {n + 8, k + 1}, {n + 8, k + 9}}};
          for (size_t i = 0; i < 8; ++i)
            REQUIRE((word >> (4 * i) & 15) == static_cast<uint32_t>(nibble(packed, n_in, order[i][0], order[i][1])));
        }
}

TEST_CASE("tiles and scales go there and back for every shape") {
  for (int64_t n_out : {64, 128, 192, 448})
    for (int64_t n_in : {32, 64, 96, 224}) {
      const Bytes packed = random_bytes(n_out * n_in / 2, static_cast<uint32_t>(n_out + n_in));
      Bytes tiles(packed.size()), back(packed.size());
      int4_to_tiles(rows_of(packed.data(), n_out, n_in / 2), n_in, tiles.data());
      tiles_to_int4(tiles.data(), n_in, rows_of(back.data(), n_out, n_in / 2));
      CHECK(back == packed);
      const int64_t n_groups = n_in / 32;
      const Bytes scales = random_bytes(n_out * n_groups * 2, 7);
      Bytes moved(scales.size()), scales_back(scales.size());
      scales_to_tiles(rows_of(scales.data(), n_out, n_groups * 2), n_groups, moved.data());
      tiles_to_scales(moved.data(), n_groups, rows_of(scales_back.data(), n_out, n_groups * 2));
      CHECK(scales_back == scales);
    }
  CHECK_FALSE(fits_tiles(32, 32));
  CHECK_FALSE(fits_tiles(64, 16));
  CHECK_FALSE(fits_tiles(0, 32));
}

TEST_CASE("the checksum is XXH64, however the bytes are cut") {
  CHECK(checksum_of("", 0) == "ef46db3751d8e999");
  CHECK(checksum_of("a", 1) == "d24ec4f1a98c6e5b");
  CHECK(checksum_of("abc", 3) == "44bc2cf5ad770999");
  const std::string text = "Nobody inspects the spammish repetition";
  CHECK(checksum_of(text.data(), text.size()) == "fbcea83c8a378bf1");
  const Bytes bytes = random_bytes(1000, 3);
  std::mt19937 random(5);
  for (int i = 0; i < 200; ++i) {
    Checksum cut;
    for (size_t at = 0; at < bytes.size();) {
      const size_t n = std::min<size_t>(random() % 80, bytes.size() - at);
      cut.update(bytes.data() + at, n);
      at += n;
    }
    REQUIRE(cut.hex() == checksum_of(bytes.data(), bytes.size()));
  }
}

TEST_CASE("ranks share out the bundled pair without loss or overlap") {
  const ModelConfig config = load_model_config(models() + "tiny-k2");
  const DraftConfig draft = load_draft_config(models() + "tiny-k2-dflash");
  const Partition whole = make_partition(config, &draft, 1);
  for (int64_t tp : {2, 4, 8}) {
    const Partition part = make_partition(config, &draft, tp);
    REQUIRE(part.tensors.size() == whole.tensors.size());
    for (size_t i = 0; i < part.tensors.size(); ++i) {
      CHECK(part.tensors[i].name == whole.tensors[i].name);
      CHECK(part.tensors[i].bytes() * (part.tensors[i].split ? tp : 1) == whole.tensors[i].bytes());
    }
  }
  std::set<std::string> names;
  for (const ShardTensor& tensor : whole.tensors) CHECK(names.insert(tensor.name).second);
  CHECK(whole.tensors.front().name == "model.embed_tokens.weight");
}

TEST_CASE("tp that does not divide is refused by the name of what it does not divide") {
  ModelConfig config = load_model_config(models() + "tiny-k2");
  DraftConfig draft = load_draft_config(models() + "tiny-k2-dflash");
  const auto refused = [&](int64_t tp) { return message_of([&] { make_partition(config, &draft, tp); }); };
  CHECK(refused(0) == "tp: 0: expected 1 to 64");
  CHECK(refused(65) == "tp: 65: expected 1 to 64");
  CHECK(refused(3) == "tp: 3: expected a divisor of vocab_size, 2048");
  CHECK(refused(16) == "tp: 16: expected a divisor of num_attention_heads, 8");
  draft.n_kv_heads = 2;
  CHECK(refused(4) == "tp: 4: expected a divisor of the drafter's num_key_value_heads, 2");
  draft.n_kv_heads = 8;
  config.dense_width = 36;
  CHECK(refused(8) == "tp: 8: expected a divisor of intermediate_size, 36");
  config.dense_width = 512;
  config.expert_width = 96;
  CHECK(contains(refused(2), "experts.w13 of 2 ranks: 96 outputs, 256 inputs: expected multiples of 64 and 32"));
  config.expert_width = 128;
  CHECK(contains(refused(8), "w13 of 8 ranks: 32 outputs"));
  config.expert_width = 192;
  config.hidden_size = 96;
  CHECK(contains(refused(1), "w2 of 1 ranks: 96 outputs, 192 inputs"));
}

TEST_CASE("pieces of every rank are what the checkpoint says, and a flipped bit is found and named") {
  for (int64_t tp : {1, 8}) {
    const ShardMaker maker(models() + "tiny-k2", models() + "tiny-k2-dflash", tp);
    std::mt19937 random(11);
    for (size_t i = 0; i < maker.partition().tensors.size(); ++i) {
      int64_t bytes = 0;
      for (int64_t piece = 0; piece < maker.n_pieces(i); ++piece) {
        Made made = make(maker, i, piece);
        bytes += maker.piece_bytes(i, piece);
        maker.compare(i, piece, made.in());
        const size_t rank = random() % made.ranks.size();
        made.ranks[rank][random() % made.ranks[rank].size()] ^= std::byte{16};
        const std::string message = message_of([&] { maker.compare(i, piece, made.in()); });
        const std::string file = rank_file_name(static_cast<int64_t>(rank), tp);
        CHECK(contains(message, file + ": " + maker.partition().tensors[i].name + ": byte "));
        CHECK(contains(message, ", as the checkpoint says"));
      }
      CHECK(bytes == maker.partition().tensors[i].bytes());
    }
    CHECK(contains(message_of([&] { maker.n_pieces(0); maker.piece_bytes(0, maker.n_pieces(0)); }), "piece: "));
    CHECK(contains(message_of([&] { maker.piece_bytes(maker.partition().tensors.size(), 0); }), "tensor: "));
  }
}

TEST_CASE("keys of kv_b are transposed by head, values are not") {
  const ShardMaker maker(models() + "tiny-k2", "", 4);
  const Checkpoint checkpoint = Checkpoint::open(models() + "tiny-k2");
  const std::string attn = "model.layers.2.self_attn.";
  const TensorView& kv_b = checkpoint.require(attn + "kv_b_proj.weight", DType::bf16, {8 * 64, 128});
  const auto element = [&](int64_t row, int64_t column) {
    bf16 value;
    std::memcpy(&value, kv_b.data + (row * 128 + column) * 2, 2);
    return value;
  };
  const Made keys = make(maker, index_of(maker.partition(), attn + "w_uk"), 0);
  const Made values = make(maker, index_of(maker.partition(), attn + "w_uv"), 0);
  for (int64_t rank = 0; rank < 4; ++rank)
    for (int64_t h = 0; h < 2; ++h)
      for (int64_t d = 0; d < 32; ++d)
        for (int64_t c = 0; c < 128; ++c) {
          bf16 key, value;
          std::memcpy(&key, keys.ranks[static_cast<size_t>(rank)].data() + ((h * 128 + c) * 32 + d) * 2, 2);
          std::memcpy(&value, values.ranks[static_cast<size_t>(rank)].data() + ((h * 32 + d) * 128 + c) * 2, 2);
          REQUIRE(key == element((rank * 2 + h) * 64 + d, c));
          REQUIRE(value == element((rank * 2 + h) * 64 + 32 + d, c));
        }
}

TEST_CASE("a source that shrinks while it is read is an error") {
  TempDir temp;
  copy_model(temp.path);
  const ShardMaker maker(temp.path, "", 1);
  const std::string file = temp.path + "/model-00002-of-000002.safetensors";
  fs::resize_file(file, fs::file_size(file) / 2);
  std::string message;
  for (size_t i = 0; i < maker.partition().tensors.size(); ++i)
    for (int64_t piece = 0; piece < maker.n_pieces(i); ++piece) {
      const std::string found = message_of([&] { make(maker, i, piece); });
      if (!found.empty()) message = found;
    }
  CHECK(contains(message, "model-00002-of-000002.safetensors: "));
  CHECK(contains(message, "truncated since it was opened"));
}
