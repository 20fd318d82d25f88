// Both models over one stream, for tests/python/test_golden.py: chosen experts, drafter logits, a round's tree.
#include <algorithm>
#include <numeric>

#include "hooks.h"
#include "runtime/pages.h"
#include "runtime/round.h"
#include "support/one_stream.h"

using namespace kdt;
using hooks::guarded;

namespace kdt::hooks {

// One stream with a cache of its own for the forward passes, and a round with its own for the trees.
class Models {
 public:
  Models(const std::string& target, const std::string& draft, int threads, int64_t max_rows, int64_t max_context)
      : ops(make_cpu_ops(threads, "")), draft_config(load_draft_config(draft)),
        kimi(*ops, load_model_config(target), Checkpoint::open(target), max_rows, max_context,
             draft_config.target_layer_ids),
        dflash(*ops, draft_config, Checkpoint::open_draft(draft), kimi, max_rows, max_context, 1),
        round(*ops, kimi, &dflash, {max_rows, max_rows - 1, max_context, pages_for(max_context), 1}), max_rows_(max_rows),
        count_(static_cast<size_t>(max_context) + 1), stream_index_(static_cast<size_t>(max_rows), 0),
        parent_(stream_index_.size(), -1) {
    std::iota(count_.begin(), count_.end(), 0);
    const ModelConfig& c = kimi.config();
    const auto n_pages = static_cast<size_t>(pages_for(max_context));
    stream.pages.resize(n_pages);
    std::iota(stream.pages.begin(), stream.pages.end(), 0);
    latent_.layer_page_bytes = ops->latent_page_bytes(c.kv_lora_rank, c.qk_rope_dim);
    latent_.page_stride = static_cast<size_t>(c.n_layers) * latent_.layer_page_bytes;
    latent_.layer_scratch_bytes = ops->latent_scratch_bytes(max_rows, c.kv_lora_rank, c.qk_rope_dim);
    draft_.layer_page_bytes = ops->draft_page_bytes(draft_config.n_kv_heads, draft_config.head_dim);
    draft_.page_stride = draft_config.layers.size() * draft_.layer_page_bytes;
    pages_ = ops->allocate(n_pages * latent_.page_stride);
    scratch_ = ops->allocate(static_cast<size_t>(c.n_layers) * latent_.layer_scratch_bytes);
    draft_pages_ = ops->allocate(n_pages * draft_.page_stride);
    taps_ = ops->allocate(draft_config.target_layer_ids.size() * static_cast<size_t>(max_rows * c.hidden_size) *
                          ops->activation_bytes());
    latent_.pages = pages_.data();
    latent_.scratch = scratch_.data();
    draft_.pages = draft_pages_.data();
  }

  // experts: out [MoE layers, n, k].
  void forward(const int32_t* ids, int64_t n, int64_t chunk, int32_t* experts) {
    const ModelConfig& c = kimi.config();
    const StreamPages pages{stream.pages.data()};
    std::vector<int32_t*> chosen(static_cast<size_t>(c.n_layers), nullptr);
    for (int64_t at = 0; at < n; at += chunk) {
      const int64_t rows = std::min(chunk, n - at);
      const int32_t* position = count_.data() + at;
      for (int64_t i = c.n_dense_layers; i < c.n_layers; ++i)
        chosen[static_cast<size_t>(i)] = experts + ((i - c.n_dense_layers) * n + at) * c.n_experts_per_token;
      ForwardArgs args{{rows, ids + at, position, stream_index_.data(), parent_.data(), position + 1}, &pages, latent_};
      args.taps = taps_.data();
      args.tap_stride = max_rows_ * c.hidden_size;
      args.chosen_experts = chosen;
      kimi.forward(args);
      dflash.commit(args.rows, count_.data(), taps_.data(), args.tap_stride, &pages, draft_);
    }
  }

  void propose(int32_t root, int64_t start, int64_t depths, float* logits) {
    const StreamPages pages{stream.pages.data()};
    const auto at = static_cast<int32_t>(start);
    dflash.propose(1, &root, &at, depths, &pages, draft_, logits);
  }

  std::unique_ptr<Ops> ops;
  DraftConfig draft_config;
  Kimi kimi;
  DFlash dflash;
  Round round;
  Stream stream;    // the round's

 private:
  int64_t max_rows_;
  std::vector<int32_t> count_;                    // 0, 1, … max_context
  std::vector<int32_t> stream_index_, parent_;    // [max_rows] of committed rows of stream 0
  LatentCache latent_{};
  DraftCache draft_{};
  Buffer pages_, scratch_, draft_pages_, taps_;
};

}  // namespace kdt::hooks

using hooks::Models;

KDT_HOOK const char* kdt_hook_models_create(const char* target, const char* draft, int threads, int64_t max_rows,
                                            int64_t max_context, Models** out) {
  return guarded([&] { *out = new Models(target, draft, threads, max_rows, max_context); });
}

KDT_HOOK void kdt_hook_models_destroy(Models* models) { delete models; }

// Commits ids [n] in chunks; experts: out [MoE layers, n, k].
KDT_HOOK const char* kdt_hook_models_forward(Models* models, const int32_t* ids, int64_t n, int64_t chunk,
                                             int32_t* experts) {
  return guarded([&] { models->forward(ids, n, chunk, experts); });
}

// Drafter logits [depths, vocab] behind the first `start` ids of the last forward.
KDT_HOOK const char* kdt_hook_models_propose(Models* models, int32_t root, int64_t start, int64_t depths,
                                             float* logits) {
  return guarded([&] { models->propose(root, start, depths, logits); });
}

// The tree of a round behind ids [n], and the target's logits at root and nodes. token, parent, depth: out
// [budget + 1]; logits: out [budget + 1, vocab].
KDT_HOOK const char* kdt_hook_models_tree(Models* models, const int32_t* ids, int64_t n, int64_t chunk, int32_t root,
                                          int64_t budget, int64_t depths, int32_t* token, int32_t* parent,
                                          int32_t* depth, int64_t* n_nodes, float* logits) {
  return guarded([&] {
    Stream& stream = models->stream;
    StageSeconds time;
    stream.length = 0;
    for (int64_t at = 0; at < n; at += chunk)
      test::prefill(models->round, stream, {ids + at, static_cast<size_t>(std::min(chunk, n - at))}, false, nullptr, time);
    stream.root = root;
    DecodePlan plan;
    plan.budget = budget;
    plan.depths = depths;
    const Tree tree = test::decode(models->round, stream, plan, time).tree;
    std::copy(tree.token.begin(), tree.token.end(), token);
    std::copy(tree.parent.begin(), tree.parent.end(), parent);
    std::copy(tree.depth.begin(), tree.depth.end(), depth);
    *n_nodes = tree.n_nodes;
    stream.length = n;
    const auto size = static_cast<size_t>(tree.n_nodes + 1);
    const std::vector<float> weight(size, 0);
    const Tree given{tree.n_nodes, {token, size}, {parent, size}, {depth, size}, weight};
    const auto got = models->round.verify(stream, given, true);
    std::copy(got.begin(), got.end(), logits);
  });
}
