// The checkpoint readers: the bundled pair as it is, and properties under hostile headers and configs.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <doctest/doctest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <random>

#include "base/error.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/config.h"

using namespace kdt;
using nlohmann::json;
namespace fs = std::filesystem;

namespace {

std::string source_root() {
  const char* root = std::getenv("KDTREE_SOURCE_ROOT");
  return root != nullptr ? root : ".";
}
std::string model_dir() { return source_root() + "/models/tiny-k2"; }
std::string draft_dir() { return source_root() + "/models/tiny-k2-dflash"; }

json read_json(const std::string& path) { return json::parse(std::ifstream(path)); }

struct TempDir {
  TempDir() {
    std::string pattern = (fs::temp_directory_path() / "kdtree-test-XXXXXX").string();
    path = mkdtemp(pattern.data());
  }
  ~TempDir() { fs::remove_all(path); }
  std::string path;
};

void write(const std::string& path, const std::string& text) { std::ofstream(path, std::ios::binary) << text; }

// A safetensors file: `header` after its length (or after `length`, when given), then `data_bytes` bytes 0, 1, 2, …
std::string file_of(const std::string& header, size_t data_bytes, int64_t length = -1) {
  const uint64_t n = length < 0 ? header.size() : static_cast<uint64_t>(length);
  std::string out;
  for (int i = 0; i < 8; ++i) out += static_cast<char>(n >> (8 * i));
  out += header;
  for (size_t i = 0; i < data_bytes; ++i) out += static_cast<char>(i);
  return out;
}

auto parse(const std::string& file) {
  return parse_safetensors(reinterpret_cast<const std::byte*>(file.data()), file.size(), "f");
}

// The message of the kdt::Error that `call` throws; "" when it returns.
template <typename Call>
std::string message_of(const Call& call, Status* status = nullptr) {
  try {
    call();
  } catch (const Error& error) {
    if (status != nullptr) *status = error.status();
    return error.what();
  }
  return "";
}

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

}  // namespace

TEST_CASE("the bundled model opens whole, and every byte can be read") {
  const Checkpoint model = Checkpoint::open(model_dir());
  const json index = read_json(model_dir() + "/model.safetensors.index.json");
  CHECK(model.tensor_count() == index["weight_map"].size());
  CHECK(model.bytes() == index["metadata"]["total_size"].get<size_t>());
  CHECK(model.skipped_tensors() == 0);
  const TensorView& embed = model.require("model.embed_tokens.weight", DType::bf16, {2048, 256});
  uint64_t before = 0, after = 0;
  for (size_t i = 0; i < embed.bytes; ++i) before = before * 31 + static_cast<uint64_t>(embed.data[i]);
  model.release(embed);
  for (size_t i = 0; i < embed.bytes; ++i) after = after * 31 + static_cast<uint64_t>(embed.data[i]);
  CHECK(before == after);
}

TEST_CASE("release takes whole pages of that tensor out of memory and no page of a neighbour") {
  const Checkpoint model = Checkpoint::open(model_dir());
  const TensorView& tensor = model.require("model.embed_tokens.weight", DType::bf16, {2048, 256});
  const TensorView& neighbour = model.require("model.layers.0.input_layernorm.weight", DType::bf16, {256});
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const uintptr_t first = (reinterpret_cast<uintptr_t>(tensor.data) + page - 1) / page * page;
  const uintptr_t last = (reinterpret_cast<uintptr_t>(tensor.data) + tensor.bytes) / page * page;
  const auto resident_kib = [] {
    std::ifstream statm("/proc/self/statm");
    long size = 0, resident = 0, shared = 0;
    statm >> size >> resident >> shared;
    return shared * sysconf(_SC_PAGESIZE) / 1024;
  };
  unsigned sum = static_cast<unsigned>(neighbour.data[0]);
  for (size_t i = 0; i < tensor.bytes; i += 64) sum += static_cast<unsigned>(tensor.data[i]);
  CHECK(sum > 0);
  const long full = resident_kib();
  model.release(tensor);
  CHECK(full - resident_kib() >= static_cast<long>((last - first) / 1024) / 2);
}

TEST_CASE("the drafter opens with and without the model. prefix") {
  const Checkpoint plain = Checkpoint::open_draft(draft_dir());
  CHECK(plain.require("fc.weight", DType::bf16, {256, 768}).bytes == 256 * 768 * 2);
  TempDir temp;
  write(temp.path + "/model.safetensors",
        file_of(R"({"model.norm.weight":{"dtype":"BF16","shape":[2],"data_offsets":[0,4]}})", 4));
  const Checkpoint prefixed = Checkpoint::open_draft(temp.path);
  CHECK(prefixed.has("norm.weight"));
  CHECK_FALSE(prefixed.has("model.norm.weight"));
  CHECK(Checkpoint::open(temp.path).has("model.norm.weight"));
}

