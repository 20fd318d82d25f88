// The OpenAPI description that GET /openapi.json serves: requests from the table of fields, answers as they are built.
#include <utility>

#include "openai_fields.h"

namespace kdt::openai {
namespace {

Json content(const char* type, Json schema) { return {{type, {{"schema", std::move(schema)}}}}; }
Json reference(const char* name) { return {{"$ref", std::string("#/components/schemas/") + name}}; }

Json response(const char* description, const char* type, Json schema) {
  return {{"description", description}, {"content", content(type, std::move(schema))}};
}

Json schemas() {
  return Json::parse(R"({
    "Error": {
      "type": "object",
      "required": ["error"],
      "properties": {"error": {
        "type": "object",
        "required": ["message", "type", "param", "code"],
        "properties": {
          "message": {"type": "string"}, "type": {"type": "string"},
          "param": {"type": ["string", "null"]}, "code": {"type": ["string", "null"]},
          "n_prompt_tokens": {"type": "integer"}, "n_ctx": {"type": "integer"}}}}},
    "Usage": {
      "type": "object",
      "required": ["prompt_tokens", "completion_tokens", "total_tokens"],
      "properties": {
        "prompt_tokens": {"type": "integer", "minimum": 0}, "completion_tokens": {"type": "integer", "minimum": 0},
        "total_tokens": {"type": "integer", "minimum": 0},
        "prompt_tokens_details": {"type": "object", "properties": {"cached_tokens": {"type": "integer"}}},
        "completion_tokens_details": {"type": "object", "properties": {"reasoning_tokens": {"type": "integer"}}}}},
    "Kdtree": {
      "type": "object",
      "required": ["rounds", "tokens_per_round", "accepted_by_depth", "seed", "speculate", "timings_ms"],
      "properties": {
        "rounds": {"type": "integer"}, "tokens_per_round": {"type": "number"}, "tokens_per_second": {"type": "number"},
        "accepted_by_depth": {"type": "array", "items": {"type": "integer"}},
        "drafted_rounds": {"type": "integer"}, "draft_nodes": {"type": "integer"}, "preemptions": {"type": "integer"},
        "seed": {"type": "integer"}, "speculate": {"enum": ["auto", "off", "chain", "tree"]},
        "timings_ms": {"type": "object", "additionalProperties": {"type": "number"}}}},
    "ChatCompletion": {
      "type": "object",
      "required": ["id", "object", "created", "model", "choices", "usage"],
      "properties": {
        "id": {"type": "string"}, "object": {"const": "chat.completion"}, "created": {"type": "integer"},
        "model": {"type": "string"}, "system_fingerprint": {"type": "string"},
        "choices": {"type": "array", "minItems": 1, "items": {
          "type": "object",
          "required": ["index", "message", "logprobs", "finish_reason"],
          "properties": {
            "index": {"type": "integer"},
            "message": {
              "type": "object",
              "required": ["role", "content"],
              "properties": {
                "role": {"const": "assistant"}, "content": {"type": ["string", "null"]}, "refusal": {"type": "null"},
                "reasoning_content": {"type": "string"},
                "tool_calls": {"type": "array", "items": {
                  "type": "object",
                  "required": ["id", "type", "function"],
                  "properties": {
                    "id": {"type": "string"}, "type": {"const": "function"},
                    "function": {
                      "type": "object",
                      "required": ["name", "arguments"],
                      "properties": {"name": {"type": "string"}, "arguments": {"type": "string"}}}}}}}},
            "logprobs": {"type": ["object", "null"]},
            "finish_reason": {"enum": ["stop", "length", "tool_calls"]},
            "stop_reason": {"type": ["string", "integer", "null"]},
            "token_ids": {"type": "array", "items": {"type": "integer"}}}}},
        "prompt_logprobs": {"type": "array"}, "prompt_token_ids": {"type": "array", "items": {"type": "integer"}},
        "usage": {"$ref": "#/components/schemas/Usage"}, "kdtree": {"$ref": "#/components/schemas/Kdtree"}}},
    "Completion": {
      "type": "object",
      "required": ["id", "object", "created", "model", "choices", "usage"],
      "properties": {
        "id": {"type": "string"}, "object": {"const": "text_completion"}, "created": {"type": "integer"},
        "model": {"type": "string"}, "system_fingerprint": {"type": "string"},
        "choices": {"type": "array", "minItems": 1, "items": {
          "type": "object",
          "required": ["index", "text", "logprobs", "finish_reason"],
          "properties": {
            "index": {"type": "integer"}, "text": {"type": "string"}, "logprobs": {"type": ["object", "null"]},
            "finish_reason": {"enum": ["stop", "length"]},
            "stop_reason": {"type": ["string", "integer", "null"]},
            "prompt_logprobs": {"type": "array"},
            "token_ids": {"type": "array", "items": {"type": "integer"}},
            "prompt_token_ids": {"type": "array", "items": {"type": "integer"}}}}},
        "usage": {"$ref": "#/components/schemas/Usage"}, "kdtree": {"$ref": "#/components/schemas/Kdtree"}}},
    "Model": {
      "type": "object",
      "required": ["id", "object", "created", "owned_by"],
      "properties": {
        "id": {"type": "string"}, "object": {"const": "model"}, "created": {"type": "integer"},
        "owned_by": {"type": "string"}, "max_model_len": {"type": "integer"}}},
    "Models": {
      "type": "object",
      "required": ["object", "data"],
      "properties": {
        "object": {"const": "list"},
        "data": {"type": "array", "items": {"$ref": "#/components/schemas/Model"}}}},
    "Tokens": {
      "type": "object",
      "required": ["count", "max_model_len", "tokens"],
      "properties": {
        "count": {"type": "integer"}, "max_model_len": {"type": "integer"},
        "tokens": {"type": "array", "items": {"type": "integer"}}, "token_strs": {"type": "null"}}},
    "Text": {"type": "object", "required": ["prompt"], "properties": {"prompt": {"type": "string"}}}
  })");
}

// What the readers demand of fields together, each rule as the alternatives it leaves. (`if` and `not` would be
// shorter, but generators of test cases cannot follow them.)
Json rules(bool is_chat) {
  static constexpr const char* kStream = R"({"anyOf": [
    {"properties": {"stream": {"const": true}, "prompt_logprobs": {"type": "null"}}, "required": ["stream"]},
    {"properties": {"stream": {"enum": [false, null]}, "stream_options": {"type": "null"}}}]})";
  static constexpr const char* kTopLogprobs = R"({"anyOf": [
    {"properties": {"logprobs": {"const": true}}, "required": ["logprobs"]},
    {"properties": {"top_logprobs": {"type": "null"}}}]})";
  static constexpr const char* kChatTokens = R"({"anyOf": [
    {"properties": {"max_tokens": {"anyOf": [{"type": "integer", "minimum": 1}, {"type": "null"}]},
                    "max_completion_tokens": {"type": "null"}}},
    {"properties": {"max_tokens": {"type": "null"},
                    "max_completion_tokens": {"anyOf": [{"type": "integer", "minimum": 1}, {"type": "null"}]}}},
    {"properties": {"max_completion_tokens": {"type": "null"}, "prompt_logprobs": {"type": "integer"}},
     "required": ["prompt_logprobs"]},
    {"properties": {"max_tokens": {"type": "null"}, "prompt_logprobs": {"type": "integer"}},
     "required": ["prompt_logprobs"]}]})";
  static constexpr const char* kCompletionTokens = R"({"anyOf": [
    {"properties": {"max_tokens": {"anyOf": [{"type": "integer", "minimum": 1}, {"type": "null"}]}}},
    {"properties": {"echo": {"const": true}}, "required": ["echo"]},
    {"properties": {"prompt_logprobs": {"type": "integer"}}, "required": ["prompt_logprobs"]}]})";
  Json all = Json::array({Json::parse(kStream)});
  if (is_chat) all.push_back(Json::parse(kTopLogprobs));
  all.push_back(Json::parse(is_chat ? kChatTokens : kCompletionTokens));
  return all;
}

}  // namespace

