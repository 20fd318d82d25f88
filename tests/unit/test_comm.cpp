// Ranks as threads: what moves where, sums in the order of ranks, and ranks that fail, hang or go another way.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <functional>
#include <random>
#include <thread>

#include "base/error.h"
#include "comm/rank_sum.h"
#include "comm/thread_comm.h"
#include "support/rank_moves.h"

using namespace kdt;
using namespace std::chrono_literals;

namespace {

std::vector<std::string> run_ranks(int n, Communicator::Deadline deadline,
                                   const std::function<void(Communicator&)>& body) {
  auto comms = make_thread_communicators(n, deadline);
  return test::run_threads(n, [&](int r) { body(*comms[static_cast<size_t>(r)]); });
}

void demand_success(const std::vector<std::string>& messages) {
  for (const std::string& message : messages) CHECK(message == "");
}

}  // namespace

TEST_CASE("bytes arrive where they belong, call after call, in any mixture") {
  for (int n : {1, 2, 3, 4, 8}) {
    std::vector<int> wrong(static_cast<size_t>(n));
    demand_success(run_ranks(n, 60s, [&](Communicator& comm) {
      REQUIRE(comm.size() == n);
      wrong[static_cast<size_t>(comm.rank())] = test::wrong_bytes(comm);
    }));
    for (int bad : wrong) CHECK(bad == 0);
  }
}

TEST_CASE("a barrier lets nobody through early") {
  constexpr int kRanks = 4, kRounds = 200;
  std::atomic<int> came{0}, early{0};
  demand_success(run_ranks(kRanks, 60s, [&](Communicator& comm) {
    for (int round = 1; round <= kRounds; ++round) {
      ++came;
      comm.barrier();
      if (came < round * kRanks) ++early;
      comm.barrier();
    }
  }));
  CHECK(early == 0);
}

TEST_CASE("the sum adds in the order of ranks, the same bits in one step and in two") {
  for (int n : {1, 2, 3, 8})
    for (int64_t count : {1, 7, 64, 1000, 16384}) {
      // Of very different sizes, so that another order gives other bits.
      std::vector<std::vector<float>> parts;
      std::mt19937 random(static_cast<uint32_t>(n * 100000 + count));
      for (int r = 0; r < n; ++r) {
        parts.emplace_back(static_cast<size_t>(count));
        for (float& value : parts.back())
          value = std::ldexp(static_cast<float>(random()) / 4e9f - 0.5f, static_cast<int>(random() % 40));
      }
      std::vector<float> expected = parts[0];
      for (int r = 1; r < n; ++r)
        for (size_t i = 0; i < expected.size(); ++i) expected[i] += parts[static_cast<size_t>(r)][i];
      std::vector<int> wrong(static_cast<size_t>(n));
      demand_success(run_ranks(n, 60s, [&](Communicator& comm) {
        RankSum sum(comm, 20000);
        const std::vector<float>& mine = parts[static_cast<size_t>(comm.rank())];
        std::vector<float> once = mine, twice = mine, chosen = mine;
        sum.one_shot(once.data(), count);
        sum.two_shot(twice.data(), count);
        sum(chosen.data(), count);
        for (const auto& found : {once, twice, chosen})
          if (std::memcmp(found.data(), expected.data(), expected.size() * 4) != 0)
            ++wrong[static_cast<size_t>(comm.rank())];
      }));
      for (int bad : wrong) CHECK(bad == 0);
    }
}

TEST_CASE("a long sum goes in slices") {
  demand_success(run_ranks(3, 60s, [](Communicator& comm) {
    RankSum sum(comm, 50000);
    std::vector<float> values(50000, static_cast<float>(comm.rank() + 1));
    sum(values.data(), 50000);
    REQUIRE(std::all_of(values.begin(), values.end(), [](float v) { return v == 6.0f; }));
    REQUIRE_THROWS_AS(sum(values.data(), 50001), Error);
  }));
}

TEST_CASE("a rank that hangs is named on every other rank within the deadline") {
  const auto start = std::chrono::steady_clock::now();
  const auto messages = run_ranks(4, 300ms, [](Communicator& comm) {
    comm.barrier();
    if (comm.rank() == 2) std::this_thread::sleep_for(900ms);
    float value = 1;
    RankSum sum(comm, 1);
    sum(&value, 1);
  });
  CHECK(std::chrono::steady_clock::now() - start < 10s);
  // The one that comes late too: the others have given up.
  for (const std::string& message : messages)
    CHECK(message == "rank 2: no answer within 300 ms: expected all_gather of every rank");
}

TEST_CASE("a rank that fails ends the others at once, and for good") {
  const auto start = std::chrono::steady_clock::now();
  std::vector<int> again(3);
  const auto messages = run_ranks(3, 60s, [&](Communicator& comm) {
    if (comm.rank() == 1) {
      comm.fail("layer 7: NaN\n");
      return;
    }
    try {
      comm.barrier();
    } catch (const Error&) {
      try {
        comm.barrier();
      } catch (const Error&) {
        ++again[static_cast<size_t>(comm.rank())];
      }
      throw;
    }
  });
  CHECK(std::chrono::steady_clock::now() - start < 20s);
  CHECK(messages[1] == "");
  for (size_t r : {0, 2}) {
    CHECK(messages[r].find("rank 1: layer 7: NaN") == 0);
    CHECK(again[r] == 1);
  }
}

TEST_CASE("ranks that go different ways are told so") {
  const auto messages = run_ranks(2, 60s, [](Communicator& comm) {
    std::byte data[16]{};
    comm.broadcast(data, comm.rank() == 0 ? 8 : 16, 0);
  });
  for (const std::string& message : messages) CHECK(message.find("broadcast of ") != std::string::npos);
  CHECK_THROWS_AS(make_thread_communicators(0, 1s), Error);
  CHECK_THROWS_AS(make_thread_communicators(65, 1s), Error);
}
