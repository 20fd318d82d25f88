// Requests of the OpenAI protocol: what is read, what is refused and under which name. No engine.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <doctest/doctest.h>

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "openai_json.h"
#include "openai_request.h"

using namespace kdt::openai;

namespace {

const Protocol& protocol() {
  static const Protocol instance = [] {
    ServedModel model;
    model.names = {"tiny-k2", "other-name"};
    model.max_context = 1024;
    model.vocab_size = 2048;
    model.has_drafter = true;
    return Protocol(model);
  }();
  return instance;
}

// A request with `members` beside what is required.
std::string chat_body(const std::string& members) {
  return R"({"messages":[{"role":"user","content":"hi"}])" + std::string(members.empty() ? "" : ",") + members + "}";
}
std::string completion_body(const std::string& members) {
  return R"({"prompt":"hi")" + std::string(members.empty() ? "" : ",") + members + "}";
}
GenerationRequest chat(const std::string& members) { return protocol().parse_chat(chat_body(members)); }
GenerationRequest completion(const std::string& members) {
  return protocol().parse_completion(completion_body(members));
}

ApiError error_of(const std::function<void()>& work) {
  try {
    work();
  } catch (const ApiError& error) {
    const Json body = Json::parse(error.body());
    CHECK(body["error"]["message"] == error.message);
    return error;
  }
  FAIL("no error");
  throw std::logic_error("unreachable");
}
ApiError chat_error(const std::string& members) {
  CAPTURE(members);
  return error_of([&] { chat(members); });
}
ApiError completion_error(const std::string& members) {
  CAPTURE(members);
  return error_of([&] { completion(members); });
}

std::string repeat(const std::string& text, size_t n) {
  std::string out;
  for (size_t i = 0; i < n; ++i) out += text;
  return out;
}

}  // namespace

TEST_CASE("bodies that are not a JSON object within the limits are 400 invalid_json") {
  const auto nested = [](size_t depth) { return R"({"metadata":)" + repeat("[", depth) + repeat("]", depth) + "}"; };
  std::string many = R"({"metadata":{)";
  for (int i = 0; i <= kMaxMembers; ++i) many += (i ? ",\"k" : "\"k") + std::to_string(i) + "\":0";
  const std::vector<std::string> bad = {
      "", " ", "{", "}", "[]", "null", "1", "\"text\"", "{} {}", "{\"a\":1,}", "{'a':1}", "{\"a\":NaN}",
      "{\"a\":1e999}", "{\"a\":\"\xff\"}", "{\"a\":\"\xc0\x80\"}", "{\"a\":\"\\ud800\"}", "{\"a\":\"\xed\xa0\x80\"}",
      "{\"a\":\"line\nbreak\"}", R"({"n":1,"n":1})", R"({"metadata":{"a":1,"a":2}})", nested(64), nested(100000),
      many + "}}", std::string("{\"a\":\0}", 7), "{\"\xff\":1}"};
  for (const std::string& body : bad) {
    CAPTURE(one_line(body));
    for (const auto& parse : std::vector<std::function<void()>>{
             [&] { protocol().parse_chat(body); }, [&] { protocol().parse_completion(body); },
             [&] { protocol().parse_tokenize(body); }, [&] { protocol().parse_detokenize(body); }}) {
      const ApiError error = error_of(parse);
      CHECK(error.http_status == 400);
      CHECK(error.type == "invalid_request_error");
      CHECK(error.code == "invalid_json");
      CHECK(error.message == one_line(error.message, 1000));
    }
  }
  CHECK_NOTHROW(chat(nested(63).substr(1, nested(63).size() - 2)));
  CHECK(error_of([] { protocol().parse_chat(R"({"metadata":{"a":1,"a":2}})"); }).message.find("'a' occurs twice") !=
        std::string::npos);
}

