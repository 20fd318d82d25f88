// One round of one stream: draft, build, verify, sample, accept, commit (design, "One request, in ten steps").
//
// Buffers are sized at construction; a round allocates nothing. One thread at a time.
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

// A sequence being decoded. Its pages hold the KV of positions [0, length); `root` is the last committed token, at
// position `length`, whose KV the next round writes.
struct Stream {
  std::vector<int32_t> pages;
  int64_t length = 0;
  int32_t root = -1;
  Sampling sampling;
};

// A draft tree, node 0 the root.
struct Tree {
  int64_t n_nodes;                     // without the root
  std::span<const int32_t> token, parent, depth;
  std::span<const float> weight;       // log of the path's probability, as the drafter has it
};

// What a decode round is to do, decided before it begins.
struct DecodePlan {
  int64_t budget = 0;                  // draft nodes; 0: no draft
  int64_t depths = 0;                  // of the tree, at most block - 1; 1 at least when budget > 0
  bool chain = false;                  // the drafter's top-1 tokens only
  bool spine = false;
  bool noise_ranking = false;
  // How many of the tree's nodes to verify; empty: all.
  std::function<int64_t(const Tree&)> cut;
};

struct DecodeResult {
  Tree tree;                           // what was verified; valid until the next round
  std::span<const int32_t> path;       // accepted nodes, the root first
  std::span<const int32_t> tokens;     // newly committed: accepted nodes' tokens, then the bonus token
  double draft_seconds, verify_seconds;   // build counts with draft; sample, accept and commit with verify
};

struct RoundLimits {
  int64_t max_rows;                    // of one forward pass
  int64_t max_budget;
  int64_t max_context;
  int64_t n_pages;
};

class Round {
 public:
  Round(Ops& ops, Kimi& target, DFlash* drafter, const RoundLimits& limits);

  // Commits up to max_rows prompt tokens. With `sample` the token after the last becomes the root. `logits`, when not
  // null, gets [tokens, vocab].
  void prefill(Stream& stream, std::span<const int32_t> tokens, bool sample, float* logits, StageSeconds& time);
  // Commits the root and what the target agrees with; the bonus token becomes the root.
  DecodeResult decode(Stream& stream, const DecodePlan& plan, StageSeconds& time);

  // Seconds of a verify pass over `rows` rows, and of a draft of `depths` positions, behind the stream's tokens.
  double measure_verify(const Stream& stream, int64_t rows);
  double measure_draft(const Stream& stream, int64_t depths);

  const RoundLimits& limits() const { return limits_; }
  bool has_drafter() const { return drafter_ != nullptr; }
  int64_t max_depths() const { return drafter_ ? drafter_->config().block_size - 1 : 0; }
  size_t cache_bytes() const { return latent_pages_.bytes() + draft_pages_.bytes(); }

  // For tests: verifies the given tree behind the stream's tokens, without committing. Returns logits [n + 1, vocab].
  std::span<const float> verify(const Stream& stream, const Tree& tree, bool poison_scratch);

 private:
  void draft(const Stream& stream, const DecodePlan& plan);
  // Rows of root and nodes; forwards them and leaves their logits in logits_.
  void verify_rows(const Stream& stream, int64_t n_nodes);
  void commit_context(const Stream& stream, std::span<const int32_t> rows);
  Rows rows(int64_t n) const;
  LatentCache latent_cache() const;
  DraftCache draft_cache() const;
  Tree tree(int64_t n_nodes) const;

  Ops& ops_;
  Kimi& target_;
  DFlash* drafter_;
  RoundLimits limits_;
  int64_t vocab_, hidden_, max_candidates_;
  size_t layer_page_bytes_, page_stride_, layer_scratch_bytes_, draft_layer_bytes_ = 0, draft_stride_ = 0;
  Buffer latent_pages_, latent_scratch_, draft_pages_, taps_, logits_, draft_logits_;
  // Rows of a pass, [max_rows]; the first budget + 1 of token and parent are the tree's node arrays too.
  std::vector<int32_t> token_, position_, stream_, parent_, visible_, logits_row_, sample_;
  std::vector<int32_t> depth_, path_, committed_, commit_position_, context_row_;
  std::vector<float> weight_;
  std::vector<int32_t> candidate_token_, candidate_position_;
  std::vector<float> candidate_log_q_;
  int64_t n_candidates_ = 0;           // of one depth, in this round
};

}  // namespace kdt
