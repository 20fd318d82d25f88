// JSON as the chat format needs it: read within limits, written as Python's json.dumps writes it.
#pragma once

#include <string>
#include <string_view>

#include <nlohmann/json.hpp>

#include "base/error.h"

namespace kdt {

// Nesting that keeps recursion over a document shallow; members that keep an ordered object's linear look-ups cheap.
constexpr int kMaxJsonDepth = 64;
constexpr int kMaxJsonMembers = 1024;

// Key order is kept. Error(status) with `subject` when it is not JSON or exceeds a limit.
nlohmann::ordered_json parse_json(std::string_view text, const std::string& subject, Status status, uint64_t max_bytes);

// json.dumps(value, ensure_ascii=False, separators=(item, key)).
std::string dump_json(const nlohmann::ordered_json& value, std::string_view item_separator,
                      std::string_view key_separator);

// repr() of Python: the shortest digits, fixed from 1e-4 up to 1e16.
std::string python_float(double value);

}  // namespace kdt
