// A backend that does what another does: for what stands in front of one and sees, fails or times its operations.
#pragma once

#include <memory>
#include <utility>

#include "ops/ops.h"

namespace kdt {

class ForwardingOps : public Ops {
 public:
  explicit ForwardingOps(std::unique_ptr<Ops> real) : real_(std::move(real)) {}

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
  void submit(const SubmitKey* key, const std::function<void()>& work) override { real_->submit(key, work); }
  void mark(Stage stage) override { real_->mark(stage); }
  void fetch(const Exchange& to, size_t bytes) override { real_->fetch(to, bytes); }
  StageSeconds wait() override { return real_->wait(); }

  void embed(const EmbedArgs& args) override { real_->embed(args); }
  void rms_norm(const RmsNormArgs& args) override { real_->rms_norm(args); }
  void linear(const LinearArgs& args) override { real_->linear(args); }
  void copy(const CopyArgs& args) override { real_->copy(args); }
  void mlp(const MlpArgs& args) override { real_->mlp(args); }
  void latent_write(const LatentWriteArgs& args) override { real_->latent_write(args); }
  void mla_attention(const MlaAttentionArgs& args) override { real_->mla_attention(args); }
  void route(const RouteArgs& args) override { real_->route(args); }
  void experts(const ExpertsArgs& args) override { real_->experts(args); }
  void logits(const LinearArgs& args) override { real_->logits(args); }
  void top_k(const TopKArgs& args) override { real_->top_k(args); }
  void sample(const SampleArgs& args) override { real_->sample(args); }
  void logprobs(const LogprobArgs& args) override { real_->logprobs(args); }
  void draft_context(const DraftContextArgs& args) override { real_->draft_context(args); }
  void draft_attention(const DraftAttentionArgs& args) override { real_->draft_attention(args); }
  void build_trees(const BuildTreesArgs& args) override { real_->build_trees(args); }
  void cut(const CutArgs& args) override { real_->cut(args); }
  void lay_rows(const LayRowsArgs& args) override { real_->lay_rows(args); }
  void accept(const AcceptArgs& args) override { real_->accept(args); }
  void commit(const CommitArgs& args) override { real_->commit(args); }
  void count_experts(const CountExpertsArgs& args) override { real_->count_experts(args); }
  void pause(double seconds) override { real_->pause(seconds); }
  void sum_ranks(const SumRanksArgs& args) override { real_->sum_ranks(args); }
  void gather_ranks(const GatherRanksArgs& args) override { real_->gather_ranks(args); }

 protected:
  const std::unique_ptr<Ops> real_;
};

}  // namespace kdt
