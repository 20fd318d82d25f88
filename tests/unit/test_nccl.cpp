// NCCL's communicator: over a fake of its library, over the real one where there is a GPU, and without either.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <doctest/doctest.h>

#include <cstdlib>
#include <cstring>
#include <mutex>
#include <set>

#include "comm/nccl_comm.h"
#include "comm/thread_comm.h"
#include "support/rank_moves.h"

using namespace kdt;
using namespace std::chrono_literals;

namespace {

// A device whose memory is the host's.
class HostStream : public DeviceStream {
 public:
  void enter() override {}
  void* handle() override { return nullptr; }
  void* allocate(size_t bytes) override {
    void* memory = std::malloc(bytes);
    mine_.insert(memory);
    return memory;
  }
  void release(void* memory) noexcept override {
    mine_.erase(memory);
    std::free(memory);
  }
  bool holds(const void* memory) override { return mine_.count(const_cast<void*>(memory)) > 0; }
  void to_device(void* to, const void* from, size_t bytes) override {
    std::memcpy(to, from, bytes);
    ++n_copies;
  }
  void to_host(void* to, const void* from, size_t bytes) override { to_device(to, from, bytes); }
  bool done() override { return true; }

  int n_copies = 0;

 private:
  std::set<void*> mine_;
};

std::string message_of(const std::string& library) {
  auto control = make_thread_communicators(1, 1s);
  try {
    make_nccl_communicator(std::move(control[0]), std::make_unique<HostStream>(), library);
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

}  // namespace

#ifndef KDT_NCCL

TEST_CASE("an engine that was built without it says what to install") {
  CHECK(message_of("") ==
        "NCCL: not built in: expected an engine built with CUDA where PyPI's nvidia-nccl-cu13 (or nccl.h) is installed");
  CHECK_THROWS_AS(make_cuda_stream(0), Error);
}

#else

namespace {

std::vector<std::string> run_ranks(int n, Communicator::Deadline deadline,
                                   const std::function<void(Communicator&, HostStream&)>& body) {
  auto control = make_thread_communicators(n, deadline);
  return test::run_threads(n, [&](int r) {
    auto stream = std::make_unique<HostStream>();
    HostStream& of_rank = *stream;
    const auto comm = make_nccl_communicator(std::move(control[static_cast<size_t>(r)]), std::move(stream), FAKE_NCCL);
    body(*comm, of_rank);
  });
}

}  // namespace

TEST_CASE("a library that is absent, another or too old is refused by name") {
  CHECK(message_of("/no/libnccl.so.2").find("/no/libnccl.so.2: ") == 0);
  CHECK(message_of("/no/libnccl.so.2").find("expected NCCL: PyPI's nvidia-nccl-cu13, with KDTREE_NCCL naming") !=
        std::string::npos);
  CHECK(message_of("libm.so.6") == "libm.so.6: ncclGetVersion: absent: expected NCCL's function");
  setenv("FAKE_NCCL_VERSION", "2708", 1);
  CHECK(message_of(FAKE_NCCL).find("NCCL 2.7.8: expected 2.18.1 or newer") != std::string::npos);
  unsetenv("FAKE_NCCL_VERSION");
  setenv("KDTREE_NCCL", "/elsewhere/libnccl.so.2", 1);
  CHECK(message_of("").find("/elsewhere/libnccl.so.2: ") == 0);
  unsetenv("KDTREE_NCCL");
  CHECK(message_of(FAKE_NCCL) == "");
}

TEST_CASE("bytes arrive where they belong, call after call, in any mixture") {
  for (int n : {1, 3, 4}) {
    std::vector<int> wrong(static_cast<size_t>(n));
    for (const std::string& message : run_ranks(n, 60s, [&](Communicator& comm, HostStream&) {
           REQUIRE(comm.size() == n);
           wrong[static_cast<size_t>(comm.rank())] = test::wrong_bytes(comm);
         }))
      CHECK(message == "");
    for (int bad : wrong) CHECK(bad == 0);
  }
}

TEST_CASE("memory of the device is used as it is") {
  for (const std::string& message : run_ranks(2, 60s, [](Communicator& comm, HostStream& stream) {
         auto* mine = static_cast<char*>(stream.allocate(4));
         auto* all = static_cast<char*>(stream.allocate(8));
         std::memset(mine, 'a' + comm.rank(), 4);
         comm.all_gather(mine, 4, all);
         CHECK(std::string(all, 8) == "aaaabbbb");
         comm.broadcast(mine, 4, 1);
         CHECK(std::string(mine, 4) == "bbbb");
         CHECK(stream.n_copies == 0);
         stream.release(mine);
         stream.release(all);
       }))
    CHECK(message == "");
}

TEST_CASE("a rank that hangs is named on every other rank") {
  const auto messages = run_ranks(4, 300ms, [](Communicator& comm, HostStream&) {
    comm.barrier();
    if (comm.rank() == 2) std::this_thread::sleep_for(1500ms);
    float value = 1, all[4];
    comm.all_gather(&value, sizeof value, all);
  });
  for (size_t r : {0, 1, 3}) CHECK(messages[r] == "rank 2: no answer within 300 ms: expected barrier of every rank");
  CHECK(messages[2].find("rank 2: no answer within 300 ms") == 0);
}

TEST_CASE("a rank that fails is named with its reason, for good") {
  const auto messages = run_ranks(3, 300ms, [](Communicator& comm, HostStream&) {
    if (comm.rank() == 1) {
      comm.fail("layer 7: NaN\n");
      std::this_thread::sleep_for(900ms);
      return;
    }
    CHECK_THROWS_AS(comm.barrier(), Error);
    comm.barrier();
  });
  for (size_t r : {0, 2}) CHECK(messages[r].find("rank 1: layer 7: NaN") == 0);
}

TEST_CASE("an error of NCCL's is told with the rank that saw it") {
  const auto messages = run_ranks(1, 5s, [](Communicator& comm, HostStream&) {
    char byte = 0;
    comm.broadcast(&byte, 1, 1);
  });
  CHECK(messages[0] == "rank 0: NCCL: invalid argument, of the fake: expected broadcast of every rank");
}

TEST_CASE("one rank on a GPU, over the real library") {
  std::unique_ptr<Communicator> comm;
  try {
    auto control = make_thread_communicators(1, 60s);
    comm = make_nccl_communicator(std::move(control[0]), make_cuda_stream(0));
  } catch (const Error& error) {
    REQUIRE(error.status() == Status::io);   // no GPU, or no NCCL
    MESSAGE("skipped: ", std::string(error.what()));
    return;
  }
  CHECK(test::wrong_bytes(*comm) == 0);
}

#endif
