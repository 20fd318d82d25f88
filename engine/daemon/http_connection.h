// One client's connection: reads requests, hands them to the handler, writes answers, notices when the client leaves.
#pragma once

#include <boost/asio/steady_timer.hpp>
#include <boost/beast/core/flat_buffer.hpp>
#include <boost/beast/http/parser.hpp>
#include <boost/beast/http/string_body.hpp>

#include "http_server.h"

namespace kdt {

// The io thread. Kept alive by its coroutine and its timer.
class HttpConnection final : public Exchange, public std::enable_shared_from_this<HttpConnection> {
 public:
  HttpConnection(HttpServer& server, asio::ip::tcp::socket socket);
  ~HttpConnection() override;

  asio::awaitable<void> run();
  // Status 503, for a connection that is one too many.
  asio::awaitable<void> turn_away();
  void close();

  HttpRequest& request() override { return request_; }
  asio::awaitable<void> respond(HttpResponse response) override;
  asio::awaitable<bool> begin_events() override;
  asio::awaitable<bool> write_events(std::string text) override;
  asio::awaitable<bool> end_events() override;
  void watch(std::function<void()> on_gone) override;
  bool gone() const override { return gone_; }

 private:
  using Parser = boost::beast::http::request_parser<boost::beast::http::string_body>;

  asio::awaitable<bool> wait_for_request();
  asio::awaitable<bool> read_request();
  asio::awaitable<bool> refuse(boost::system::error_code error);
  asio::awaitable<bool> refuse(int status, std::string why);
  asio::awaitable<void> answer();
  asio::awaitable<void> linger();
  bool take_head();
  bool framed_as_read() const;
  template <typename Message>
  void set_fields(Message& message, const HeaderFields& fields, const std::string& content_type);
  asio::awaitable<bool> write(std::string_view bytes);
  bool keeps_open() const;
  void set_deadline(Clock::duration time);
  void clear_deadline();
  void arm_watch();
  void look_for_end(int64_t watch);
  void stop_watch();
  void leave();

  HttpServer& server_;
  asio::ip::tcp::socket socket_;
  asio::steady_timer deadline_;     // of the read or write in progress: ends it, and sets timed_out_
  asio::steady_timer next_look_;
  boost::beast::flat_buffer buffer_;
  std::optional<Parser> parser_;
  HttpRequest request_;
  std::function<void()> on_gone_;
  Clock::time_point began_{};
  int64_t watch_ = 0;               // counts watches: a completion of an older one is ignored
  int status_ = 0;                  // of the answer that was begun; 0: none yet
  bool events_ = false;             // the answer is a stream
  bool chunked_ = false;
  bool complete_ = false;           // the answer was written to its end
  bool timed_out_ = false;
  bool gone_ = false;
  bool closing_ = false;
  bool keep_alive_ = false;         // as the client asks
  bool watching_ = false;
};

}  // namespace kdt
