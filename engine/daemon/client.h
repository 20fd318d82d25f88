// The handles of kdtree.h as C++ objects that free themselves, and errors as exceptions (failure.h).
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "kdtree.h"

namespace kdt {

// Throws Failure (exit code 1) with the library's message unless `status` is KDT_OK.
void check(kdt_status status);
// Throws unless the library that was loaded speaks the ABI this program was built for.
void check_abi();

class Engine {
 public:
  explicit Engine(const kdt_engine_options& options);

  std::vector<int32_t> tokenize(std::string_view text) const;
  // `messages_json`: an array in OpenAI's form; `thinking`: KDT_THINKING_*.
  std::vector<int32_t> encode_chat(const std::string& messages_json, int32_t thinking) const;
  nlohmann::ordered_json info() const;
  kdt_engine* get() const noexcept { return handle_.get(); }

 private:
  struct Destroy {
    void operator()(kdt_engine* engine) const noexcept { kdt_engine_destroy(engine); }
  };
  std::unique_ptr<kdt_engine, Destroy> handle_;
};

// Whether mpirun started this process as a rank other than 0, which follows rank 0 and says nothing.
bool is_follower();
// What such a process does instead of its command: its exit code.
int follow(const kdt_engine_options& options);

// A submitted request; the engine may go first.
struct DestroyRequest {
  void operator()(kdt_request* request) const noexcept { kdt_request_destroy(request); }
};
using RequestHandle = std::unique_ptr<kdt_request, DestroyRequest>;

// What one request yielded. `result` borrows nothing: what it would is copied beside it.
struct Generation {
  std::string text;
  std::vector<int32_t> ids;
  std::vector<int64_t> accepted_by_depth;
  std::string error;
  std::string stop_string;
  kdt_result result;
};

// Called with text as it becomes complete; false asks the request to stop.
using TextSink = std::function<bool(std::string_view)>;

// Runs one request to its end, on the calling thread. SIGINT cancels it (interrupt.h); the caller asks interrupted().
Generation run_request(const Engine& engine, const kdt_request_options& options, const TextSink& sink);

// One user turn as a JSON array of messages. Bytes that are not UTF-8 pass through, for the library to name.
std::string user_turn(std::string_view text);

}  // namespace kdt
