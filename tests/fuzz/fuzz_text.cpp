// The text room on arbitrary bytes. The first byte chooses what the rest is: the tokenizer's two files (NUL between
// them), the chat format's messages and tools (NUL between them), a text to tokenise, or a byte stream in pieces.
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>

#include "base/error.h"
#include "text/chat.h"
#include "text/tokenizer.h"
#include "text/utf8_stream.h"

namespace {

void demand(bool good) {
  if (!good) std::abort();
}

// The 256 single bytes and a few merges, in base64.
const kdt::Tokenizer& byte_tokenizer() {
  static const kdt::Tokenizer tokenizer = [] {
    static constexpr std::string_view kDigits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    std::string model;
    for (int byte = 0; byte < 256; byte++) {
      model += kDigits[byte >> 2];
      model += kDigits[(byte & 3) << 4];
      model += "== " + std::to_string(byte) + "\n";
    }
    model += "YWE= 256\nYWFhYQ== 257\nICA= 258\nYWI= 259\n4pA= 260\n";
    return kdt::Tokenizer::parse(model, R"({"added_tokens_decoder":{}})", "fuzz");
  }();
  return tokenizer;
}

void check_tokenizer(std::string_view model, std::string_view config) {
  kdt::Tokenizer tokenizer = kdt::Tokenizer::parse(model, config, "fuzz");
  for (int32_t id = 0; id < tokenizer.size(); id++) demand(!tokenizer.bytes(id).empty());
}

void check_chat(std::string_view messages, std::string_view tools) {
  for (kdt::ToolFormat format : {kdt::ToolFormat::json, kdt::ToolFormat::typescript}) {
    kdt::ChatOptions options;
    options.tool_format = format;
    bool after_text = false;
    for (const kdt::ChatPiece& piece : kdt::render_chat(messages, tools, options)) {
      demand(!piece.text.empty() && kdt::find_invalid_utf8(piece.text) == std::string::npos);
      demand(piece.control || !after_text);
      after_text = !piece.control;
    }
  }
}

void check_stream(std::string_view bytes) {
  kdt::Utf8Stream whole, cut;
  std::string expected = whole.push(bytes);
  expected += whole.flush();
  demand(kdt::find_invalid_utf8(expected) == std::string::npos);
  std::string out;
  for (char byte : bytes) out += cut.push(std::string_view(&byte, 1));
  demand(out + cut.flush() == expected);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  std::string_view text(reinterpret_cast<const char*>(data) + 1, size - 1);
  size_t split = std::min(text.find('\0'), text.size());
  std::string_view first = text.substr(0, split), second = text.substr(std::min(split + 1, text.size()));
  try {
    switch (data[0] % 4) {
      case 0: check_tokenizer(first, second); break;
      case 1: check_chat(first, second); break;
      case 2: demand(byte_tokenizer().decode(byte_tokenizer().encode(text)) == text); break;
      default: check_stream(text); break;
    }
  } catch (const kdt::Error&) {
  }
  return 0;
}
