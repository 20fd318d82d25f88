// A backend that does what another does until one of its operations fails, for tests of what becomes of everyone else.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <stdexcept>
#include <thread>

#include "ops/forwarding_ops.h"

namespace kdt::test {

class FailingOps : public ForwardingOps {
 public:
  // `left`: calls of operations, and submissions, that succeed; negative: all of them. Recorded work is submitted without calls.
  FailingOps(std::unique_ptr<Ops> real, std::shared_ptr<std::atomic<int64_t>> left)
      : ForwardingOps(std::move(real)), left_(std::move(left)) {}

  void submit(const SubmitKey* key, const std::function<void()>& work) override {
    count("submit");
    real_->submit(key, work);
  }

#define KDT_FORWARD(op, Args) \
  void op(const Args& args) override { \
    count(#op); \
    real_->op(args); \
  }
  KDT_FORWARD(embed, EmbedArgs)
  KDT_FORWARD(rms_norm, RmsNormArgs)
  KDT_FORWARD(linear, LinearArgs)
  KDT_FORWARD(copy, CopyArgs)
  KDT_FORWARD(mlp, MlpArgs)
  KDT_FORWARD(latent_write, LatentWriteArgs)
  KDT_FORWARD(mla_attention, MlaAttentionArgs)
  KDT_FORWARD(route, RouteArgs)
  KDT_FORWARD(experts, ExpertsArgs)
  KDT_FORWARD(logits, LinearArgs)
  KDT_FORWARD(top_k, TopKArgs)
  KDT_FORWARD(sample, SampleArgs)
  KDT_FORWARD(logprobs, LogprobArgs)
  KDT_FORWARD(draft_context, DraftContextArgs)
  KDT_FORWARD(draft_attention, DraftAttentionArgs)
  KDT_FORWARD(build_trees, BuildTreesArgs)
  KDT_FORWARD(cut, CutArgs)
  KDT_FORWARD(lay_rows, LayRowsArgs)
  KDT_FORWARD(accept, AcceptArgs)
  KDT_FORWARD(commit, CommitArgs)
  KDT_FORWARD(count_experts, CountExpertsArgs)
  KDT_FORWARD(sum_ranks, SumRanksArgs)
  KDT_FORWARD(gather_ranks, GatherRanksArgs)
#undef KDT_FORWARD

 private:
  virtual void count(const char* op) {
    if (left_->load() < 0) return;
    if (left_->fetch_sub(1) == 0) throw std::runtime_error(std::string("ops.") + op + ": injected: expected to run");
  }

  std::shared_ptr<std::atomic<int64_t>> left_;
};

// A backend whose operations wait as long as `hang` says so.
class HangingOps final : public FailingOps {
 public:
  HangingOps(std::unique_ptr<Ops> real, std::shared_ptr<std::atomic<bool>> hang)
      : FailingOps(std::move(real), nullptr), hang_(std::move(hang)) {}

 private:
  void count(const char*) override {
    while (*hang_) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }

  std::shared_ptr<std::atomic<bool>> hang_;
};

}  // namespace kdt::test
