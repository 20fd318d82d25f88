// Times one op at a time on the device: recorded once over several layers' worth of weights, so that the L2 cache serves
// none of them, then replayed.
#pragma once

#include <algorithm>
#include <cstdio>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "ops/ops.h"

namespace kdt::bench {

constexpr int64_t kRotate = 256 << 20;     // bytes of weights in turn, several times any L2 cache
constexpr int kReplays = 21;

// The median of kReplays replays of f(0), …, f(n - 1), recorded once, by the call. `id`: its own with these ops.
template <class F>
double median_seconds(Ops& ops, int64_t id, int64_t n, const F& f) {
  SubmitKey key{};
  key[0] = id;
  std::vector<double> seconds;
  for (int i = -2; i < kReplays; ++i) {
    ops.submit(&key, [&] {
      for (int64_t turn = 0; turn < n; ++turn) f(turn);
      ops.mark(Stage::verify);
    });
    const double taken = ops.wait()[Stage::verify] / static_cast<double>(n);
    if (i >= 0) seconds.push_back(taken);
  }
  std::nth_element(seconds.begin(), seconds.begin() + kReplays / 2, seconds.end());
  return seconds[kReplays / 2];
}

class Bench {
 public:
  // bandwidth: bytes a second that a kernel can read. only: a part of the names of ops to time.
  Bench(Ops& ops, double bandwidth, std::string only)
      : ops_(ops), bandwidth_(bandwidth), only_(std::move(only)), random_(1) {
    std::printf("%-16s %-28s %5s %9s %9s %8s %6s\n", "op", "shape", "rows", "us", "MB", "GB/s", "% read");
  }

  Ops& ops() { return ops_; }
  std::mt19937_64& random() { return random_; }
  bool wants(const std::string& op) const { return op.find(only_) != std::string::npos; }

  // How many matrices of so many bytes are taken in turn.
  static int64_t layers(int64_t bytes) {
    return std::clamp<int64_t>(kRotate / std::max<int64_t>(bytes, 1) + 1, 2, 128);
  }

  // Memory of the device, kept until the end.
  template <class T>
  T* put(const std::vector<T>& values) {
    Buffer& made = memory_.emplace_back(ops_.allocate(values.size() * sizeof(T)));
    ops_.copy_in(made, 0, values.data(), values.size() * sizeof(T));
    return made.as<T>();
  }
  template <class T>
  T* space(int64_t count) {
    return memory_.emplace_back(ops_.allocate(static_cast<size_t>(count) * sizeof(T))).template as<T>();
  }
  // The same, of random BF16 values; large ones repeat.
  std::byte* filled(int64_t bytes) {
    constexpr int64_t kPiece = 8 << 20;
    const std::byte* values = random_bytes(kPiece);
    Buffer& made = memory_.emplace_back(ops_.allocate(static_cast<size_t>(bytes)));
    for (int64_t at = 0; at < bytes; at += kPiece)
      ops_.copy_in(made, static_cast<size_t>(at), values, static_cast<size_t>(std::min(kPiece, bytes - at)));
    return made.as<std::byte>();
  }
  void forget_memory() { memory_.clear(); }

  // BF16 of about unit size, random signs and bits: what a multiplier does with zeros says nothing.
  std::vector<uint16_t> bf16_values(int64_t count, float scale = 1) {
    std::vector<uint16_t> values(static_cast<size_t>(count));
    std::uniform_real_distribution<float> of(-scale, scale);
    for (uint16_t& v : values) v = static_cast<uint16_t>(std::bit_cast<uint32_t>(of(random_)) >> 16);
    return values;
  }
  uint16_t* activations(int64_t rows, int64_t width) { return put(bf16_values(rows * width)); }
  std::vector<int32_t> ids(int64_t count, int64_t below) {
    std::vector<int32_t> values(static_cast<size_t>(count));
    for (int32_t& v : values) v = static_cast<int32_t>(random_() % static_cast<uint64_t>(below));
    return values;
  }
  // Host bytes that all weights are made of: long enough for the largest.
  const std::byte* random_bytes(int64_t bytes) {
    while (static_cast<int64_t>(bytes_.size()) * 2 < bytes) {
      const auto more = bf16_values(1 << 20, 0.05f);
      bytes_.insert(bytes_.end(), more.begin(), more.end());
    }
    return reinterpret_cast<const std::byte*>(bytes_.data());
  }

  // f(i) calls the op on layer i of n. bytes: what it has to read, each time.
  template <class F>
  void time(const std::string& op, const std::string& shape, int64_t rows, double bytes, int64_t n, const F& f) {
    if (!wants(op)) return;
    const double median = median_seconds(ops_, ++n_keys_, n, f);
    std::printf("%-16s %-28s %5lld %9.2f %9.2f %8.0f %6.1f\n", op.c_str(), shape.c_str(), static_cast<long long>(rows),
                median * 1e6, bytes * 1e-6, bytes / median * 1e-9, 100 * bytes / median / bandwidth_);
    std::fflush(stdout);
  }

 private:
  Ops& ops_;
  double bandwidth_;
  std::string only_;
  std::mt19937_64 random_;
  std::vector<Buffer> memory_;
  std::vector<uint16_t> bytes_;
  int64_t n_keys_ = 0;
};

void bench_dense(Bench& bench);
void bench_experts(Bench& bench);
void bench_attention(Bench& bench);
void bench_vocabulary(Bench& bench);

}  // namespace kdt::bench
