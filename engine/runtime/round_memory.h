// The arrays of a round: what the host tells it, what operations hand to each other, and what the host hears back. All of
// them are sized at construction, so that work recorded once finds them where they were.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "ops/ops.h"

namespace kdt {

// One array in memory that both sides know.
template <class T>
struct Shared {
  T* host = nullptr;
  T* device = nullptr;
  T& operator[](int64_t i) const { return host[i]; }
};

// Lays arrays one after the other into an Exchange.
class SharedArrays {
 public:
  template <class T>
  void add(Shared<T>& array, int64_t n) {
    constexpr size_t kAlign = 64;
    const size_t at = (bytes_ + kAlign - 1) / kAlign * kAlign;
    bytes_ = at + static_cast<size_t>(n) * sizeof(T);
    place_.push_back([&array, at](const Exchange& memory) {
      array.host = reinterpret_cast<T*>(memory.host() + at);
      array.device = reinterpret_cast<T*>(memory.device() + at);
    });
  }
  void allocate(Ops& ops) {
    memory_ = ops.exchange(bytes_);
    for (const auto& place : place_) place(memory_);
    place_.clear();
  }
  const Exchange& memory() const { return memory_; }
  size_t bytes() const { return bytes_; }

 private:
  std::vector<std::function<void(const Exchange&)>> place_;
  size_t bytes_ = 0;
  Exchange memory_;
};

constexpr int64_t kMaxTopLogprobs = 20;

struct RoundSizes {
  int64_t rows, streams, block;      // block: of the drafter; 0: none
  int64_t layers;
};

// Written by the host before a round and sent whole. Entries of prompts come first in the arrays of rows; operations write the
// rest, those of trees.
struct RoundInput {
  explicit RoundInput(Ops& ops, const RoundSizes& sizes);
  SharedArrays arrays;
  Shared<RoundCounts> counts;
  Shared<int32_t> n_drafts, n_block_rows, n_candidate_rows;   // live counts of the draft
  Shared<int32_t> n_given;                                    // of rows, in a pass over given rows
  Shared<StreamPages> pages;                                  // [streams] decode tasks, then prefill tasks
  Shared<Sampling> sampling;
  Shared<LogitAdjust> adjust;
  Shared<StreamPlan> plan;                                    // [streams] decode tasks
  Shared<spec::CutTables> cut;
  // The draft, of the streams that draft
  Shared<StreamPages> draft_pages;
  Shared<Sampling> draft_sampling;
  Shared<int32_t> block_token, block_start;                   // [streams * block] anchor and masks; [streams]
  Shared<int32_t> candidate_row, candidate_position;          // [streams * (block - 1)]
  // Rows of the pass, [rows]
  Shared<int32_t> token, position, stream, parent, visible;
  Shared<int32_t> logits_row;
  Shared<int32_t> sample_token, sample_position, sample_stream, sample_parent;
  Shared<int32_t> kept_row, kept_position, kept_stream;
  Shared<int32_t> scored_row, scored_token;
};

// Written by operations and fetched whole.
struct RoundOutput {
  explicit RoundOutput(Ops& ops, const RoundSizes& sizes);
  SharedArrays arrays;
  Shared<double> outlook;                                     // [spec::Outlook::kPoints]
  Shared<int32_t> n_rows, n_logits, n_sampled, n_kept, n_logprobs;   // live counts
  Shared<int32_t> distinct_experts;                           // [layers]
  Shared<int32_t> n_nodes, n_path, first_row;                 // [streams]
  Shared<int32_t> sample;                                     // [rows]
  Shared<int32_t> path, path_token;                           // [rows] at StreamPlan::first
  Shared<int32_t> node_token, node_parent, node_depth;        // [rows] at StreamPlan::first
  Shared<float> node_weight;
  TreeNodes nodes() const { return {node_token.device, node_parent.device, node_depth.device, node_weight.device}; }
};

// Log-probabilities, fetched only when somebody wants them: [rows], and [rows, n_top] dense.
struct RoundLogprobs {
  explicit RoundLogprobs(Ops& ops, const RoundSizes& sizes);
  SharedArrays arrays;
  Shared<float> logprob, top_logprob;
  Shared<int32_t> top_token;
};

// Lists whose lengths vary from round to round: page tables, and what penalties go by. Grows between rounds; what points into
// it is in RoundInput.
class RoundLists {
 public:
  RoundLists(Ops& ops, size_t bytes) : ops_(ops), memory_(ops.exchange(bytes)) {}
  // Room for `bytes` in all, before the first `add` of a round.
  void begin(size_t bytes);
  // Where the copy will be for operations.
  template <class T>
  const T* add(std::span<const T> list) {
    static_assert(sizeof(T) == 4);
    const size_t at = used_;
    std::copy(list.begin(), list.end(), reinterpret_cast<T*>(memory_.host() + at));
    used_ += list.size_bytes();
    return reinterpret_cast<const T*>(memory_.device() + at);
  }
  void send() { ops_.send(memory_, used_); }

  // Of several ranks: what rank 0 has added becomes this rank's.
  const std::byte* host() const { return memory_.host(); }
  std::byte* device() const { return memory_.device(); }
  size_t bytes() const { return used_; }
  void receive(const std::byte* from, size_t bytes) {
    begin(bytes);
    std::copy_n(from, bytes, memory_.host());
    used_ = bytes;
  }

 private:
  Ops& ops_;
  Exchange memory_;
  size_t used_ = 0;
};

}  // namespace kdt