TEST_CASE("defaults are OpenAI's") {
  const GenerationRequest c = chat("");
  CHECK(c.model == "tiny-k2");
  CHECK(c.temperature == 1);
  CHECK(!c.max_tokens.has_value());
  CHECK(c.max_context == 1024);
  CHECK(c.n == 1);
  CHECK(!c.stream);
  CHECK(c.logprobs == -1);
  CHECK(c.prompt_logprobs == -1);
  CHECK(c.thinking == KDT_THINKING_DEFAULT);
  CHECK(completion("").max_tokens == 16);
  CHECK(chat("").seed != chat("").seed);
}

TEST_CASE("every optional field may be null, which is as good as absent") {
  const Json paths = Json::parse(protocol().openapi_body("1", false))["paths"];
  const std::map<std::string, std::function<void(const std::string&)>> endpoints = {
      {"/v1/chat/completions", [](const std::string& members) { chat(members); }},
      {"/v1/completions", [](const std::string& members) { completion(members); }},
      {"/tokenize",
       [](const std::string& members) { protocol().parse_tokenize(R"({"prompt":"x",)" + members + "}"); }}};
  for (const auto& [path, parse] : endpoints) {
    const Json& schema = paths[path]["post"]["requestBody"]["content"]["application/json"]["schema"];
    CHECK(schema["additionalProperties"] == false);
    size_t n = 0;
    for (const auto& [name, value] : schema["properties"].items()) {
      if (name == "messages" || name == "prompt") continue;
      const std::string& field = name;
      CAPTURE(field);
      CHECK_NOTHROW(parse("\"" + name + "\":null"));
      ++n;
    }
    CHECK(n >= (path == "/tokenize" ? 6 : 50));
  }
}

TEST_CASE("values out of type or range name their field") {
  const std::map<std::string, std::vector<std::string>> both = {
      {"temperature", {"-0.1", "2.1", "\"1\"", "true", "[]", "{}"}},
      {"top_p", {"-0.1", "1.01", "\"x\""}},
      {"top_k", {"-2", "1.5", "2147483648", "1e30", "-1e30", "18446744073709551616"}},
      {"min_p", {"-1", "1.5"}},
      {"presence_penalty", {"-2.1", "2.1"}},
      {"frequency_penalty", {"-2.1", "2.1"}},
      {"repetition_penalty", {"0", "-1", "10.5"}},
      {"seed", {"1.5", "\"1\"", "true", "18446744073709551616", "-9223372036854775809", "1e40"}},
      {"max_tokens", {"-1", "0", "2147483648", "9223372036854775808", "1.5", "\"5\"", "true"}},
      {"min_tokens", {"-1", "1.2"}},
      {"ignore_eos", {"1", "\"true\""}},
      {"stream", {"1", "\"yes\""}},
      {"n", {"0", "-1", "65", "1e9", "9223372036854775807", "1.5"}},
      {"logit_bias",
       {"[]", "1", R"({"x":1})", R"({"-1":1})", R"({"01":1})", R"({"2048":1})", R"({"99999999999999999999":1})",
        R"({"":1})", R"({"1 ":1})"}},
      {"logit_bias.1", {R"({"1":101})", R"({"1":-101})", R"({"1":"x"})"}},
      {"stop",
       {"\"\"", "1", "{}", "\"a\\u0000b\"", "\"" + std::string(1025, 'x') + "\"",
        "[" + repeat("\"a\",", 32) + "\"a\"]"}},
      {"stop[1]", {R"(["a",""])", R"(["a",1])"}},
      {"stop_token_ids", {"1", "[" + repeat("1,", 256) + "1]"}},
      {"stop_token_ids[0]", {"[-1]", "[2048]", "[1.5]", "[true]"}},
      {"prompt_logprobs", {"-1", "21", "true"}},
      {"priority", {"2147483648", "\"high\""}},
      {"timeout", {"0", "-1", "86401"}},
      {"speculate", {"\"maybe\"", "1"}},
      {"budget", {"-1", "1025"}},
      {"spine", {"1"}},
      {"stream_options", {"1", "[]"}},
      {"stream_options.include_usage", {R"({"include_usage":1})"}},
      {"stream_options.x", {R"({"x":true})"}}};
  for (const auto& [param, values] : both) {
    for (const std::string& value : values) {
      const std::string member = "\"" + param.substr(0, param.find_first_of(".[")) + "\":" + value;
      for (const ApiError& error : {chat_error(member), completion_error(member)}) {
        CAPTURE(member);
        CHECK(error.http_status == 400);
        CHECK(error.param == param);
        CHECK(error.message.find(param) != std::string::npos);
        CHECK(error.message.size() < 400);
      }
    }
  }
  CHECK(chat_error(R"("top_logprobs":21,"logprobs":true)").param == "top_logprobs");
  CHECK(chat_error(R"("top_logprobs":2)").param == "top_logprobs");
  CHECK(chat_error(R"("logprobs":5)").param == "logprobs");
  CHECK(completion_error(R"("logprobs":true)").param == "logprobs");
  CHECK(completion_error(R"("logprobs":21)").param == "logprobs");
  CHECK(chat_error(R"("stream_options":{})").param == "stream_options");
}

