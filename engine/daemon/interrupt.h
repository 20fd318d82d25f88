// Ctrl-C. While a request runs the first SIGINT asks it to stop, so that what was generated is still reported; at any
// other time, and the second time, it ends the process with exit code 130.
#pragma once

namespace kdt {

void install_interrupt_handler();
bool interrupted() noexcept;

// For the lifetime of the object a SIGINT is answered by the code that polls interrupted().
class InterruptScope {
 public:
  InterruptScope() noexcept;
  ~InterruptScope();
  InterruptScope(const InterruptScope&) = delete;
  InterruptScope& operator=(const InterruptScope&) = delete;
};

}  // namespace kdt
