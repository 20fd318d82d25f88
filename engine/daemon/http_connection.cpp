#include "http_connection.h"

#include <poll.h>
#include <sys/socket.h>

#include <array>
#include <boost/asio/buffer.hpp>
#include <boost/asio/redirect_error.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <boost/asio/write.hpp>
#include <boost/beast/http.hpp>
#include <cerrno>
#include <ctime>

#include "http_text.h"
#include "kdtree.h"

namespace kdt {
namespace {

namespace beast = boost::beast;
namespace http = beast::http;
using asio::ip::tcp;
using boost::system::error_code;

// Besides the header: what is read ahead of a body's parse.
constexpr size_t kReadAhead = size_t{64} << 10;
// An answer is written in pieces, each within the write timeout, so that a long one may take longer.
constexpr size_t kPieceBytes = size_t{256} << 10;
// How long, and how much of, a request that was refused unread is read away. Closing at once would reset the
// connection, and the client would lose the answer.
constexpr auto kLinger = std::chrono::seconds(2);
// Between looks at a client whose next request is in the socket already: its leaving is no event then.
constexpr auto kLookInterval = std::chrono::milliseconds(100);

auto with_error(error_code& error) { return asio::redirect_error(asio::use_awaitable, error); }

std::string http_date() {
  const std::time_t now = std::time(nullptr);
  std::tm utc{};
  gmtime_r(&now, &utc);
  char text[64];
  return std::string(text, std::strftime(text, sizeof(text), "%a, %d %b %Y %H:%M:%S GMT", &utc));
}

// The path of a target in origin or absolute form; "" of another.
std::string path_of(std::string_view target) {
  if (target.substr(0, 7) == "http://") {
    const size_t slash = target.find('/', 7);
    target = slash == std::string_view::npos ? std::string_view("/") : target.substr(slash);
  }
  if (target == "*") return "*";
  return target.substr(0, 1) == "/" ? std::string(target.substr(0, target.find_first_of("?#"))) : std::string();
}

// The status for a request that could not be read; 0: nobody waits for an answer.
int status_of(error_code error) {
  if (error == http::error::header_limit || error == http::error::buffer_overflow) return 431;
  if (error == http::error::body_limit) return 413;
  if (error == http::error::bad_version) return 505;
  if (error == http::error::end_of_stream || error == http::error::partial_message) return 0;
  return error.category() == http::make_error_code(http::error::bad_method).category() ? 400 : 0;
}

}  // namespace

HttpConnection::HttpConnection(HttpServer& server, tcp::socket socket)
    : server_(server),
      socket_(std::move(socket)),
      deadline_(server.io_),
      next_look_(server.io_),
      buffer_(server.limits_.max_header_bytes + kReadAhead) {
  error_code error;
  const tcp::endpoint peer = socket_.remote_endpoint(error);
  if (!error) request_.peer = peer.address().to_string() + ":" + std::to_string(peer.port());
  server_.connections_.insert(this);
}

HttpConnection::~HttpConnection() { server_.connections_.erase(this); }

asio::awaitable<void> HttpConnection::run() {
  const auto self = shared_from_this();
  for (bool open = true; open;) {
    // Not in the loop's condition: GCC 12 awaits the right-hand side of && whatever the left one is.
    const bool arrived = co_await wait_for_request();
    if (!arrived) break;
    status_ = 0;
    events_ = complete_ = false;
    began_ = Clock::now();
    if (co_await read_request()) co_await answer();
    const double seconds = std::chrono::duration<double>(Clock::now() - began_).count();
    if (status_ != 0 || gone_) server_.handler_->done(request_, complete_ ? status_ : kClientGone, seconds);
    open = complete_ && keeps_open();
  }
  co_await linger();
}

asio::awaitable<void> HttpConnection::turn_away() {
  const auto self = shared_from_this();
  HttpResponse response = server_.handler_->refuse(request_, 503, "Too many connections are open.");
  closing_ = true;
  co_await respond(std::move(response));
  co_await linger();
}

void HttpConnection::close() {
  closing_ = true;
  error_code ignored;
  socket_.close(ignored);
  deadline_.cancel();
  next_look_.cancel();
  if (watching_) leave();
}

bool HttpConnection::keeps_open() const { return keep_alive_ && !closing_ && !server_.draining_; }

// ------------------------------------------------------------------------------------------------ reading

asio::awaitable<bool> HttpConnection::wait_for_request() {
  error_code error;
  if (buffer_.size() == 0) {
    set_deadline(parser_ ? server_.limits_.idle : server_.limits_.header);
    co_await socket_.async_wait(tcp::socket::wait_read, with_error(error));
    clear_deadline();
  }
  co_return !error && !timed_out_ && !closing_;
}

asio::awaitable<bool> HttpConnection::read_request() {
  error_code error;
  parser_.emplace();
  parser_->header_limit(static_cast<uint32_t>(server_.limits_.max_header_bytes));
  parser_->body_limit(server_.limits_.max_body_bytes);
  HttpRequest fresh;
  fresh.peer = std::move(request_.peer);
  request_ = std::move(fresh);
  keep_alive_ = false;
  set_deadline(server_.limits_.header);
  co_await http::async_read_header(socket_, buffer_, *parser_, with_error(error));
  clear_deadline();
  if (error) co_return co_await refuse(error);
  if (!take_head()) co_return co_await refuse(http::make_error_code(http::error::bad_target));
  if (!framed_as_read()) co_return co_await refuse(http::make_error_code(http::error::bad_transfer_encoding));
  if (parser_->get().version() >= 11 && parser_->get().count(http::field::host) != 1)
    co_return co_await refuse(http::make_error_code(http::error::bad_field));
  // HTTP/1.0 knows no expectations: they are not looked at (RFC 9110, 10.1.1).
  const std::string_view expected = parser_->get().version() >= 11 ? request_.field("expect") : std::string_view();
  const bool waits = lower_case(expected) == "100-continue";
  if (!expected.empty() && !waits) co_return co_await refuse(417, "The header Expect can ask for 100-continue alone.");

  if (std::optional<HttpResponse> refusal = server_.handler_->check(request_)) {
    keep_alive_ = keep_alive_ && parser_->is_done();
    co_await respond(std::move(*refusal));
    co_return false;
  }
  if (waits && request_.has_body) {
    http::response<http::empty_body> go_on(http::status::continue_, 11);
    set_deadline(server_.limits_.write);
    co_await http::async_write(socket_, go_on, with_error(error));
    if (error) co_return false;
  }
  set_deadline(server_.limits_.body);
  co_await http::async_read(socket_, buffer_, *parser_, with_error(error));
  clear_deadline();
  if (error) co_return co_await refuse(error);
  request_.body = std::move(parser_->get().body());
  co_return true;
}

bool HttpConnection::take_head() {
  const auto& head = parser_->get();
  // The type differs between versions of Boost.
  const auto text = [](auto view) { return std::string(view.data(), view.size()); };
  request_.method = text(head.method_string());
  request_.path = path_of(text(head.target()));
  for (const auto& field : head) {
    request_.fields.emplace_back(lower_case(text(field.name_string())), text(field.value()));
  }
  request_.has_body = !parser_->is_done();
  keep_alive_ = head.keep_alive();
  return !request_.path.empty() && (request_.path != "*" || request_.method == "OPTIONS");
}

// Whether the body ends where a proxy in front sees its end (RFC 9112, 6.1): `chunked` is the only coding there is, and the
// parser has seen to it that no length stands beside it.
bool HttpConnection::framed_as_read() const {
  const auto& head = parser_->get();
  const auto codings = head.count(http::field::transfer_encoding);
  return codings == 0 || (codings == 1 && head.version() >= 11 &&
                          beast::iequals(head[http::field::transfer_encoding], "chunked") &&
                          head.count(http::field::content_length) == 0);
}

asio::awaitable<bool> HttpConnection::refuse(error_code error) {
  const int status = timed_out_ ? 408 : status_of(error);
  keep_alive_ = false;
  if (status == 0 || closing_) co_return false;
  const auto more_than = [](std::string_view what, uint64_t bytes) {
    return std::string(what) + " has more than " + std::to_string(bytes) + " bytes.";
  };
  const std::string why = timed_out_      ? "The request did not arrive in time."
                          : status == 413 ? more_than("The body", server_.limits_.max_body_bytes)
                          : status == 431 ? more_than("The header", server_.limits_.max_header_bytes)
                                          : "The request was refused: " + error.message() + ".";
  timed_out_ = false;
  co_return co_await refuse(status, why);
}

asio::awaitable<bool> HttpConnection::refuse(int status, std::string why) {
  keep_alive_ = false;
  HttpResponse response = server_.handler_->refuse(request_, status, why);
  co_await respond(std::move(response));
  co_return false;
}

// Reads away what the client still sends, for a while, and closes.
asio::awaitable<void> HttpConnection::linger() {
  const auto self = shared_from_this();
  error_code error;
  socket_.shutdown(tcp::socket::shutdown_send, error);
  timed_out_ = false;
  set_deadline(kLinger);
  std::array<char, 4096> scratch;
  while (!error && !timed_out_ && !closing_) {
    co_await socket_.async_read_some(asio::buffer(scratch), with_error(error));
  }
  clear_deadline();
  deadline_.cancel();
  socket_.close(error);
}

// ------------------------------------------------------------------------------------------------ answering

asio::awaitable<void> HttpConnection::answer() {
  struct Count {
    explicit Count(int64_t& n_) : n(n_) { ++n; }
    ~Count() { --n; }
    int64_t& n;
  };
  const Count count(server_.n_requests_);
  bool failed = false;
  try {
    co_await server_.handler_->handle(*this);
  } catch (const std::exception&) {
    failed = true;
  }
  stop_watch();
  if (failed && status_ == 0 && !gone_) {
    HttpResponse response = server_.handler_->refuse(request_, 500, "The server failed to answer this request.");
    co_await respond(std::move(response));
  }
}

template <typename Message>
void HttpConnection::set_fields(Message& message, const HeaderFields& fields, const std::string& content_type) {
  message.set(http::field::server, std::string("kdtree-run/") + kdt_version());
  message.set(http::field::date, http_date());
  if (!content_type.empty()) message.set(http::field::content_type, content_type);
  for (const auto& [name, value] : server_.handler_->common_fields(request_)) message.set(name, value);
  for (const auto& [name, value] : fields) message.set(name, value);
  message.keep_alive(keeps_open());
}

asio::awaitable<void> HttpConnection::respond(HttpResponse response) {
  status_ = response.status;
  const unsigned version = parser_ ? parser_->get().version() : 11;
  http::response<http::string_body> message(http::int_to_status(static_cast<unsigned>(response.status)), version);
  set_fields(message, response.fields, response.status == 204 ? std::string() : response.content_type);
  message.body() = std::move(response.body);
  if (response.status != 204) message.content_length(message.body().size());
  if (request_.method == "HEAD") message.body().clear();

  error_code error;
  http::response_serializer<http::string_body> serializer(message);
  serializer.limit(kPieceBytes);
  while (!error && !timed_out_ && !serializer.is_done()) {
    set_deadline(server_.limits_.write);
    co_await http::async_write_some(socket_, serializer, with_error(error));
  }
  clear_deadline();
  complete_ = !error && !timed_out_;
}

asio::awaitable<bool> HttpConnection::begin_events() {
  events_ = true;
  status_ = 200;
  const unsigned version = parser_->get().version();
  chunked_ = version >= 11;
  if (!chunked_) keep_alive_ = false;   // the stream ends where the connection does
  http::response<http::empty_body> message(http::status::ok, version);
  set_fields(message, {{"Cache-Control", "no-cache"}, {"X-Accel-Buffering", "no"}}, "text/event-stream; charset=utf-8");
  if (chunked_) message.chunked(true);
  error_code error;
  http::response_serializer<http::empty_body> serializer(message);
  set_deadline(server_.limits_.write);
  co_await http::async_write_header(socket_, serializer, with_error(error));
  clear_deadline();
  if (error || timed_out_) leave();
  co_return !gone_;
}

asio::awaitable<bool> HttpConnection::write_events(std::string text) {
  for (size_t at = 0; at < text.size() && !gone_; at += kPieceBytes) {
    co_await write(std::string_view(text).substr(at, kPieceBytes));
  }
  co_return !gone_;
}

asio::awaitable<bool> HttpConnection::write(std::string_view bytes) {
  error_code error;
  set_deadline(server_.limits_.write);
  if (chunked_) {
    const auto chunk = http::make_chunk(asio::buffer(bytes.data(), bytes.size()));
    co_await asio::async_write(socket_, chunk, with_error(error));
  } else {
    co_await asio::async_write(socket_, asio::buffer(bytes.data(), bytes.size()), with_error(error));
  }
  clear_deadline();
  if (error || timed_out_) leave();
  co_return !gone_;
}

asio::awaitable<bool> HttpConnection::end_events() {
  error_code error;
  if (chunked_ && !gone_) {
    const auto last = http::make_chunk_last();
    set_deadline(server_.limits_.write);
    co_await asio::async_write(socket_, last, with_error(error));
    clear_deadline();
  }
  if (error || timed_out_) leave();
  complete_ = !gone_;
  co_return complete_;
}

// ------------------------------------------------------------------------------------------------ time and leaving

void HttpConnection::set_deadline(Clock::duration time) {
  deadline_.expires_after(time);
  deadline_.async_wait([self = shared_from_this()](error_code) {
    // A wait that was replaced completes too, and maybe late: only a deadline that has passed counts.
    if (self->deadline_.expiry() > Clock::now()) return;
    self->timed_out_ = true;
    error_code ignored;
    self->socket_.cancel(ignored);
  });
}

void HttpConnection::clear_deadline() { deadline_.expires_at(Clock::time_point::max()); }

void HttpConnection::watch(std::function<void()> on_gone) {
  on_gone_ = std::move(on_gone);
  watching_ = true;
  ++watch_;
  arm_watch();
}

void HttpConnection::stop_watch() {
  if (!watching_) return;
  watching_ = false;
  on_gone_ = nullptr;
  next_look_.cancel();
  error_code ignored;
  socket_.cancel(ignored);
}

void HttpConnection::arm_watch() {
  socket_.async_wait(tcp::socket::wait_read, [self = shared_from_this(), watch = watch_](error_code error) {
    if (!error) self->look_for_end(watch);
  });
}

// The socket is readable: the end of the connection, an error, or a request sent ahead.
void HttpConnection::look_for_end(int64_t watch) {
  if (!watching_ || watch != watch_) return;
  char byte = 0;
  const ssize_t n = recv(socket_.native_handle(), &byte, 1, MSG_PEEK | MSG_DONTWAIT);
  if (n < 0 && (errno == EAGAIN || errno == EINTR)) return arm_watch();
  pollfd hung_up = {socket_.native_handle(), POLLRDHUP, 0};
  if (n <= 0 || poll(&hung_up, 1, 0) != 0) return leave();
  next_look_.expires_after(kLookInterval);
  next_look_.async_wait([self = shared_from_this(), watch](error_code error) {
    if (!error) self->look_for_end(watch);
  });
}

void HttpConnection::leave() {
  if (gone_) return;
  gone_ = true;
  keep_alive_ = false;
  error_code ignored;
  socket_.cancel(ignored);   // a write that waits for the client ends
  if (const auto on_gone = std::exchange(on_gone_, nullptr)) on_gone();
}

}  // namespace kdt
