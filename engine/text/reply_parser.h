// Reads an assistant turn in Kimi's chat format while it streams: reasoning, content and tool calls.
//
// Control tokens count only as token ids: text that looks like one is text. What a model gets wrong still yields whole
// parts: a tool call inside an unclosed `<think>` ends the reasoning, calls need no section around them, an unclosed
// call ends with the next one, and no marker ever appears in a part. How text is cut into events changes no joined
// part. Not thread-safe; keeps nothing of the tokenizer.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "text/tokenizer.h"

namespace kdt {

// The values of KDT_PART_* in kdtree.h.
enum class PartKind : int32_t { reasoning = 1, content = 2, tool_begin = 3, tool_arguments = 4 };

struct ReplyPart {
  PartKind kind;
  int32_t tool_index;        // of a tool part: the call's number within the turn; else -1
  std::string text;          // empty for tool_begin
  std::string id, name;      // of tool_begin: "functions.search:0" and "search"
};

class ReplyParser {
 public:
  // `thinking`: the turn starts inside reasoning. Without `tools` the text of tool calls is content. A checkpoint may
  // lack any of the control tokens.
  ReplyParser(const Tokenizer& tokenizer, bool thinking, bool tools);

  // One token event; token -1 is text alone. The text of a control token ends with its name, which is no part.
  void push(int32_t token, std::string_view text);
  // The turn has ended: an id that was still open begins its call. Nothing may follow.
  void finish();

  // Made by the last push or finish; adjacent text of one kind is one part.
  std::span<const ReplyPart> parts() const { return parts_; }

 private:
  enum class Control { think, think_end, section_begin, call_begin, argument_begin, call_end, section_end };
  struct Marker {
    int32_t id;
    Control control;
    std::string_view name;   // static
  };
  // `section` is between calls, `id` before a call's arguments.
  enum class Place { reasoning, content, section, id, arguments };

  void control(Control control);
  void text(std::string_view text);
  void append(PartKind kind, std::string_view text);
  void begin_call();
  void close_call(bool complete);

  std::vector<Marker> markers_;
  bool tools_;
  Place place_;
  bool in_section_ = false;     // a call that ends leads back into its section, or to content
  bool blank_ = true;           // in a section: nothing but white space since the last marker
  bool has_arguments_ = false;  // of the open call, white space apart
  std::string id_;              // of the open call, until its arguments begin
  int32_t n_calls_ = 0;
  bool finished_ = false;
  std::vector<ReplyPart> parts_;
};

// "functions.search:0" -> "search". An id of another form keeps what it has: without "functions.", without ":0", and if
// nothing is left of it, all of it.
std::string tool_name(std::string_view id);

}  // namespace kdt
