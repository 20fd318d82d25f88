// parse_safetensors on arbitrary bytes: a kdt::Error or views that lie in the file and do not overlap.
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string_view>

#include "base/error.h"
#include "checkpoint/safetensors.h"

namespace {

// `bytes` in a block of exactly that size, so that the sanitizer sees a read past its end.
void check(std::string_view bytes) {
  const auto file = std::make_unique<std::byte[]>(bytes.size());
  std::memcpy(file.get(), bytes.data(), bytes.size());
  try {
    size_t total = 0;
    unsigned sum = 0;
    for (const auto& [name, view] : kdt::parse_safetensors(file.get(), bytes.size(), "fuzz")) {
      int64_t count = 1;
      for (int64_t dim : view.shape) count *= dim;
      if (name != view.name || static_cast<size_t>(count) * kdt::dtype_size(view.dtype) != view.bytes) std::abort();
      for (size_t i = 0; i < view.bytes; ++i) sum += static_cast<unsigned>(view.data[i]);
      total += view.bytes;
    }
    if (total > bytes.size() || sum > 255 * bytes.size()) std::abort();
  } catch (const kdt::Error&) {
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  check(bytes);
  // Once more with a header length that fits: mutations of the JSON rarely keep it right.
  const size_t last = bytes.rfind('}');
  if (last == std::string_view::npos || last < 8) return 0;
  std::string fixed(bytes);
  const uint64_t length = last + 1 - 8;
  for (size_t i = 0; i < 8; ++i) fixed[i] = static_cast<char>(length >> (8 * i));
  check(fixed);
  return 0;
}