std::string Protocol::openapi_body(std::string_view version, bool authenticated) const {
  const auto responses = [](Json good) {
    return Json{{"200", std::move(good)},
                {"default", response("An error, in OpenAI's form", "application/json", reference("Error"))}};
  };
  const auto json = [](const char* description, Json schema) {
    return response(description, "application/json", std::move(schema));
  };
  const auto get = [](const char* id, Json all) {
    return Json{{"get", {{"operationId", id}, {"responses", std::move(all)}}}};
  };
  const auto post = [&](const char* id, Json schema, Json good) {
    return Json{{"post",
                 {{"operationId", id},
                  {"requestBody", {{"required", true}, {"content", content("application/json", std::move(schema))}}},
                  {"responses", responses(std::move(good))}}}};
  };
  const auto open = [](Json path) {  // needs no key
    path["get"]["security"] = Json::array();
    return path;
  };
  const auto generate = [&](Endpoint endpoint, const char* id, const char* answer) {
    Json schema = table_->schema(endpoint);
    schema["allOf"] = rules(endpoint == kChat);
    Json good = json("The answer, or with stream the events of it", reference(answer));
    good["content"]["text/event-stream"] = Json::object();
    return post(id, std::move(schema), std::move(good));
  };

  Json tokenize = table_->schema(kTokenize);
  tokenize["oneOf"] = Json::array();
  for (const char* field : {"prompt", "messages"}) {
    const char* other = std::string_view(field) == "prompt" ? "messages" : "prompt";
    tokenize["oneOf"].push_back(
        {{"required", {field}}, {"properties", {{field, {{"not", {{"type", "null"}}}}}, {other, {{"type", "null"}}}}}});
  }
  Json model_path = get("model", responses(json("One model", reference("Model"))));
  model_path["get"]["parameters"] = Json::array(
      {{{"name", "model"}, {"in", "path"}, {"required", true}, {"schema", {{"type", "string"}, {"minLength", 1}}}}});

  const Json any_object = {{"type", "object"}};
  const auto state = [&](const char* id, const char* good, const char* bad) {
    return open(get(id, {{"200", json(good, any_object)}, {"503", json(bad, any_object)}}));
  };
  Json paths = {
      {"/v1/chat/completions", generate(kChat, "chat", "ChatCompletion")},
      {"/v1/completions", generate(kCompletion, "complete", "Completion")},
      {"/v1/models", get("models", responses(json("The served models", reference("Models"))))},
      {"/v1/models/{model}", std::move(model_path)},
      {"/tokenize", post("tokenize", std::move(tokenize), json("The token ids", reference("Tokens")))},
      {"/detokenize", post("detokenize", table_->schema(kDetokenize), json("The text", reference("Text")))},
      {"/v1/abort",
       post("abort", Json::parse(R"({"type": "object", "properties": {"id": {"type": "string"}}, "required": ["id"]})"),
            json("The response of that id ends with an error", any_object))},
      {"/reset_prefix_cache",
       {{"post",
         {{"operationId", "reset_prefix_cache"}, {"responses", responses(json("How many pages", any_object))}}}}},
      {"/health", state("health", "The engine lives", "The engine failed or stands still")},
      {"/ready", state("ready", "New requests are taken", "Starting or shutting down")},
      {"/version", open(get("version", {{"200", json("The version", any_object)}}))},
      {"/metrics", open(get("metrics", {{"200", response("Prometheus figures", "text/plain", {{"type", "string"}})}}))},
      {"/openapi.json", get("openapi", responses(json("This description", any_object)))}};
  Json document = {{"openapi", "3.1.0"},
                   {"info", {{"title", "kdtree-engine"}, {"version", std::string(version)}}},
                   {"paths", std::move(paths)},
                   {"components", {{"schemas", schemas()}}}};
  if (authenticated) {
    document["components"]["securitySchemes"] = {{"key", {{"type", "http"}, {"scheme", "bearer"}}}};
    document["security"] = Json::array({{{"key", Json::array()}}});
  }
  return write_json(document);
}

}  // namespace kdt::openai
