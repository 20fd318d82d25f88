// The engine under threads: submit, read, cancel, drain, reset, score and fail, all at once. Run under ThreadSanitizer too.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <doctest/doctest.h>

#include <poll.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <random>
#include <thread>

#include "base/error.h"
#include "runtime/engine.h"
#include "support/failing_ops.h"
#include "support/test_backend.h"

using namespace kdt;
using namespace kdt::test;

namespace {

std::unique_ptr<Engine> make_engine(std::shared_ptr<std::atomic<int64_t>> left = nullptr,
                                    const std::function<void(EngineOptions&)>& change = {}) {
  const char* root = std::getenv("KDTREE_SOURCE_ROOT");
  EngineOptions options;
  options.model_path = std::string(root ? root : ".") + "/models/tiny-k2";
  options.draft_path = options.model_path + "-dflash";
  options.max_context = 512;
  options.prefill_chunk = 32;
  options.max_budget = 32;
  if (change) change(options);
  if (!left) left = std::make_shared<std::atomic<int64_t>>(-1);
  return std::make_unique<Engine>(options, [left](Communicator*) { return std::make_unique<FailingOps>(make_test_ops(2), left); });
}

RequestSettings settings_of(int64_t n_prompt, int64_t max_tokens, uint64_t seed = 0) {
  RequestSettings s;
  for (int64_t i = 0; i < n_prompt; ++i) s.prompt.push_back(static_cast<int32_t>((seed * 31 + static_cast<uint64_t>(i) * 7) % 1000));
  s.max_tokens = max_tokens;
  s.sampling.temperature = seed % 2 == 0 ? 0.0 : 0.9;
  s.sampling.seed = seed;
  s.ignore_eos = true;
  return s;
}

std::vector<int32_t> read_all(Request& request) {
  std::vector<int32_t> ids;
  for (;;) {
    const auto& events = request.next(7, -1);
    if (events.empty()) return ids;
    for (const Event& event : events)
      if (event.kind == EventKind::token) ids.push_back(event.token);
  }
}

Status status_of(const std::function<void()>& f) {
  try {
    f();
  } catch (const Error& error) {
    return error.status();
  }
  return Status::ok;
}

void wait_until(const std::function<bool()>& condition) {
  for (int i = 0; i < 20000 && !condition(); ++i) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  CHECK(condition());
}

}  // namespace

