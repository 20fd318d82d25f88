// Request bodies of the OpenAI protocol on arbitrary bytes: an ApiError whose body is JSON, or a request inside its
// limits. The first byte chooses the endpoint.
#include <cstdlib>
#include <string>
#include <string_view>

#include "openai_json.h"
#include "openai_request.h"

using namespace kdt::openai;

namespace {

void demand(bool good) {
  if (!good) std::abort();
}

const Protocol& protocol() {
  static const Protocol instance = [] {
    ServedModel model;
    model.names = {"m", "tiny-k2"};
    model.max_context = 1024;
    model.vocab_size = 2048;
    model.has_drafter = true;
    return Protocol(model);
  }();
  return instance;
}

template <class Number>
bool in(Number value, double low, double high) {
  return static_cast<double>(value) >= low && static_cast<double>(value) <= high;
}

void check_ids(const std::vector<int32_t>& ids) {
  for (const int32_t id : ids) demand(in(id, 0, 2047));
}

void check(const GenerationRequest& r) {
  demand(in(r.n, 1, 64) && in(r.n_choices(), 1, 128));
  demand(in(r.temperature, 0, 2) && in(r.top_p, 0, 1) && r.top_p > 0 && in(r.min_p, 0, 1) && in(r.top_k, 0, INT32_MAX));
  demand(in(r.presence_penalty, -2, 2) && in(r.frequency_penalty, -2, 2) && in(r.repetition_penalty, 0, 10));
  demand(in(r.logprobs, -1, 20) && in(r.prompt_logprobs, -1, 20) && in(r.timeout_ms, 0, 86400000));
  demand(in(r.max_tokens.value_or(1), 0, INT32_MAX) && in(r.min_tokens, 0, INT32_MAX) && in(r.budget, 0, 1024));
  demand(r.max_tokens != 0 || r.echo || r.prompt_logprobs >= 0);
  demand(r.bias_tokens.size() == r.bias_values.size() && r.bias_tokens.size() <= 1024 && r.stop.size() <= 32);
  check_ids(r.bias_tokens);
  check_ids(r.stop_token_ids);
  for (const std::string& stop : r.stop) demand(in(stop.size(), 1, 1024) && stop.find('\0') == std::string::npos);
  for (const Prompt& prompt : r.prompts) {
    demand(prompt.is_text ? !prompt.text.empty() : !prompt.ids.empty());
    check_ids(prompt.ids);
  }
  if (r.kind == RequestKind::chat) demand(Json::parse(r.messages_json).is_array());
  if (!r.tools_json.empty()) demand(Json::parse(r.tools_json).is_array());
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const std::string_view body(reinterpret_cast<const char*>(data) + 1, size - 1);
  try {
    switch (data[0] % 4) {
      case 0:
        check(protocol().parse_chat(body));
        break;
      case 1:
        check(protocol().parse_completion(body));
        break;
      case 2: {
        const TokenizeRequest request = protocol().parse_tokenize(body);
        demand(request.is_chat != request.messages_json.empty());
        break;
      }
      default:
        check_ids(protocol().parse_detokenize(body));
    }
  } catch (const ApiError& error) {
    demand(error.http_status == 400 || error.http_status == 404);
    demand(Json::parse(error.body())["error"]["message"].is_string());
  }
  return 0;
}
