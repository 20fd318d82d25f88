// Reading small text files whole.
#pragma once

#include <cstddef>
#include <string>

namespace kdt {

bool file_exists(const std::string& path);

// Error(io) when it cannot be read, Error(bad_file) when it is longer than max_bytes.
std::string read_text_file(const std::string& path, size_t max_bytes);

}  // namespace kdt
