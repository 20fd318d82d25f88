// The flags of kdtree-run serve.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "options.h"

namespace kdt {

struct ServeOptions {
  EngineFlags engine;
  std::string host = "127.0.0.1";
  int32_t port = 8000;
  std::vector<std::string> served_model_names;   // empty: the checkpoint directory's name
  std::string api_key_file;
  std::vector<std::string> allowed_origins;

  int32_t max_streams = 64;
  int32_t max_waiting = 1024;
  int64_t kv_tokens = 0;       // 0: the library's default
  bool no_prefix_cache = false;

  int32_t max_n = 64;
  int64_t max_body_bytes = int64_t{8} << 20;
  int32_t max_connections = 1024;
  // Seconds.
  double header_timeout = 10;
  double body_timeout = 60;
  double idle_timeout = 75;
  double write_timeout = 30;
  double request_timeout = 0;  // 0: none
  double stall_timeout = 60;
  double shutdown_timeout = 30;
  double log_interval = 10;    // 0: never
  bool log_json = false;

  void declare(Flags& flags);
  // Borrows the strings of this object.
  kdt_engine_options to_engine_options() const;
};

}  // namespace kdt
