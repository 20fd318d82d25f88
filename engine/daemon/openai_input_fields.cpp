// What is asked: the model, a prompt or a conversation, and its tools.
#include <string>
#include <utility>

#include "openai_fields.h"

namespace kdt::openai {
namespace {

constexpr int64_t kMaxTools = 1024;
constexpr int64_t kMaxMessages = 65536;

void read_model(const Json& value, Draft& draft) {
  const std::string& name = read_string("model", value);
  for (const std::string& served : draft.served.names) {
    if (name == served) {
      draft.request.model = name;
      return;
    }
  }
  throw model_not_found(name, draft.served.names);
}

// ------------------------------------------------------------------------------------------------ prompts
void add_text(const std::string& name, const Json& value, Draft& draft) {
  const std::string& text = read_string(name, value);
  if (text.empty()) throw invalid_value(name, "an empty string", "at least one character");
  draft.request.prompts.push_back({true, text, {}});
}

void add_ids(const std::string& name, const Json& value, Draft& draft) {
  std::vector<int32_t> ids = read_ids(name, value, INT32_MAX, draft.served);
  if (ids.empty()) throw invalid_value(name, "an empty array", "at least one token id");
  draft.request.prompts.push_back({false, {}, std::move(ids)});
}

// A string, an array of token ids, or an array of either.
void read_prompt(const Json& value, Draft& draft) {
  if (value.is_string()) return add_text("prompt", value, draft);
  if (!value.is_array()) throw invalid_type("prompt", value, "a string, token ids, or an array of them");
  if (value.empty() || value[0].is_number()) return add_ids("prompt", value, draft);
  if (!value[0].is_string() && !value[0].is_array()) {
    throw invalid_type("prompt[0]", value[0], "a token id, a string, or an array of token ids");
  }
  size_t i = 0;
  for (const Json& item : read_array("prompt", value, draft.limits.sequences)) {
    const std::string name = "prompt[" + std::to_string(i++) + "]";
    if (value[0].is_array()) {
      add_ids(name, item, draft);
    } else {
      add_text(name, item, draft);
    }
  }
}

// ------------------------------------------------------------------------------------------------ conversations
// The library reads messages by itself; here is only what it would not notice. The role "developer" is OpenAI's newer
// name of "system".
void read_messages(const Json& value, Draft& draft) {
  draft.has_messages = true;
  Json messages = read_array("messages", value, kMaxMessages);
  if (messages.empty()) throw invalid_value("messages", "an empty array", "at least one message");
  for (size_t i = 0; i < messages.size(); ++i) {
    const std::string name = "messages[" + std::to_string(i) + "]";
    Json& message = messages[i];
    read_members(name, message);
    for (const char* member : {"function_call", "audio", "prefix", "partial"}) {
      const auto found = message.find(member);
      if (found == message.end() || found->is_null() || *found == false) continue;
      throw unsupported(name + "." + member, "it has no meaning in this model's chat format");
    }
    const auto role = message.find("role");
    if (role != message.end() && *role == "developer") *role = "system";
  }
  draft.request.messages_json = write_json(messages);
}

void read_tools(const Json& value, Draft& draft) {
  size_t i = 0;
  for (const Json& tool : read_array("tools", value, kMaxTools)) {
    const std::string name = "tools[" + std::to_string(i++) + "].function";
    if (!tool.is_object()) continue;  // for the library to name
    const auto function = tool.find("function");
    if (function == tool.end() || !function->is_object()) continue;
    const auto strict = function->find("strict");
    if (strict != function->end() && !strict->is_null() && read_boolean(name + ".strict", *strict)) {
      throw unsupported(name + ".strict", "arguments are not constrained to a schema");
    }
  }
  draft.tools = value;
}

void read_tool_choice(const Json& value, Draft& draft) {
  if (value == "auto") return;
  if (value != "none") throw unsupported("tool_choice", "only auto and none are supported: calls cannot be forced");
  draft.tools_off = true;
}

void read_template_kwargs(const Json& value, Draft& draft) {
  for (const auto& [key, setting] : read_members("chat_template_kwargs", value).items()) {
    const std::string name = "chat_template_kwargs." + key;
    if (key == "thinking" || key == "enable_thinking") {
      if (setting.is_null()) continue;
      const int32_t thinking = read_boolean(name, setting) ? KDT_THINKING_ON : KDT_THINKING_OFF;
      if (draft.request.thinking != KDT_THINKING_DEFAULT && draft.request.thinking != thinking) {
        throw invalid_value(name, shown(setting), "the value of its other name");
      }
      draft.request.thinking = thinking;
    } else if (key == "preserve_thinking") {
      draft.request.preserve_thinking = !setting.is_null() && read_boolean(name, setting);
    } else {
      throw ApiError(400, "unknown_parameter", "Unknown parameter: '" + one_line(name) + "'.", one_line(name));
    }
  }
}

// ------------------------------------------------------------------------------------------------ schemas
Json message_schema() {
  return Json::parse(R"({
    "type": "object",
    "properties": {
      "content": {"anyOf": [
        {"type": "string"}, {"type": "null"},
        {"type": "array", "items": {
          "type": "object",
          "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
          "required": ["type", "text"]}}]},
      "name": {"type": ["string", "null"]},
      "tool_calls": {"type": ["array", "null"], "items": {
        "type": "object",
        "properties": {
          "id": {"type": "string", "minLength": 1},
          "function": {
            "type": "object",
            "properties": {"arguments": {"type": ["string", "object"]}},
            "required": ["arguments"]}},
        "required": ["id", "function"]}},
      "function_call": {"enum": [null, false]},
      "audio": {"enum": [null, false]},
      "prefix": {"enum": [null, false]},
      "partial": {"enum": [null, false]}},
    "required": ["role"],
    "anyOf": [
      {"properties": {"role": {"const": "assistant"}, "reasoning_content": {"type": "string"}},
       "required": ["reasoning_content"]},
      {"properties": {
        "role": {"const": "assistant"},
        "reasoning_content": {"type": "null"},
        "reasoning": {"type": ["string", "null"]}}},
      {"properties": {
        "role": {"const": "tool"},
        "tool_call_id": {"type": "string", "minLength": 1},
        "tool_calls": {"anyOf": [{"type": "null"}, {"maxItems": 0}]}},
       "required": ["content", "tool_call_id"]},
      {"properties": {
        "role": {"enum": ["system", "developer", "user"]},
        "tool_calls": {"anyOf": [{"type": "null"}, {"maxItems": 0}]}},
       "required": ["content"]}]
  })");
}

Json tools_schema() {
  return Json::parse(R"({
    "type": "array",
    "maxItems": 1024,
    "items": {
      "type": "object",
      "properties": {
        "type": {"const": "function"},
        "function": {
          "type": "object",
          "properties": {
            "name": {"type": "string", "minLength": 1},
            "description": {"type": ["string", "null"]},
            "parameters": {"type": ["object", "null"]},
            "strict": {"enum": [false, null]}},
          "required": ["name"]}},
      "required": ["type", "function"]}
  })");
}

