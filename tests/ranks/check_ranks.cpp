// One rank of a launcher's job: what moves where, or how the others learn of a rank that fails, hangs or dies.
//
//   mpirun -n 4 check_ranks moves          every call with random sizes, sums in the order of ranks
//   mpirun -n 4 check_ranks fail|hang|die RANK DEADLINE_MS
//   mpirun -n 4 check_ranks latency        microseconds of small calls, on rank 0
//
// Prints `rank R: ok`, or the message that its call ended with, and then exits with 3.
#include <csignal>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "comm/mpi_comm.h"
#include "comm/rank_sum.h"

using namespace kdt;
using Clock = std::chrono::steady_clock;

namespace {

std::byte byte_of(uint32_t call, int from, int to, size_t i) {
  return static_cast<std::byte>((call * 31 + static_cast<uint32_t>(from) * 7 + static_cast<uint32_t>(to) * 3 + i) % 251);
}

void demand(bool good, const char* what) {
  if (!good) throw Error(Status::internal, std::string(what) + ": other bytes: expected those that were sent");
}

void moves(Communicator& comm) {
  std::mt19937 random(7);   // the same calls on every rank
  const int n = comm.size(), me = comm.rank();
  for (uint32_t call = 0; call < 300; ++call) {
    const size_t bytes = random() % 5 == 0 ? random() % 2000000 : random() % 50;
    const size_t all_bytes = bytes * static_cast<size_t>(n);
    std::vector<std::byte> mine(bytes), from(all_bytes), all(all_bytes);
    const auto at = [&](int r, size_t i) { return static_cast<size_t>(r) * bytes + i; };
    for (size_t i = 0; i < bytes; ++i) mine[i] = byte_of(call, me, 0, i);
    const int root = static_cast<int>(random() % static_cast<uint32_t>(n));
    comm.all_gather(mine.data(), bytes, all.data());
    for (int r = 0; r < n; ++r)
      for (size_t i = 0; i < bytes; ++i) demand(all[at(r, i)] == byte_of(call, r, 0, i), "all_gather");
    comm.broadcast(mine.data(), bytes, root);
    for (size_t i = 0; i < bytes; ++i) demand(mine[i] == byte_of(call, root, 0, i), "broadcast");
    for (int r = 0; r < n; ++r)
      for (size_t i = 0; i < bytes; ++i) from[at(r, i)] = byte_of(call, me, r, i);
    comm.all_to_all(from.data(), bytes, all.data());
    for (int r = 0; r < n; ++r)
      for (size_t i = 0; i < bytes; ++i) demand(all[at(r, i)] == byte_of(call, r, me, i), "all_to_all");
    if (call % 10 == 0) comm.barrier();
  }
  for (int64_t count : {1, 1000, 30000}) {
    const auto value = [](int rank, int64_t i) {
      return std::ldexp(static_cast<float>(rank * 37 + i % 101 + 1), static_cast<int>((rank * 13 + i) % 40));
    };
    std::vector<float> values(static_cast<size_t>(count)), expected(values.size());
    for (int64_t i = 0; i < count; ++i) {
      values[static_cast<size_t>(i)] = value(me, i);
      float total = value(0, i);
      for (int r = 1; r < n; ++r) total += value(r, i);
      expected[static_cast<size_t>(i)] = total;
    }
    RankSum sum(comm, count);
    sum(values.data(), count);
    demand(std::memcmp(values.data(), expected.data(), values.size() * sizeof(float)) == 0, "sum");
  }
}

void latency(Communicator& comm) {
  for (size_t bytes : {size_t{8}, size_t{16} << 10, size_t{256} << 10}) {
    constexpr int kCalls = 2000;
    std::vector<std::byte> mine(bytes), all(bytes * static_cast<size_t>(comm.size()));
    comm.barrier();
    const auto start = Clock::now();
    for (int i = 0; i < kCalls; ++i) comm.all_gather(mine.data(), bytes, all.data());
    const double us = std::chrono::duration<double, std::micro>(Clock::now() - start).count() / kCalls;
    if (comm.rank() == 0) std::printf("all_gather of %zu bytes by %d ranks: %.1f us\n", bytes, comm.size(), us);
  }
}

void stop(Communicator& comm, const std::string& how) {
  if (how == "fail") comm.fail("no more memory");
  if (how == "hang") std::this_thread::sleep_for(std::chrono::seconds(4));
  if (how == "die") std::raise(SIGKILL);
}

int run(int argc, char** argv) {
  const std::string what = argc > 1 ? argv[1] : "";
  const int bad = argc > 2 ? std::atoi(argv[2]) : -1;
  const auto comm = make_mpi_communicator(std::chrono::milliseconds(argc > 3 ? std::atoi(argv[3]) : 60000));
  const std::string rank = "rank " + std::to_string(comm->rank());
  const auto start = Clock::now();
  try {
    if (what == "moves") {
      moves(*comm);
    } else if (what == "latency") {
      latency(*comm);
    } else {
      comm->barrier();
      if (comm->rank() == bad) stop(*comm, what);
      comm->barrier();
    }
  } catch (const Error& error) {
    const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
    std::printf("%s after %.1f s: %s\n", rank.c_str(), seconds, error.what());
    std::fflush(stdout);
    return 3;
  }
  std::printf("%s: ok\n", rank.c_str());
  std::fflush(stdout);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const Error& error) {
    std::printf("error: %s\n", error.what());
    return 1;
  }
}