TEST_CASE("values reach the request") {
  const GenerationRequest r = completion(
      R"("model":"other-name","temperature":0,"top_p":0.5,"top_k":-1,"min_p":0.1,"presence_penalty":-2,)"
      R"("frequency_penalty":2,)"
      R"("repetition_penalty":1.5,"seed":-1,"max_tokens":7,"min_tokens":3,"ignore_eos":true,"stop":["a","b"],)"
      R"("stop_token_ids":[5,6],"logit_bias":{"17":-100,"0":2.5},"n":3,"stream":true,)"
      R"("stream_options":{"include_usage":true,"continuous_usage_stats":true},"logprobs":4,"echo":true,"priority":-3,)"
      R"("timeout":0.0015,"speculate":"chain","budget":9,"spine":true,"return_token_ids":true,)"
      R"("return_tokens_as_token_ids":true)");
  CHECK(r.model == "other-name");
  CHECK(r.temperature == 0);
  CHECK(r.top_p == 0.5);
  CHECK(r.top_k == 0);
  CHECK(r.seed == UINT64_MAX);
  CHECK(r.stop == std::vector<std::string>{"a", "b"});
  CHECK(r.bias_tokens == std::vector<int32_t>{17, 0});
  CHECK(r.include_usage);
  CHECK(r.timeout_ms == 2);
  const std::vector<int32_t> prompt = {1, 2};
  const ChoiceOptions made = choice_options(r, prompt, 2);
  const kdt_request_options& o = made.options;
  CHECK(o.struct_size == sizeof o);
  CHECK(o.max_tokens == 7);
  CHECK(o.n_prompt == 2);
  CHECK(o.prompt == prompt.data());
  CHECK((o.temperature == 0 && o.top_p == 0.5 && o.min_p == 0.1 && o.top_k == 0));
  CHECK((o.presence_penalty == -2 && o.frequency_penalty == 2 && o.repetition_penalty == 1.5));
  CHECK((o.has_seed == 1 && o.seed == UINT64_MAX && o.choice == 2));
  CHECK((o.min_tokens == 3 && o.ignore_eos == 1 && o.n_stop_tokens == 2 && o.stop_tokens[1] == 6));
  CHECK((o.n_stop == 2 && std::string(o.stop[1]) == "b"));
  CHECK((o.n_bias == 2 && o.bias_values[1] == 2.5f));
  CHECK((o.logprobs == 4 && o.prompt_logprobs == 4));  // the echo has log-probabilities too
  CHECK((o.priority == -3 && o.timeout_ms == 2 && o.speculate == KDT_SPECULATE_CHAIN && o.budget == 9 && o.spine == 1));
  CHECK(choice_options(chat(""), prompt, 0).options.max_tokens == 1022);
  CHECK(chat(R"("max_completion_tokens":5)").max_tokens == 5);
  CHECK(chat_error(R"("max_completion_tokens":5,"max_tokens":5)").param == "max_tokens");
  CHECK(chat(R"("seed":18446744073709551615)").seed == UINT64_MAX);
  CHECK(chat(R"("seed":3.0)").seed == 3);
  CHECK(chat(R"("top_p":0)").top_p > 0);
  CHECK(chat(R"("logprobs":true)").logprobs == 0);
  CHECK(chat(R"("logprobs":true,"top_logprobs":3)").logprobs == 3);
  CHECK(chat(R"("stop":[])").stop.empty());
}

