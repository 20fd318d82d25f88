#include "text/split.h"

#include <algorithm>

#include "text/unicode_classes.h"

namespace kdt {
namespace {

constexpr size_t kNone = static_cast<size_t>(-1);

// The code point at the front of valid UTF-8, and its length in bytes.
struct Character {
  uint32_t code;
  uint32_t size;
};

Character front_character(std::string_view text) {
  auto byte = [&](size_t i) { return static_cast<uint32_t>(static_cast<unsigned char>(text[i])); };
  uint32_t lead = byte(0);
  if (lead < 0x80) return {lead, 1};
  if (lead < 0xe0) return {(lead & 0x1f) << 6 | (byte(1) & 0x3f), 2};
  if (lead < 0xf0) return {(lead & 0x0f) << 12 | (byte(1) & 0x3f) << 6 | (byte(2) & 0x3f), 3};
  return {(lead & 7) << 18 | (byte(1) & 0x3f) << 12 | (byte(2) & 0x3f) << 6 | (byte(3) & 0x3f), 4};
}

}  // namespace

SplitChunk::SplitChunk(std::string_view& text) {
  size_t n_expected = std::min(text.size(), kChunkCharacters);
  classes_.reserve(n_expected);
  offsets_.reserve(n_expected + 1);
  size_t size = 0;
  while (size < text.size() && classes_.size() < kChunkCharacters) {
    Character c = front_character(text.substr(size));
    classes_.push_back(unicode_classes(c.code));
    offsets_.push_back(static_cast<uint32_t>(size));
    size += c.size;
  }
  offsets_.push_back(static_cast<uint32_t>(size));
  text_ = text.substr(0, size);
  text.remove_prefix(size);
}

std::string_view SplitChunk::next() {
  if (at_ == classes_.size()) return {};
  if (at_ == cut_) cut_ = next_cut();
  size_t end = piece_end();
  std::string_view piece = text_.substr(offsets_[at_], offsets_[end] - offsets_[at_]);
  at_ = end;
  return piece;
}

// A cut falls before the character that makes a run of white space, or of anything else, longer than kRunCharacters;
// that character starts the next run.
size_t SplitChunk::next_cut() const {
  size_t run = 1;
  for (size_t i = at_ + 1; i < classes_.size(); i++) {
    if ((classes_[i] ^ classes_[i - 1]) & kPythonSpace) {
      run = 1;
    } else if (++run > kRunCharacters) {
      return i;
    }
  }
  return classes_.size();
}

size_t SplitChunk::run_end(size_t at, uint8_t classes) const {
  while (at < cut_ && (classes_[at] & classes)) at++;
  return at;
}

// [U]*[L]+ and an optional contraction, as a backtracking matcher finds it: U gives back what L needs.
size_t SplitChunk::lower_word_end(size_t at) const {
  size_t upper = run_end(at, kUpperish);
  if (upper < cut_ && (classes_[upper] & kLowerish)) return contraction_end(run_end(upper, kLowerish));
  while (upper > at) {
    if (classes_[--upper] & kLowerish) return contraction_end(upper + 1);
  }
  return kNone;
}

// [U]+[L]* and an optional contraction.
size_t SplitChunk::upper_word_end(size_t at) const {
  size_t upper = run_end(at, kUpperish);
  return upper == at ? kNone : contraction_end(run_end(upper, kLowerish));
}

// (?i:'s|'t|'re|'ve|'m|'ll|'d)?: U+017F (ſ) folds to s, no other letter outside ASCII to one of these.
size_t SplitChunk::contraction_end(size_t at) const {
  auto letter = [&](size_t i) -> char {
    if (i >= cut_) return 0;
    std::string_view c = text_.substr(offsets_[i], offsets_[i + 1] - offsets_[i]);
    if (c == "\u017f") return 's';
    if (c.size() > 1) return 0;
    return c[0] >= 'A' && c[0] <= 'Z' ? static_cast<char>(c[0] + ('a' - 'A')) : c[0];
  };
  if (letter(at) != '\'') return at;
  char first = letter(at + 1);
  if (first == 's' || first == 't' || first == 'm' || first == 'd') return at + 2;
  char second = letter(at + 2);
  bool two = (first == 'r' && second == 'e') || (first == 'v' && second == 'e') || (first == 'l' && second == 'l');
  return two ? at + 3 : at;
}

// The alternatives of Kimi's pattern in their order, each as long as a backtracking matcher makes it:
//   [\p{Han}]+
//   [^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(contraction)?
//   [^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(contraction)?
//   \p{N}{1,3}
//    ?[^\s\p{L}\p{N}]+[\r\n]*
//   \s*[\r\n]+
//   \s+(?!\S)
//   \s+
// Each run is read a bounded number of times before it is left behind, so the whole is linear.
size_t SplitChunk::piece_end() const {
  uint8_t first = classes_[at_];
  if (first & kHan) return run_end(at_, kHan);

  bool prefix = !(first & (kLetterOrNumber | kNewline));
  size_t end = kNone;
  if (prefix) end = lower_word_end(at_ + 1);
  if (end == kNone) end = lower_word_end(at_);
  if (end == kNone && prefix) end = upper_word_end(at_ + 1);
  if (end == kNone) end = upper_word_end(at_);
  if (end != kNone) return end;

  if (first & kNumber) {   // no further: a run of digits is many pieces
    size_t number = at_ + 1;
    while (number < std::min(cut_, at_ + 3) && (classes_[number] & kNumber)) number++;
    return number;
  }

  auto punctuation_end = [&](size_t at) {
    while (at < cut_ && !(classes_[at] & (kSpace | kLetterOrNumber))) at++;
    return at;
  };
  size_t mark = at_ + (text_[offsets_[at_]] == ' ');
  end = punctuation_end(mark);
  if (end > mark) return run_end(end, kNewline);

  end = run_end(at_, kSpace);
  for (size_t i = end; i > at_; i--) {
    if (classes_[i - 1] & kNewline) return i;
  }
  return end == cut_ || end == at_ + 1 ? end : end - 1;
}

}  // namespace kdt
