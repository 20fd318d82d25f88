// From an HTTP request to engine requests and back: one for each prompt and choice, submitted together, their events
// written as they come (server-sent events) or gathered for one body.
#pragma once

#include <string>
#include <string_view>
#include <unordered_map>

#include "http_server.h"
#include "openai_request.h"
#include "openai_text.h"
#include "workers.h"

namespace kdt {

class LiveReply;

// The io thread.
class Generations {
 public:
  // All of them outlive it. `timeout`: of each generation; zero is none.
  Generations(asio::io_context& io, Workers& workers, kdt_engine* engine, const openai::Protocol& protocol,
              const openai::ModelText& text, std::chrono::milliseconds timeout)
      : io_(io), workers_(workers), engine_(engine), protocol_(protocol), text_(text), timeout_(timeout) {}

  // Answers the exchange. When its client leaves (queued, in prefill, while decoding, in a write that waits) the
  // engine's requests are cancelled. Throws openai::ApiError when no answer was begun.
  asio::awaitable<void> serve(Exchange& exchange, openai::RequestKind kind);
  // Ends the generation of this response id with an error; false: there is none.
  bool abort(std::string_view id);
  // Ends every one: open streams get `error` as their last event, others as their answer.
  void fail_all(const openai::ApiError& error);

 private:
  asio::awaitable<void> stream(Exchange& exchange, LiveReply& generation);

  asio::io_context& io_;
  Workers& workers_;
  kdt_engine* engine_;
  const openai::Protocol& protocol_;
  const openai::ModelText& text_;
  std::chrono::milliseconds timeout_;
  std::unordered_map<std::string, LiveReply*> open_;   // by response id
};

}  // namespace kdt
