// Tools as TypeScript, the way K2.5 and K2.6 were trained to read them.
#pragma once

#include <optional>
#include <string>

#include <nlohmann/json.hpp>

namespace kdt {

// `tools`: an array of OpenAI tools as parse_json yields it. Keys are taken in sorted order at every level, and within
// an object required properties come first. Nothing when a schema has no form here (`oneOf`, `const`, a reference to
// another document): the checkpoint's own encoder gives up too, and the chat format declares the tools as sorted JSON.
std::optional<std::string> typescript_tools(const nlohmann::ordered_json& tools);

// The same document with the keys of every object in ascending order.
nlohmann::ordered_json sort_keys(const nlohmann::ordered_json& value);

}  // namespace kdt