TEST_CASE("threads that submit, read, cancel, reset and watch at once each get their own text") {
  const auto engine = make_engine();
  const int n_threads = 6, n_each = 4;
  std::vector<std::vector<int32_t>> alone;
  for (int i = 0; i < n_threads * n_each; ++i) {
    RequestSettings s = settings_of(5 + 11 * (i % 7), 24, static_cast<uint64_t>(i));
    s.speculate = Speculate::off;
    alone.push_back(read_all(*engine->submit(std::move(s))));
  }
  std::atomic<bool> over{false};
  std::thread watcher([&] {
    while (!over) {
      engine->figures();
      engine->health();
      engine->reset_prefix_cache();
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  });
  std::vector<std::thread> clients;
  std::atomic<int> wrong{0};
  for (int t = 0; t < n_threads; ++t)
    clients.emplace_back([&, t] {
      for (int k = 0; k < n_each; ++k) {
        const int i = t * n_each + k;
        const auto request = engine->submit(settings_of(5 + 11 * (i % 7), 24, static_cast<uint64_t>(i)));
        const auto doomed = engine->submit(settings_of(40, 200, 99));
        wrong += read_all(*request) != alone[static_cast<size_t>(i)];
        doomed->cancel();
        read_all(*doomed);
        const Finish finish = doomed->result().finish;
        wrong += finish != Finish::cancelled && finish != Finish::length;
      }
    });
  for (auto& client : clients) client.join();
  over = true;
  watcher.join();
  CHECK(wrong == 0);
  const Health health = engine->health();
  CHECK(health.running + health.waiting == 0);
}

TEST_CASE("the descriptor is readable exactly while something is there") {
  const auto engine = make_engine();
  const auto request = engine->submit(settings_of(4, 30));
  pollfd watched{request->descriptor(), POLLIN, 0};
  size_t n = 0;
  for (bool done = false; !done;) {
    REQUIRE(poll(&watched, 1, 10000) == 1);
    const auto& events = request->next(1000, 0);   // does not throw: something is there
    REQUIRE(!events.empty());
    n += events.size();
    done = events.back().kind == EventKind::finished;
  }
  CHECK(n == 31);
  CHECK(poll(&watched, 1, 0) == 1);   // after the end next() does not wait either
  CHECK(request->next(1, 0).empty());
}

TEST_CASE("cancelled while queued, while prefilling and while decoding, by deadline and all at once") {
  const auto engine = make_engine(nullptr, [](EngineOptions& o) { o.max_streams = 1; });
  const auto decoding = engine->submit(settings_of(3, 400));
  decoding->next(1, -1);
  const auto queued = engine->submit(settings_of(3, 10));
  queued->cancel();
  read_all(*queued);
  CHECK(queued->result().finish == Finish::cancelled);
  RequestSettings late = settings_of(3, 10);
  late.timeout = std::chrono::milliseconds(1);
  const auto timed = engine->submit(late);
  read_all(*timed);
  CHECK(timed->result().finish == Finish::cancelled);
  CHECK(timed->result().error.find("timeout_ms") == 0);
  decoding->cancel();
  read_all(*decoding);
  CHECK(decoding->result().finish == Finish::cancelled);
  const auto prefilling = engine->submit(settings_of(480, 10));
  wait_until([&] { return engine->health().running == 1; });
  prefilling->cancel();
  CHECK(read_all(*prefilling).empty());
  std::vector<std::shared_ptr<Request>> many;
  for (int i = 0; i < 5; ++i) many.push_back(engine->submit(settings_of(3, 400)));
  engine->cancel_all();
  for (const auto& request : many) {
    read_all(*request);
    CHECK(request->result().finish == Finish::cancelled);
  }
  CHECK(read_all(*engine->submit(settings_of(3, 5))).size() == 5);
}

TEST_CASE("a full queue, a drained engine and bad settings refuse by name") {
  const auto engine = make_engine(nullptr, [](EngineOptions& o) {
    o.max_streams = 1;
    o.max_waiting = 2;
  });
  const auto first = engine->submit(settings_of(3, 400));
  first->next(1, -1);
  const auto second = engine->submit(settings_of(3, 3)), third = engine->submit(settings_of(3, 3));
  CHECK(status_of([&] { engine->submit(settings_of(3, 3)); }) == Status::queue_full);
  CHECK(status_of([&] { engine->submit(settings_of(300, 300)); }) == Status::context_length);
  CHECK(status_of([&] { engine->submit(settings_of(0, 3)); }) == Status::invalid_argument);
  CHECK(status_of([&] { engine->drain(1); }) == Status::timeout);
  CHECK(status_of([&] { engine->submit(settings_of(3, 3)); }) == Status::shutting_down);
  first->cancel();
  engine->drain(-1);
  CHECK(read_all(*second).size() == 3);
  CHECK(read_all(*third).size() == 3);
  CHECK(engine->health().draining);
}

TEST_CASE("scores run beside streams and equal themselves") {
  const auto engine = make_engine();
  const auto vocab = static_cast<size_t>(engine->vocab_size());
  const std::vector<int32_t> ids = settings_of(70, 1).prompt;
  std::vector<float> before(ids.size() * vocab), beside(before.size());
  engine->score(ids, before.data());
  const auto stream = engine->submit(settings_of(3, 300));
  engine->score(ids, beside.data());
  CHECK(before == beside);
  engine->cancel_all();
  read_all(*stream);
}

TEST_CASE("an operation that fails in the middle of a round ends every request by name, and the engine") {
  std::mt19937 random(7);
  for (int round = 0; round < 6; ++round) {
    const auto left = std::make_shared<std::atomic<int64_t>>(-1);
    const auto engine = make_engine(left, [](EngineOptions& o) { o.max_streams = 3; });
    std::vector<std::shared_ptr<Request>> requests;
    for (int i = 0; i < 6; ++i) requests.push_back(engine->submit(settings_of(30, 400, static_cast<uint64_t>(i))));
    requests[0]->next(1, -1);
    // A recorded round counts once: on CUDA 400 of them are all that the first stream needs.
    left->store(static_cast<int64_t>(random() % (on_cuda() ? 60 : 400)));
    for (const auto& request : requests) {
      read_all(*request);
      const Result result = request->result();
      CHECK(result.finish == Finish::error);
      CHECK(result.error.find("injected") != std::string::npos);
    }
    const Health health = engine->health();
    CHECK(health.failed);
    CHECK(engine->failure().find("injected") != std::string::npos);
    wait_until([&] { return engine->health().running + engine->health().waiting == 0; });
    CHECK(status_of([&] { engine->submit(settings_of(3, 3)); }) == Status::engine_failed);
    std::vector<float> logits(static_cast<size_t>(engine->vocab_size()));
    const std::vector<int32_t> one{1};
    CHECK(status_of([&] { engine->score(one, logits.data()); }) == Status::engine_failed);
  }
}

TEST_CASE("an engine that is destroyed ends what runs") {
  std::shared_ptr<Request> running, queued;
  {
    const auto engine = make_engine(nullptr, [](EngineOptions& o) { o.max_streams = 1; });
    running = engine->submit(settings_of(3, 400));
    queued = engine->submit(settings_of(3, 400));
    running->next(1, -1);
  }
  read_all(*running);
  read_all(*queued);
  CHECK(running->result().finish == Finish::cancelled);
  CHECK(queued->result().finish == Finish::cancelled);
}

namespace {

// Four ranks of the bundled model, the third of which is what `of_third` makes of its backend.
std::unique_ptr<Engine> make_ranks(const std::function<std::unique_ptr<Ops>(std::unique_ptr<Ops>)>& of_third,
                                   std::chrono::milliseconds deadline) {
  const char* root = std::getenv("KDTREE_SOURCE_ROOT");
  EngineOptions options;
  options.model_path = std::string(root ? root : ".") + "/models/tiny-k2";
  options.draft_path = options.model_path + "-dflash";
  options.max_context = 512;
  options.tp = 4;
  options.rank_deadline = deadline;
  return std::make_unique<Engine>(options, [&, make_ops = make_test_ranks(1)](Communicator* comm) {
    std::unique_ptr<Ops> ops = make_ops(comm);
    return comm->rank() == 2 && of_third ? of_third(std::move(ops)) : std::move(ops);
  });
}

}  // namespace

TEST_CASE("ranks yield what they yield, every time") {
  std::vector<std::vector<int32_t>> texts;
  for (int run = 0; run < 2; ++run) {
    const auto engine = make_ranks({}, std::chrono::seconds(60));
    const auto a = engine->submit(settings_of(20, 30, 1)), b = engine->submit(settings_of(30, 30, 2));
    texts.push_back(read_all(*a));
    texts.push_back(read_all(*b));
    std::vector<float> logits(static_cast<size_t>(40 * engine->vocab_size()));
    engine->score(settings_of(40, 1).prompt, logits.data());
    CHECK(std::isfinite(logits.back()));
  }
  CHECK(texts[0].size() == 30);
  CHECK(texts[0] == texts[2]);
  CHECK(texts[1] == texts[3]);
}

TEST_CASE("an operation that fails on one rank fails the engine by that rank's name") {
  const auto left = std::make_shared<std::atomic<int64_t>>(-1);
  const auto engine = make_ranks([&](std::unique_ptr<Ops> ops) { return std::make_unique<FailingOps>(std::move(ops), left); },
                                 std::chrono::seconds(60));
  const auto request = engine->submit(settings_of(20, 400));
  const auto other = engine->submit(settings_of(20, 400, 3));
  while (request->next(1, -1).empty()) {
  }
  *left = 25;
  read_all(*request);
  read_all(*other);
  for (const auto& ended : {request, other}) {
    CHECK(ended->result().finish == Finish::error);
    CHECK(ended->result().error.find("rank 2: ops.") != std::string::npos);
    CHECK(ended->result().error.find("injected") != std::string::npos);
  }
  CHECK(engine->health().failed);
  CHECK(status_of([&] { engine->submit(settings_of(4, 4)); }) == Status::engine_failed);
}

TEST_CASE("a rank that hangs is named within the deadline, while the engine works and while it is idle") {
  for (const bool idle : {false, true}) {
    const auto hang = std::make_shared<std::atomic<bool>>(false);
    const auto engine = make_ranks([&](std::unique_ptr<Ops> ops) { return std::make_unique<HangingOps>(std::move(ops), hang); },
                                   std::chrono::milliseconds(2000));
    const auto request = engine->submit(settings_of(20, idle ? 8 : 400));
    if (idle) read_all(*request);
    else
      while (request->next(1, -1).empty()) {
      }
    // Idle ranks meet, and nobody is missed.
    if (idle) std::this_thread::sleep_for(std::chrono::milliseconds(3000));
    CHECK_FALSE(engine->health().failed);
    *hang = true;
    const auto last = idle ? engine->submit(settings_of(20, 400)) : request;
    read_all(*last);
    CHECK(last->result().finish == Finish::error);
    CHECK(last->result().error.find("rank 2: no answer within 2000 ms") != std::string::npos);
    *hang = false;
  }
}

TEST_CASE("a rank that cannot load ends the start with its own error") {
  CHECK(status_of([] {
    make_ranks([](std::unique_ptr<Ops>) -> std::unique_ptr<Ops> { throw Error(Status::out_of_memory, "memory: none: expected some"); },
               std::chrono::seconds(60));
  }) == Status::out_of_memory);
}
