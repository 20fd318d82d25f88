// One round of all streams that take part in it: draft, build, verify, sample, accept, commit (design, "One request, in ten
// steps"), with prompt chunks in the same pass.
//
// Buffers are sized at construction; a round allocates nothing on the backend. One thread at a time.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "base/stage.h"
#include "model/dflash.h"
#include "model/kimi.h"
#include "ops/ops.h"

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

// What one stream's draft is to be, decided before the round begins.
struct DecodePlan {
  int64_t budget = 0;                  // draft nodes; 0: no draft
  int64_t depths = 0;                  // of the tree, at most block - 1; 1 at least when budget > 0
  bool spine = false;                  // the drafter's top-1 chain first; the whole tree when budget <= depths
  bool noise_ranking = false;
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
  // How many of its tree's nodes each stream verifies: n_nodes [decode] comes with all of them and may be lowered. Streams
  // that do not draft have none. Empty: all.
  std::function<void(std::span<const Tree> trees, std::span<int64_t> n_nodes)> cut;
  bool count_experts = false;
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
  Round(Ops& ops, Kimi& target, DFlash* drafter, const RoundLimits& limits);

  // Roots, nodes and prompt tokens together are at most max_rows. `time` gets the stages; a round without a decode task is
  // all prefill.
  RoundResult run(const RoundPlan& plan, StageSeconds& time);

  // Seconds of a verify pass over `rows` rows, and of a draft of `depths` positions, behind the stream's tokens.
  double measure_verify(const Stream& stream, int64_t rows);
  double measure_draft(const Stream& stream, int64_t depths);

  const RoundLimits& limits() const { return limits_; }
  int64_t vocab_size() const { return vocab_; }
  // Distinct experts of a layer for that many rows, were routing uniform.
  double expected_experts(int64_t rows) const;
  bool has_drafter() const { return drafter_ != nullptr; }
  int64_t max_depths() const { return drafter_ ? drafter_->config().block_size - 1 : 0; }
  size_t cache_bytes() const { return latent_pages_.bytes() + draft_pages_.bytes(); }

  // For tests: verifies the given tree behind the stream's tokens, without committing. Returns logits [n + 1, vocab].
  std::span<const float> verify(const Stream& stream, const Tree& tree, bool poison_scratch);

 private:
  // The nodes of one stream's tree among all trees of the round, and its rows in the pass.
  struct Branch {
    int64_t at = 0, n_nodes = 0;       // of trees_: root at `at`
    int64_t row = 0;                   // the root's
    int64_t path_at = 0, n_path = 0;
  };

  void draft(std::span<const DecodeTask> tasks);
  void build(const RoundPlan& plan);
  void add_tree_rows(const Stream& stream, int32_t stream_index, const Tree& tree);
  void add_prompt_rows(const PrefillTask& task, int32_t stream_index);
  void forward(int64_t n_logits, bool keep_experts = false);
  double count_experts() const;
  void sample_rows(const RoundPlan& plan);
  void accept(const RoundPlan& plan);
  void commit(const RoundPlan& plan);
  void find_logprobs(const RoundPlan& plan);
  Logprobs take_logprobs(int64_t n, int64_t n_top, const int32_t* row, const int32_t* token);
  void begin(size_t n_streams);
  Rows rows(int64_t n) const;
  LatentCache latent_cache() const;
  DraftCache draft_cache() const;
  Tree tree_of(const Branch& branch) const;

  Ops& ops_;
  Kimi& target_;
  DFlash* drafter_;
  RoundLimits limits_;
  int64_t vocab_, hidden_, max_candidates_;
  size_t layer_page_bytes_, page_stride_, layer_scratch_bytes_, draft_layer_bytes_ = 0, draft_stride_ = 0;
  Buffer latent_pages_, latent_scratch_, draft_pages_, taps_, logits_, draft_logits_;

  // The streams of this round: decode tasks, then prefill tasks.
  std::vector<StreamPages> pages_;
  std::vector<Sampling> sampling_;
  std::vector<const LogitAdjust*> adjust_;
  bool any_adjust_ = false;
  // Rows of the pass, [max_rows]: trees, then prompt chunks.
  int64_t n_rows_ = 0;
  std::vector<int32_t> token_, position_, stream_, parent_, visible_;
  // Rows with logits: those that are sampled first.
  int64_t n_sampled_ = 0;
  std::vector<int32_t> logits_row_, sample_token_, sample_position_, sample_stream_, sample_parent_, sample_;
  // Trees, one after the other, node indices within their tree.
  std::vector<Branch> branches_;
  std::vector<int32_t> tree_token_, tree_parent_, tree_depth_;
  std::vector<float> tree_weight_;
  std::vector<Tree> trees_;
  std::vector<int64_t> n_nodes_;
  // Accepted paths, one after the other, and the rows committed with them.
  std::vector<int32_t> path_, committed_, commit_row_, commit_position_, context_row_, context_position_,
      context_stream_;
  // The draft: [streams that draft, depths, candidates]
  std::vector<size_t> drafting_;       // indices of decode tasks
  int64_t draft_depths_ = 0, n_candidates_ = 0;
  std::vector<StreamPages> draft_stream_;
  std::vector<Sampling> draft_sampling_;
  std::vector<int32_t> anchor_, start_, candidate_token_, candidate_position_;
  std::vector<float> candidate_log_q_;
  // Log-probabilities of the round
  std::vector<int32_t> wanted_row_, top_token_;
  std::vector<float> logprob_, top_logprob_;
  std::vector<std::vector<int32_t>> experts_;   // by layer, [max_rows, k]; empty for dense layers
  std::vector<int32_t*> experts_out_;
  std::vector<DecodeResult> decode_results_;
  std::vector<PrefillResult> prefill_results_;
};

}  // namespace kdt
