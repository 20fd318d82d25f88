// Cuts text into the pieces that byte-pair encoding works on: Kimi's chunks, then Kimi's pattern.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

namespace kdt {

// What `str.isspace` and a tiktoken that overflowed its stack made necessary, and what the model was trained with.
constexpr size_t kChunkCharacters = 400'000;
constexpr size_t kRunCharacters = 25'000;

// One chunk of a text, character by character.
class SplitChunk {
 public:
  // Takes at most kChunkCharacters characters from the front of `text` (valid UTF-8), and cuts them off it.
  explicit SplitChunk(std::string_view& text);
  // The next piece, empty at the end. Pieces follow each other without gaps.
  std::string_view next();

 private:
  size_t next_cut() const;
  size_t piece_end() const;
  size_t run_end(size_t at, uint8_t classes) const;
  size_t lower_word_end(size_t at) const;
  size_t upper_word_end(size_t at) const;
  size_t contraction_end(size_t at) const;

  std::string_view text_;
  std::vector<uint8_t> classes_;     // [n characters]
  std::vector<uint32_t> offsets_;    // [n characters + 1], bytes from the start of text_
  size_t at_ = 0;                    // first character of the next piece
  size_t cut_ = 0;                   // the pattern sees nothing from this character on
};

}  // namespace kdt
