#include "routes.h"

#include <spdlog/fmt/fmt.h>

#include <algorithm>
#include <array>
#include <random>

#include "http_text.h"
#include "openai_json.h"

namespace kdt {

// A path that ends in * stands for every path that begins so.
struct Route {
  std::string_view method;
  std::string_view path;
  bool open;                    // asks for no API key
  bool quiet;                   // polled by machines: not logged
  Routes::Answer (Routes::*answer)(Exchange&);

  bool matches(std::string_view requested) const {
    if (path.back() != '*') return requested == path;
    const std::string_view start = path.substr(0, path.size() - 1);
    return requested.size() > start.size() && requested.substr(0, start.size()) == start;
  }
  static const std::array<Route, 13> kAll;
};

constexpr std::array<Route, 13> Route::kAll = {{
    {"POST", "/v1/chat/completions", false, false, &Routes::chat},
    {"POST", "/v1/completions", false, false, &Routes::completion},
    {"POST", "/tokenize", false, false, &Routes::tokenize},
    {"POST", "/detokenize", false, false, &Routes::detokenize},
    {"POST", "/v1/abort", false, false, &Routes::abort},
    {"POST", "/reset_prefix_cache", false, false, &Routes::reset_prefix_cache},
    {"GET", "/v1/models", false, false, &Routes::models},
    {"GET", "/v1/models/*", false, false, &Routes::model},
    {"GET", "/openapi.json", false, false, &Routes::openapi},
    {"GET", "/health", true, true, &Routes::health},
    {"GET", "/ready", true, true, &Routes::ready},
    {"GET", "/version", true, true, &Routes::version},
    {"GET", "/metrics", true, true, &Routes::metrics},
}};

namespace {

constexpr size_t kLongestId = 128;
constexpr int kRetrySeconds = 1;

const Route* find_route(std::string_view path) {
  const auto matches = [&](const Route& each) { return each.matches(path); };
  const auto found = std::find_if(Route::kAll.begin(), Route::kAll.end(), matches);
  return found == Route::kAll.end() ? nullptr : &*found;
}

std::string methods_of(const Route& route) {
  return std::string(route.method) + (route.method == "GET" ? ", HEAD, OPTIONS" : ", OPTIONS");
}

bool takes(const Route& route, std::string_view method) {
  return method == route.method || method == "OPTIONS" || (method == "HEAD" && route.method == "GET");
}

// The answer, which the log knows too.
HttpResponse error_response(HttpRequest& request, const openai::ApiError& error) {
  request.error_code = error.code;
  request.error_param = error.param;
  HttpResponse response;
  response.status = error.http_status;
  response.body = error.body();
  if (error.http_status == 429 || error.http_status == 503) {
    response.fields.emplace_back("Retry-After", std::to_string(kRetrySeconds));
  }
  if (error.http_status == 401) response.fields.emplace_back("WWW-Authenticate", "Bearer");
  return response;
}

HttpResponse json_response(int status, std::string body) {
  HttpResponse response;
  response.status = status;
  response.body = std::move(body);
  return response;
}

std::string random_prefix() {
  std::random_device device;
  return fmt::format("{:08x}", device());
}

}  // namespace

Routes::Routes(const Parts& parts) : parts_(parts), id_prefix_(random_prefix()) {}

// ------------------------------------------------------------------------------------------------ every request

std::optional<HttpResponse> Routes::check(HttpRequest& head) {
  const std::string_view given = head.field("x-request-id");
  const bool printable = std::all_of(given.begin(), given.end(), [](char c) { return c > ' ' && c < 0x7f; });
  const bool usable = !given.empty() && printable && given.size() <= kLongestId;
  head.id = usable ? std::string(given) : fmt::format("req-{}{:08x}", id_prefix_, ++next_id_);
  const Route* route = find_route(head.path);
  if (head.path == "*") return std::nullopt;
  if (!route) {
    const std::string path = openai::one_line(head.path);
    return error_response(head, {404, "not_found", "Unknown path '" + path + "'; /openapi.json has those there are."});
  }
  if (!takes(*route, head.method)) {
    HttpResponse response = error_response(
        head, {405, "method_not_allowed", std::string(route->path) + " takes " + methods_of(*route) + "."});
    response.fields.emplace_back("Allow", methods_of(*route));
    return response;
  }
  if (head.method == "OPTIONS") return std::nullopt;
  if (!route->open && parts_.keys.required() && !parts_.keys.accepts(head.field("authorization"))) {
    return error_response(head, {401, "invalid_api_key",
                                 head.field("authorization").empty()
                                     ? "You didn't provide an API key. Send it as 'Authorization: Bearer KEY'."
                                     : "Incorrect API key provided."});
  }
  if (!route->open && is_rebound(head)) {
    return error_response(head, {403, "forbidden_origin",
                                 "This daemon listens on this machine alone and has no API key; a web page that came by "
                                 "another name, '" + openai::one_line(head.field("origin")) + "', may not use it "
                                 "(--allow-origin, --api-key-file)."});
  }
  // A page of any site may send a form or plain text to this address without asking; JSON it may not.
  const std::string_view type = head.field("content-type");
  const bool from_page = !head.field("origin").empty();
  if (head.method == "POST" && !is_json(type) && (!type.empty() || from_page)) {
    return error_response(head, {415, "unsupported_media_type", "Send the body with 'Content-Type: application/json'."});
  }
  const std::string_view coding = head.field("content-encoding");
  if (head.method == "POST" && !coding.empty() && lower_case(coding) != "identity") {
    HttpResponse response = error_response(head, {415, "unsupported_media_type",
                                                  "The body is encoded as '" + openai::one_line(coding) + "': expected it as it "
                                                  "is, without Content-Encoding."});
    response.fields.emplace_back("Accept-Encoding", "identity");
    return response;
  }
  return std::nullopt;
}

asio::awaitable<void> Routes::handle(Exchange& exchange) {
  HttpRequest& request = exchange.request();
  const Route* route = find_route(request.path);
  if (request.method == "OPTIONS") {
    HttpResponse response;
    response.status = 204;
    const std::string methods = route ? methods_of(*route) : "GET, HEAD, POST, OPTIONS";
    response.fields.emplace_back("Allow", methods);
    const std::string_view asked = request.field("access-control-request-headers");
    if (allows_origin(request.field("origin"))) {
      response.fields.emplace_back("Access-Control-Allow-Methods", methods);
      if (!asked.empty()) response.fields.emplace_back("Access-Control-Allow-Headers", std::string(asked));
      response.fields.emplace_back("Access-Control-Max-Age", "600");
    }
    co_await exchange.respond(std::move(response));
    co_return;
  }
  std::optional<openai::ApiError> failure;
  try {
    co_await (this->*route->answer)(exchange);
  } catch (const openai::ApiError& error) {
    failure = error;
  } catch (const std::exception& error) {
    parts_.log.error(std::string("internal error: ") + error.what(), {{"request_id", request.id}});
    failure = openai::ApiError(500, "internal_error", "The server failed to answer this request.");
  }
  if (failure && !exchange.gone()) {
    HttpResponse response = error_response(request, *failure);
    co_await exchange.respond(std::move(response));
  }
}

HttpResponse Routes::refuse(HttpRequest& request, int status, std::string_view why) {
  const char* code = status == 408   ? "request_timeout"
                     : status == 413 ? "request_too_large"
                     : status == 417 ? "expectation_failed"
                     : status == 431 ? "header_too_large"
                     : status == 503 ? "too_many_connections"
                     : status == 505 ? "http_version_not_supported"
                     : status >= 500 ? "internal_error"
                                     : "bad_request";
  return error_response(request, {status, code, std::string(why)});
}

HeaderFields Routes::common_fields(const HttpRequest& request) {
  HeaderFields fields;
  if (!request.id.empty()) fields.emplace_back("X-Request-Id", request.id);
  const std::string_view origin = request.field("origin");
  if (!parts_.options.allowed_origins.empty()) fields.emplace_back("Vary", "Origin");
  if (allows_origin(origin)) {
    fields.emplace_back("Access-Control-Allow-Origin", std::string(origin));
    fields.emplace_back("Access-Control-Expose-Headers", "X-Request-Id, Retry-After");
  }
  return fields;
}

bool Routes::allows_origin(std::string_view origin) const {
  const std::vector<std::string>& allowed = parts_.options.allowed_origins;
  const auto covers = [&](const std::string& each) { return each == "*" || each == origin; };
  return !origin.empty() && std::any_of(allowed.begin(), allowed.end(), covers);
}

// A page whose site has given its own name this machine's address is of one origin with the daemon, to a browser.
bool Routes::is_rebound(const HttpRequest& head) const {
  const std::string_view origin = head.field("origin");
  if (origin.empty() || parts_.keys.required() || allows_origin(origin) || !parts_.server.is_loopback()) return false;
  const std::string host = host_of(head.field("host"));
  return host == host_of(origin) && !names_loopback(host);
}

void Routes::done(const HttpRequest& request, int status, double seconds) {
  const Route* route = find_route(request.path);
  ++figures_.requests[{route ? route->path : "other", status}];
  if (route && route->quiet && status == 200) return;
  const std::string path = openai::one_line(request.path);
  const std::string method = openai::one_line(request.method, 16);
  ServeLog::Fields fields = {{"peer", request.peer}, {"method", method},    {"path", path},
                             {"status", status},     {"seconds", seconds}, {"request_id", request.id}};
  std::string text = fmt::format("{} \"{} {}\" {} {:.3f} s", request.peer, method, path, status, seconds);
  for (const std::string& part : {request.id, request.note}) text += part.empty() ? "" : " " + part;
  // Of a stream that was begun the status tells nothing of its end.
  const auto add_field = [&](const char* name, const std::string& value) {
    if (value.empty()) return;
    fields[name] = openai::one_line(value);
    text += fmt::format(" {}={}", name, openai::one_line(value));
  };
  add_field("error", request.error_code);
  add_field("param", request.error_param);
  parts_.log.info(text, fields);
}

void Routes::connection_refused() {
  if (figures_.connections_refused++ == 0) {
    parts_.log.warning("a connection was refused: --max-connections are open; further ones are counted in the metrics");
  }
}

// ------------------------------------------------------------------------------------------------ endpoints

Routes::Answer Routes::chat(Exchange& exchange) {
  return parts_.generations.serve(exchange, openai::RequestKind::chat);
}

Routes::Answer Routes::completion(Exchange& exchange) {
  return parts_.generations.serve(exchange, openai::RequestKind::completion);
}

Routes::Answer Routes::respond_from_worker(Exchange& exchange, std::function<std::string()> body) {
  HttpResponse response;
  std::function<void()> work = [&] { response.body = body(); };
  if (exchange.request().body.size() < kLongBody) {
    work();
  } else {
    co_await parts_.workers.run(std::move(work));
  }
  co_await exchange.respond(std::move(response));
}

Routes::Answer Routes::tokenize(Exchange& exchange) {
  return respond_from_worker(exchange, [this, &exchange] {
    const openai::Protocol& protocol = parts_.protocol;
    return openai::tokenize_body(parts_.engine, protocol.model(), protocol.parse_tokenize(exchange.request().body));
  });
}

Routes::Answer Routes::detokenize(Exchange& exchange) {
  return respond_from_worker(exchange, [this, &exchange] {
    return openai::detokenize_body(parts_.engine, parts_.protocol.parse_detokenize(exchange.request().body));
  });
}

Routes::Answer Routes::abort(Exchange& exchange) {
  const openai::Json body = openai::read_object(exchange.request().body, parts_.protocol.limits().json_depth);
  if (!body.contains("id") || !body["id"].is_string()) {
    throw openai::invalid_value("id", "no string", "the id of a response");
  }
  const std::string id = body["id"].get<std::string>();
  if (!parts_.generations.abort(id)) {
    const std::string shown = openai::one_line(id);
    throw openai::ApiError(404, "response_not_found", "No response '" + shown + "' is being made.", "id");
  }
  HttpResponse response = json_response(200, openai::Json{{"id", id}, {"aborted", true}}.dump());
  co_await exchange.respond(std::move(response));
}

Routes::Answer Routes::reset_prefix_cache(Exchange& exchange) {
  int64_t n_pages = 0;
  std::optional<openai::ApiError> failure;
  // It may wait for the end of a round.
  std::function<void()> work = [&] {
    const kdt_status status = kdt_engine_reset_prefix_cache(parts_.engine, &n_pages);
    if (status != KDT_OK) failure = openai::from_status(status, kdt_last_error());
  };
  co_await parts_.workers.run(std::move(work));
  if (failure) throw openai::ApiError(*failure);
  HttpResponse response = json_response(200, openai::Json{{"pages", n_pages}}.dump());
  co_await exchange.respond(std::move(response));
}

Routes::Answer Routes::models(Exchange& exchange) {
  return exchange.respond(json_response(200, parts_.protocol.models_body()));
}

Routes::Answer Routes::model(Exchange& exchange) {
  constexpr size_t kStart = std::string_view("/v1/models/").size();
  const std::string_view encoded = std::string_view(exchange.request().path).substr(kStart);
  const std::optional<std::string> name = percent_decoded(encoded);
  if (!name) throw openai::model_not_found(encoded, parts_.protocol.model().names);
  HttpResponse response = json_response(200, parts_.protocol.model_body(*name));
  co_await exchange.respond(std::move(response));
}

Routes::Answer Routes::openapi(Exchange& exchange) {
  return exchange.respond(json_response(200, parts_.protocol.openapi_body(kdt_version(), parts_.keys.required())));
}

std::string Routes::fault() const {
  kdt_health health = {};
  health.struct_size = sizeof(health);
  if (kdt_engine_health(parts_.engine, &health) != KDT_OK) return kdt_last_error();
  if (health.failed) return std::string("the engine has failed: ") + health.error;
  const bool stalled = health.seconds_since_round > parts_.options.stall_timeout;
  return stalled ? fmt::format("the engine has not moved on for {:.0f} s", health.seconds_since_round) : std::string();
}

Routes::Answer Routes::health(Exchange& exchange) {
  const std::string why = fault();
  HttpResponse response = why.empty() ? json_response(200, R"({"status":"ok"})")
                                      : error_response(exchange.request(), {503, "engine_failed", openai::one_line(why, 500)});
  co_await exchange.respond(std::move(response));
}

Routes::Answer Routes::ready(Exchange& exchange) {
  std::string why = fault();
  kdt_health health = {};
  health.struct_size = sizeof(health);
  if (why.empty() && kdt_engine_health(parts_.engine, &health) == KDT_OK) {
    if (parts_.shutdown.phase() != Phase::serving || health.draining) why = "the server is shutting down";
    if (health.running + health.waiting >= parts_.options.max_streams + parts_.options.max_waiting)
      why = "as many requests wait as may";
  }
  HttpResponse response = why.empty() ? json_response(200, R"({"status":"ready"})")
                                      : error_response(exchange.request(), {503, "not_ready", openai::one_line(why, 500)});
  co_await exchange.respond(std::move(response));
}

Routes::Answer Routes::version(Exchange& exchange) {
  return exchange.respond(json_response(200, openai::Json{{"version", kdt_version()}}.dump()));
}

Routes::Answer Routes::metrics(Exchange& exchange) {
  figures_.open_connections = parts_.server.n_connections();
  figures_.open_requests = parts_.server.n_requests() - 1;
  HttpResponse response;
  response.content_type = kMetricsContentType;
  response.body = metrics_page(parts_.engine, parts_.protocol.model().names.front(), figures_);
  co_await exchange.respond(std::move(response));
}

}  // namespace kdt
