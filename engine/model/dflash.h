// The drafter: DFlash's block-diffusion model (z-lab/dflash), Qwen3-style layers over the target's tapped features.
//
// Its context is the committed tokens below the anchor: their features go through fc and hidden_norm, and every layer's
// keys and values of them are projected once and cached in the stream's pages. A block is the anchor (the last committed
// token, whose own feature does not exist yet) and block_size - 1 masks, which see the context and each other.
#pragma once

#include <cstdint>
#include <vector>

#include "checkpoint/checkpoint.h"
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

class DFlash {
 public:
  DFlash(Ops& ops, const DraftConfig& config, const Checkpoint& checkpoint, Kimi& target, int64_t max_rows,
         int64_t max_context, int64_t max_streams);

  // Context keys and values of newly committed tokens. `rows`: their positions and streams; `tap_row` [rows.n] is each
  // one's row in `taps` [n_taps, tap_stride] as the target's forward left them.
  void commit(const Rows& rows, const int32_t* tap_row, const Act* taps, int64_t tap_stride, const StreamPages* streams,
              const DraftCache& cache);

  // Logits of the first `depths` mask positions of every stream's block: out [n_streams, depths, vocab]. `anchor`: last
  // committed tokens, at positions `start`.
  void propose(int64_t n_streams, const int32_t* anchor, const int32_t* start, int64_t depths, const StreamPages* streams,
               const DraftCache& cache, float* logits);

  const DraftConfig& config() const { return config_; }

 private:
  struct Layer {
    Buffer input_norm, post_norm, q_norm, k_norm;
    Matrix q, kv, o, gate_up, down;   // kv: key rows, then value rows
    int64_t window;
  };

  Ops& ops_;
  DraftConfig config_;
  Kimi& target_;
  RopeTables rope_;
  std::vector<Matrix> fc_;            // one a tap: feature = Σ fc_k · h_k
  Buffer hidden_norm_, norm_;
  std::vector<Layer> layers_;
  Buffer feature_, context_kv_;                         // [max_rows, …]
  Buffer x_, h_, qkv_, attention_, mlp_;                // [max_streams * block, …]
  Buffer token_;                                        // [max_streams, block]: anchor and masks
  Buffer every_row_, draft_row_;                        // [max_streams * block] row indices: 0, 1, …; those of `depths` masks
  std::vector<int32_t> host_rows_;                      // [max_streams * block]
};

}  // namespace kdt
