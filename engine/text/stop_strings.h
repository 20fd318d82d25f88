// Finds the first stop string in a text that arrives in pieces.
//
// First is the match that starts earliest, and of those the one that ends first: what a search of the whole text
// finds, however it is cut into pieces. A match is therefore reported only when no string that began before it can
// still complete. All offsets are bytes from the start of the stream. When pieces are whole UTF-8 characters, so is
// every span between them. Time is linear in text and strings: Knuth-Morris-Pratt for each string. Not thread-safe.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace kdt {

constexpr size_t kMaxStopStrings = 32;
constexpr size_t kMaxStopBytes = 1024;

struct StopMatch {
  int64_t begin, end;   // the text ends at `begin`; `end` is past the string's last byte
  int index;            // of the string, as given
};

class StopStrings {
 public:
  // Up to 32 strings, each 1 to 1024 bytes of UTF-8: otherwise Error(invalid_argument) naming stop[i]. None is fine.
  explicit StopStrings(std::span<const std::string> strings);

  // The next piece. Unless `armed`, no string that completes in it is a match (min_tokens); one that is begun in it may
  // be. After a match the matcher takes no more text until reset().
  std::optional<StopMatch> push(std::string_view text, bool armed = true);

  // The stream has ended, or a special token of `n_bytes` follows: no match reaches past here, so one that waited for a
  // longer string is decided. Without one everything is safe, those bytes included.
  std::optional<StopMatch> interrupt(int64_t n_bytes = 0);

  // Bytes from the start of the stream that no match of text to come can contain: they may be released. After a match,
  // its begin.
  int64_t safe() const;

  // A new stream.
  void reset();

 private:
  struct Needle {
    std::string text;
    std::vector<uint16_t> border;   // [size + 1]: of the first i bytes, the longest proper prefix that also ends them
    uint16_t matched = 0;           // bytes of `text` that end the stream so far
  };
  int64_t earliest_begin() const;

  std::vector<Needle> needles_;
  int64_t position_ = 0;
  std::optional<StopMatch> best_;   // the earliest complete match so far
  bool over_ = false;
};

}  // namespace kdt
