// Kimi's chat format, as code (a checkpoint's template is never executed).
//
// Control tokens are inserted as ids; message contents are encoded with specials off, piece by piece, so text that looks
// like a control token stays text.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "text/tokenizer.h"

namespace kdt {

// How tools are declared: compact JSON (K2-Thinking) or TypeScript (K2.5, K2.6).
enum class ToolFormat { json, typescript };

struct ChatOptions {
  ToolFormat tool_format = ToolFormat::json;
  // Unset: the assistant turn opens with `<think>`, as true does, and reasoning of the turns in progress is kept.
  std::optional<bool> thinking;
  bool preserve_thinking = false;    // keep the reasoning of earlier turns too (K2.6)
  bool add_generation_prompt = true;
};

// One control token or one piece of ordinary text, in order; the rendering before tokenisation.
struct ChatPiece {
  bool control;
  std::string text;
};

// `messages_json`: an array in OpenAI's form (roles system, user, assistant, tool; content a string, null or text parts;
// name, tool_calls, tool_call_id, reasoning_content or reasoning). `tools_json`: empty, or an array of OpenAI tools.
// Error(invalid_argument) naming the message and field when something is missing or of the wrong kind.
std::vector<ChatPiece> render_chat(std::string_view messages_json, std::string_view tools_json, const ChatOptions& options);
std::vector<int32_t> encode_chat(const Tokenizer& tokenizer, const std::vector<ChatPiece>& pieces);

}  // namespace kdt
