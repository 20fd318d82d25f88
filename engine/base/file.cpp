#include "base/file.h"

#include <filesystem>
#include <fstream>

#include "base/error.h"

namespace kdt {

bool file_exists(const std::string& path) {
  std::error_code error;
  return std::filesystem::exists(path, error);
}

std::string read_text_file(const std::string& path, size_t max_bytes) {
  std::error_code error;
  if (!std::filesystem::is_regular_file(path, error)) {
    fail(Status::io, path, error ? error.message() : "not a file", "a readable file");
  }
  std::ifstream in(path, std::ios::binary);
  if (!in) fail(Status::io, path, "cannot be opened", "a readable file");
  // Read in pieces and counted: a file may grow while it is read.
  std::string text;
  char piece[1 << 16];
  while (in.read(piece, sizeof piece) || in.gcount() > 0) {
    text.append(piece, static_cast<size_t>(in.gcount()));
    if (text.size() > max_bytes) {
      fail(Status::bad_file, path, "more than " + std::to_string(max_bytes) + " bytes", "a smaller file");
    }
  }
  if (in.bad()) fail(Status::io, path, "cannot be read", "a readable file");
  return text;
}

}  // namespace kdt
