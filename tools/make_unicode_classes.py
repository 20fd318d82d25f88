#!/usr/bin/env python3
"""Write engine/text/unicode_classes.cpp: the character classes of Kimi's splitting pattern.

The classes are read out of tiktoken's own regular-expression engine, so the table is of the Unicode version that the
installed tiktoken uses, whatever the distribution's libraries know. Run it again when a newer tiktoken moves on.

    make_unicode_classes.py [OUT]
"""
import argparse
import pathlib
import sys

import tiktoken

# One bit a class, in the order of the enum in engine/text/unicode_classes.h.
CLASSES = [
    r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]",
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]",
    r"[\p{L}\p{N}]",
    r"\p{N}",
    r"\p{Han}",
    r"\s",
    r"[\r\n]",
    r"[\s\x1c-\x1f]",
]
SURROGATES = range(0xD800, 0xE000)


def members(pattern: str, characters: str) -> set[str]:
    """encode_ordinary keeps what the pattern matches and drops the rest."""
    encoding = tiktoken.Encoding("bytes", pat_str=pattern, special_tokens={},
                                 mergeable_ranks={bytes([i]): i for i in range(256)})
    return set(encoding.decode(encoding.encode_ordinary(characters)))


def main() -> None:
    root = pathlib.Path(__file__).resolve().parent.parent
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", type=pathlib.Path, default=root / "engine/text/unicode_classes.cpp",
                        help="the file to write [default: %(default)s]")
    out = parser.parse_args().out
    characters = "".join(chr(c) for c in range(0x110000) if c not in SURROGATES)
    sets = [members(pattern, characters) for pattern in CLASSES]
    spaces = {c for c in characters if c.isspace()}
    if sets[-1] != spaces:
        sys.exit(f"error: str.isspace: {sorted(sets[-1] ^ spaces)}: expected \\s and U+001C to U+001F")
    starts, last = [], None
    for code in range(0x110000):
        value = sum(1 << bit for bit, members_ in enumerate(sets) if chr(code) in members_)
        if value != last:
            starts.append(f"0x{code << 8 | value:x}")
            last = value
    lines, line = [], " "
    for entry in starts:
        if len(line) + len(entry) + 2 > 120:
            lines.append(line)
            line = " "
        line += f" {entry},"
    lines.append(line)
    body = "\n".join(lines)
    head = f"// Written by tools/make_unicode_classes.py with tiktoken {tiktoken.__version__}; not to be edited."
    out.write_text(f"""{head}
#include "text/unicode_classes.h"

#include <algorithm>
#include <iterator>

namespace kdt {{
namespace {{

// First code point << 8 | classes of it and of all up to the next entry; ascending.
constexpr uint32_t kRanges[] = {{
{body}
}};

uint8_t find_classes(uint32_t code) {{
  return static_cast<uint8_t>(*std::prev(std::upper_bound(std::begin(kRanges), std::end(kRanges), code << 8 | 0xff)));
}}

struct Ascii {{
  uint8_t classes[128];
  Ascii() {{
    for (uint32_t code = 0; code < 128; code++) classes[code] = find_classes(code);
  }}
}};

}}  // namespace

uint8_t unicode_classes(uint32_t code) {{
  static const Ascii ascii;
  return code < 128 ? ascii.classes[code] : find_classes(code);
}}

}}  // namespace kdt
""")


if __name__ == "__main__":
    main()
