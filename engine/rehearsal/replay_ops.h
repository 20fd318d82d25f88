// A backend whose rounds count as long as they take elsewhere: tokens are its own, times those of a rehearsal's report.
// So what is chosen by time, the trees of mode auto above all, is chosen as it would be there. The real one's memory is the host's.
#pragma once

#include <memory>

#include "ops/forwarding_ops.h"
#include "rehearsal/replay_costs.h"

namespace kdt {

class ReplayOps final : public ForwardingOps {
 public:
  ReplayOps(std::unique_ptr<Ops> real, ReplayCosts costs) : ForwardingOps(std::move(real)), costs_(std::move(costs)) {}

  void submit(const SubmitKey* key, const std::function<void()>& work) override {
    rows_ = streams_ = drafts_ = prompt_rows_ = 0;
    real_->submit(key, work);
  }
  // Rows of prompts take no time: what is replayed is decoding.
  StageSeconds wait() override;

  void embed(const EmbedArgs& args) override {
    if (args.rows.position) rows_ = args.rows.n.now();   // the drafter's have none
    real_->embed(args);
  }
  void draft_attention(const DraftAttentionArgs& args) override {
    drafts_ = args.n_streams.now();
    real_->draft_attention(args);
  }
  void lay_rows(const LayRowsArgs& args) override {
    streams_ = args.n_streams.now();
    prompt_rows_ = args.counts->n_prompt;
    real_->lay_rows(args);
  }

 private:
  const ReplayCosts costs_;
  int64_t rows_ = 0, streams_ = 0, drafts_ = 0, prompt_rows_ = 0;   // of the last submission
};

}  // namespace kdt
