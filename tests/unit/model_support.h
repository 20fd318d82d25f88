// The bundled pair on the CPU backend, for the tests of rounds: models, a round and streams with pages of their own.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <numeric>
#include <span>
#include <string>
#include <vector>

#include "checkpoint/checkpoint.h"
#include "model/dflash.h"
#include "model/kimi.h"
#include "model/weights.h"
#include "runtime/pages.h"
#include "runtime/round.h"
#include "support/one_stream.h"
#include "support/test_backend.h"

namespace kdt::test {

constexpr int64_t kMaxRows = 512, kMaxBudget = 256, kMaxContext = 1024;

// KDTREE_TEST_FULL=1: whole matrices, else a part of them.
inline bool full_run() {
  const char* full = std::getenv("KDTREE_TEST_FULL");
  return full && std::string(full) == "1";
}

inline std::string models_directory() {
  const char* root = std::getenv("KDTREE_SOURCE_ROOT");
  return std::string(root ? root : ".") + "/models/";
}

class Bundled {
 public:
  // `n_streams`: as many streams of kMaxContext tokens have pages.
  explicit Bundled(int threads, int64_t n_streams = 2) : Bundled(make_test_ops(threads), n_streams) {}
  Bundled(std::unique_ptr<Ops> its_ops, int64_t n_streams) : ops(std::move(its_ops)), n_streams_(n_streams) {
    const std::string model = models_directory() + "tiny-k2", draft = models_directory() + "tiny-k2-dflash";
    const DraftConfig draft_config = load_draft_config(draft);
    target = std::make_unique<Kimi>(*ops, load_model_config(model), WeightReader(Checkpoint::open(model), *ops), kMaxRows, kMaxContext,
                                    draft_config.target_layer_ids);
    drafter = std::make_unique<DFlash>(*ops, draft_config, WeightReader(Checkpoint::open_draft(draft), *ops), *target,
                                       kMaxRows, kMaxContext, n_streams);
    round = std::make_unique<Round>(*ops, *target, drafter.get(),
                                    RoundLimits{kMaxRows, kMaxBudget, kMaxContext, n_streams * pages_for(kMaxContext), n_streams});
  }

  int64_t vocab() const { return target->config().vocab_size; }

  // Streams take every n_streams-th page: neighbours of a page are another stream's.
  Stream stream(int64_t index) const {
    Stream s;
    for (int64_t i = 0; i < pages_for(kMaxContext); ++i)
      s.pages.push_back(static_cast<int32_t>(index + n_streams_ * (i % 2 == 0 ? i : pages_for(kMaxContext) - i)));
    return s;
  }

  // Logits [ids, vocab] when `with_logits`; with `sample` the stream's root is set.
  std::vector<float> prefill(Stream& s, std::span<const int32_t> ids, int64_t chunk, bool with_logits, bool sample) {
    std::vector<float> logits(with_logits ? ids.size() * static_cast<size_t>(vocab()) : 0);
    for (size_t at = 0; at < ids.size(); at += static_cast<size_t>(chunk)) {
      const auto part = ids.subspan(at, std::min(static_cast<size_t>(chunk), ids.size() - at));
      test::prefill(*round, s, part, sample && at + part.size() == ids.size(),
                    with_logits ? logits.data() + at * static_cast<size_t>(vocab()) : nullptr, time);
    }
    return logits;
  }

  std::unique_ptr<Ops> ops;
  std::unique_ptr<Kimi> target;
  std::unique_ptr<DFlash> drafter;
  std::unique_ptr<Round> round;
  StageSeconds time;

 private:
  int64_t n_streams_;
};

inline bool same_bits(std::span<const float> a, std::span<const float> b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size_bytes()) == 0;
}

}  // namespace kdt::test
