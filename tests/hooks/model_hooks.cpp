// Both models over one stream, for tests/python/test_golden.py: chosen experts, drafter logits, a round's tree.
#include <algorithm>
#include <numeric>

#include "hooks.h"
#include "model/weights.h"
#include "runtime/pages.h"
#include "runtime/round.h"
#include "support/one_stream.h"

using namespace kdt;
using hooks::guarded;

namespace kdt::hooks {

// One stream with a cache of its own for the forward passes, and a round with its own for the trees.
class Models {
 public:
  Models(const std::string& target, const std::string& draft, const std::string& backend, int threads, int64_t max_rows,
         int64_t max_context)
      : ops(make_ops(threads, backend)), draft_config(load_draft_config(draft)),
        kimi(*ops, load_model_config(target), WeightReader(Checkpoint::open(target), *ops), max_rows, max_context,
             draft_config.target_layer_ids),
        dflash(*ops, draft_config, WeightReader(Checkpoint::open_draft(draft), *ops), kimi, max_rows, max_context, 1),
        round(*ops, kimi, &dflash, {max_rows, max_rows - 1, max_context, pages_for(max_context), 1}),
        max_rows_(max_rows) {
    const ModelConfig& c = kimi.config();
    const int64_t n_pages = pages_for(max_context), block = draft_config.block_size;
    stream.pages.resize(static_cast<size_t>(n_pages));
    std::iota(stream.pages.begin(), stream.pages.end(), 0);
    for (auto* column : {&token_, &position_, &stream_, &parent_, &visible_, &tap_row_}) arrays_.add(*column, max_rows);
    arrays_.add(page_table_, n_pages);
    arrays_.add(pages_of_stream_, 1);
    arrays_.add(block_token_, block);
    arrays_.add(candidate_row_, block);
    arrays_.add(start_, 1);
    arrays_.allocate(*ops);
    std::copy(stream.pages.begin(), stream.pages.end(), page_table_.host);
    pages_of_stream_[0] = {page_table_.device};
    std::iota(tap_row_.host, tap_row_.host + max_rows, 0);
    std::fill_n(parent_.host, max_rows, -1);
    latent_.layer_page_bytes = ops->latent_page_bytes(c.kv_lora_rank, c.qk_rope_dim);
    latent_.page_stride = static_cast<size_t>(c.n_layers) * latent_.layer_page_bytes;
    latent_.layer_scratch_bytes = ops->latent_scratch_bytes(max_rows, c.kv_lora_rank, c.qk_rope_dim);
    draft_.layer_page_bytes = ops->draft_page_bytes(draft_config.n_kv_heads, draft_config.head_dim);
    draft_.page_stride = draft_config.layers.size() * draft_.layer_page_bytes;
    latent_pages_ = ops->allocate(static_cast<size_t>(n_pages) * latent_.page_stride);
    scratch_ = ops->allocate(static_cast<size_t>(c.n_layers) * latent_.layer_scratch_bytes);
    draft_pages_ = ops->allocate(static_cast<size_t>(n_pages) * draft_.page_stride);
    taps_ = ops->allocate(draft_config.target_layer_ids.size() * static_cast<size_t>(max_rows * c.hidden_size) *
                          ops->activation_bytes());
    logits_ = ops->allocate(static_cast<size_t>(block * c.vocab_size) * sizeof(float));
    latent_.pages = latent_pages_.data();
    latent_.scratch = scratch_.data();
    draft_.pages = draft_pages_.data();
  }

  // experts: out [MoE layers, n, k].
  void forward(const int32_t* ids, int64_t n, int64_t chunk, int32_t* experts) {
    const ModelConfig& c = kimi.config();
    std::vector<int32_t*> chosen(static_cast<size_t>(c.n_layers), nullptr);
    for (int64_t at = 0; at < n; at += chunk) {
      const int64_t rows = std::min(chunk, n - at);
      for (int64_t i = 0; i < rows; ++i) {
        token_[i] = ids[at + i];
        position_[i] = static_cast<int32_t>(at + i);
        visible_[i] = position_[i] + 1;
      }
      for (int64_t i = c.n_dense_layers; i < c.n_layers; ++i)
        chosen[static_cast<size_t>(i)] = experts + ((i - c.n_dense_layers) * n + at) * c.n_experts_per_token;
      ForwardArgs args{{rows, token_.device, position_.device, stream_.device, parent_.device, visible_.device},
                       pages_of_stream_.device, latent_};
      args.taps = taps_.data();
      args.tap_stride = max_rows_ * c.hidden_size;
      args.chosen_experts = chosen;
      run([&] {
        kimi.forward(args);
        dflash.commit(args.rows, tap_row_.device, taps_.data(), args.tap_stride, pages_of_stream_.device, draft_);
      });
    }
  }

  void propose(int32_t root, int64_t start, int64_t depths, float* logits) {
    const int64_t block = draft_config.block_size;
    std::fill_n(block_token_.host, block, draft_config.mask_token_id);
    block_token_[0] = root;
    start_[0] = static_cast<int32_t>(start);
    std::iota(candidate_row_.host, candidate_row_.host + depths, 1);
    run([&] {
      dflash.propose({1, block, depths, depths, block_token_.device, start_.device, candidate_row_.device,
                      pages_of_stream_.device}, draft_, logits_.as<float>());
    });
    ops->copy_out(logits_, 0, logits, static_cast<size_t>(depths * kimi.config().vocab_size) * sizeof(float));
  }

  std::unique_ptr<Ops> ops;
  DraftConfig draft_config;
  Kimi kimi;
  DFlash dflash;
  Round round;
  Stream stream;    // the round's

 private:
  void run(const std::function<void()>& work) {
    ops->send(arrays_.memory(), arrays_.bytes());
    ops->submit(nullptr, work);
    ops->wait();
  }

  int64_t max_rows_;
  SharedArrays arrays_;
  Shared<int32_t> token_, position_, stream_, parent_, visible_, tap_row_;   // [max_rows] committed rows of stream 0
  Shared<int32_t> page_table_, block_token_, candidate_row_, start_;
  Shared<StreamPages> pages_of_stream_;
  LatentCache latent_{};
  DraftCache draft_{};
  Buffer latent_pages_, scratch_, draft_pages_, taps_, logits_;
};

}  // namespace kdt::hooks

using hooks::Models;

KDT_HOOK const char* kdt_hook_models_create(const char* target, const char* draft, const char* backend, int threads,
                                            int64_t max_rows, int64_t max_context, Models** out) {
  return guarded([&] { *out = new Models(target, draft, backend, threads, max_rows, max_context); });
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
