// The page Prometheus reads: the engine's figures, and what the daemon itself counts.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <utility>

#include "kdtree.h"

namespace kdt {

// What the daemon counts. The io thread.
struct HttpFigures {
  // By route and status; 499: the client left before its answer was complete.
  std::map<std::pair<std::string_view, int>, int64_t> requests;
  int64_t connections_refused = 0;
  int64_t open_connections = 0;
  int64_t open_requests = 0;
};

constexpr const char* kMetricsContentType = "text/plain; version=0.0.4; charset=utf-8";

// Every series has the label model_name.
std::string metrics_page(kdt_engine* engine, const std::string& model_name, const HttpFigures& http);

}  // namespace kdt
