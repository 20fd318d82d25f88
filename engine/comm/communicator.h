// How tensor-parallel ranks meet: bytes move from rank to rank, and nothing is added on the way (rank_sum.h adds).
//
// Ranks are SPMD: every rank makes the same calls in the same order with the same sizes, each from one thread at a time,
// and every call returns when this rank's part of it is done: what it gave may change, what it gets is there.
//
// What the model and the runtime do with it, on every rank alike:
//  - a round begins with broadcast(plan) from rank 0, which alone plans and measures: tokens, rows, budgets, costs; it ends
//    with an all_gather of the ranks' checksums of it and of what came of it. With nothing to do rank 0 broadcasts an empty
//    plan well within the deadline, so that the others can tell an idle rank 0 from a dead one; the barrier that follows
//    tells rank 0 the same of them;
//  - embed: a rank has rows [r, r + 1) * vocab / n of the table and zeros for the other tokens; the sum of the ranks is
//    exact. After o_proj and after the MLP or experts of each layer: RankSum over the rows of the residual stream;
//  - the latent KV is replicated: each rank writes the same bits to its own pages, and nothing is sent;
//  - lm_head: a rank has logits of its part of the vocabulary, and all_gather gives every rank whole rows;
//  - the drafter by heads and widths in the same way.
//
// The watchdog: a call that the others do not answer within the deadline ends in Error(engine_failed) naming the first
// rank that is missing, on every rank that still runs; so does one after fail(). A communicator that failed stays failed.
#pragma once

#include <chrono>
#include <cstddef>
#include <string>

namespace kdt {

class Communicator {
 public:
  using Deadline = std::chrono::milliseconds;   // of one call

  virtual ~Communicator() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  // Between calls; every rank sets the same.
  virtual Deadline deadline() const = 0;
  virtual void set_deadline(Deadline deadline) = 0;

  // No rank leaves before the last has come.
  virtual void barrier() = 0;
  // `data` of rank `root` becomes everyone's.
  virtual void broadcast(void* data, size_t bytes, int root) = 0;
  // `all`: size() blocks of `bytes`, that of rank r the r-th. `mine` may be this rank's block in it.
  virtual void all_gather(const void* mine, size_t bytes, void* all) = 0;
  // `from` and `to`: size() blocks of `bytes` each; block r of `from` becomes block rank() of rank r's `to`.
  virtual void all_to_all(const void* from, size_t bytes, void* to) = 0;
  // This rank cannot go on: the others' calls end with its name and `why`. Any thread may call it.
  virtual void fail(const std::string& why) noexcept = 0;
};

}  // namespace kdt
