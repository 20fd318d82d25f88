// Replies of the OpenAI protocol: events in, chunks or a body out. The model's text is a script: no engine.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <doctest/doctest.h>

#include <cstdlib>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "openai_support.h"
#include "openai_utf8.h"

using namespace kdt::openai;

TEST_CASE("a streamed chat: role, one chunk a token, the reason, then usage") {
  GenerationRequest r = request(RequestKind::chat, true);
  r.include_usage = true;
  Run run(r);
  run.tokens(0, {{0, "Hello"}, {1, ","}, {4, ""}, {5, "\xe6\xbc\xa2"}});  // an accepted block of four
  run.end(0, result_of(KDT_FINISH_STOP), "tail");
  REQUIRE(run.reply.done());
  const std::vector<Json> chunks = run.chunks();
  REQUIRE(chunks.size() == 7);
  CHECK(chunks[0]["choices"][0]["delta"] == Json{{"role", "assistant"}, {"content", ""}});
  CHECK(chunks[1]["choices"][0]["delta"]["content"] == "Hello");
  CHECK(chunks[3]["choices"][0]["delta"]["content"] == "\xe6\xbc\xa2");
  CHECK(chunks[4]["choices"][0]["delta"]["content"] == "tail");  // text still held back at the end is not lost
  CHECK(chunks[5]["choices"][0]["finish_reason"] == "stop");
  CHECK(chunks[5]["kdtree"]["seed"] == 42);
  CHECK(chunks[5]["kdtree"]["accepted_by_depth"] == Json::array({4, 2}));
  CHECK(chunks[6]["choices"].empty());
  CHECK(chunks[6]["usage"]["completion_tokens"] == 4);
  CHECK(chunks[6]["usage"]["prompt_tokens_details"]["cached_tokens"] == 3);
  for (size_t i = 0; i < 6; ++i) {
    CHECK(chunks[i]["usage"].is_null());
    CHECK(chunks[i]["id"] == chunks[6]["id"]);
    CHECK(chunks[i]["object"] == "chat.completion.chunk");
  }
}

TEST_CASE("a chat's body: reasoning, content and usage") {
  GenerationRequest r = request(RequestKind::chat, false);
  r.thinking = KDT_THINKING_ON;
  Run run(r);
  run.tokens(0, {{0, "Hello"}, {1, ","}, {kThinkEnd, "</think>"}, {2, " w"}, {3, "orld"}});
  run.end(0, result_of(KDT_FINISH_LENGTH));
  CHECK(run.out.empty());
  const Json body = run.body();
  const Json& choice = body["choices"][0];
  CHECK(choice["message"]["content"] == " world");
  CHECK(choice["message"]["reasoning_content"] == "Hello,");
  CHECK(choice["finish_reason"] == "length");
  CHECK(choice["logprobs"].is_null());
  CHECK(body["object"] == "chat.completion");
  CHECK(body["usage"]["total_tokens"] == 7);
  CHECK(body["usage"]["completion_tokens_details"]["reasoning_tokens"] == 2);
  CHECK(body["kdtree"]["timings_ms"]["verify"] == 7);
  CHECK(body["kdtree"]["tokens_per_round"] == 2.5);
}

TEST_CASE("tool calls, streamed and whole; a call that ends and one that begins in one block lose nothing") {
  const std::vector<Token> turn = {{0, "Hello"},   {kCallBegin, ""}, {kArguments, ""}, {6, "{\"a\":"},
                                   {7, "1}"},      {kCallEnd, ""},   {kCallBegin, ""}, {kArguments, ""},
                                   {6, "{\"a\":"}, {7, "1}"},        {kCallEnd, ""}};
  for (const bool stream : {false, true}) {
    GenerationRequest r = request(RequestKind::chat, stream);
    r.tools_json = "[{}]";
    Run run(r);
    run.tokens(0, turn);
    run.end(0, result_of(KDT_FINISH_STOP));
    Json calls, content;
    if (stream) {
      const Json sum = joined(run.chunks(), 0);
      CHECK(sum["finish"] == "tool_calls");
      calls = sum["calls"], content = sum["content"];
    } else {
      const Json body = run.body();
      CHECK(body["choices"][0]["finish_reason"] == "tool_calls");
      content = body["choices"][0]["message"]["content"];
      for (const Json& call : body["choices"][0]["message"]["tool_calls"]) {
        calls.push_back(
            {{"id", call["id"]}, {"name", call["function"]["name"]}, {"arguments", call["function"]["arguments"]}});
      }
    }
    CHECK(content == "Hello");
    REQUIRE(calls.size() == 2);
    for (size_t i = 0; i < 2; ++i) {
      CHECK(calls[i] == Json{{"id", "functions.f:" + std::to_string(i)}, {"name", "f"}, {"arguments", "{\"a\":1}"}});
    }
  }
}

