// One round of all streams that take part in it: draft, build, verify, sample, accept, commit (design, "One request, in ten
// steps"), with prompt chunks in the same pass.
//
// A round is one submission to the backend: the host lays the plan, sends it, submits the work and waits once, then reads what
// came of it. Buffers are sized at construction; a round allocates nothing on the backend. One thread at a time.
//
// On several ranks every rank has a Round. Rank 0's is used as if it were the only one; the others' follow().
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <span>
#include <vector>

#include "base/stage.h"
#include "comm/communicator.h"
#include "model/dflash.h"
#include "model/kimi.h"
#include "ops/ops.h"
#include "runtime/round_memory.h"

namespace kdt {

// A sequence as the round sees it. Its pages hold the KV of positions [0, length); `root` is the last committed token, at
// position `length`, whose KV the next round writes.
struct Stream {
  std::vector<int32_t> pages;
  int64_t length = 0;
  int32_t root = -1;
  Sampling sampling;
  const LogitAdjust* adjust = nullptr;   // null: logits as they are
};

// A draft tree, node 0 the root.
struct Tree {
  int64_t n_nodes;                     // without the root
  std::span<const int32_t> token, parent, depth;
  std::span<const float> weight;       // log of the path's probability, as the drafter has it
};

// A tree that is given, behind a stream's tokens.
struct GivenTree {
  const Stream* stream;
  Tree tree;
};

// What one stream's draft is to be, decided before the round begins.
struct DecodePlan {
  int64_t budget = 0;                  // draft nodes; 0: no draft
  int64_t depths = 0;                  // of the tree, at most block - 1; 1 at least when budget > 0
  bool spine = false;                  // the drafter's top-1 chain first; the whole tree when budget <= depths
  bool noise_ranking = false;
  int32_t calibration = -1;            // of RoundPlan::cut, whose choice its nodes are; -1: all of them are verified
};

struct DecodeTask {
  Stream* stream;
  DecodePlan plan;
  int64_t n_top = -1;                  // log-probabilities wanted: -1 none, else of the token and of this many of the top
};

// Commits `tokens` of a prompt. With `sample` the token after the last becomes the root.
struct PrefillTask {
  Stream* stream;
  std::span<const int32_t> tokens;
  bool sample = false;
  float* logits = nullptr;             // host memory, not null: gets [tokens, vocab]
  int64_t n_top = -1;                  // of the sampled token
  int64_t prompt_n_top = -1;           // of the prompt's own tokens: `next` [tokens or one less] follow each
  std::span<const int32_t> next = {};
};

struct RoundPlan {
  std::span<const DecodeTask> decode;
  std::span<const PrefillTask> prefill;
  // By what the nodes of streams with a calibration are cut, also to its most_rows; null: all are verified.
  const spec::CutTables* cut = nullptr;
  bool count_experts = false;
  bool record = false;                 // now, where rounds are: not when its shape has come some times
};

// Of tokens of one stream, in their order; empty when not wanted.
struct Logprobs {
  int64_t n_top = 0;
  std::span<const float> logprob;      // [n]
  std::span<const int32_t> top_token;  // [n, n_top]
  std::span<const float> top_logprob;  // [n, n_top]
};

struct DecodeResult {
  Tree tree;                           // what was verified
  std::span<const int32_t> path;       // accepted nodes, the root first
  std::span<const int32_t> tokens;     // newly committed: accepted nodes' tokens, then the bonus token
  Logprobs logprobs;                   // of `tokens`
};

struct PrefillResult {
  Logprobs root, prompt;               // of the sampled root; of `next`
};

// Valid until the next round.
struct RoundResult {
  std::span<const DecodeResult> decode;
  std::span<const PrefillResult> prefill;
  double draft_seconds = 0, verify_seconds = 0;   // build counts with draft; sample, accept and commit with verify
  int64_t room = 0;                    // rows that the pass had room for
  bool usual = true;                   // the times are what such a round takes: where rounds are recorded, it was before
  spec::Outlook outlook;               // of a round with a cut, see spec::JointCut
  double distinct_experts = 0;         // of a layer in this pass, mean over layers; when they were counted
};

struct RoundLimits {
  int64_t max_rows;                    // of one forward pass
  int64_t max_budget;                  // of one stream
  int64_t max_context;
  int64_t n_pages;
  int64_t max_streams;
};

class Round {
 public:
  // `comm` null: the only rank.
  Round(Ops& ops, Kimi& target, DFlash* drafter, const RoundLimits& limits, Communicator* comm = nullptr);

  // Roots, nodes and prompt tokens together are at most max_rows. `time` gets the stages; a round without a decode task is
  // all prefill.
  RoundResult run(const RoundPlan& plan, StageSeconds& time);

  // Seconds of a verify pass over `rows` rows, and of a draft of `depths` positions by n_streams, behind the stream's tokens.
  double measure_verify(const Stream& stream, int64_t rows);
  double measure_draft(const Stream& stream, int64_t depths, int64_t n_streams);

  const RoundLimits& limits() const { return limits_; }
  int64_t capacity(int64_t rows) const { return ops_.capacity(rows); }
  // Whether the backend records the work of a round's shape: then capacities are more than counts.
  bool records() const { return capacity(kUncommonRows) != kUncommonRows; }
  // Rows that the pass of a plan gets room for where it is recorded: few numbers of streams and of rows are told apart. The
  // streams' `nodes` are their trees', a mean; `other_rows` those of prompts and given trees.
  int64_t wide_streams(int64_t streams) const;
  int64_t room(int64_t streams, int64_t nodes, int64_t other_rows) const;
  // Whether a round without prompts and wishes, of trees of up to tree_nodes (0: none) and this room, is recorded.
  bool recorded(int64_t streams, int64_t tree_nodes, int64_t room) const;
  int64_t vocab_size() const { return vocab_; }
  // Distinct experts of a layer for that many rows, were routing uniform.
  double expected_experts(int64_t rows) const;
  bool has_drafter() const { return drafter_ != nullptr; }
  int64_t max_depths() const { return drafter_ ? drafter_->config().block_size - 1 : 0; }
  size_t cache_bytes() const { return latent_pages_.bytes() + draft_pages_.bytes(); }

