// UTF-8 as replies need it.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace kdt::openai {

// Bytes of the UTF-8 character that starts at `at`; 0 where none does.
size_t character_bytes(std::string_view text, size_t at);
bool is_utf8(std::string_view text);
// With U+FFFD for each byte that belongs to no character.
std::string mended_utf8(std::string_view text);
// Code points of UTF-8 text: the unit of text_offset.
int64_t count_characters(std::string_view text);

}  // namespace kdt::openai
