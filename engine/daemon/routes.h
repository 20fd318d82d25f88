// The daemon's endpoints: who may call which, and what each answers.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "auth.h"
#include "generation.h"
#include "http_server.h"
#include "metrics_page.h"
#include "openai_error.h"
#include "openai_request.h"
#include "serve_log.h"
#include "serve_options.h"
#include "shutdown.h"
#include "workers.h"

namespace kdt {

struct Route;

// The io thread.
class Routes final : public HttpHandler {
 public:
  // All of them outlive it.
  struct Parts {
    const ServeOptions& options;
    kdt_engine* engine;
    const openai::Protocol& protocol;
    const ApiKeys& keys;
    Generations& generations;
    Workers& workers;
    const HttpServer& server;
    const Shutdown& shutdown;
    ServeLog& log;
  };
  explicit Routes(const Parts& parts);

  std::optional<HttpResponse> check(HttpRequest& head) override;
  asio::awaitable<void> handle(Exchange& exchange) override;
  HttpResponse refuse(HttpRequest& request, int status, std::string_view why) override;
  HeaderFields common_fields(const HttpRequest& request) override;
  void done(const HttpRequest& request, int status, double seconds) override;
  void connection_refused() override;

 private:
  friend struct Route;
  using Answer = asio::awaitable<void>;

  Answer chat(Exchange& exchange);
  Answer completion(Exchange& exchange);
  Answer tokenize(Exchange& exchange);
  Answer detokenize(Exchange& exchange);
  Answer abort(Exchange& exchange);
  Answer reset_prefix_cache(Exchange& exchange);
  Answer models(Exchange& exchange);
  Answer model(Exchange& exchange);
  Answer openapi(Exchange& exchange);
  Answer health(Exchange& exchange);
  Answer ready(Exchange& exchange);
  Answer version(Exchange& exchange);
  Answer metrics(Exchange& exchange);

  Answer respond_from_worker(Exchange& exchange, std::function<std::string()> body);
  // Why the engine does not work; "" while it does.
  std::string fault() const;
  bool allows_origin(std::string_view origin) const;
  bool is_rebound(const HttpRequest& head) const;

  Parts parts_;
  HttpFigures figures_;
  uint64_t next_id_ = 0;
  std::string id_prefix_;
};

}  // namespace kdt
