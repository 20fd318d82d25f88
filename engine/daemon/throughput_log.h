// The line about throughput that operators grep for, and one about speculation: rates since the last such line.
#pragma once

#include <chrono>

#include "figures.h"
#include "serve_log.h"

namespace kdt {

// The io thread.
class ThroughputLog {
 public:
  ThroughputLog(kdt_engine* engine, ServeLog& log);
  // Writes both lines, unless nothing has happened since the last ones.
  void write();

 private:
  void write_speculation(const Figures& now, double seconds);
  double since(const Figures& now, const char* name) const { return now.at(name) - last_.at(name); }

  kdt_engine* engine_;
  ServeLog& log_;
  Figures last_;
  std::chrono::steady_clock::time_point last_time_;
};

}  // namespace kdt
