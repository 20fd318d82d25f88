#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <doctest/doctest.h>

#include <atomic>
#include <vector>

#include "base/error.h"
#include "base/philox.h"
#include "base/thread_pool.h"

using namespace kdt;

// Known answers of the Random123 distribution (kat_vectors, philox4x32 10).
TEST_CASE("Philox4x32-10 gives the published known answers") {
  using Words = std::array<uint32_t, 4>;
  CHECK(philox4x32({0, 0, 0, 0}, {0, 0}) == Words{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8});
  CHECK(philox4x32({0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff}, {0xffffffff, 0xffffffff}) ==
        Words{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd});
  CHECK(philox4x32({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}) ==
        Words{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1});
}

TEST_CASE("noise is finite at both ends of its range") {
  CHECK(gumbel(0) == doctest::Approx(-std::log(std::log(2.0) * 33)));
  CHECK(gumbel(0xffffffffu) == doctest::Approx(std::log(2.0) * 33));
}

TEST_CASE("a thread pool runs every share once, again and again") {
  for (int size : {1, 2, 3, 7}) {
    ThreadPool pool(size);
    for (int round = 0; round < 500; ++round) {
      std::vector<std::atomic<int>> hits(static_cast<size_t>(size));
      pool.run([&](int t) { hits[static_cast<size_t>(t)].fetch_add(1); });
      for (auto& hit : hits) REQUIRE(hit.load() == 1);
    }
    for (int64_t n : {0, 1, 5, 16, 1000}) {
      int64_t next = 0;
      for (int t = 0; t < size; ++t) {
        const auto share = pool.share(n, t);
        CHECK(share.begin == next);
        next = share.end;
      }
      CHECK(next == n);
    }
  }
}

TEST_CASE("messages name field, value and expectation, and stay on one printable line") {
  const Error error(Status::invalid_argument, "budget", "a\nb\x01", "1 to 8");
  CHECK(std::string(error.what()) == "budget: a\\x0ab\\x01: expected 1 to 8");
  CHECK(printable(std::string(500, 'x')).size() < 100);
  CHECK(printable("caf\xc3\xa9 \xff\xe2\x82") == "caf\xc3\xa9 \\xff\\xe2\\x82");
}
