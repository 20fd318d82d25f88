#include "checkpoint/safetensors.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/error.h"
#include "checkpoint/json_fields.h"

namespace kdt {
namespace {

constexpr uint64_t kLengthBytes = 8;              // of the header, little-endian, at the start of the file
constexpr uint64_t kMaxHeaderBytes = 100'000'000;  // the format's own limit
constexpr size_t kMaxRank = 8;

struct DTypeEntry {
  DType dtype;
  const char* name;
  size_t bytes;
};
constexpr DTypeEntry kDTypes[] = {
    {DType::bool8, "BOOL", 1}, {DType::u8, "U8", 1},     {DType::i8, "I8", 1},   {DType::i16, "I16", 2},
    {DType::f16, "F16", 2},    {DType::bf16, "BF16", 2}, {DType::i32, "I32", 4}, {DType::f32, "F32", 4},
    {DType::i64, "I64", 8},    {DType::f64, "F64", 8},
};

const DTypeEntry& entry_of(DType dtype) { return kDTypes[static_cast<size_t>(dtype)]; }

struct Span {
  uint64_t begin, end;  // bytes from the end of the header
  const TensorView* tensor;
};

// `file` and the tensor's name, for messages.
std::string subject_of(const std::string& file, const std::string& tensor) { return file + ": " + tensor; }

DType parse_dtype(const Fields& fields) {
  const std::string name = fields.text("dtype");
  for (const DTypeEntry& entry : kDTypes) {
    if (name == entry.name) return entry.dtype;
  }
  fields.refuse(Status::bad_file, "dtype", "one of BOOL, U8, I8, I16, F16, BF16, I32, F32, I64, F64");
}

// Bytes of the tensor; false when they do not fit 63 bits.
bool byte_count(const std::vector<int64_t>& shape, DType dtype, uint64_t* bytes) {
  int64_t product = static_cast<int64_t>(entry_of(dtype).bytes);
  for (int64_t dim : shape) {
    if (__builtin_mul_overflow(product, dim, &product)) return false;
  }
  *bytes = static_cast<uint64_t>(product);
  return true;
}

// Without the check of its neighbours.
Span parse_tensor(const Fields& fields, uint64_t data_bytes, TensorView& out) {
  const std::string subject = subject_of(out.file, out.name);
  out.dtype = parse_dtype(fields);
  out.shape = fields.integers("shape", 0, INT64_MAX);
  if (out.shape.size() > kMaxRank) {
    fields.refuse(Status::bad_file, "shape", "at most " + std::to_string(kMaxRank) + " dimensions");
  }
  const std::vector<int64_t> offsets = fields.integers("data_offsets", 0, INT64_MAX);
  if (offsets.size() != 2) fields.refuse(Status::bad_file, "data_offsets", "two offsets, begin and end");
  const uint64_t begin = static_cast<uint64_t>(offsets[0]), end = static_cast<uint64_t>(offsets[1]);
  const std::string span = "bytes " + std::to_string(begin) + " to " + std::to_string(end);
  if (begin > end) fail(Status::bad_file, subject, span, "data_offsets in ascending order");
  uint64_t bytes = 0;
  if (!byte_count(out.shape, out.dtype, &bytes)) {
    fail(Status::bad_file, subject, "a shape of more than 2^63 bytes", "a shape that fits its data_offsets");
  }
  if (bytes != end - begin) {
    fail(Status::bad_file, subject, span, std::to_string(bytes) + " bytes, as its dtype and shape say");
  }
  if (end > data_bytes) {
    fail(Status::bad_file, subject, span,
         "a span inside the file's " + std::to_string(data_bytes) + " bytes of data (is the file truncated?)");
  }
  out.bytes = bytes;
  return {begin, end, &out};
}

// The format leaves no byte unnamed and none named twice.
void check_neighbours(std::vector<Span>& spans, uint64_t data_bytes, const std::string& file) {
  std::sort(spans.begin(), spans.end(), [](const Span& a, const Span& b) {
    return a.begin != b.begin ? a.begin < b.begin : a.end < b.end;
  });
  uint64_t covered = 0;
  for (const Span& span : spans) {
    if (span.begin != covered) {
      fail(Status::bad_file, subject_of(file, span.tensor->name), "bytes from " + std::to_string(span.begin),
           "data_offsets from " + std::to_string(covered) +
               (span.begin < covered ? ": it overlaps another tensor" : ": no tensor names the bytes between"));
    }
    covered = span.end;
  }
  if (covered != data_bytes) {
    fail(Status::bad_file, file, std::to_string(data_bytes) + " bytes of data",
         std::to_string(covered) + " bytes, as the header says");
  }
}

void read_metadata(const Fields& header, std::map<std::string, std::string>* out) {
  const Fields metadata = header.object("__metadata__");
  for (const std::string& key : metadata.keys()) {
    const std::string value = metadata.text(key);
    if (out) (*out)[key] = value;
  }
}

uint64_t header_bytes(const std::byte* file, size_t bytes, const std::string& name) {
  if (bytes < kLengthBytes) {
    fail(Status::bad_file, name, "truncated: " + std::to_string(bytes) + " bytes", "8 bytes or more");
  }
  uint64_t length = 0;
  for (size_t i = 0; i < kLengthBytes; ++i) length |= static_cast<uint64_t>(file[i]) << (8 * i);
  if (length > kMaxHeaderBytes) {
    fail(Status::bad_file, name, "a header of " + std::to_string(length) + " bytes",
         "at most " + std::to_string(kMaxHeaderBytes));
  }
  if (length > bytes - kLengthBytes) {
    fail(Status::bad_file, name, "truncated: " + std::to_string(bytes) + " bytes",
         std::to_string(kLengthBytes + length) + " bytes or more, as the header's length says");
  }
  return length;
}

}  // namespace

size_t dtype_size(DType dtype) { return entry_of(dtype).bytes; }
const char* dtype_name(DType dtype) { return entry_of(dtype).name; }

std::map<std::string, TensorView, std::less<>> parse_safetensors(const std::byte* file, size_t bytes,
                                                                 const std::string& name,
                                                                 std::map<std::string, std::string>* metadata) {
  const uint64_t length = header_bytes(file, bytes, name);
  const std::byte* data = file + kLengthBytes + length;
  const uint64_t data_bytes = bytes - kLengthBytes - length;
  const auto json = parse_json_object({reinterpret_cast<const char*>(file) + kLengthBytes, length}, name);
  const Fields header(json, name);

  std::map<std::string, TensorView, std::less<>> tensors;
  std::vector<Span> spans;
  for (const auto& item : json.items()) {
    if (item.key() == "__metadata__") {
      read_metadata(header, metadata);
      continue;
    }
    TensorView& view = tensors[item.key()];
    view.name = item.key();
    view.file = name;
    if (!item.value().is_object()) {
      fail(Status::bad_file, subject_of(name, view.name), "no object", "an object of dtype, shape and data_offsets");
    }
    spans.push_back(parse_tensor(Fields(item.value(), name, view.name), data_bytes, view));
    view.data = data + spans.back().begin;
    view.offset = kLengthBytes + length + spans.back().begin;
  }
  check_neighbours(spans, data_bytes, name);
  return tensors;
}

struct SafetensorsFile::Impl {
  ~Impl() {
    reader.reset();   // its threads write into the memory
    if (memory != MAP_FAILED) munmap(memory, bytes);
    if (mapping != MAP_FAILED) munmap(mapping, bytes);
  }

