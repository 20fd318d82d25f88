// Ranks as threads of a test, and whether bytes arrive where they belong.
#pragma once

#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "comm/communicator.h"

namespace kdt::test {

// Runs `body(r)` as every rank of `n`; the message with which each ended, "" when it returned.
inline std::vector<std::string> run_threads(int n, const std::function<void(int)>& body) {
  std::vector<std::string> messages(static_cast<size_t>(n));
  std::vector<std::thread> threads;
  for (int r = 0; r < n; ++r)
    threads.emplace_back([&, r] {
      try {
        body(r);
      } catch (const Error& error) {
        messages[static_cast<size_t>(r)] = error.what();
        if (error.status() != Status::engine_failed) messages[static_cast<size_t>(r)] += " (another status)";
      }
    });
  for (std::thread& thread : threads) thread.join();
  return messages;
}

// Byte i that rank `from` has for rank `to` in a call.
inline std::byte byte_of(uint32_t call, int from, int to, size_t i) {
  return static_cast<std::byte>((call * 31 + static_cast<uint32_t>(from) * 7 + static_cast<uint32_t>(to) * 3 + i) % 251);
}

// 300 calls in any mixture, the same on every rank; how many bytes arrived wrong.
inline int wrong_bytes(Communicator& comm) {
  const int n = comm.size(), me = comm.rank();
  std::mt19937 random(static_cast<uint32_t>(n));
  int wrong = 0;
  for (uint32_t call = 0; call < 300; ++call) {
    const size_t bytes = random() % 4 == 0 ? random() % 20000 : random() % 40;
    const size_t all_bytes = bytes * static_cast<size_t>(n);
    std::vector<std::byte> mine(bytes), from(all_bytes), all(all_bytes);
    const auto block = [&](std::vector<std::byte>& v, int r) { return v.data() + static_cast<size_t>(r) * bytes; };
    switch (random() % 4) {
      case 0: comm.barrier(); break;
      case 1: {
        const int root = static_cast<int>(random() % static_cast<uint32_t>(n));
        for (size_t i = 0; i < bytes; ++i) mine[i] = byte_of(call, me, 0, i);
        comm.broadcast(mine.data(), bytes, root);
        for (size_t i = 0; i < bytes; ++i) wrong += mine[i] != byte_of(call, root, 0, i);
        break;
      }
      case 2:
        for (size_t i = 0; i < bytes; ++i) block(all, me)[i] = byte_of(call, me, 0, i);
        comm.all_gather(block(all, me), bytes, all.data());
        for (int r = 0; r < n; ++r)
          for (size_t i = 0; i < bytes; ++i) wrong += block(all, r)[i] != byte_of(call, r, 0, i);
        break;
      default:
        for (int r = 0; r < n; ++r)
          for (size_t i = 0; i < bytes; ++i) block(from, r)[i] = byte_of(call, me, r, i);
        comm.all_to_all(from.data(), bytes, all.data());
        for (int r = 0; r < n; ++r)
          for (size_t i = 0; i < bytes; ++i) wrong += block(all, r)[i] != byte_of(call, r, me, i);
    }
  }
  return wrong;
}

}  // namespace kdt::test
