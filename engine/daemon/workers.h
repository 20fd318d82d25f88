// Threads for what would hold up the io thread: reading and tokenising a long body.
#pragma once

#include <boost/asio/thread_pool.hpp>

#include "http_server.h"

namespace kdt {

class Workers {
 public:
  explicit Workers(asio::io_context& io) : io_(io), pool_(kThreads) {}
  ~Workers() { pool_.join(); }
  // Runs `work` on a worker; the caller goes on, on the io thread, when it has ended. What it throws is thrown here.
  asio::awaitable<void> run(std::function<void()> work);

 private:
  static constexpr size_t kThreads = 2;

  asio::io_context& io_;
  asio::thread_pool pool_;
};

// Bodies from this length on are read by a worker: shorter ones take less than a round.
constexpr size_t kLongBody = size_t{16} << 10;

}  // namespace kdt
