// A backend that does what another does, and sees what a pass consists of: for rehearsals, in front of the real one.
//
// It notes every operation of a recorded pass with the bytes of weights it reads, takes experts from a table instead of the
// router's choice when it is told to, and times or leaves out the calls of one operation. Nothing of it runs when recorded
// work is replayed.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ops/forwarding_ops.h"

namespace kdt {

struct OpCost {
  double bytes = 0;            // of weights, without those of experts, which depend on the routing
  double weights = 0;          // that a row is multiplied with, those of its experts too
  double pause = 0;            // seconds that pass for other ranks
};

// What ranks that are not there take: a sum or a gather of all ranks waits for as long as a rank that reads the others' parts over
// its links, sums in one shot or in two, whichever is sooner (cuda/ranks.cu), and then works as it does alone.
struct Collectives {
  int64_t ranks = 1;
  double seconds = 0;          // of each shot, beside its bytes
  double bytes_per_second = 0; // that a rank reads from all others together
};

// The calls of one operation in a pass: of linear, of one shape.
struct OpCalls {
  std::string name;            // "linear 2112x7168"
  int64_t calls = 0;
  OpCost cost{};
};

class RehearsalOps final : public ForwardingOps {
 public:
  // What is done to the calls of one operation. `gaps`: timed with nothing between the two marks, for what marks cost.
  enum class Watch { nothing, time, gaps, leave_out };
  // Where a watched operation's time is found in the stages: all of its calls together, and the rest of the pass.
  static constexpr Stage kWatched = Stage::prefill, kUnwatched = Stage::emit;

  explicit RehearsalOps(std::unique_ptr<Ops> real) : ForwardingOps(std::move(real)) {}

  void watch(Watch how, const std::string& name = "");
  // From now on the i-th layer with experts takes them from table + i * stride ([rows, k], the backend's memory); null: from the router.
  void choose(const int32_t* table, int64_t stride) { table_ = table, stride_ = stride; }
  // From now on such take time; they are an operation of their own, "collective".
  void emulate(const Collectives& collectives) { collectives_ = collectives; }
  // Work is not recorded, so that all it needs is there before it is.
  void record(bool on) { records_ = on; }
  // Of the last submission.
  const std::vector<OpCalls>& calls() const { return *calls_; }
  double expert_bytes() const { return expert_bytes_; }   // of one expert, scales included
  double watched_seconds() const { return last_[kWatched]; }

  void submit(const SubmitKey* key, const std::function<void()>& work) override;
  StageSeconds wait() override { return last_ = real_->wait(); }

  void embed(const EmbedArgs& args) override;
  void rms_norm(const RmsNormArgs& args) override;
  void linear(const LinearArgs& args) override;
  void copy(const CopyArgs& args) override;
  void mlp(const MlpArgs& args) override;
  void latent_write(const LatentWriteArgs& args) override;
  void mla_attention(const MlaAttentionArgs& args) override;
  void route(const RouteArgs& args) override;
  void experts(const ExpertsArgs& args) override;
  void logits(const LinearArgs& args) override;
  void top_k(const TopKArgs& args) override;
  void sample(const SampleArgs& args) override;
  void logprobs(const LogprobArgs& args) override;
  void draft_context(const DraftContextArgs& args) override;
  void draft_attention(const DraftAttentionArgs& args) override;
  void build_trees(const BuildTreesArgs& args) override;
  void cut(const CutArgs& args) override;
  void lay_rows(const LayRowsArgs& args) override;
  void accept(const AcceptArgs& args) override;
  void commit(const CommitArgs& args) override;
  void count_experts(const CountExpertsArgs& args) override;
  void sum_ranks(const SumRanksArgs& args) override;
  void gather_ranks(const GatherRanksArgs& args) override;

 private:
  template <class F>
  void note(const std::string& name, OpCost cost, const F& op);
  const int32_t* chosen(const int32_t* by_router) const;
  // `bytes`: of a rank's part; `shots`: at most.
  void wait_for_ranks(double bytes, int shots);

  Watch watch_ = Watch::nothing;
  std::string watched_;
  const int32_t* table_ = nullptr;
  int64_t stride_ = 0, layer_ = 0;   // layer_: of those with experts, in the pass that is being recorded
  bool records_ = true;
  Collectives collectives_;
  StageSeconds last_;
  double expert_bytes_ = 0;
  std::map<std::pair<Watch, std::string>, int64_t> variants_;   // passes recorded under one key that differ
  std::map<SubmitKey, std::vector<OpCalls>> recorded_;
  std::vector<OpCalls> noted_;           // of the pass that is being recorded
  const std::vector<OpCalls>* calls_ = &noted_;
};

}  // namespace kdt
