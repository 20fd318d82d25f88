#include "http_server.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/redirect_error.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/use_awaitable.hpp>

#include "failure.h"
#include "http_connection.h"

namespace kdt {
namespace {

using asio::ip::tcp;
using boost::system::error_code;

// After a failed accept: most often descriptors have run out, and one comes free by and by.
constexpr auto kAcceptPause = std::chrono::milliseconds(100);

// Connections beyond the limit that are told so at a time; further ones are closed without a word.
constexpr int64_t kTurnedAway = 64;

// A dead network under an idle or waiting client is noticed within about two minutes.
void set_options(tcp::socket& socket) {
  error_code ignored;
  socket.set_option(tcp::no_delay(true), ignored);
  socket.set_option(asio::socket_base::keep_alive(true), ignored);
  const int idle_seconds = 60, interval_seconds = 20, n_probes = 3;
  setsockopt(socket.native_handle(), IPPROTO_TCP, TCP_KEEPIDLE, &idle_seconds, sizeof(int));
  setsockopt(socket.native_handle(), IPPROTO_TCP, TCP_KEEPINTVL, &interval_seconds, sizeof(int));
  setsockopt(socket.native_handle(), IPPROTO_TCP, TCP_KEEPCNT, &n_probes, sizeof(int));
  // Megabytes of kernel buffer would hide for long that a client does not read.
  socket.set_option(asio::socket_base::send_buffer_size(128 << 10), ignored);
}

}  // namespace

std::string_view HttpRequest::field(std::string_view name) const {
  for (const auto& [each, value] : fields) {
    if (each == name) return value;
  }
  return {};
}

HttpServer::HttpServer(asio::io_context& io, const HttpLimits& limits) : io_(io), limits_(limits), acceptor_(io) {}

HttpServer::~HttpServer() = default;

void HttpServer::bind(const std::string& host, int32_t port) {
  error_code error;
  tcp::resolver resolver(io_);
  const auto found = resolver.resolve(host, std::to_string(port), tcp::resolver::passive, error);
  if (error || found.empty()) {
    fail_run("--host", host, "an address or a name of this machine (" + error.message() + ")");
  }
  const tcp::endpoint endpoint = found.begin()->endpoint();
  acceptor_.open(endpoint.protocol(), error);
  if (!error) acceptor_.set_option(tcp::acceptor::reuse_address(true), error);
  if (!error) acceptor_.bind(endpoint, error);
  if (error == asio::error::address_in_use) {
    fail_run("--port", std::to_string(port),
             "a free port: another program listens on it; stop that one, or choose another with "
             "`kdtree-run serve --port N`");
  }
  if (error == asio::error::access_denied) {
    fail_run("--port", std::to_string(port), "a port this user may open: 1024 or above");
  }
  if (error) fail_run("--host", host, "an address of this machine (" + error.message() + ")");
}

void HttpServer::listen(HttpHandler& handler) {
  handler_ = &handler;
  error_code error;
  acceptor_.listen(asio::socket_base::max_listen_connections, error);
  // Two programs may bind, only one may listen.
  if (error) fail_run("--port", url(), "a free port (" + error.message() + ")");
  asio::co_spawn(io_, accept(), asio::detached);
}

std::string HttpServer::url() const {
  error_code ignored;
  const tcp::endpoint endpoint = acceptor_.local_endpoint(ignored);
  const std::string address = endpoint.address().to_string();
  const std::string host = endpoint.address().is_v6() ? "[" + address + "]" : address;
  return "http://" + host + ":" + std::to_string(endpoint.port());
}

bool HttpServer::is_loopback() const {
  error_code ignored;
  return acceptor_.local_endpoint(ignored).address().is_loopback();
}

asio::awaitable<void> HttpServer::accept() {
  asio::steady_timer pause(io_);
  while (acceptor_.is_open()) {
    error_code error;
    tcp::socket socket(io_);
    co_await acceptor_.async_accept(socket, asio::redirect_error(asio::use_awaitable, error));
    if (!acceptor_.is_open()) break;
    if (!error) start(std::move(socket), error);
    if (error && error != asio::error::connection_aborted) {
      pause.expires_after(kAcceptPause);
      co_await pause.async_wait(asio::redirect_error(asio::use_awaitable, error));
    }
  }
}

// A connection that there is no memory for must not end the loop of accepts.
void HttpServer::start(tcp::socket socket, error_code& error) try {
  const bool accepted = n_connections() < limits_.max_connections;
  if (!accepted) {
    handler_->connection_refused();
    if (n_connections() >= limits_.max_connections + kTurnedAway) return;
  }
  set_options(socket);
  const auto connection = std::make_shared<HttpConnection>(*this, std::move(socket));
  asio::co_spawn(
      io_, [connection, accepted] { return accepted ? connection->run() : connection->turn_away(); }, asio::detached);
} catch (const std::exception&) {
  error = asio::error::no_memory;
}

void HttpServer::stop_accepting() {
  draining_ = true;
  error_code ignored;
  acceptor_.close(ignored);
}

void HttpServer::close_all() {
  stop_accepting();
  for (HttpConnection* connection : connections_) connection->close();
}

}  // namespace kdt
