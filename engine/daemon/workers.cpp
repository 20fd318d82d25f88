#include "workers.h"

#include <boost/asio/executor_work_guard.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/redirect_error.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <exception>

namespace kdt {
namespace {

struct Job {
  explicit Job(asio::io_context& io) : ended(io, Clock::time_point::max()) {}

  asio::steady_timer ended;   // cancelled at the end
  std::exception_ptr error;
  bool is_over = false;       // of the io thread
};

}  // namespace

asio::awaitable<void> Workers::run(std::function<void()> work) {
  const auto job = std::make_shared<Job>(io_);
  // The guard keeps the io thread from running out of work before the job comes back to it.
  asio::post(pool_, [job, work = std::move(work), &io = io_, guard = asio::make_work_guard(io_)] {
    try {
      work();
    } catch (...) {
      job->error = std::current_exception();
    }
    asio::post(io, [job] {
      job->is_over = true;
      job->ended.cancel();
    });
  });
  while (!job->is_over) {
    boost::system::error_code ignored;
    co_await job->ended.async_wait(asio::redirect_error(asio::use_awaitable, ignored));
  }
  if (job->error) std::rethrow_exception(job->error);
}

}  // namespace kdt