TEST_CASE("a call without content has null content; one cut off by the limit says length") {
  GenerationRequest r = request(RequestKind::chat, false);
  r.tools_json = "[{}]";
  Run run(r);
  run.tokens(0, {{kCallBegin, ""}, {kArguments, ""}, {6, "{\"a\":"}});
  run.end(0, result_of(KDT_FINISH_LENGTH));
  const Json choice = run.body()["choices"][0];
  CHECK(choice["message"]["content"].is_null());
  CHECK(choice["finish_reason"] == "length");
}

TEST_CASE("chat log-probabilities: every token, in its own chunk, bytes of partial characters included") {
  const float inf = std::numeric_limits<float>::infinity();
  const std::vector<Token> tokens = {{0, "Hello", -0.5f, {{0, -0.5f}, {1, -2}, {2, -3}}},
                                     {4, "", -1, {{4, -1}, {5, -inf}, {0, -9}}},
                                     {5, "\xe6\xbc\xa2", -0.25f, {{5, -0.25f}, {1, -4}, {2, -5}}}};
  for (const bool stream : {false, true}) {
    GenerationRequest r = request(RequestKind::chat, stream);
    r.logprobs = 2;
    Run run(r);
    run.tokens(0, tokens);
    run.end(0, result_of(KDT_FINISH_STOP));
    Json content = Json::array();
    if (stream) {
      const Json sum = joined(run.chunks(), 0);
      for (const Json& part : sum["logprobs"]) {
        REQUIRE(part["content"].size() == 1);
        content.push_back(part["content"][0]);
      }
    } else {
      content = run.body()["choices"][0]["logprobs"]["content"];
    }
    REQUIRE(content.size() == 3);
    CHECK(content[0]["token"] == "Hello");
    CHECK(content[0]["logprob"] == -0.5);
    CHECK(content[0]["top_logprobs"].size() == 2);
    CHECK(content[1]["token"] == "\\xe6\\xbc");
    CHECK(content[1]["bytes"] == Json::array({0xe6, 0xbc}));
    CHECK(content[1]["top_logprobs"][1]["logprob"] == -9999);
    CHECK(content[2]["bytes"] == Json::array({0xa2}));
  }
}

TEST_CASE("a completion echoes its prompt, with offsets in characters; streamed and whole agree") {
  for (const bool stream : {false, true}) {
    for (const int32_t logprobs : {-1, 0, 1}) {
      GenerationRequest r = request(RequestKind::completion, stream);
      r.echo = true;
      r.logprobs = logprobs;
      r.return_token_ids = true;
      r.prompts = {{true, "\xe6\xbc\xa2,", {}}};
      Run run(r, {{4, 5, 1}});
      if (logprobs >= 0) {
        run.event(0, KDT_EVENT_PROMPT_TOKEN, {4, "", kNan});
        run.event(0, KDT_EVENT_PROMPT_TOKEN, {5, "\xe6\xbc\xa2", -1, {{5, -1}}});
        run.event(0, KDT_EVENT_PROMPT_TOKEN, {1, ",", -2, {{0, -0.1f}}});
      }
      run.tokens(0, {{8, "\xf0\x9f\x99\x82", -3, {{8, -3}}}, {2, " w", -4, {{2, -4}}}});
      run.end(0, result_of(KDT_FINISH_LENGTH));
      Json text, all, ids;
      if (stream) {
        const Json sum = joined(run.chunks(), 0);
        text = sum["content"], ids = sum["ids"];
        for (const Json& part : sum["logprobs"]) {
          for (const auto& [name, values] : part.items()) {
            for (const Json& value : values) all[name].push_back(value);
          }
        }
        CHECK(run.chunks()[0]["choices"][0]["prompt_token_ids"] == Json::array({4, 5, 1}));
      } else {
        const Json choice = run.body()["choices"][0];
        text = choice["text"], ids = choice["token_ids"], all = choice["logprobs"];
      }
      CHECK(text == "\xe6\xbc\xa2,\xf0\x9f\x99\x82 w");
      CHECK(ids == Json::array({8, 2}));
      if (logprobs < 0) {
        CHECK(all.is_null());
        continue;
      }
      CHECK(all["tokens"] == Json::array({"bytes:\\xe6\\xbc", "bytes:\\xa2", ",", "\xf0\x9f\x99\x82", " w"}));
      CHECK(all["token_logprobs"] == Json::array({nullptr, -1, -2, -3, -4}));
      CHECK(all["text_offset"] == Json::array({0, 0, 1, 2, 3}));
      CHECK(all["top_logprobs"][0].is_null());
      CHECK(all["top_logprobs"][2].contains(","));  // the token itself, with whatever is above it
      CHECK(all["top_logprobs"][2].size() == (logprobs == 0 ? 1 : 2));
    }
  }
}

