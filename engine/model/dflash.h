// The drafter: DFlash's block-diffusion model (z-lab/dflash), Qwen3-style layers over the target's tapped features.
//
// Its context is the committed tokens below the anchor: their features go through fc and hidden_norm, and every layer's
// keys and values of them are projected once and cached in the stream's pages. A block is the anchor (the last committed
// token, whose own feature does not exist yet) and block_size - 1 masks, which see the context and each other.
#pragma once

#include <cstdint>
#include <vector>

#include "checkpoint/config.h"
#include "model/kimi.h"
#include "model/rope_table.h"
#include "ops/ops.h"

namespace kdt {

// The drafter's context keys and values: a page holds its 64 tokens' part of every drafter layer.
struct DraftCache {
  void* pages;
  size_t page_stride, layer_page_bytes;
};

// The blocks of a draft: of every stream its last committed token and the masks behind it.
struct DraftBlocks {
  Count n_streams;
  Count n_rows;                // streams × block
  Count n_candidates;          // streams × depths
  int64_t depths;
  const int32_t* token;        // [n_rows] the anchor and the masks of each block
  const int32_t* start;        // [n_streams] positions of the anchors
  const int32_t* row;          // [n_candidates] rows of the first `depths` masks of each block
  const StreamPages* streams;
};

class DFlash {
 public:
  DFlash(Ops& ops, const DraftConfig& config, const WeightSource& read, Kimi& target, int64_t max_rows,
         int64_t max_context, int64_t max_streams);

  // Context keys and values of newly committed tokens. `rows`: their positions and streams; `tap_row` [rows.n] is each
  // one's row in `taps` [n_taps, tap_stride] as the target's forward left them.
  void commit(const Rows& rows, const int32_t* tap_row, const Act* taps, int64_t tap_stride, const StreamPages* streams,
              const DraftCache& cache);

  // Logits of the first `depths` mask positions of every stream's block: out [n_streams, depths, vocab].
  void propose(const DraftBlocks& blocks, const DraftCache& cache, float* logits);

  const DraftConfig& config() const { return config_; }        // of the whole drafter
  const DraftConfig& rank_config() const { return local_; }    // with the rank's own widths

 private:
  struct Layer {
    Buffer input_norm, post_norm, q_norm, k_norm;
    Matrix q, kv, o, gate_up, down;   // kv: key rows, then value rows
    int64_t window;
  };

  Ops& ops_;
  DraftConfig config_, local_;
  Kimi& target_;
  RankParts parts_;
  int64_t max_context_;
  RopeTables rope_;
  std::vector<Matrix> fc_;            // one a tap: feature = Σ fc_k · h_k
  Buffer hidden_norm_, norm_;
  std::vector<Layer> layers_;
  Buffer feature_, feature_part_, context_kv_;          // [max_rows, …]; feature_part_: of several ranks
  Buffer x_, h_, qkv_, attention_, mlp_;                // [max_streams * block, …]
  Buffer every_row_;                                    // [max_streams * block] 0, 1, …
  Buffer attention_work_;
};

}  // namespace kdt
