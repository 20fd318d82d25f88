#include "text/reply_parser.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "base/error.h"
#include "text/utf8_stream.h"

namespace kdt {
namespace {

// A model that never ends an id must not make it grow for ever; the longest function name of OpenAI's API has 64 bytes.
constexpr size_t kMaxIdBytes = 1024;

constexpr std::string_view kBlanks = " \t\r\n";

std::string_view trimmed(std::string_view text) {
  const size_t begin = text.find_first_not_of(kBlanks);
  if (begin == std::string_view::npos) return {};
  return text.substr(begin, text.find_last_not_of(kBlanks) + 1 - begin);
}

}  // namespace

ReplyParser::ReplyParser(const Tokenizer& tokenizer, bool thinking, bool tools)
    : tools_(tools), place_(thinking ? Place::reasoning : Place::content) {
  // Some checkpoints spell the section's begin in the singular.
  static constexpr std::pair<std::string_view, Control> kKnown[] = {
      {"<think>", Control::think},
      {"</think>", Control::think_end},
      {"<|tool_calls_section_begin|>", Control::section_begin},
      {"<|tool_call_section_begin|>", Control::section_begin},
      {"<|tool_call_begin|>", Control::call_begin},
      {"<|tool_call_argument_begin|>", Control::argument_begin},
      {"<|tool_call_end|>", Control::call_end},
      {"<|tool_calls_section_end|>", Control::section_end},
  };
  for (const auto& [name, control] : kKnown) {
    if (std::optional<int32_t> id = tokenizer.special(name)) markers_.push_back({*id, control, name});
  }
}

void ReplyParser::push(int32_t token, std::string_view piece) {
  check_argument(!finished_, "reply", "finished", "no token after its end");
  parts_.clear();
  const auto marker = std::find_if(markers_.begin(), markers_.end(), [&](const Marker& m) { return m.id == token; });
  if (marker == markers_.end()) return text(piece);
  // Ordinary text that was held back may stand before the name.
  if (piece.ends_with(marker->name)) piece.remove_suffix(marker->name.size());
  text(piece);
  control(marker->control);
}

void ReplyParser::finish() {
  parts_.clear();
  close_call(false);
  finished_ = true;
}

void ReplyParser::control(Control control) {
  const bool in_call = place_ == Place::id || place_ == Place::arguments;
  const bool in_tools = in_call || place_ == Place::section;
  switch (control) {
    case Control::think:
      if (!in_tools) place_ = Place::reasoning;
      return;
    case Control::think_end:
      if (!in_tools) place_ = Place::content;
      return;
    case Control::section_begin:
    case Control::call_begin:
      close_call(false);
      place_ = Place::content;
      if (!tools_) return;
      if (control == Control::section_begin) in_section_ = true;
      place_ = control == Control::section_begin ? Place::section : Place::id;
      blank_ = true;
      return;
    case Control::argument_begin:
      if (place_ != Place::id) return;
      begin_call();
      place_ = Place::arguments;
      return;
    case Control::call_end:
      if (in_call) close_call(true);
      return;
    case Control::section_end:
      close_call(false);
      if (in_tools) place_ = Place::content;
      in_section_ = false;
      return;
  }
}

void ReplyParser::text(std::string_view piece) {
  switch (place_) {
    case Place::reasoning: return append(PartKind::reasoning, piece);
    case Place::content: return append(PartKind::content, piece);
    case Place::arguments:
      has_arguments_ = has_arguments_ || !trimmed(piece).empty();
      return append(PartKind::tool_arguments, piece);
    case Place::id:
      // White space before the id takes no room.
      if (id_.empty()) piece.remove_prefix(std::min(piece.find_first_not_of(kBlanks), piece.size()));
      id_ += piece.substr(0, kMaxIdBytes - std::min(id_.size(), kMaxIdBytes));
      return;
    case Place::section:
      // White space lays calls out; words between them are the model's, and content.
      if (blank_) piece.remove_prefix(std::min(piece.find_first_not_of(kBlanks), piece.size()));
      blank_ = blank_ && piece.empty();
      return append(PartKind::content, piece);
  }
}

void ReplyParser::append(PartKind kind, std::string_view piece) {
  if (piece.empty()) return;
  const int32_t index = kind == PartKind::tool_arguments ? n_calls_ - 1 : -1;
  if (parts_.empty() || parts_.back().kind != kind || parts_.back().tool_index != index)
    parts_.push_back({kind, index, {}, {}, {}});
  parts_.back().text += piece;
}

// The open call's id is complete.
void ReplyParser::begin_call() {
  std::string id(trimmed(id_));
  // Cut at the limit, perhaps inside a character.
  id.resize(std::min(id.size(), find_invalid_utf8(id)));
  std::string name = tool_name(id);
  parts_.push_back({PartKind::tool_begin, n_calls_++, {}, std::move(id), std::move(name)});
  id_.clear();
  has_arguments_ = false;
}

// `complete`: by its end marker. Its arguments are JSON then: none at all are an empty object.
void ReplyParser::close_call(bool complete) {
  if (place_ != Place::id && place_ != Place::arguments) return;
  if (place_ == Place::id && !trimmed(id_).empty()) {
    begin_call();
    place_ = Place::arguments;
  }
  if (complete && place_ == Place::arguments && !has_arguments_) append(PartKind::tool_arguments, "{}");
  id_.clear();
  place_ = in_section_ ? Place::section : Place::content;
  blank_ = true;
}

std::string tool_name(std::string_view id) {
  constexpr std::string_view kPrefix = "functions.";
  std::string_view name = id;
  if (name.starts_with(kPrefix)) name.remove_prefix(kPrefix.size());
  const size_t colon = name.rfind(':');
  if (colon != std::string_view::npos && name.find_first_not_of("0123456789", colon + 1) == std::string_view::npos)
    name = name.substr(0, colon);
  name = trimmed(name);
  return std::string(name.empty() ? id : name);
}

}  // namespace kdt