TEST_CASE("echo without a token to generate") {
  for (const bool stream : {false, true}) {
    GenerationRequest r = request(RequestKind::completion, stream);
    r.echo = true;
    r.max_tokens = 0;
    Run run(r);
    run.event(0, KDT_EVENT_PROMPT_TOKEN, {0, "Hello", kNan});
    run.end(0, result_of(KDT_FINISH_LENGTH));
    const Json text = stream ? joined(run.chunks(), 0)["content"] : run.body()["choices"][0]["text"];
    CHECK(text == "Hello,");
  }
}

TEST_CASE("prompt_logprobs, with ranks where they are known") {
  for (const RequestKind kind : {RequestKind::chat, RequestKind::completion}) {
    GenerationRequest r = request(kind, false);
    r.prompt_logprobs = 1;
    Run run(r);
    run.event(0, KDT_EVENT_PROMPT_TOKEN, {0, "Hello", kNan});
    run.event(0, KDT_EVENT_PROMPT_TOKEN, {1, ",", -2, {{2, -0.5f}, {1, -2}}});
    run.end(0, result_of(KDT_FINISH_LENGTH));
    const Json body = run.body();
    const Json& all = kind == RequestKind::chat ? body["prompt_logprobs"] : body["choices"][0]["prompt_logprobs"];
    CHECK(all == Json::parse(R"([null, {"1": {"logprob": -2.0, "rank": 2, "decoded_token": ","},
                                        "2": {"logprob": -0.5, "rank": 1, "decoded_token": " w"}}])"));
  }
}

TEST_CASE("choices of several prompts are numbered prompt by prompt; a prompt counts once") {
  GenerationRequest r = request(RequestKind::completion, true);
  r.n = 2;
  r.include_usage = r.continuous_usage = true;
  r.prompts = {{true, "a", {}}, {true, "b", {}}};
  Run run(r, {{0, 1, 2}, {3}});
  for (int64_t i = 3; i >= 0; --i) run.tokens(i, {{0, "c" + std::to_string(i)}});
  for (int64_t i = 0; i < 4; ++i) run.end(i, result_of(KDT_FINISH_STOP));
  CHECK(run.reply.done());
  for (int64_t i = 0; i < 4; ++i) CHECK(joined(run.chunks(), i)["content"] == "c" + std::to_string(i));
  const Json usage = run.chunks().back()["usage"];
  CHECK(usage["prompt_tokens"] == 4);
  CHECK(usage["completion_tokens"] == 4);
  CHECK(usage["prompt_tokens_details"]["cached_tokens"] == 6);
  CHECK(run.chunks()[0]["usage"]["completion_tokens"] == 1);
}

TEST_CASE("what ended the text is named") {
  GenerationRequest r = request(RequestKind::completion, false);
  r.stop = {"END"};
  r.stop_token_ids = {7};
  const auto reason = [&](int32_t token, const char* text) {
    Run run(r);
    kdt_result result = result_of(KDT_FINISH_STOP);
    result.stop_token = token;
    result.stop_string = text;
    run.end(0, result);
    return run.body()["choices"][0]["stop_reason"];
  };
  CHECK(reason(-1, "END") == "END");
  CHECK(reason(7, "") == 7);
  CHECK(reason(8, "").is_null());  // the model's own stop id
}

TEST_CASE("a failed choice fails the reply, once, by name") {
  kdt_result timed_out = result_of(KDT_FINISH_CANCELLED), broken = result_of(KDT_FINISH_ERROR);
  timed_out.total_ms = 60;
  broken.error = "round: verify: expected finite logits";
  const std::map<std::string, std::pair<kdt_result, int>> cases = {
      {"cancelled", {result_of(KDT_FINISH_CANCELLED), 503}},
      {"timeout", {timed_out, 408}},
      {"engine_failed", {broken, 503}}};
  for (const auto& [code, expected] : cases) {
    for (const bool stream : {false, true}) {
      GenerationRequest r = request(RequestKind::chat, stream);
      r.n = 2;
      r.timeout_ms = 50;
      Run run(r);
      run.tokens(0, {{0, "Hello"}});
      run.end(0, expected.first);
      REQUIRE(run.reply.done());
      CHECK(run.reply.failure()->code == code);
      CHECK(run.reply.failure()->http_status == expected.second);
      const size_t n = run.out.size();
      run.tokens(1, {{0, "late"}});
      run.end(1, result_of(KDT_FINISH_STOP));
      run.reply.fail(ApiError(503, "shutting_down", "again"), run.out);
      CHECK(run.out.size() == n);
      if (stream) CHECK(Json::parse(run.out.back())["error"]["code"] == code);
      if (!stream) CHECK(run.out.empty());
    }
  }
  Run run(request(RequestKind::completion, true));
  run.reply.fail(ApiError(503, "shutting_down", "The server shuts down."), run.out);
  CHECK(run.reply.done());
  CHECK(Json::parse(run.out.back())["error"]["type"] == "server_error");
}

