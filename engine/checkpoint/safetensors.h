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

#include "checkpoint/read_ahead.h"

namespace kdt {

enum class DType { bool8, u8, i8, i16, f16, bf16, i32, f32, i64, f64 };
size_t dtype_size(DType dtype);
const char* dtype_name(DType dtype);  // as safetensors spells it: "BF16", "I32", …

struct TensorView {
  std::string name;
  DType dtype;
  std::vector<int64_t> shape;   // row-major
  const std::byte* data;        // in memory of the SafetensorsFile; no alignment is promised
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

  // From here on the bytes [begin, end) of the file, whole tensors side by side, are read ahead in that order. `direct`:
  // their views move to other memory, which holds a tensor between await() and release() alone.
  void read_ahead(ReadMode mode, uint64_t begin, uint64_t end);
  // The tensor, or the part of one that a view was cut down to, is in memory. Without read_ahead() it always is.
  void await(const TensorView& tensor) const;
  // Its pages are not needed any more: they leave the resident set. Reading a mapping again is legal and slow.
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
