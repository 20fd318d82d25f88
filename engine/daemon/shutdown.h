// How the daemon ends. SIGTERM or SIGINT: no new connection, open requests finish; those that have not within the
// timeout end with an error; exit code 0. A second signal stops at once (130). When the engine fails every request has
// ended with its error: the daemon stays for a moment, so that those are read and /health is seen to be 503, and exits
// with 1.
#pragma once

#include <boost/asio/signal_set.hpp>
#include <boost/asio/steady_timer.hpp>
#include <chrono>
#include <functional>

#include "generation.h"
#include "http_server.h"
#include "kdtree.h"
#include "serve_log.h"

namespace kdt {

enum class Phase { serving, draining, cancelling, failed, ending };

// The io thread.
class Shutdown {
 public:
  // All of them outlive it. `on_end`: nothing is open any more, or nothing is waited for: what keeps io.run() busy has
  // to end.
  Shutdown(asio::io_context& io, kdt_engine* engine, HttpServer& server, Generations& generations, ServeLog& log,
           Clock::duration timeout, std::function<void()> on_end);
  // Takes the signals over and looks after the engine from now on.
  void start();
  Phase phase() const noexcept { return phase_; }
  // Once io.run() has returned.
  int exit_code() const noexcept { return exit_code_; }

 private:
  void await_signal();
  void on_signal(int signal);
  void await_tick();
  void tick();
  void look_at_engine();
  void cancel();
  void end();
  void enter(Phase phase, Clock::duration time);

  kdt_engine* engine_;
  HttpServer& server_;
  Generations& generations_;
  ServeLog& log_;
  Clock::duration timeout_;
  std::function<void()> on_end_;
  asio::signal_set signals_;
  asio::steady_timer ticks_;
  Phase phase_ = Phase::serving;
  Clock::time_point phase_end_{}, signalled_{};
  int exit_code_ = 0;
};

}  // namespace kdt
