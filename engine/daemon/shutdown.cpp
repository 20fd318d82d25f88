#include "shutdown.h"

#include <signal.h>
#include <unistd.h>

#include "failure.h"
#include "table.h"

namespace kdt {
namespace {

using boost::system::error_code;
using std::chrono::milliseconds;
using std::chrono::seconds;

// Between looks at the engine while it serves, and at what is still open while the daemon ends.
constexpr auto kTick = milliseconds(250);
constexpr auto kEndTick = milliseconds(20);
// After the engine has failed.
constexpr auto kFailureGrace = seconds(2);
// For clients to take the error that ends their stream.
constexpr auto kCancelGrace = seconds(5);
// For connections to close, and for the round that is running: a pass cannot be left.
constexpr auto kEndGrace = seconds(5);
// One request to end may come as two signals: to the process and to its group.
constexpr auto kSameSignal = milliseconds(20);

}  // namespace

Shutdown::Shutdown(asio::io_context& io, kdt_engine* engine, HttpServer& server, Generations& generations,
                   ServeLog& log, Clock::duration timeout, std::function<void()> on_end)
    : engine_(engine),
      server_(server),
      generations_(generations),
      log_(log),
      timeout_(timeout),
      on_end_(std::move(on_end)),
      signals_(io),
      ticks_(io) {}

void Shutdown::start() {
  signals_.add(SIGTERM);
  signals_.add(SIGINT);
  await_signal();
  await_tick();
}

void Shutdown::await_signal() {
  signals_.async_wait([this](error_code error, int signal) {
    if (!error) on_signal(signal);
  });
}

void Shutdown::on_signal(int signal) {
  const std::string name = signal == SIGINT ? "SIGINT" : "SIGTERM";
  if (phase_ != Phase::serving && Clock::now() < signalled_ + kSameSignal) return await_signal();
  if (phase_ != Phase::serving) {
    log_.warning(name + " again: stopping at once");
    _exit(exit_code_ != 0 ? exit_code_ : static_cast<int>(kExitInterrupted));
  }
  log_.info(name + ": finishing " + counted(server_.n_requests(), "open request") + "; again to stop at once");
  signalled_ = Clock::now();
  server_.stop_accepting();
  kdt_engine_drain(engine_, 0);   // a timeout says that requests are left, which is what the ticks look at
  enter(Phase::draining, timeout_);
  await_signal();
}

void Shutdown::enter(Phase phase, Clock::duration time) {
  phase_ = phase;
  phase_end_ = Clock::now() + time;
}

void Shutdown::await_tick() {
  ticks_.expires_after(phase_ == Phase::serving ? kTick : kEndTick);
  ticks_.async_wait([this](error_code error) {
    if (!error) tick();
  });
}

void Shutdown::tick() {
  look_at_engine();
  const bool is_late = phase_ != Phase::serving && Clock::now() >= phase_end_;
  const bool is_idle = server_.n_requests() == 0;
  switch (phase_) {
    case Phase::serving: break;
    case Phase::draining:
      if (is_idle) end();
      else if (is_late) cancel();
      break;
    case Phase::cancelling:
      if (is_idle || is_late) end();
      break;
    case Phase::failed:
      if (is_late) end();
      break;
    case Phase::ending:
      if (server_.n_connections() == 0 && kdt_engine_drain(engine_, 0) != KDT_ERR_TIMEOUT) {
        signals_.cancel();
        on_end_();
        return;
      }
      if (is_late) {
        log_.warning("stopped in the middle of a round");
        _exit(exit_code_);
      }
  }
  await_tick();
}

void Shutdown::look_at_engine() {
  kdt_health health = {};
  health.struct_size = sizeof(health);
  if (exit_code_ != 0 || phase_ == Phase::ending) return;
  if (kdt_engine_health(engine_, &health) != KDT_OK || !health.failed) return;
  log_.error(std::string("the engine has failed, and the daemon ends: ") + health.error);
  exit_code_ = kExitFailed;
  generations_.fail_all(openai::ApiError(503, "engine_failed", std::string("The engine has failed: ") + health.error));
  enter(Phase::failed, kFailureGrace);
}

void Shutdown::cancel() {
  log_.warning("the shutdown timeout is over: cancelling " + counted(server_.n_requests(), "open request"));
  generations_.fail_all(openai::ApiError(503, "shutting_down", "The server is shutting down."));
  kdt_engine_cancel_all(engine_);
  enter(Phase::cancelling, kCancelGrace);
}

void Shutdown::end() {
  server_.close_all();
  enter(Phase::ending, kEndGrace);
}

}  // namespace kdt
