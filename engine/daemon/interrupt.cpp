#include "interrupt.h"

#include <signal.h>
#include <unistd.h>

#include <atomic>

#include "failure.h"

namespace kdt {
namespace {

std::atomic<bool> polled{false};
std::atomic<bool> pressed{false};
static_assert(std::atomic<bool>::is_always_lock_free, "a signal handler may touch lock-free atomics only");

void on_interrupt(int) {
  if (polled.load() && !pressed.exchange(true)) return;
  _exit(kExitInterrupted);
}

}  // namespace

void install_interrupt_handler() {
  struct sigaction action = {};
  action.sa_handler = on_interrupt;
  sigemptyset(&action.sa_mask);
  action.sa_flags = SA_RESTART;
  sigaction(SIGINT, &action, nullptr);
}

bool interrupted() noexcept { return pressed.load(); }

InterruptScope::InterruptScope() noexcept { polled.store(true); }
InterruptScope::~InterruptScope() { polled.store(false); }

}  // namespace kdt