TEST_CASE("the wrapper's prefix comes off and vision tensors are skipped") {
  TempDir temp;
  write(temp.path + "/model.safetensors",
        file_of(R"({"language_model.model.norm.weight":{"dtype":"BF16","shape":[2],"data_offsets":[0,4]},)"
                R"("vision_tower.a":{"dtype":"U8","shape":[3],"data_offsets":[4,7]},)"
                R"("mm_projector.b":{"dtype":"U8","shape":[1],"data_offsets":[7,8]}})", 8));
  const Checkpoint model = Checkpoint::open(temp.path);
  CHECK(model.has("model.norm.weight"));
  CHECK(model.tensor_count() == 1);
  CHECK(model.skipped_tensors() == 2);
  CHECK(model.bytes() == 4);
}

TEST_CASE("require names file, tensor, found and expected") {
  const Checkpoint model = Checkpoint::open(model_dir());
  const std::string shard = "model-00002-of-000002.safetensors: model.norm.weight: BF16 [256]: expected a tensor of ";
  CHECK(contains(message_of([&] { model.require("model.norm.weight", DType::f32, {256}); }), shard + "F32 [256]"));
  CHECK(contains(message_of([&] { model.require("model.norm.weight", DType::bf16, {128, 2}); }),
                 shard + "BF16 [128, 2]"));
  CHECK(contains(message_of([&] { model.require("no.such", DType::bf16, {1}); }),
                 "tiny-k2: no.such: absent: expected a tensor of BF16 [1]"));
}

TEST_CASE("legal corners of the format") {
  CHECK(parse(file_of("{}", 0)).empty());
  CHECK(parse(file_of("{}      ", 0)).empty());
  CHECK(parse(file_of(R"({"__metadata__":{"format":"pt"}})", 0)).empty());
  const auto scalar = parse(file_of(R"({"a":{"dtype":"F64","shape":[],"data_offsets":[0,8]}})", 8));
  CHECK(scalar.at("a").bytes == 8);
  const std::string file = file_of(R"({"b":{"dtype":"U8","shape":[2],"data_offsets":[1,3]},)"
                                   R"("a":{"data_offsets":[0,1],"shape":[1],"dtype":"U8"},)"
                                   R"("empty":{"dtype":"F32","shape":[0,7],"data_offsets":[1,1]}})", 3);
  const auto two = parse(file);  // its views point into `file`
  CHECK(two.at("b").data[1] == std::byte{2});
  CHECK(two.at("empty").bytes == 0);
}

TEST_CASE("hostile safetensors files are errors that name the file") {
  const auto tensor = [](const std::string& dtype, const std::string& shape, const std::string& offsets) {
    return R"({"t":{"dtype":")" + dtype + R"(","shape":)" + shape + R"(,"data_offsets":)" + offsets + "}}";
  };
  std::string deep(100'000, '[');
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"", "f: truncated: 0 bytes"},
      {"1234567", "f: truncated: 7 bytes"},
      {file_of("{}", 0, 3), "f: truncated: 10 bytes: expected 11 bytes or more"},
      {file_of("{}", 0, INT64_MAX), "f: a header of 9223372036854775807 bytes"},
      {file_of("{}", 0, 100'000'001), "f: a header of 100000001 bytes"},
      {file_of("", 0), "JSON error"},
      {file_of("[]", 0), "f: an array of 0: expected a JSON object"},
      {file_of("{", 0), "JSON error at byte"},
      {file_of("{\"\xff\":1}", 0), "JSON error at byte"},
      {file_of("{\"a\":" + deep, 0), "JSON nested too deep"},
      {file_of(R"({"t":1})", 0), "f: t: no object"},
      {file_of(R"({"__metadata__":{"a":1}})", 0), "f: __metadata__.a: 1: expected a string"},
      {file_of(R"({"t":{"dtype":"U8","shape":[1]}})", 1), "f: t.data_offsets: absent"},
      {file_of(tensor("F8_E4M3", "[1]", "[0,1]"), 1), "f: t.dtype: \"F8_E4M3\""},
      {file_of(tensor("U8", "[-1]", "[0,1]"), 1), "f: t.shape: -1"},
      {file_of(tensor("U8", "[1.0]", "[0,1]"), 1), "f: t.shape: 1.0"},
      {file_of(tensor("U8", "[1]", "[0,1,2]"), 1), "f: t.data_offsets: an array of 3"},
      {file_of(tensor("U8", "[1]", "[1,0]"), 1), "f: t: bytes 1 to 0: expected data_offsets in ascending order"},
      {file_of(tensor("U8", "[1]", "[0,18446744073709551615]"), 1), "f: t.data_offsets: 18446744073709551615"},
      {file_of(tensor("U8", "[2]", "[0,1]"), 1), "f: t: bytes 0 to 1: expected 2 bytes"},
      {file_of(tensor("U8", "[2]", "[0,2]"), 1), "f: t: bytes 0 to 2: expected a span inside the file's 1 bytes"},
      {file_of(tensor("F64", "[4611686018427387904,4]", "[0,0]"), 0), "f: t: a shape of more than 2^63 bytes"},
      {file_of(tensor("U8", "[4294967296,4294967296]", "[0,0]"), 0), "f: t: a shape of more than 2^63 bytes"},
      {file_of(tensor("U8", "[1,1,1,1,1,1,1,1,1]", "[0,1]"), 1), "f: t.shape: an array of 9"},
      {file_of(tensor("U8", "[1]", "[1,2]"), 2), "f: t: bytes from 1: expected data_offsets from 0"},
      {file_of(tensor("U8", "[1]", "[0,1]"), 2), "f: 2 bytes of data: expected 1 bytes"},
      {file_of(R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},)"
               R"("b":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}})", 3),
       "f: b: bytes from 1: expected data_offsets from 2: it overlaps"},
      {file_of(R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
               R"("a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})", 1), "f: \"a\" twice"},
  };
  for (const auto& bad : cases) {
    const std::string &file = bad.first, &expected = bad.second;
    Status status = Status::ok;
    const std::string message = message_of([&] { parse(file); }, &status);
    CAPTURE(expected);
    CAPTURE(message);
    CHECK(contains(message, expected));
    CHECK(status == Status::bad_file);
  }
}

