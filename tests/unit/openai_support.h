// What the tests of replies share: a scripted model, a reply that is fed its events, and what a client makes of chunks.
// Include after doctest.h.
#pragma once

#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "openai_json.h"
#include "openai_response.h"

namespace kdt::openai {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr int32_t kThinkEnd = 100, kCallBegin = 101, kArguments = 102, kCallEnd = 103;

// Tokens 0 to 99 are pieces of text; the ids above steer the reader, as control tokens do.
inline const std::vector<std::string> kPieces = {
    "Hello", ",", " w", "orld", "\xe6\xbc", "\xa2", "{\"a\":", "1}", "\xf0\x9f\x99\x82", " "};

struct ScriptReader final : TurnReader {
  explicit ScriptReader(bool thinking) : kind(thinking ? KDT_PART_REASONING : KDT_PART_CONTENT) {}
  std::vector<Part> push(int32_t token, std::string_view text) override {
    switch (token) {
      case kThinkEnd:
        kind = KDT_PART_CONTENT;
        return {};
      case kCallBegin:
        ++calls;
        return {};
      case kArguments:
        kind = KDT_PART_TOOL_ARGUMENTS;
        return {{KDT_PART_TOOL_BEGIN, calls, "", "functions.f:" + std::to_string(calls), "f"}};
      case kCallEnd:
        kind = KDT_PART_CONTENT;
        return {};
      default:
        break;
    }
    if (text.empty()) return {};
    return {{kind, kind == KDT_PART_TOOL_ARGUMENTS ? calls : -1, std::string(text), "", ""}};
  }
  std::vector<Part> finish() override { return {}; }
  int32_t kind;
  int32_t calls = -1;
};

struct ScriptText final : ModelText {
  std::string bytes(std::span<const int32_t> ids) const override {
    std::string out;
    for (const int32_t id : ids) out += kPieces[static_cast<size_t>(id)];
    return out;
  }
  std::unique_ptr<TurnReader> read_turn(int32_t thinking, bool) const override {
    return std::make_unique<ScriptReader>(thinking == KDT_THINKING_ON);
  }
};
inline const ScriptText kText;

struct Token {
  int32_t id;
  std::string text;
  float logprob = kNan;
  std::vector<std::pair<int32_t, float>> top = {};
};

inline kdt_result result_of(int32_t finish) {
  static const int64_t depths[] = {4, 2};
  kdt_result r{};
  r.finish_reason = finish;
  r.rounds = 2;
  r.tokens_per_round = 2.5;
  r.tokens_per_second = 10;
  r.generated_tokens = 6;
  r.n_depths = 2;
  r.accepted_by_depth = depths;
  r.error = "";
  r.stop_token = -1;
  r.stop_string = "";
  r.cached_tokens = 3;
  r.timings_ms[KDT_STAGE_VERIFY] = 7;
  return r;
}

// A reply and what came out of it.
struct Run {
  explicit Run(const GenerationRequest& request, std::vector<std::vector<int32_t>> prompts = {{0, 1}},
               const ModelText& text = kText)
      : reply(std::make_shared<GenerationRequest>(request), std::move(prompts), text) {
    reply.begin(out);
  }

  void event(int64_t choice, int32_t kind, const Token& token) {
    std::vector<int32_t> ids;
    std::vector<float> values;
    for (const auto& [id, value] : token.top) ids.push_back(id), values.push_back(value);
    const kdt_event e = {kind,
                         token.id,
                         token.text.data(),
                         static_cast<int64_t>(token.text.size()),
                         token.logprob,
                         static_cast<int32_t>(ids.size()),
                         ids.data(),
                         values.data()};
    reply.event(choice, e, out);
  }
  void tokens(int64_t choice, const std::vector<Token>& all) {
    for (const Token& token : all) event(choice, KDT_EVENT_TOKEN, token);
  }
  void end(int64_t choice, const kdt_result& result, const std::string& held = "") {
    event(choice, KDT_EVENT_FINISHED, {-1, held});
    reply.finish(choice, result, out);
  }
  std::vector<Json> chunks() const {
    std::vector<Json> all;
    for (const std::string& payload : out) all.push_back(Json::parse(payload));
    return all;
  }
  Json body() const { return Json::parse(reply.body()); }

  Payloads out;
  Reply reply;
};

inline GenerationRequest request(RequestKind kind, bool stream) {
  GenerationRequest r;
  r.kind = kind;
  r.model = "tiny-k2";
  r.stream = stream;
  r.seed = 42;
  if (kind == RequestKind::completion) r.prompts = {{true, "Hello,", {}}};
  return r;
}

// What a client has after adding up the chunks of choice `index`: message, finish reason, logprobs, ids.
inline Json joined(const std::vector<Json>& chunks, int64_t index) {
  Json sum = {{"content", ""},     {"reasoning", ""},           {"calls", Json::array()},
              {"finish", nullptr}, {"logprobs", Json::array()}, {"ids", Json::array()}};
  for (const Json& chunk : chunks) {
    for (const Json& choice : chunk["choices"]) {
      if (choice["index"] != index) continue;
      CHECK(sum["finish"].is_null());
      const Json delta = choice.contains("delta") ? choice["delta"] : Json{{"content", choice["text"]}};
      sum["content"] = sum["content"].get<std::string>() + delta.value("content", "");
      sum["reasoning"] = sum["reasoning"].get<std::string>() + delta.value("reasoning_content", "");
      for (const Json& call : delta.value("tool_calls", Json::array())) {
        const auto at = call["index"].get<size_t>();
        if (at == sum["calls"].size())
          sum["calls"].push_back({{"id", call["id"]}, {"name", call["function"]["name"]}, {"arguments", ""}});
        Json& arguments = sum["calls"][at]["arguments"];
        arguments = arguments.get<std::string>() + call["function"].value("arguments", "");
      }
      if (choice["logprobs"].is_object()) sum["logprobs"].push_back(choice["logprobs"]);
      for (const Json& id : choice.value("token_ids", Json::array())) sum["ids"].push_back(id);
      sum["finish"] = choice["finish_reason"];
    }
  }
  return sum;
}

}  // namespace kdt::openai
