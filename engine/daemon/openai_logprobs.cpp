#include "openai_logprobs.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "openai_utf8.h"

namespace kdt::openai {
namespace {

// JSON has no infinity; the protocol's clients know this value as "never".
constexpr double kLeastLogprob = -9999;

Json number(float logprob) {
  if (std::isnan(logprob)) return nullptr;
  return std::max(static_cast<double>(logprob), kLeastLogprob);
}

std::string escape_partial(std::string_view bytes) {
  static constexpr char kHex[] = "0123456789abcdef";
  std::string out;
  for (size_t i = 0; i < bytes.size();) {
    const size_t n = character_bytes(bytes, i);
    if (n == 0) {
      const auto byte = static_cast<unsigned char>(bytes[i++]);
      out.append({'\\', 'x', kHex[byte >> 4], kHex[byte & 15]});
    } else {
      out += bytes.substr(i, n);
      i += n;
    }
  }
  return out;
}

Json named(TokenNames& names, int32_t id, float logprob) {
  Json bytes = Json::array();
  for (const char c : names.bytes(id)) bytes.push_back(static_cast<unsigned char>(c));
  return {{"token", names.name(id)}, {"logprob", number(logprob)}, {"bytes", std::move(bytes)}};
}

}  // namespace

const std::string& TokenNames::bytes(int32_t id) {
  const auto [entry, is_new] = bytes_.try_emplace(id);
  if (is_new) entry->second = text_.bytes({&id, 1});
  return entry->second;
}

std::string TokenNames::name(int32_t id) {
  return as_ids_ ? "token_id:" + std::to_string(id) : escape_partial(bytes(id));
}

std::string TokenNames::completion_name(int32_t id) {
  return as_ids_ || is_utf8(bytes(id)) ? name(id) : "bytes:" + name(id);
}

Json chat_logprob(TokenNames& names, const kdt_event& event, int32_t n_top) {
  Json item = named(names, event.token_id, event.logprob);
  Json top = Json::array();
  for (int32_t i = 0; i < std::min(event.n_top, n_top); ++i)
    top.push_back(named(names, event.top_ids[i], event.top_logprobs[i]));
  item["top_logprobs"] = std::move(top);
  return item;
}

void CompletionLogprobs::add(TokenNames& names, const kdt_event& event, int32_t n_top, int64_t offset) {
  tokens_.push_back(names.completion_name(event.token_id));
  logprobs_.push_back(number(event.logprob));
  offsets_.push_back(offset);
  if (std::isnan(event.logprob)) {
    tops_.push_back(nullptr);
    return;
  }
  Json top = Json::object();
  for (int32_t i = 0; i < std::min(event.n_top, n_top); ++i) {
    top[names.completion_name(event.top_ids[i])] = number(event.top_logprobs[i]);
  }
  top[names.completion_name(event.token_id)] = number(event.logprob);
  tops_.push_back(std::move(top));
}

Json CompletionLogprobs::take() {
  return {{"tokens", std::exchange(tokens_, Json::array())},
          {"token_logprobs", std::exchange(logprobs_, Json::array())},
          {"top_logprobs", std::exchange(tops_, Json::array())},
          {"text_offset", std::exchange(offsets_, Json::array())}};
}

Json prompt_logprob(TokenNames& names, const kdt_event& event, int32_t n_top) {
  if (std::isnan(event.logprob)) return nullptr;
  Json item = Json::object();
  const auto add = [&](int32_t id, float logprob, Json rank) {
    item[std::to_string(id)] = {
        {"logprob", number(logprob)}, {"rank", std::move(rank)}, {"decoded_token", names.name(id)}};
  };
  add(event.token_id, event.logprob, nullptr);
  // The token's own rank is known where it is among the top.
  for (int32_t i = 0; i < event.n_top; ++i) {
    if (i < n_top || event.top_ids[i] == event.token_id) add(event.top_ids[i], event.top_logprobs[i], i + 1);
  }
  return item;
}

}  // namespace kdt::openai
