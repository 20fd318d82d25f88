#include "openai_error.h"

#include <utility>

#include "openai_utf8.h"

namespace kdt::openai {
namespace {

using nlohmann::ordered_json;

const char* type_of(int http_status) {
  switch (http_status) {
    case 401:
      return "authentication_error";
    case 403:
      return "permission_error";
    case 429:
      return "rate_limit_error";
    default:
      return http_status >= 500 ? "server_error" : "invalid_request_error";
  }
}

ordered_json text_or_null(const std::string& text) { return text.empty() ? ordered_json() : ordered_json(text); }

std::string escaped(unsigned char byte) {
  static constexpr char kHex[] = "0123456789abcdef";
  if (byte == '\n') return "\\n";
  if (byte == '\r') return "\\r";
  if (byte == '\t') return "\\t";
  return {'\\', 'x', kHex[byte >> 4], kHex[byte & 15]};
}

}  // namespace

ApiError::ApiError(int status, std::string code_, std::string message_, std::string param_)
    : http_status(status),
      message(std::move(message_)),
      type(type_of(status)),
      code(std::move(code_)),
      param(std::move(param_)) {}

std::string ApiError::body() const {
  ordered_json error = {
      {"message", message}, {"type", type}, {"param", text_or_null(param)}, {"code", text_or_null(code)}};
  for (const auto& [name, value] : details.items()) error[name] = value;
  return ordered_json{{"error", std::move(error)}}.dump(-1, ' ', false, ordered_json::error_handler_t::replace);
}

ApiError invalid_value(std::string param, std::string_view value, std::string_view expected) {
  std::string message = param + ": " + one_line(value) + ": expected " + std::string(expected);
  return ApiError(400, "invalid_value", std::move(message), std::move(param));
}

ApiError unsupported(std::string param, std::string_view why) {
  std::string message = "Unsupported parameter: '" + param + "'" + (why.empty() ? "" : ": ") + std::string(why) + ".";
  return ApiError(400, "unsupported_parameter", std::move(message), std::move(param));
}

ApiError model_not_found(std::string_view model, const std::vector<std::string>& served) {
  std::string names;
  for (const std::string& name : served) names += (names.empty() ? "'" : ", '") + one_line(name) + "'";
  return ApiError(404, "model_not_found", "The model '" + one_line(model) + "' does not exist; served here: " + names + ".",
                  "model");
}

ApiError context_length_exceeded(int64_t n_prompt, int64_t max_tokens, int64_t n_context, std::string param) {
  const std::string total = std::to_string(n_prompt + max_tokens);
  ApiError error(400, "context_length_exceeded",
                 "This model's maximum context length is " + std::to_string(n_context) +
                     " tokens. However, you requested " + total + " tokens (" + std::to_string(n_prompt) +
                     " in the prompt, " + std::to_string(max_tokens) +
                     " in the completion). Please reduce the length of the prompt or of the completion.",
                 std::move(param));
  error.details["n_prompt_tokens"] = n_prompt;
  error.details["n_ctx"] = n_context;
  return error;
}

ApiError from_status(kdt_status status, std::string_view message) {
  const std::string text = message.empty() ? kdt_status_name(status) : std::string(message);
  switch (status) {
    case KDT_ERR_INVALID_ARGUMENT:
    case KDT_ERR_UNSUPPORTED: {
      const size_t end = text.find(": ");
      return ApiError(400, status == KDT_ERR_UNSUPPORTED ? "unsupported_value" : "invalid_value", text,
                      end == std::string::npos ? "" : text.substr(0, end));
    }
    case KDT_ERR_CONTEXT_LENGTH:
      return ApiError(400, "context_length_exceeded", text);
    case KDT_ERR_QUEUE_FULL:
      return ApiError(429, "queue_full", text);
    case KDT_ERR_SHUTTING_DOWN:
      return ApiError(503, "shutting_down", text);
    case KDT_ERR_ENGINE_FAILED:
      return ApiError(503, "engine_failed", text);
    case KDT_ERR_CANCELLED:
      return ApiError(503, "cancelled", text);
    case KDT_ERR_IO:   // of a request: no descriptor left for it
      return ApiError(503, "out_of_descriptors", text);
    case KDT_ERR_OUT_OF_MEMORY:
      return ApiError(503, "out_of_memory", text);
    default:
      return ApiError(500, "internal_error", text);
  }
}

std::string one_line(std::string_view text, size_t limit) {
  std::string out;
  for (size_t i = 0; i < text.size();) {
    const auto byte = static_cast<unsigned char>(text[i]);
    const size_t n = character_bytes(text, i);
    // U+0080 to U+009F are control characters to a terminal.
    const bool control =
        byte < 0x20 || byte == 0x7f || (n == 2 && byte == 0xc2 && static_cast<unsigned char>(text[i + 1]) < 0xa0);
    std::string piece;
    for (size_t k = 0; k < (n == 0 ? 1 : n); ++k) {
      if (n == 0 || control) {
        piece += escaped(static_cast<unsigned char>(text[i + k]));
      } else {
        piece += text[i + k];
      }
    }
    if (out.size() + piece.size() > limit) return out + "...";
    out += piece;
    i += n == 0 ? 1 : n;
  }
  return out;
}

}  // namespace kdt::openai
