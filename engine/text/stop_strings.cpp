#include "text/stop_strings.h"

#include <algorithm>

#include "base/error.h"
#include "text/utf8_stream.h"

namespace kdt {

StopStrings::StopStrings(std::span<const std::string> strings) {
  check_argument(strings.size() <= kMaxStopStrings, "stop", std::to_string(strings.size()) + " strings",
                 "at most " + std::to_string(kMaxStopStrings));
  for (size_t i = 0; i < strings.size(); i++) {
    const std::string& text = strings[i];
    const std::string subject = "stop[" + std::to_string(i) + "]";
    check_argument(!text.empty() && text.size() <= kMaxStopBytes, subject, std::to_string(text.size()) + " bytes",
                   "1 to " + std::to_string(kMaxStopBytes));
    check_argument(find_invalid_utf8(text) == std::string_view::npos, subject, text, "UTF-8");
    Needle needle{text, std::vector<uint16_t>(text.size() + 1, 0)};
    for (size_t end = 1; end < text.size(); end++) {
      size_t border = needle.border[end];
      while (border > 0 && text[border] != text[end]) border = needle.border[border];
      needle.border[end + 1] = static_cast<uint16_t>(border + (text[border] == text[end]));
    }
    needles_.push_back(std::move(needle));
  }
}

std::optional<StopMatch> StopStrings::push(std::string_view text, bool armed) {
  if (over_) return std::nullopt;
  for (const char byte : text) {
    position_++;
    for (Needle& needle : needles_) {
      size_t matched = needle.matched;
      while (matched > 0 && needle.text[matched] != byte) matched = needle.border[matched];
      matched += needle.text[matched] == byte;
      if (matched == needle.text.size()) {
        const int64_t begin = position_ - static_cast<int64_t>(matched);
        // An equal begin came with a shorter string: that one ended first.
        if (armed && (!best_ || begin < best_->begin))
          best_ = {begin, position_, static_cast<int>(&needle - needles_.data())};
        matched = needle.border[matched];
      }
      needle.matched = static_cast<uint16_t>(matched);
    }
    if (best_ && earliest_begin() >= best_->begin) {
      over_ = true;
      return best_;
    }
  }
  return std::nullopt;
}

std::optional<StopMatch> StopStrings::interrupt(int64_t n_bytes) {
  if (over_) return std::nullopt;
  for (Needle& needle : needles_) needle.matched = 0;
  if (best_) {
    over_ = true;
    return best_;
  }
  position_ += n_bytes;
  return std::nullopt;
}

int64_t StopStrings::safe() const { return best_ ? std::min(best_->begin, earliest_begin()) : earliest_begin(); }

void StopStrings::reset() {
  for (Needle& needle : needles_) needle.matched = 0;
  position_ = 0;
  best_.reset();
  over_ = false;
}

int64_t StopStrings::earliest_begin() const {
  uint16_t longest = 0;
  for (const Needle& needle : needles_) longest = std::max(longest, needle.matched);
  return position_ - longest;
}

}  // namespace kdt
