// Streams of generated text. An even first byte: stop strings, compared with a search of the whole text; the input is
// pieces of length-prefixed bytes, the first ones the strings. An odd one: an assistant turn, a byte below 16 a control
// token and any other a byte of text, read whole and cut.
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "text/reply_parser.h"
#include "text/stop_strings.h"
#include "text/utf8_stream.h"

namespace {

void demand(bool good) {
  if (!good) std::abort();
}

std::string_view take(std::string_view& data) {
  if (data.empty()) return {};
  const size_t size = static_cast<unsigned char>(data[0]) % 32;
  const std::string_view piece = data.substr(1, size);
  data.remove_prefix(1 + piece.size());
  return piece;
}

void check_stop(std::string_view data) {
  std::vector<std::string> strings(data.empty() ? 0 : static_cast<unsigned char>(data[0]) % 40);
  if (!data.empty()) data.remove_prefix(1);
  for (std::string& string : strings) string = take(data);
  kdt::StopStrings matcher(strings);
  std::string text;
  std::optional<kdt::StopMatch> found;
  for (int64_t safe = 0; !data.empty() && !found;) {
    const std::string_view piece = take(data);
    text += piece;
    found = matcher.push(piece);
    demand(matcher.safe() >= safe && matcher.safe() <= static_cast<int64_t>(text.size()));
    safe = matcher.safe();
  }
  if (!found) found = matcher.interrupt();
  size_t begin = std::string::npos;
  for (const std::string& string : strings) begin = std::min(begin, text.find(string));
  demand(found.has_value() == (begin != std::string::npos));
  if (!found) return;
  demand(static_cast<size_t>(found->begin) == begin && matcher.safe() == found->begin);
  demand(text.substr(begin).starts_with(strings[static_cast<size_t>(found->index)]));
  demand(found->end - found->begin == static_cast<int64_t>(strings[static_cast<size_t>(found->index)].size()));
}

constexpr std::string_view kMarkers[] = {
    "<think>", "</think>", "<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>",
    "<|tool_call_end|>", "<|tool_calls_section_end|>"};
constexpr int32_t kFirstSpecial = 256;

// The 256 single bytes, in base64, and the control tokens.
const kdt::Tokenizer& tokenizer() {
  static const kdt::Tokenizer tokenizer = [] {
    static constexpr std::string_view kDigits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    std::string model, names;
    for (int byte = 0; byte < 256; byte++) {
      model += kDigits[byte >> 2];
      model += kDigits[(byte & 3) << 4];
      model += "== " + std::to_string(byte) + "\n";
    }
    for (size_t i = 0; i < std::size(kMarkers); i++) {
      names += (names.empty() ? "\"" : ",\"") + std::to_string(kFirstSpecial + i) + "\":{\"content\":\"" +
               std::string(kMarkers[i]) + "\"}";
    }
    return kdt::Tokenizer::parse(model, "{\"added_tokens_decoder\":{" + names + "}}", "fuzz");
  }();
  return tokenizer;
}

// The parts of a turn, joined: kinds, call numbers and texts.
class Reading {
 public:
  explicit Reading(bool thinking, bool tools) : parser_(tokenizer(), thinking, tools) {}
  void push(int32_t token, std::string_view text) {
    parser_.push(token, text);
    collect();
  }
  std::string finish() {
    parser_.finish();
    collect();
    return joined_;
  }

 private:
  void collect() {
    for (const kdt::ReplyPart& part : parser_.parts()) {
      demand(kdt::find_invalid_utf8(part.text + part.id + part.name) == std::string_view::npos);
      const auto kind = static_cast<int>(part.kind) * 1000 + part.tool_index;
      if (kind != last_ || part.kind == kdt::PartKind::tool_begin)
        joined_ += '\0' + std::to_string(kind) + part.id + '\0' + part.name;
      last_ = kind;
      joined_ += part.text;
    }
  }

  kdt::ReplyParser parser_;
  std::string joined_;
  int last_ = 0;
};

void check_reply(std::string_view data, bool thinking, bool tools) {
  Reading whole(thinking, tools), cut(thinking, tools);
  kdt::Utf8Stream characters, bytes;
  std::string held;
  for (const char c : data) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte >= 16) {
      held += characters.push({&c, 1});
      cut.push(-1, bytes.push({&c, 1}));
      continue;
    }
    const size_t marker = byte % std::size(kMarkers);
    const std::string name(kMarkers[marker]);
    const auto token = kFirstSpecial + static_cast<int32_t>(marker);
    whole.push(token, held + characters.push(name));
    cut.push(token, bytes.push(name));
    held.clear();
  }
  whole.push(-1, held + characters.flush());
  cut.push(-1, bytes.flush());
  demand(whole.finish() == cut.finish());
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const std::string_view text(reinterpret_cast<const char*>(data) + 1, size - 1);
  try {
    if (data[0] % 2 == 0) {
      check_stop(text);
    } else {
      check_reply(text, data[0] & 2, data[0] & 4);
    }
  } catch (const kdt::Error&) {
  }
  return 0;
}
