// A round on several ranks: what rank 0 has laid reaches the others, all run it, and compare what came of it.
//
// Rank 0 alone plans and measures. An announcement says which work it is and of which shape; behind it come the bytes of
// RoundInput and RoundLists, whose pointers every rank moves to its own lists. Trees, samples and paths are functions of
// them and are not sent: the ranks' sums of them are compared instead.
#include <cstring>

#include "base/error.h"
#include "checkpoint/checksum.h"
#include "runtime/round.h"

namespace kdt {

struct Round::Announcement {
  Work work;
  Shape shape;
  size_t list_bytes;
  uintptr_t lists;         // where they are for rank 0's operations
};

void Round::announce(Work work, const Shape& shape) {
  const bool carries = work != Work::idle && work != Work::stop;
  Announcement said{work, shape, carries ? lists_.bytes() : 0, reinterpret_cast<uintptr_t>(lists_.device())};
  comm_->broadcast(&said, sizeof said, 0);
  if (!carries) return;
  const size_t n = in_.arrays.bytes();
  message_.resize(n + said.list_bytes);
  std::memcpy(message_.data(), in_.arrays.memory().host(), n);
  std::memcpy(message_.data() + n, lists_.host(), said.list_bytes);
  comm_->broadcast(message_.data(), message_.size(), 0);
}

void Round::receive(const Announcement& said) {
  const size_t n = in_.arrays.bytes();
  message_.resize(n + said.list_bytes);
  comm_->broadcast(message_.data(), message_.size(), 0);
  std::memcpy(in_.arrays.memory().host(), message_.data(), n);
  lists_.receive(message_.data() + n, said.list_bytes);
  const auto move = [&](auto*& list) {
    const uintptr_t at = reinterpret_cast<uintptr_t>(list) - said.lists;
    list = reinterpret_cast<std::remove_reference_t<decltype(list)>>(lists_.device() + at);
  };
  for (int64_t i = 0; i < said.shape.all_streams; ++i) {
    move(in_.pages[i].page_table);
    LogitAdjust& adjust = in_.adjust[i];
    move(adjust.seen);
    move(adjust.seen_count);
    move(adjust.bias_token);
    move(adjust.bias);
    move(adjust.banned);
  }
  for (int64_t i = 0; said.shape.drafts > 0 && i < *in_.n_drafts.host; ++i) move(in_.draft_pages[i].page_table);
}

void Round::follow() {
  for (;;) {
    Announcement said;
    comm_->broadcast(&said, sizeof said, 0);
    if (said.work == Work::stop) return;
    if (said.work == Work::idle) {
      comm_->barrier();
      continue;
    }
    receive(said);
    perform(said.work, said.shape);
  }
}

void Round::keep_alive() {
  if (!comm_ || Clock::now() - met_ < comm_->deadline() / kMeetings) return;
  announce(Work::idle, {});
  comm_->barrier();
  met_ = Clock::now();
}

void Round::stop() {
  if (comm_) announce(Work::stop, {});
}

void Round::agree(Work work) {
  Checksum sum;
  sum.update(message_.data(), message_.size());
  if (work == Work::round) {
    const auto add = [&](const auto& array, int64_t n) {
      sum.update(array.host, static_cast<size_t>(n) * sizeof(*array.host));
    };
    add(out_.n_rows, 1);
    add(out_.sample, *out_.n_sampled.host);
    const int64_t n_decode = in_.counts.host->n_decode;
    add(out_.n_nodes, n_decode);
    add(out_.n_path, n_decode);
    for (int64_t i = 0; i < n_decode; ++i) {
      const size_t first = static_cast<size_t>(in_.plan[i].first), n = static_cast<size_t>(out_.n_nodes[i] + 1);
      sum.update(out_.node_token.host + first, n * sizeof(int32_t));
      sum.update(out_.node_weight.host + first, n * sizeof(float));
    }
  }
  const uint64_t mine = sum.value();
  std::vector<uint64_t> all(static_cast<size_t>(comm_->size()));
  comm_->all_gather(&mine, sizeof mine, all.data());
  met_ = Clock::now();
  for (size_t rank = 1; rank < all.size(); ++rank)
    if (all[rank] != all[0])
      fail(Status::engine_failed, "rank " + std::to_string(rank), "a round that went another way than rank 0's",
           "equal bits on every rank: one build, one kind of machine, one model");
}

}  // namespace kdt
