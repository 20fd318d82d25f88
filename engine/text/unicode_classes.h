// The character classes of Kimi's splitting pattern, of the Unicode version that tiktoken uses.
//
// A table of our own: what a regular-expression library knows of Unicode depends on its version, and thousands of
// characters (a whole block of Han among them) changed class between the one of tiktoken and those of our platforms.
#pragma once

#include <cstdint>

namespace kdt {

// The bits of unicode_classes(), as written by tools/make_unicode_classes.py.
enum UnicodeClass : uint8_t {
  kUpperish = 1,         // \p{Lu} \p{Lt} \p{Lm} \p{Lo} \p{M}, without Han
  kLowerish = 2,         // \p{Ll} \p{Lm} \p{Lo} \p{M}, without Han
  kLetterOrNumber = 4,   // \p{L} \p{N}
  kNumber = 8,           // \p{N}
  kHan = 16,             // \p{Han}: mostly letters, some numbers and symbols
  kSpace = 32,           // \s
  kNewline = 64,         // \r \n
  kPythonSpace = 128,    // str.isspace: \s and U+001C to U+001F
};

// Classes of a code point; those of U+10FFFF for anything beyond. Safe from any thread.
uint8_t unicode_classes(uint32_t code);

}  // namespace kdt