  // Of a rank other than 0: takes part in rank 0's work until that one stops.
  void follow();
  // Of rank 0, from time to time between rounds: each side sees that the other is there.
  void keep_alive();
  // How long rank 0 may go without a round or a keep_alive.
  Communicator::Deadline patience() const { return comm_ ? comm_->deadline() / kMeetings : Communicator::Deadline::max(); }
  void stop();
  // For rehearsals: a pass over the given trees and the sampling of their nodes, without a commit; the stages verify and sample.
  StageSeconds verify_given(std::span<const GivenTree> trees, bool count_experts);
  // Distinct experts of every layer in the last pass that counted them; 0 where there are none.
  std::span<const int32_t> distinct_experts() const {
    return {out_.distinct_experts.host, static_cast<size_t>(n_layers_)};
  }
  // For rehearsals: fills all pages, the drafter's too, with activations that repeat; `pattern` in the backend's own type.
  void fill_pages(std::span<const std::byte> pattern);

  // For tests: verifies the given tree behind the stream's tokens, without committing. Returns logits [n + 1, vocab].
  std::span<const float> verify(const Stream& stream, const Tree& tree, bool poison_scratch);

 private:
  static constexpr int64_t kUncommonRows = 9;
  using Clock = std::chrono::steady_clock;
  static constexpr int kMeetings = 8;  // of idle ranks, within a deadline
  // What is submitted: a round; a pass over given rows, sampled or with its logits read; a draft alone. The rest is for ranks.
  enum class Work : int64_t { round, given, draft, verify, poisoned_verify, idle, stop };
  // What the work of a round depends on besides memory: where it is recorded, counts are capacities.
  struct Shape {
    int64_t drafts = 0, depths = 0, candidates = 0;
    int64_t streams = 0, rows = 0, logits = 0, kept = 0;
    int64_t scored = 0;                // rows whose logits are read alone; a round with any is not recorded
    bool cut = false, adjust = false, count_experts = false;
    int64_t n_top = -1;                // log-probabilities: of the largest wish
    int64_t all_streams = 0;           // of decode and prefill tasks; part of no key
    bool recorded = true;              // or replayed; rank 0 says; part of no key
    SubmitKey key(Work work) const;
  };

  // Before: the host lays the plan. round_plan.cpp
  Shape lay_plan(const RoundPlan& plan);
  void lay_streams(const RoundPlan& plan, Shape& shape);
  void fit(Shape& shape) const;
  void widen(Shape& shape) const;
  void lay_draft(std::span<const DecodeTask> tasks, Shape& shape);
  void lay_prompts(const RoundPlan& plan, Shape& shape);
  void send();
  // Submits and waits; on all ranks, once rank 0 has announced it.
  StageSeconds execute(Work work, const Shape& shape);
  StageSeconds perform(Work work, const Shape& shape);
  // A shape that may not come again is not recorded: that takes as long as several rounds that are not, of ranks that share a
  // card as ten.
  static constexpr int kRunsBefore = 4;
  bool is_recorded(const SubmitKey& key) const;
  // Several ranks. round_ranks.cpp
  struct Announcement;
  void announce(Work work, const Shape& shape);
  void receive(const Announcement& said);
  void agree(Work work);
  // Within: operations, on the backend's memory.
  void run_round(const Shape& shape);
  void draft(const Shape& shape);
  void forward(const Rows& rows, Count n_logits, int32_t* distinct_experts);
  // After: what the host makes of it. round_results.cpp
  void read_decode(const RoundPlan& plan);
  void read_prompts(const RoundPlan& plan);
  Logprobs logprobs(int64_t at, int64_t n, int64_t n_top);
  // A forward pass alone, over a tree that is given. round_given.cpp
  Shape lay_given(std::span<const GivenTree> trees);
  void run_given(const Shape& shape, bool sample);

  LatentCache latent_cache() const;
  DraftCache draft_cache() const;
  Tree tree_of(size_t i) const;        // of decode task i, as it was verified

  Ops& ops_;
  Kimi& target_;
  DFlash* drafter_;
  RoundLimits limits_;
  Communicator* comm_;
  int64_t vocab_, hidden_, n_layers_, max_candidates_;
  size_t layer_page_bytes_, page_stride_, layer_scratch_bytes_, draft_layer_bytes_ = 0, draft_stride_ = 0;
  Buffer latent_pages_, latent_scratch_, draft_pages_, taps_, logits_, draft_logits_;
  Buffer candidate_token_, candidate_log_q_, vocabulary_work_;
  RoundInput in_;
  RoundOutput out_;
  RoundLogprobs logprobs_;
  RoundLists lists_;

  std::vector<DecodeResult> decode_results_;
  std::vector<PrefillResult> prefill_results_;
  int64_t n_top_ = -1;                 // of the round's log-probabilities
  std::vector<int32_t> top_token_;     // [n, n_top] of each task, one after the other
  std::vector<float> top_logprob_;
  std::vector<float> given_logits_;
  std::vector<std::byte> message_;     // what rank 0 sent: the input, then the lists
  Clock::time_point met_ = Clock::now();   // when the ranks last did
  std::map<SubmitKey, int> runs_;      // of rounds, by shape, on rank 0; more than kRunsBefore: it is recorded
};

}  // namespace kdt