TEST_CASE("prompts: text, ids and lists of them; an empty one is refused (it must not reach the engine)") {
  const auto parse = [](const std::string& prompt) {
    return protocol().parse_completion(R"({"prompt":)" + prompt + "}");
  };
  CHECK(parse(R"("x")").prompts[0].text == "x");
  CHECK(parse("[1,2]").prompts[0].ids == std::vector<int32_t>{1, 2});
  CHECK(parse(R"(["a","b"])").n_choices() == 2);
  CHECK(parse("[[1],[2,3]]").prompts[1].ids == std::vector<int32_t>{2, 3});
  CHECK(parse(R"("\u0000")").prompts[0].text == std::string(1, '\0'));
  for (const char* bad : {"\"\"", "[]", "[[]]", "[\"\"]", "[\"a\",1]", "[1,\"a\"]", "[[1],\"a\"]", "[null]", "1", "{}",
                          "[{}]", "[2048]", "[-1]", "[[1],[]]", "null", "true"}) {
    CAPTURE(bad);
    const ApiError error = error_of([&] { parse(bad); });
    CHECK(error.http_status == 400);
    CHECK(error.param.substr(0, 6) == "prompt");
  }
  for (const char* neither : {"[true]", "[null]", "[{}]"}) {
    const ApiError error = error_of([&] { parse(neither); });
    CHECK(error.code == "invalid_type");
    CHECK(error.param == "prompt[0]");
    CHECK(error.message.find("a token id, a string, or an array of token ids") != std::string::npos);
  }
  CHECK(error_of([] { protocol().parse_completion("{}"); }).code == "missing_required_parameter");
  CHECK(error_of([&] { parse("[" + repeat("\"a\",", 128) + "\"a\"]"); }).param == "prompt");
  CHECK(error_of([] { protocol().parse_completion(R"({"prompt":["a","b","c"],"n":43})"); }).param == "n");
}

TEST_CASE("no tokens to generate is allowed where there is something to answer") {
  CHECK(completion(R"("max_tokens":0,"echo":true)").max_tokens == 0);
  CHECK(completion(R"("max_tokens":0,"prompt_logprobs":0)").max_tokens == 0);
  CHECK(chat(R"("max_tokens":0,"prompt_logprobs":2)").max_tokens == 0);
  CHECK(completion_error(R"("max_tokens":0)").param == "max_tokens");
  CHECK(completion_error(R"("max_tokens":5,"min_tokens":6)").param == "min_tokens");
  const GenerationRequest r = completion(R"("max_tokens":0,"echo":true)");
  CHECK(choice_options(r, {1}, 0).options.prompt_logprobs == 0);
}

TEST_CASE("an unknown model is 404 model_not_found") {
  for (const ApiError& error : {chat_error(R"("model":"gpt-4")"), completion_error(R"("model":"gpt-4")")}) {
    CHECK(error.http_status == 404);
    CHECK(error.code == "model_not_found");
    CHECK(error.param == "model");
  }
  CHECK(Json::parse(protocol().models_body())["data"].size() == 2);
  CHECK(Json::parse(protocol().model_body("other-name"))["id"] == "other-name");
  CHECK(error_of([] { protocol().model_body("x\n"); }).message ==
        "The model 'x\\n' does not exist; served here: 'tiny-k2', 'other-name'.");
}

