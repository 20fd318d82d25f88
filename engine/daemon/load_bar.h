// How far loading, or a rehearsal, is, on standard error, when that is a terminal.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>

#include "kdtree.h"

namespace kdt {

// Drawn by a thread of its own as long as the object lives; nothing is left on the screen.
class LoadBar {
 public:
  enum class Unit { bytes, pieces };
  explicit LoadBar(const char* verb = "loading", Unit unit = Unit::bytes);   // verb: static
  ~LoadBar();
  LoadBar(const LoadBar&) = delete;
  LoadBar& operator=(const LoadBar&) = delete;

  // For kdt_engine_options; NULL without a terminal. Lives as long as the bar.
  kdt_load_progress* progress() const noexcept { return progress_.get(); }

 private:
  struct Destroy {
    void operator()(kdt_load_progress* progress) const noexcept { kdt_load_progress_destroy(progress); }
  };

  void draw();

  const char* const verb_;
  const Unit unit_;
  std::unique_ptr<kdt_load_progress, Destroy> progress_;
  std::mutex mutex_;
  std::condition_variable ended_;
  bool end_ = false;
  std::thread thread_;
};

}  // namespace kdt
