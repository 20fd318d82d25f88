#include "text/chat.h"

#include "base/error.h"
#include "text/json_text.h"
#include "text/tool_declaration.h"

namespace kdt {
namespace {

using nlohmann::ordered_json;

constexpr uint64_t kMaxMessagesBytes = 16u << 20;
constexpr uint64_t kMaxToolsBytes = 4u << 20;

// A control token ends a piece of text; text that follows text joins it, so that it is tokenised as one.
class Pieces {
 public:
  void control(std::string_view token) { pieces_.push_back({true, std::string(token)}); }
  void text(std::string_view text) {
    if (text.empty()) return;
    if (pieces_.empty() || pieces_.back().control) pieces_.push_back({false, {}});
    pieces_.back().text += text;
  }
  std::vector<ChatPiece> take() { return std::move(pieces_); }

 private:
  std::vector<ChatPiece> pieces_;
};

[[noreturn]] void bad(const std::string& field, const ordered_json* value, std::string_view expected) {
  std::string shown = !value ? "missing" : value->is_string() ? value->get<std::string>() : dump_json(*value, ",", ":");
  fail(Status::invalid_argument, field, shown, expected);
}

const ordered_json* member(const ordered_json& object, const char* key) {
  auto found = object.find(key);
  return found == object.end() ? nullptr : &*found;
}

// A string, or nothing where the member is absent or null.
const std::string* optional_string(const ordered_json& object, const char* key, const std::string& where) {
  const ordered_json* value = member(object, key);
  if (!value || value->is_null()) return nullptr;
  if (!value->is_string()) bad(where + "." + key, value, "a string");
  return &value->get_ref<const std::string&>();
}

const std::string& required_string(const ordered_json& object, const char* key, const std::string& where) {
  const ordered_json* value = member(object, key);
  if (!value || !value->is_string() || value->get_ref<const std::string&>().empty()) {
    bad(where + "." + key, value, "a string");
  }
  return value->get_ref<const std::string&>();
}

struct Message {
  std::string role, name, content, reasoning, tool_call_id;
  struct Call {
    std::string id, arguments;
  };
  std::vector<Call> calls;
};

std::string read_content(const ordered_json& message, const std::string& role, const std::string& where) {
  static constexpr std::string_view kExpected = "a string or text parts";
  const std::string field = where + ".content";
  const ordered_json* content = member(message, "content");
  if (!content && role == "assistant") return {};
  if (!content) bad(field, content, kExpected);
  if (content->is_null()) return {};
  if (content->is_string()) return content->get<std::string>();
  if (!content->is_array()) bad(field, content, kExpected);
  std::string text;
  for (size_t i = 0; i < content->size(); i++) {
    const ordered_json& part = (*content)[i];
    const std::string at = field + "[" + std::to_string(i) + "]";
    if (!part.is_object()) bad(at, &part, "an object");
    const ordered_json* type = member(part, "type");
    if (!type || *type != "text") bad(at + ".type", type, "\"text\"");
    const ordered_json* words = member(part, "text");
    if (!words || !words->is_string()) bad(at + ".text", words, "a string");
    text += words->get_ref<const std::string&>();
  }
  return text;
}

std::vector<Message::Call> read_calls(const ordered_json& message, const std::string& role, const std::string& where) {
  const std::string field = where + ".tool_calls";
  const ordered_json* calls = member(message, "tool_calls");
  if (!calls || calls->is_null()) return {};
  if (!calls->is_array()) bad(field, calls, "an array");
  if (!calls->empty() && role != "assistant") bad(field, calls, "none in a message of role " + role);
  std::vector<Message::Call> out;
  for (size_t i = 0; i < calls->size(); i++) {
    const ordered_json& call = (*calls)[i];
    const std::string at = field + "[" + std::to_string(i) + "]";
    if (!call.is_object()) bad(at, &call, "an object");
    const ordered_json* function = member(call, "function");
    if (!function || !function->is_object()) bad(at + ".function", function, "an object");
    const ordered_json* arguments = member(*function, "arguments");
    if (!arguments || !(arguments->is_string() || arguments->is_object())) {
      bad(at + ".function.arguments", arguments, "a string or an object");
    }
    out.push_back({required_string(call, "id", at),
                   arguments->is_string() ? arguments->get<std::string>() : dump_json(*arguments, ", ", ": ")});
  }
  return out;
}

Message read_message(const ordered_json& json, const std::string& where) {
  if (!json.is_object()) bad(where, &json, "an object");
  Message message;
  message.role = required_string(json, "role", where);
  if (message.role != "system" && message.role != "user" && message.role != "assistant" && message.role != "tool") {
    bad(where + ".role", member(json, "role"), "system, user, assistant or tool");
  }
  const std::string* name = optional_string(json, "name", where);
  message.name = name && !name->empty() ? *name : message.role;
  message.content = read_content(json, message.role, where);
  message.calls = read_calls(json, message.role, where);
  if (message.role == "tool") message.tool_call_id = required_string(json, "tool_call_id", where);
  if (message.role == "assistant") {
    const std::string* reasoning = optional_string(json, "reasoning_content", where);
    if (!reasoning) reasoning = optional_string(json, "reasoning", where);
    if (reasoning) message.reasoning = *reasoning;
  }
  return message;
}

std::vector<Message> read_messages(std::string_view text) {
  ordered_json json = parse_json(text, "messages", Status::invalid_argument, kMaxMessagesBytes);
  if (!json.is_array() || json.empty()) bad("messages", &json, "an array of at least one message");
  std::vector<Message> messages;
  messages.reserve(json.size());
  for (size_t i = 0; i < json.size(); i++) {
    messages.push_back(read_message(json[i], "messages[" + std::to_string(i) + "]"));
  }
  return messages;
}

// The declaration's text; empty without tools.
std::string read_tools(std::string_view text, ToolFormat format) {
  if (text.empty()) return {};
  ordered_json json = parse_json(text, "tools", Status::invalid_argument, kMaxToolsBytes);
  if (json.is_null()) return {};
  if (!json.is_array()) bad("tools", &json, "an array of tools");
  if (json.empty()) return {};
  for (size_t i = 0; i < json.size(); i++) {
    const std::string where = "tools[" + std::to_string(i) + "]";
    if (!json[i].is_object()) bad(where, &json[i], "an object");
    const ordered_json* type = member(json[i], "type");
    if (!type || *type != "function") bad(where + ".type", type, "\"function\"");
    const ordered_json* function = member(json[i], "function");
    if (!function || !function->is_object()) bad(where + ".function", function, "an object");
    required_string(*function, "name", where + ".function");
    optional_string(*function, "description", where + ".function");
    const ordered_json* parameters = member(*function, "parameters");
    if (parameters && !parameters->is_null() && !parameters->is_object()) {
      bad(where + ".function.parameters", parameters, "an object");
    }
  }
  if (format == ToolFormat::json) return dump_json(json, ",", ":");
  if (std::optional<std::string> declaration = typescript_tools(json)) return *declaration;
  return dump_json(sort_keys(json), ",", ":");
}

void render_calls(const std::vector<Message::Call>& calls, Pieces& out) {
  if (calls.empty()) return;
  out.control("<|tool_calls_section_begin|>");
  for (const Message::Call& call : calls) {
    out.control("<|tool_call_begin|>");
    out.text(call.id);
    out.control("<|tool_call_argument_begin|>");
    out.text(call.arguments);
    out.control("<|tool_call_end|>");
  }
  out.control("<|tool_calls_section_end|>");
}

void render_message(const Message& message, bool keeps_reasoning, Pieces& out) {
  out.control(message.role == "user"        ? "<|im_user|>"
              : message.role == "assistant" ? "<|im_assistant|>"
                                            : "<|im_system|>");
  out.text(message.name);
  out.control("<|im_middle|>");
  if (message.role == "assistant") {
    out.control("<think>");
    if (keeps_reasoning) out.text(message.reasoning);
    out.control("</think>");
  }
  if (message.role == "tool") out.text("## Return of " + message.tool_call_id + "\n");
  out.text(message.content);
  render_calls(message.calls, out);
  out.control("<|im_end|>");
}

}  // namespace

std::vector<ChatPiece> render_chat(std::string_view messages_json, std::string_view tools_json,
                                   const ChatOptions& options) {
  std::vector<Message> messages = read_messages(messages_json);
  std::string tools = read_tools(tools_json, options.tool_format);

  Pieces out;
  if (!tools.empty()) {
    out.control("<|im_system|>");
    out.text("tool_declare");
    out.control("<|im_middle|>");
    out.text(tools);
    out.control("<|im_end|>");
  }
  // Turns up to the last plain answer are history; those after it are still in progress, and their reasoning is needed.
  size_t n_history = messages.size();
  while (n_history > 0 && !(messages[n_history - 1].role == "assistant" && messages[n_history - 1].calls.empty())) {
    n_history--;
  }
  bool thinks = options.thinking.value_or(true);
  for (size_t i = 0; i < messages.size(); i++) {
    render_message(messages[i], thinks && (options.preserve_thinking || i >= n_history), out);
  }
  if (options.add_generation_prompt) {
    out.control("<|im_assistant|>");
    out.text("assistant");
    out.control("<|im_middle|>");
    out.control("<think>");
    if (!thinks) out.control("</think>");
  }
  return out.take();
}

std::vector<int32_t> encode_chat(const Tokenizer& tokenizer, const std::vector<ChatPiece>& pieces) {
  std::vector<int32_t> ids;
  for (const ChatPiece& piece : pieces) {
    if (piece.control) {
      std::optional<int32_t> id = tokenizer.special(piece.text);
      if (!id) fail(Status::unsupported, "tokenizer", piece.text, "a special token of that name");
      ids.push_back(*id);
    } else {
      std::vector<int32_t> text = tokenizer.encode(piece.text);
      ids.insert(ids.end(), text.begin(), text.end());
    }
  }
  return ids;
}

}  // namespace kdt