Json template_kwargs_schema() {
  return Json::parse(R"({
    "type": "object",
    "properties": {
      "thinking": {"type": ["boolean", "null"]},
      "enable_thinking": {"type": ["boolean", "null"]},
      "preserve_thinking": {"type": ["boolean", "null"]}},
    "additionalProperties": false
  })");
}

}  // namespace

Fields input_fields(const ServedModel& model, const RequestLimits& limits) {
  const Json text = {{"type", "string"}, {"minLength", 1}};
  const Json ids = ids_schema(model, 1, INT32_MAX);
  const Json messages = {{"type", "array"}, {"items", message_schema()}, {"minItems", 1}, {"maxItems", kMaxMessages}};
  const auto several = [&](const Json& item) {
    return Json{{"type", "array"}, {"items", item}, {"minItems", 1}, {"maxItems", limits.sequences}};
  };
  return {{"model", kEverywhere, {{"enum", model.names}}, read_model},
          {"messages", kChat, messages, read_messages, true},
          {"messages", kTokenize, messages, read_messages},
          {"prompt", kCompletion, {{"anyOf", {text, ids, several(text), several(ids)}}}, read_prompt, true},
          {"prompt",
           kTokenize,
           {{"type", "string"}},
           [](const Json& value, Draft& draft) {
             draft.has_prompt = true;
             draft.request.prompts = {{true, read_string("prompt", value), {}}};
           }},
          {"tokens", kDetokenize, ids_schema(model, 0, INT32_MAX),
           [](const Json& value, Draft& draft) { draft.tokens = read_ids("tokens", value, INT32_MAX, draft.served); },
           true},
          {"tools", kChat | kTokenize, tools_schema(), read_tools},
          {"tool_choice", kChat, {{"enum", {"auto", "none"}}}, read_tool_choice},
          {"chat_template_kwargs", kChat | kTokenize, template_kwargs_schema(), read_template_kwargs}};
}

}  // namespace kdt::openai
