// A backend that does what another does until one of its operations fails, for tests of what becomes of everyone else.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <stdexcept>
#include <thread>

#include "ops/ops.h"

namespace kdt::test {

class FailingOps : public Ops {
 public:
  // `left`: calls of operations, and submissions, that succeed; negative: all of them. Recorded work is submitted without calls.
  FailingOps(std::unique_ptr<Ops> real, std::shared_ptr<std::atomic<int64_t>> left)
      : real_(std::move(real)), left_(std::move(left)) {}

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
  void submit(const SubmitKey* key, const std::function<void()>& work) override {
    count("submit");
    real_->submit(key, work);
  }
  void mark(Stage stage) override { real_->mark(stage); }
  void fetch(const Exchange& to, size_t bytes) override { real_->fetch(to, bytes); }
  StageSeconds wait() override { return real_->wait(); }

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

  std::unique_ptr<Ops> real_;
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
