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

#include "ops/ops.h"

namespace kdt {

// The calls of one operation in a pass: of linear, of one shape.
struct OpCalls {
  std::string name;            // "linear 2112x7168"
  int64_t calls = 0;
  double bytes = 0;            // of weights, without those of experts, which depend on the routing
};

class RehearsalOps final : public Ops {
 public:
  // What is done to the calls of one operation. `gaps`: timed with nothing between the two marks, for what marks cost.
  enum class Watch { nothing, time, gaps, leave_out };
  // Where a watched operation's time is found in the stages: all of its calls together, and the rest of the pass.
  static constexpr Stage kWatched = Stage::prefill, kUnwatched = Stage::emit;

  explicit RehearsalOps(std::unique_ptr<Ops> real) : real_(std::move(real)) {}

  void watch(Watch how, const std::string& name = "");
  // From now on the i-th layer with experts takes them from table + i * stride ([rows, k], the backend's memory); null: from the router.
  void choose(const int32_t* table, int64_t stride) { table_ = table, stride_ = stride; }
  // Work is not recorded, so that all it needs is there before it is.
  void record(bool on) { records_ = on; }
  // Of the last submission.
  const std::vector<OpCalls>& calls() const { return *calls_; }
  double expert_bytes() const { return expert_bytes_; }   // of one expert, scales included

  const char* backend() const override { return real_->backend(); }
  const char* instruction_set() const override { return real_->instruction_set(); }
  int threads() const override { return real_->threads(); }
  size_t activation_bytes() const override { return real_->activation_bytes(); }
  Buffer allocate(size_t bytes) override { return real_->allocate(bytes); }
  Buffer allocate_for_ranks(size_t bytes) override { return real_->allocate_for_ranks(bytes); }
  void copy_in(Buffer& to, size_t offset, const void* from, size_t bytes) override { real_->copy_in(to, offset, from, bytes); }
  void copy_out(const Buffer& from, size_t offset, void* to, size_t bytes) override { real_->copy_out(from, offset, to, bytes); }
  Exchange exchange(size_t bytes) override { return real_->exchange(bytes); }
  const void* upload_raw(const std::byte* source, size_t bytes) override { return real_->upload_raw(source, bytes); }
  Matrix upload_matrix(std::span<const MatrixSource> stacked) override { return real_->upload_matrix(stacked); }
  Matrix upload_gate_up(const MatrixSource& gate, const MatrixSource& up) override { return real_->upload_gate_up(gate, up); }
  Matrix upload_int4(const Int4Source& source, int64_t group) override { return real_->upload_int4(source, group); }
  Matrix upload_int4_gate_up(const Int4Source& gate, const Int4Source& up, int64_t group) override {
    return real_->upload_int4_gate_up(gate, up, group);
  }
  Matrix upload_tiles(const TileSource& source) override { return real_->upload_tiles(source); }
  Matrix upload_tiles_gate_up(const TileSource& both) override { return real_->upload_tiles_gate_up(both); }
  MatrixGroup group(std::span<const Matrix> matrices) override { return real_->group(matrices); }
  size_t latent_page_bytes(int64_t lora, int64_t rope) const override { return real_->latent_page_bytes(lora, rope); }
  size_t latent_scratch_bytes(int64_t rows, int64_t lora, int64_t rope) const override {
    return real_->latent_scratch_bytes(rows, lora, rope);
  }
  size_t draft_page_bytes(int64_t heads, int64_t dim) const override { return real_->draft_page_bytes(heads, dim); }
  size_t experts_scratch_bytes(int64_t rows, int64_t k, int64_t n, int64_t width, int64_t shared, int64_t hidden) const override {
    return real_->experts_scratch_bytes(rows, k, n, width, shared, hidden);
  }
  size_t attention_work_bytes(int64_t rows, int64_t heads, int64_t key_dims, int64_t context) const override {
    return real_->attention_work_bytes(rows, heads, key_dims, context);
  }
  size_t vocabulary_work_bytes(int64_t rows, int64_t vocab, int64_t k) const override {
    return real_->vocabulary_work_bytes(rows, vocab, k);
  }
  size_t weight_bytes() const override { return real_->weight_bytes(); }
  size_t spare_bytes() const override { return real_->spare_bytes(); }
  size_t free_bytes() const override { return real_->free_bytes(); }
  double read_bandwidth() override { return real_->read_bandwidth(); }
  int64_t capacity(int64_t rows) const override { return real_->capacity(rows); }
  void send(const Exchange& from, size_t bytes) override { real_->send(from, bytes); }
  void submit(const SubmitKey* key, const std::function<void()>& work) override;
  void mark(Stage stage) override { real_->mark(stage); }
  void fetch(const Exchange& to, size_t bytes) override { real_->fetch(to, bytes); }
  StageSeconds wait() override { return real_->wait(); }

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
  void note(const std::string& name, double bytes, const F& op);
  const int32_t* chosen(const int32_t* by_router) const;

  std::unique_ptr<Ops> real_;
  Watch watch_ = Watch::nothing;
  std::string watched_;
  const int32_t* table_ = nullptr;
  int64_t stride_ = 0, layer_ = 0;   // layer_: of those with experts, in the pass that is being recorded
  bool records_ = true;
  double expert_bytes_ = 0;
  std::map<std::pair<Watch, std::string>, int64_t> variants_;   // passes recorded under one key that differ
  std::map<SubmitKey, std::vector<OpCalls>> recorded_;
  std::vector<OpCalls> noted_;           // of the pass that is being recorded
  const std::vector<OpCalls>* calls_ = &noted_;
};

}  // namespace kdt
