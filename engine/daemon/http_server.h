// HTTP/1.1 over TCP on one io thread: the listener, and what a request, its answer and its handler look like. Beast
// stays inside http_connection.cpp.
//
// Life of a connection: wait for a request (idle timeout) -> header (header timeout, 408, 431) -> HttpHandler::check,
// which may refuse it unread -> body (body timeout, 408, 413) -> HttpHandler::handle -> again, if the client keeps it
// open.
#pragma once

#include <utility>   // first: Boost 1.74's awaitable.hpp uses it and does not include it

#include <boost/asio/awaitable.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_set>
#include <vector>

namespace kdt {

namespace asio = boost::asio;
using Clock = std::chrono::steady_clock;
using HeaderFields = std::vector<std::pair<std::string, std::string>>;

struct HttpLimits {
  size_t max_header_bytes = size_t{16} << 10;
  uint64_t max_body_bytes = 0;
  int64_t max_connections = 0;
  Clock::duration header{};
  Clock::duration body{};
  Clock::duration idle{};
  Clock::duration write{};   // for each piece of an answer
};

struct HttpRequest {
  std::string method;
  std::string path;          // as it was sent, without the query; begins with /
  HeaderFields fields;       // names in lower case
  std::string body;
  std::string peer;          // address and port
  std::string id;            // of the log and of the answer's X-Request-Id; the handler's
  std::string note;          // what the handler wants in the log beside
  std::string error_code;    // of the error that was its answer, or that ended its stream; "" of none
  std::string error_param;   // the field at fault
  bool has_body = false;

  // The first field of this (lower-case) name; "" when there is none.
  std::string_view field(std::string_view name) const;
};

struct HttpResponse {
  int status = 200;
  std::string body;
  std::string content_type = "application/json";
  HeaderFields fields;
};

// 499 in figures and log: the client left before its answer was complete.
constexpr int kClientGone = 499;

// One request that is being answered. Either respond() once, or begin_events(), write_events()..., end_events().
class Exchange {
 public:
  virtual ~Exchange() = default;
  virtual HttpRequest& request() = 0;
  virtual asio::awaitable<void> respond(HttpResponse response) = 0;
  // A stream of server-sent events. False: the client has gone, or has not read for the write timeout.
  virtual asio::awaitable<bool> begin_events() = 0;
  virtual asio::awaitable<bool> write_events(std::string text) = 0;
  virtual asio::awaitable<bool> end_events() = 0;
  // `on_gone` is called at most once, when the client closes the connection while this request is being answered; never
  // after handle() has returned.
  virtual void watch(std::function<void()> on_gone) = 0;
  virtual bool gone() const = 0;
};

class HttpHandler {
 public:
  virtual ~HttpHandler() = default;
  // Looks at the header alone. A response refuses the request, whose body is not read then.
  virtual std::optional<HttpResponse> check(HttpRequest& head) = 0;
  virtual asio::awaitable<void> handle(Exchange& exchange) = 0;
  // The answer to what is not HTTP, too large or too slow.
  virtual HttpResponse refuse(HttpRequest& request, int status, std::string_view why) = 0;
  // Fields that every answer to this request carries.
  virtual HeaderFields common_fields(const HttpRequest& request) = 0;
  // The request has been answered, or its client has gone.
  virtual void done(const HttpRequest& request, int status, double seconds) = 0;
  virtual void connection_refused() = 0;
};

class HttpConnection;

class HttpServer {
 public:
  // `io` and the handler outlive the server; the server outlives its connections, which end within io.run().
  HttpServer(asio::io_context& io, const HttpLimits& limits);
  ~HttpServer();

  // Takes the address, so that a port in use is known before a model is loaded. Throws Failure.
  void bind(const std::string& host, int32_t port);
  // From now on connections are accepted.
  void listen(HttpHandler& handler);
  std::string url() const;          // "http://127.0.0.1:8000"
  bool is_loopback() const;

  // Connections that are open stay, and close after the request they are at.
  void stop_accepting();
  // Ends every connection, wherever it is.
  void close_all();
  int64_t n_connections() const { return static_cast<int64_t>(connections_.size()); }
  int64_t n_requests() const { return n_requests_; }

 private:
  friend class HttpConnection;
  asio::awaitable<void> accept();
  void start(asio::ip::tcp::socket socket, boost::system::error_code& error);

  asio::io_context& io_;
  HttpLimits limits_;
  HttpHandler* handler_ = nullptr;
  asio::ip::tcp::acceptor acceptor_;
  std::unordered_set<HttpConnection*> connections_;
  int64_t n_requests_ = 0;
  bool draining_ = false;
};

}  // namespace kdt
