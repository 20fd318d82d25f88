// kdt_reply_*: the reply parser at the C ABI.
#include <memory>
#include <string_view>
#include <vector>

#include "capi/guard.h"
#include "capi/handles.h"
#include "text/reply_parser.h"
#include "text/utf8_stream.h"

using kdt::check_argument;
using kdt::capi::guarded;

// Holds nothing of the engine: it may outlive it.
struct kdt_reply {
  kdt::ReplyParser parser;
};

namespace {

kdt::ReplyParser& parser_of(kdt_reply* handle) {
  check_argument(handle != nullptr, "reply", "NULL", "a reply");
  return handle->parser;
}

}  // namespace

extern "C" {

kdt_status kdt_reply_create(kdt_engine* engine, int32_t thinking, int32_t tools, kdt_reply** out) {
  return guarded([&] {
    check_argument(out != nullptr, "out", "NULL", "a place for the reply");
    *out = nullptr;
    check_argument(thinking >= KDT_THINKING_DEFAULT && thinking <= KDT_THINKING_ON, "thinking",
                   std::to_string(thinking), "-1 to 1");
    const kdt::Engine& from = kdt::capi::engine_of(engine);
    const bool thinks = thinking == KDT_THINKING_DEFAULT ? from.thinks_by_default() : thinking == KDT_THINKING_ON;
    *out = new kdt_reply{kdt::ReplyParser(from.tokenizer(), thinks, tools != 0)};
  });
}

kdt_status kdt_reply_push(kdt_reply* reply, int32_t token_id, const char* text, int64_t text_bytes) {
  return guarded([&] {
    check_argument(text_bytes >= 0 && text_bytes <= int64_t{1} << 40, "text_bytes", std::to_string(text_bytes),
                   "the length of the text");
    check_argument(text != nullptr || text_bytes == 0, "text", "NULL", "UTF-8 text");
    const std::string_view piece(text ? text : "", static_cast<size_t>(text_bytes));
    const size_t wrong = kdt::find_invalid_utf8(piece);
    check_argument(wrong == std::string_view::npos, "text", "byte " + std::to_string(wrong), "whole UTF-8 characters");
    parser_of(reply).push(token_id, piece);
  });
}

kdt_status kdt_reply_finish(kdt_reply* reply) {
  return guarded([&] { parser_of(reply).finish(); });
}

kdt_status kdt_reply_parts(kdt_reply* reply, kdt_part* parts, int64_t capacity, int64_t* n) {
  return guarded([&] {
    std::vector<kdt_part> out;
    for (const kdt::ReplyPart& part : parser_of(reply).parts())
      out.push_back({static_cast<int32_t>(part.kind), part.tool_index, part.text.c_str(),
                     static_cast<int64_t>(part.text.size()), part.id.c_str(), part.name.c_str()});
    kdt::capi::hand_out(out.data(), out.size(), parts, capacity, n);
  });
}

void kdt_reply_destroy(kdt_reply* reply) { delete reply; }

}  // extern "C"