TEST_CASE("any prefix and any flipped byte of a file is an error or a set of views inside it") {
  std::ifstream in(draft_dir() + "/model.safetensors", std::ios::binary);
  std::string header(8 + 2488, '\0');
  in.read(header.data(), static_cast<std::streamsize>(header.size()));
  const std::string whole = header + std::string(3'542'272, '\1');
  CHECK(parse(whole).size() > 20);
  std::mt19937 random(1);
  for (int i = 0; i < 400; ++i) {
    std::string file = whole;
    if (i % 2 == 0) {
      // A copy of exactly that size, so that a sanitizer sees a read past it.
      file = whole.substr(0, random() % (i % 4 == 0 ? header.size() : whole.size()));
    } else {
      for (int n = 0; n < 3; ++n) file[random() % header.size()] = static_cast<char>(random());
    }
    Status status = Status::ok;
    message_of([&] {
      for (const auto& [name, view] : parse(file)) {
        const auto* begin = reinterpret_cast<const std::byte*>(file.data());
        CHECK((view.data >= begin && view.data + view.bytes <= begin + file.size()));
      }
    }, &status);
    CHECK((status == Status::ok || status == Status::bad_file));
    if (i % 2 == 0) CHECK(status == Status::bad_file);
  }
}

TEST_CASE("directories and indexes that do not hold together") {
  TempDir temp;
  const std::string index = temp.path + "/model.safetensors.index.json";
  const auto open = [&](Status* status) { return message_of([&] { Checkpoint::open(temp.path); }, status); };
  const std::string one = R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})";
  Status status = Status::ok;
  CHECK(contains(message_of([&] { Checkpoint::open(temp.path + "/none"); }, &status), "no such directory"));
  CHECK(status == Status::io);
  CHECK(contains(open(&status), "no weights: expected model.safetensors.index.json or model.safetensors"));
  fs::create_directory(temp.path + "/model.safetensors");
  CHECK(contains(open(&status), "not a file"));
  CHECK(status == Status::io);
  fs::remove(temp.path + "/model.safetensors");

  write(temp.path + "/one.safetensors", file_of(one, 1));
  write(temp.path + "/two.safetensors", file_of(one, 1));
  const std::vector<std::pair<std::string, std::string>> cases = {
      {R"({})", "index.json: weight_map: absent"},
      {R"({"weight_map":{}})", "index.json: weight_map: empty"},
      {R"({"weight_map":{"a":1}})", "weight_map.a: 1: expected a string"},
      {R"({"weight_map":{"a":"../one.safetensors"}})", "weight_map.a: \"../one.safetensors\": expected the plain name"},
      {R"({"weight_map":{"a":"/etc/passwd"}})", "expected the plain name"},
      {R"({"weight_map":{"a":".."}})", "expected the plain name"},
      {R"({"weight_map":{"a":""}})", "expected the plain name"},
      {R"({"weight_map":{"a":"one.safetensors\u0000x"}})", "expected the plain name"},
      {R"({"weight_map":{"a":"three.safetensors"}})", "three.safetensors: no such file"},
      {R"({"weight_map":{"b":"one.safetensors"}})", "one.safetensors: b: absent"},
      {R"({"weight_map":{"a":"one.safetensors","a":"two.safetensors"}})", "\"a\" twice"},
      {std::string(R"({"weight_map":{"a":"one.safetensors"}})") + '\0' + "}", "a NUL at byte"},
  };
  for (const auto& bad : cases) {
    const std::string& expected = bad.second;
    write(index, bad.first);
    const std::string message = open(&status);
    CAPTURE(expected);
    CAPTURE(message);
    CHECK(contains(message, expected));
  }
  write(temp.path + "/two.safetensors",
        file_of(R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
                R"("b":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}})", 2));
  write(index, R"({"weight_map":{"a":"one.safetensors","b":"two.safetensors"}})");
  CHECK(contains(open(&status), "two.safetensors: a: duplicate: expected one tensor of that name; another is in"));
  CHECK(status == Status::bad_file);
}