TEST_CASE("harmless fields are ignored, fields that change meaning are refused by name") {
  for (const char* member :
       {R"("user":"me")", R"("metadata":{"a":"b"})", R"("store":true)", R"("service_tier":"auto")",
        R"("safety_identifier":"x")", R"("prompt_cache_key":"x")", R"("parallel_tool_calls":true)",
        R"("response_format":{"type":"text"})", R"("modalities":["text"])", R"("echo":false)",
        R"("add_generation_prompt":true)", R"("use_beam_search":false)", R"("length_penalty":1.0)",
        R"("skip_special_tokens":false)", R"("tool_choice":"auto")", R"("tools":[])", R"("best_of":1)"}) {
    CAPTURE(member);
    CHECK_NOTHROW(chat(member));
  }
  const std::map<std::string, std::string> refused = {{"response_format", R"({"type":"json_object"})"},
                                                      {"guided_json", "{}"},
                                                      {"guided_regex", "\"a\""},
                                                      {"guided_choice", "[]"},
                                                      {"guided_grammar", "\"x\""},
                                                      {"structured_outputs", "{}"},
                                                      {"grammar", "\"x\""},
                                                      {"functions", "[]"},
                                                      {"function_call", "\"auto\""},
                                                      {"audio", "{}"},
                                                      {"modalities", R"(["text","audio"])"},
                                                      {"parallel_tool_calls", "false"},
                                                      {"use_beam_search", "true"},
                                                      {"include_stop_str_in_output", "true"},
                                                      {"typical_p", "0.5"},
                                                      {"top_a", "0.1"},
                                                      {"mirostat", "1"},
                                                      {"dry_multiplier", "0.8"},
                                                      {"xtc_probability", "0.5"},
                                                      {"lora_request", "{}"},
                                                      {"reasoning_effort", "\"high\""},
                                                      {"add_generation_prompt", "false"},
                                                      {"tool_choice", "\"required\""},
                                                      {"chat_template", "\"{{ x }}\""},
                                                      {"logits_processors", "[]"},
                                                      {"best_of", "2"},
                                                      {"continue_final_message", "true"}};
  for (const auto& [name, value] : refused) {
    const ApiError error = chat_error("\"" + name + "\":" + value);
    const std::string& field = name;
    CAPTURE(field);
    CHECK(error.http_status == 400);
    CHECK(error.code == "unsupported_parameter");
    CHECK(error.param == name);
  }
  CHECK(chat_error(R"("tool_choice":{"type":"function","function":{"name":"f"}})").param == "tool_choice");
  for (const char* member : {R"("suffix":"x")", R"("prompt_embeds":"x")", R"("best_of":3)", R"("n":2,"best_of":1)"}) {
    CHECK(completion_error(member).code == "unsupported_parameter");
  }
  CHECK_NOTHROW(completion(R"("n":2,"best_of":2)"));
  for (const char* member :
       {R"("temprature":1)", R"("prompt":"x")", R"("Temperature":1)", R"("":1)", R"("__proto__":{})"}) {
    CHECK(chat_error(member).code == "unknown_parameter");
  }
  CHECK(chat_error("\"a\\u001b[31m\":1").message == "Unknown parameter: 'a\\x1b[31m'.");
}

