// How arrays of a test get to a device and back.
#include <cstdlib>
#include <cstring>
#include <stdexcept>

#include "base/bf16.h"
#include "hooks.h"

namespace kdt::hooks {
namespace {

// NaN as BF16 and as fp32, and no index.
constexpr uint8_t kGuard[2] = {0xA5, 0xFF};

// Bytes on both sides. A memory checker wants none: it watches what lies around an allocation.
size_t margin() {
  static const size_t bytes = [] {
    const char* set = std::getenv("KDTREE_TEST_MARGIN");
    return set ? static_cast<size_t>(std::strtoul(set, nullptr, 10)) : size_t{256};
  }();
  return bytes;
}

void fill_guard(std::vector<std::byte>& image) {
  for (size_t i = 0; i < image.size(); ++i) image[i] = static_cast<std::byte>(kGuard[i % 2]);
}

bool is_guard(const std::vector<std::byte>& image, size_t begin, size_t end) {
  for (size_t i = begin; i < end; ++i)
    if (image[i] != static_cast<std::byte>(kGuard[i % 2])) return false;
  return true;
}

// What a test puts into activations is BF16 already, so that its reference computes with the same values.
void to_bf16(const float* from, size_t n, std::byte* to) {
  for (size_t i = 0; i < n; ++i) {
    const auto bits = std::bit_cast<uint32_t>(from[i]);
    if ((bits & 0xFFFF) != 0)
      throw std::invalid_argument("activation[" + std::to_string(i) + "]: " + std::to_string(from[i]) +
                                  ": expected a BF16 value");
    const auto upper = static_cast<bf16>(bits >> 16);
    std::memcpy(to + 2 * i, &upper, 2);
  }
}

void from_bf16(const std::byte* from, size_t n, float* to) {
  for (size_t i = 0; i < n; ++i) {
    bf16 value;
    std::memcpy(&value, from + 2 * i, 2);
    to[i] = bf16_to_float(value);
  }
}

}  // namespace

Count Staged::count(const CountArgument* n) {
  if (!n->live) return {n->most};
  live_.push_back(*n->live);
  live_memory_.push_back(backend_.ops->allocate(sizeof(int32_t)));
  return {n->most, live_memory_.back().as<int32_t>()};
}

Rows Staged::rows(const RowsArgument* rows) {
  const auto column = [this](const Array& array) { return in<int32_t>(&array); };
  return {count(&rows->n), column(rows->token), column(rows->position), column(rows->stream), column(rows->parent),
          column(rows->visible)};
}

const StreamPages* Staged::streams(const Array* page_tables, int64_t n_streams) {
  const int32_t* tables = in<int32_t>(page_tables);
  const int64_t width = page_tables->count<int32_t>() / std::max<int64_t>(n_streams, 1);
  auto& made = streams_.emplace_back(std::make_unique<std::vector<StreamPages>>());
  for (int64_t i = 0; i < n_streams; ++i) made->push_back({tables + i * width});
  return values(*made);
}

void* Staged::place_bytes(void* host, size_t bytes, size_t offset, bool act, bool written) {
  if (!backend_.on_device()) return host;
  for (Piece& known : pieces_)
    if (known.host == host && host && known.act == act) {
      known.written |= written;
      return known.memory.as<std::byte>() + known.begin;
    }
  return piece(host, act ? bytes / sizeof(float) * backend_.ops->activation_bytes() : bytes, offset, act, written);
}

void* Staged::piece(void* host, size_t bytes, size_t offset, bool act, bool written) {
  Ops& ops = *backend_.ops;
  const size_t begin = margin() > 0 ? margin() + offset : 0;
  Piece& made = pieces_.emplace_back(Piece{host, bytes, act, written, begin, {}, {}});
  made.sent.resize(begin + bytes + margin());
  fill_guard(made.sent);
  if (!host)
    std::memset(made.sent.data() + begin, 0xFF, bytes);
  else if (act && ops.activation_bytes() == 2)
    to_bf16(static_cast<const float*>(host), bytes / 2, made.sent.data() + begin);
  else
    std::memcpy(made.sent.data() + begin, host, bytes);
  made.memory = ops.allocate(made.sent.size());
  ops.copy_in(made.memory, 0, made.sent.data(), made.sent.size());
  return made.memory.as<std::byte>() + begin;
}

void Staged::bring_back(Piece& piece) {
  std::vector<std::byte> got(piece.sent.size());
  backend_.ops->copy_out(piece.memory, 0, got.data(), got.size());
  const size_t end = piece.begin + piece.bytes;
  if (!is_guard(got, 0, piece.begin) || !is_guard(got, end, got.size())) throw std::runtime_error("guard bytes");
  if (!piece.host) return;
  if (!piece.written) {
    if (got != piece.sent) throw std::runtime_error("an input was written");
  } else if (piece.act && backend_.ops->activation_bytes() == 2) {
    from_bf16(got.data() + piece.begin, piece.bytes / 2, static_cast<float*>(piece.host));
  } else {
    std::memcpy(piece.host, got.data() + piece.begin, piece.bytes);
  }
}

void Staged::set_live(bool as_given) {
  for (size_t i = 0; i < live_.size(); ++i) {
    const int32_t now = as_given ? live_[i] : 0;
    backend_.ops->copy_in(live_memory_[i], 0, &now, sizeof now);
  }
}

void Staged::run(const std::function<void(Ops&)>& work) {
  Ops& ops = *backend_.ops;
  if (live_.empty()) {
    ops.submit(nullptr, [&] { work(ops); });
    ops.wait();
  } else {
    SubmitKey key{};
    key[0] = ++backend_.n_recorded;
    for (const bool as_given : {false, true}) {
      set_live(as_given);
      ops.submit(&key, [&] { work(ops); });
      ops.wait();
    }
  }
  for (Piece& piece : pieces_) bring_back(piece);
}

}  // namespace kdt::hooks
