// One safetensors file (https://github.com/huggingface/safetensors), mapped read-only and checked once.
//
// The header is hostile until checked: its length, every dtype, shape and span are verified in 64 bits, spans may not
// overlap or leave the file, and shape × dtype must equal the span. After open() a TensorView can be read without
// checks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace kdt {

enum class DType { bool8, u8, i8, i16, f16, bf16, i32, f32, i64, f64 };
size_t dtype_size(DType dtype);
const char* dtype_name(DType dtype);  // as safetensors spells it: "BF16", "I32", …

struct TensorView {
  std::string name;
  DType dtype;
  std::vector<int64_t> shape;   // row-major
  const std::byte* data;        // inside the mapping; owned by the SafetensorsFile; no alignment is promised
  size_t bytes;
  std::string file;             // for messages
  uint64_t offset;              // of data in the file
};

class SafetensorsFile {
 public:
  // Throws Error(io) when the file cannot be opened, Error(bad_file) when it is not a valid safetensors file.
  static SafetensorsFile open(const std::string& path);
  SafetensorsFile(SafetensorsFile&&) noexcept;
  SafetensorsFile& operator=(SafetensorsFile&&) noexcept;
  ~SafetensorsFile();

  const std::map<std::string, TensorView, std::less<>>& tensors() const;
  const std::map<std::string, std::string>& metadata() const;   // `__metadata__`; empty when there is none
  size_t bytes() const;                                          // of the whole file
  // The tensor's pages are not needed any more: they leave the resident set. Reading them again is legal and slow.
  void release(const TensorView& tensor) const;

 private:
  struct Impl;
  explicit SafetensorsFile(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

// The header check alone, for the reader above and its fuzz target: `file` is the whole file's bytes.
std::map<std::string, TensorView, std::less<>> parse_safetensors(
    const std::byte* file, size_t bytes, const std::string& name,
    std::map<std::string, std::string>* metadata = nullptr);

}  // namespace kdt