TEST_CASE("conversations, tools and template settings") {
  CHECK(error_of([] { protocol().parse_chat("{}"); }).code == "missing_required_parameter");
  for (const char* messages : {"[]", "\"hi\"", "[1]", "{}"}) {
    CAPTURE(messages);
    const ApiError error = error_of([&] { protocol().parse_chat(std::string(R"({"messages":)") + messages + "}"); });
    CHECK(error.param.substr(0, 8) == "messages");
  }
  const GenerationRequest r =
      protocol().parse_chat(R"({"messages":[{"role":"developer","content":"be brief"},{"role":"user","content":"hi"}],)"
                            R"("tools":[{"type":"function","function":{"name":"f","parameters":{"z":1,"a":2}}}],)"
                            R"("chat_template_kwargs":{"thinking":true,"preserve_thinking":true}})");
  CHECK(Json::parse(r.messages_json)[0]["role"] == "system");
  CHECK(r.tools_json.find("\"z\":1,\"a\":2") != std::string::npos);  // in the client's order
  CHECK(r.thinking == KDT_THINKING_ON);
  CHECK(r.preserve_thinking);
  const char* tools = R"("tools":[{"type":"function","function":{"name":"f"}}],"tool_choice":"none")";
  CHECK(chat(tools).tools_json.empty());
  CHECK(chat(R"("chat_template_kwargs":{"enable_thinking":false})").thinking == KDT_THINKING_OFF);
  CHECK(chat_error(R"("chat_template_kwargs":{"chat_template":"x"})").param == "chat_template_kwargs.chat_template");
  CHECK(chat_error(R"("chat_template_kwargs":{"thinking":1})").param == "chat_template_kwargs.thinking");
  CHECK(chat_error(R"("chat_template_kwargs":{"thinking":true,"enable_thinking":false})").http_status == 400);
  CHECK(chat_error(R"("tools":[{"type":"function","function":{"name":"f","strict":true}}])").param ==
        "tools[0].function.strict");
  CHECK(error_of([] {
          protocol().parse_chat(R"({"messages":[{"role":"assistant","content":"x","function_call":{}}]})");
        }).param == "messages[0].function_call");
}

TEST_CASE("tokenize and detokenize") {
  CHECK(protocol().parse_tokenize(R"({"prompt":"","add_special_tokens":false})").prompt.empty());
  CHECK(protocol()
            .parse_tokenize(R"({"messages":[{"role":"user","content":"x"}],"add_generation_prompt":true})")
            .is_chat);
  CHECK(error_of([] { protocol().parse_tokenize("{}"); }).http_status == 400);
  CHECK(error_of([] { protocol().parse_tokenize(R"({"prompt":"x","messages":[{}]})"); }).http_status == 400);
  CHECK(error_of([] { protocol().parse_tokenize(R"({"prompt":["x"]})"); }).param == "prompt");
  CHECK(protocol().parse_detokenize(R"({"tokens":[1,2]})") == std::vector<int32_t>{1, 2});
  CHECK(error_of([] { protocol().parse_detokenize(R"({"tokens":[99999]})"); }).param == "tokens[0]");
  CHECK(error_of([] { protocol().parse_detokenize("{}"); }).param == "tokens");
}

TEST_CASE("errors of the library become OpenAI's") {
  CHECK(from_status(KDT_ERR_INVALID_ARGUMENT, "messages[0].role: king: expected x").param == "messages[0].role");
  CHECK(from_status(KDT_ERR_QUEUE_FULL, "x").http_status == 429);
  CHECK(from_status(KDT_ERR_SHUTTING_DOWN, "x").http_status == 503);
  CHECK(from_status(KDT_ERR_ENGINE_FAILED, "x").type == "server_error");
  CHECK(from_status(KDT_ERR_INTERNAL, "x").http_status == 500);
  const Json body = Json::parse(context_length_exceeded(1000, 100, 1024, "messages").body())["error"];
  CHECK(body["code"] == "context_length_exceeded");
  CHECK(body["n_prompt_tokens"] == 1000);
  CHECK(body["n_ctx"] == 1024);
  CHECK(Json::parse(ApiError(401, "invalid_api_key", "\xff").body())["error"]["param"].is_null());
}

TEST_CASE("text for the log is one printable line") {
  CHECK(one_line("a\nb\r\t\x1b[0m\x7f") == "a\\nb\\r\\t\\x1b[0m\\x7f");
  CHECK(one_line("\xc2\x9b"
                 "1m\xff\xe6\xbc\xa2") == "\\xc2\\x9b1m\\xff\xe6\xbc\xa2");
  CHECK(one_line(std::string(500, 'x')).size() == 123);
}
