// JSON of a client: read within limits, and shown in messages.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace kdt::openai {

using Json = nlohmann::ordered_json;

// The whole of `body` as one JSON object whose key order is kept. Throws ApiError (400) for what is not JSON or not
// UTF-8, a key that occurs twice, nesting beyond `max_depth` and objects of more than kMaxMembers members.
Json read_object(std::string_view body, int64_t max_depth);

// Keeps the linear look-ups of an ordered object cheap.
constexpr int64_t kMaxMembers = 1024;

// Compact JSON; strings that are not UTF-8 are mended.
std::string write_json(const Json& value);
// How a message shows a value: a scalar as it is, "an array", "an object".
std::string shown(const Json& value);

}  // namespace kdt::openai
