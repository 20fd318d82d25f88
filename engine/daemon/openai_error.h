// Errors as OpenAI's clients read them: an HTTP status and {"error":{"message","type","param","code"}}.
#pragma once

#include <cstdint>
#include <exception>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "kdtree.h"

namespace kdt::openai {

struct ApiError : std::exception {
  // `type` follows from the status: invalid_request_error, authentication_error, rate_limit_error, server_error.
  ApiError(int status, std::string code_, std::string message_, std::string param_ = {});

  const char* what() const noexcept override { return message.c_str(); }
  // The response's body, or the payload of an SSE event.
  std::string body() const;

  int http_status;
  std::string message;
  std::string type;
  std::string code;                                                   // "" is null
  std::string param;                                                  // "" is null
  nlohmann::ordered_json details = nlohmann::ordered_json::object();  // further members of "error"
};

// 400: a field's value is not what it has to be. `value` is shortened and escaped.
ApiError invalid_value(std::string param, std::string_view value, std::string_view expected);
// 400: a field or a value this server does not implement; ignoring it would change what the client gets.
ApiError unsupported(std::string param, std::string_view why);
// 404. `served`: the names there are.
ApiError model_not_found(std::string_view model, const std::vector<std::string>& served);
// 400 context_length_exceeded, with n_prompt_tokens and n_ctx as further members.
ApiError context_length_exceeded(int64_t n_prompt, int64_t max_tokens, int64_t n_context, std::string param);
// A failed call of the library. `message` is kdt_last_error() of the same thread; the field it begins with is `param`.
ApiError from_status(kdt_status status, std::string_view message);

// One printable line of at most `limit` bytes, control characters and what is not UTF-8 escaped: text of a client that
// goes into a log line or a message.
std::string one_line(std::string_view text, size_t limit = 120);

}  // namespace kdt::openai