  // Where a view's bytes begin in the file, when they are of this file.
  std::optional<size_t> place_of(const TensorView& tensor) const {
    const auto base = reinterpret_cast<uintptr_t>(memory != MAP_FAILED ? memory : mapping);
    const auto begin = reinterpret_cast<uintptr_t>(tensor.data);
    if (begin < base || begin - base >= bytes) return std::nullopt;
    return begin - base;
  }

  std::string path;
  void* mapping = MAP_FAILED;
  void* memory = MAP_FAILED;   // in place of the mapping when the file is read directly
  size_t bytes = 0;
  std::unique_ptr<ReadAhead> reader;
  std::map<std::string, TensorView, std::less<>> tensors;
  std::map<std::string, std::string> metadata;
};

SafetensorsFile::SafetensorsFile(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
SafetensorsFile::SafetensorsFile(SafetensorsFile&&) noexcept = default;
SafetensorsFile& SafetensorsFile::operator=(SafetensorsFile&&) noexcept = default;
SafetensorsFile::~SafetensorsFile() = default;

SafetensorsFile SafetensorsFile::open(const std::string& path) {
  auto impl = std::make_unique<Impl>();
  impl->path = path;
  // O_NONBLOCK: a named pipe in place of the file is refused below, not waited for.
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) fail(Status::io, path, std::strerror(errno), "a readable file");
  struct stat info {};
  const bool regular = fstat(fd, &info) == 0 && S_ISREG(info.st_mode);
  impl->bytes = regular ? static_cast<size_t>(info.st_size) : 0;
  // An empty mapping is an error to mmap, an empty file one to the format.
  if (impl->bytes > 0) impl->mapping = mmap(nullptr, impl->bytes, PROT_READ, MAP_PRIVATE, fd, 0);
  const int error = errno;
  ::close(fd);
  if (!regular) fail(Status::io, path, "not a file", "a readable file");
  if (impl->bytes == 0) fail(Status::bad_file, path, "truncated: 0 bytes", "a safetensors file");
  if (impl->mapping == MAP_FAILED) fail(Status::io, path, std::strerror(error), "a file that can be mapped");
  impl->tensors = parse_safetensors(static_cast<const std::byte*>(impl->mapping), impl->bytes, path, &impl->metadata);
  return SafetensorsFile(std::move(impl));
}

const std::map<std::string, TensorView, std::less<>>& SafetensorsFile::tensors() const { return impl_->tensors; }

const std::map<std::string, std::string>& SafetensorsFile::metadata() const { return impl_->metadata; }
size_t SafetensorsFile::bytes() const { return impl_->bytes; }

void SafetensorsFile::read_ahead(ReadMode mode, uint64_t begin, uint64_t end) {
  auto* memory = static_cast<std::byte*>(impl_->mapping);
  if (mode == ReadMode::direct) {
    constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    impl_->memory = mmap(nullptr, impl_->bytes, PROT_READ | PROT_WRITE, kFlags, -1, 0);
    if (impl_->memory == MAP_FAILED)
      fail(Status::out_of_memory, impl_->path, std::strerror(errno),
           std::to_string(impl_->bytes) + " bytes of address space");
    memory = static_cast<std::byte*>(impl_->memory);
    for (auto& [name, view] : impl_->tensors) view.data = memory + view.offset;
  }
  impl_->reader = std::make_unique<ReadAhead>(impl_->path, mode, memory, begin, end);
}

void SafetensorsFile::await(const TensorView& tensor) const {
  const auto place = impl_->place_of(tensor);
  if (impl_->reader && place) impl_->reader->wait(*place, *place + tensor.bytes);
}

void SafetensorsFile::release(const TensorView& tensor) const {
  const auto place = impl_->place_of(tensor);
  if (!place) return;
  if (impl_->reader) {
    impl_->reader->release(*place, *place + tensor.bytes);
    return;
  }
  const auto begin = reinterpret_cast<uintptr_t>(tensor.data);
  // Only whole pages: the first and last may hold a neighbour's bytes that are still to be read.
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const uintptr_t first = (begin + page - 1) / page * page;
  const uintptr_t last = (begin + tensor.bytes) / page * page;
  if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_DONTNEED);
}

}  // namespace kdt