TEST_CASE("tokens as ids, and text that is no UTF-8 is mended") {
  GenerationRequest r = request(RequestKind::chat, false);
  r.logprobs = 1;
  r.tokens_as_ids = true;
  Run run(r);
  run.tokens(0, {{4, "", -1, {{5, -1}}}});
  run.end(0, result_of(KDT_FINISH_STOP));
  const Json item = run.body()["choices"][0]["logprobs"]["content"][0];
  CHECK(item["token"] == "token_id:4");
  CHECK(item["top_logprobs"][0]["token"] == "token_id:5");
  CHECK(mended_utf8("a\xe6\xbc"
                    "b\xff") ==
        "a\xef\xbf\xbd\xef\xbf\xbd"
        "b\xef\xbf\xbd");
  CHECK(count_characters("\xe6\xbc\xa2,\xf0\x9f\x99\x82") == 3);
}

TEST_CASE("a turn with calls, as the chat format writes it, is read back from the library's own tokens") {
  const char* root = std::getenv("KDTREE_SOURCE_ROOT");
  REQUIRE(root != nullptr);
  const std::string model = std::string(root) + "/models/tiny-k2";
  kdt_engine_options options;
  REQUIRE(kdt_engine_options_init(&options, sizeof options) == KDT_OK);
  options.model_path = model.c_str();
  kdt_engine* raw = nullptr;
  REQUIRE(kdt_engine_create(&options, &raw) == KDT_OK);
  const std::unique_ptr<kdt_engine, decltype(&kdt_engine_destroy)> engine(raw, kdt_engine_destroy);
  const EngineText text(raw);

  Json messages = Json::array({{{"role", "user"}, {"content", "go"}}});
  const auto encode = [&] {
    std::vector<int32_t> ids(4096);
    int64_t n = 0;
    REQUIRE(kdt_chat_encode(raw, messages.dump().c_str(), nullptr, KDT_THINKING_OFF, 0, ids.data(), 4096, &n) == KDT_OK);
    ids.resize(static_cast<size_t>(n));
    return ids;
  };
  const std::vector<int32_t> before = encode();
  const std::string content = "See <|tool_call_begin|> \xe6\xbc\xa2\xe5\xad\x97 </think>";
  const std::vector<std::string> arguments = {R"({"q": "a\\"b", "n": [1, 2]})", "{}"};
  Json calls = Json::array();
  for (size_t i = 0; i < 2; ++i) {
    calls.push_back({{"id", "functions.find_it:" + std::to_string(i)},
                     {"type", "function"},
                     {"function", {{"name", "find_it"}, {"arguments", arguments[i]}}}});
  }
  messages.push_back({{"role", "assistant"}, {"content", content}, {"tool_calls", calls}});
  std::vector<int32_t> turn = encode();
  turn.erase(turn.begin(), turn.begin() + static_cast<int64_t>(before.size()));
  size_t end = 0;
  while (text.bytes({&turn[end], 1}) != "<|im_end|>") ++end;

  for (const bool stream : {false, true}) {
    GenerationRequest r = request(RequestKind::chat, stream);
    r.tools_json = "[{}]";
    r.thinking = KDT_THINKING_OFF;
    Run run(r, {before}, text);
    // As the engine hands text out: whole characters alone.
    std::string held;
    for (size_t i = 0; i < end; ++i) {
      held += text.bytes({&turn[i], 1});
      run.tokens(0, {{turn[i], is_utf8(held) ? std::exchange(held, {}) : ""}});
    }
    run.end(0, result_of(KDT_FINISH_STOP));
    REQUIRE(!run.reply.failure());
    if (stream) {
      const Json sum = joined(run.chunks(), 0);
      CHECK(sum["content"] == content);
      CHECK(sum["finish"] == "tool_calls");
      REQUIRE(sum["calls"].size() == 2);
      for (size_t i = 0; i < 2; ++i) CHECK(sum["calls"][i]["arguments"] == arguments[i]);
    } else {
      const Json message = run.body()["choices"][0]["message"];
      CHECK(message["content"] == content);
      CHECK(message["tool_calls"] == calls);
    }
  }
}
