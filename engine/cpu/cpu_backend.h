// The class behind make_cpu_ops; its operations are spread over the files of this folder by kind.
#pragma once

#include <algorithm>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "base/thread_pool.h"
#include "comm/communicator.h"
#include "comm/rank_sum.h"
#include "cpu/kernels.h"
#include "ops/ops.h"

namespace kdt::cpu {

constexpr int64_t round_up(int64_t value, int64_t to) { return (value + to - 1) / to * to; }

// Where slot t's key element d lies among blocks of 16 transposed keys.
constexpr int64_t key_offset(int64_t t, int64_t d, int64_t dk) {
  return t / kKeyBlock * kKeyBlock * dk + d * kKeyBlock + t % kKeyBlock;
}

// One page of one layer's latent KV, fp32: keys [4][key_dims][16], then the latents once more by token, [64][value_dims]
// padded with zeros. A scratch row has the latent, padded, then k_pe.
struct LatentLayout {
  int64_t kv_lora, rope, key_dims, value_dims, scratch_stride;
  LatentLayout(int64_t lora, int64_t rope_dim)
      : kv_lora(lora), rope(rope_dim), key_dims(lora + rope_dim), value_dims(round_up(lora, 16)),
        scratch_stride(value_dims + round_up(rope_dim, 16)) {}
  int64_t page_floats() const { return (key_dims + value_dims) * kPageTokens; }
  // Element d of the key in a scratch row.
  float key(const float* row, int64_t d) const { return row[d < kv_lora ? d : d - kv_lora + value_dims]; }
  // Puts a scratch row into slot t of a page.
  void place(const float* row, float* page, int64_t t) const {
    for (int64_t d = 0; d < key_dims; ++d) page[key_offset(t, d, key_dims)] = key(row, d);
    std::copy_n(row, value_dims, page + key_dims * kPageTokens + t * value_dims);
  }
};

// One page of one drafter layer: for every kv head, keys [4][head_dim][16] and values [64][value_dims].
struct DraftLayout {
  int64_t head_dim, value_dims, n_kv_heads;
  DraftLayout(int64_t kv_heads, int64_t dim) : head_dim(dim), value_dims(round_up(dim, 16)), n_kv_heads(kv_heads) {}
  int64_t head_floats() const { return (head_dim + value_dims) * kPageTokens; }
  int64_t page_floats() const { return head_floats() * n_kv_heads; }
};

// The other ranks of a model, and memory for what they send.
struct RankMeeting {
  explicit RankMeeting(Communicator& comm);
  Communicator& comm;
  RankSum sum;
  std::vector<std::byte> gathered;
};

class CpuOps final : public Ops {
 public:
  // `comm` null: no other ranks.
  CpuOps(int threads, Communicator* comm);

  const char* backend() const override { return "cpu"; }
  const char* instruction_set() const override { return instruction_set_.c_str(); }
  int threads() const override { return pool_.size(); }
  size_t activation_bytes() const override { return sizeof(float); }

  Buffer allocate(size_t bytes) override;
  Buffer allocate_for_ranks(size_t bytes) override { return allocate(bytes); }
  void copy_in(Buffer& to, size_t offset, const void* from, size_t bytes) override;
  void copy_out(const Buffer& from, size_t offset, void* to, size_t bytes) override;
  Exchange exchange(size_t bytes) override { return Exchange(allocate(bytes)); }
  const void* upload_raw(const std::byte* source, size_t bytes) override;
  Matrix upload_matrix(std::span<const MatrixSource> stacked) override;
  Matrix upload_gate_up(const MatrixSource& gate, const MatrixSource& up) override;
  Matrix upload_int4(const Int4Source& source, int64_t group_size) override;
  Matrix upload_int4_gate_up(const Int4Source& gate, const Int4Source& up, int64_t group_size) override;
  Matrix upload_tiles(const TileSource& source) override;
  Matrix upload_tiles_gate_up(const TileSource& both) override;
  MatrixGroup group(std::span<const Matrix> matrices) override;
  size_t latent_page_bytes(int64_t kv_lora, int64_t rope) const override;
  size_t latent_scratch_bytes(int64_t rows, int64_t kv_lora, int64_t rope) const override;
  size_t draft_page_bytes(int64_t n_kv_heads, int64_t head_dim) const override;
  size_t experts_scratch_bytes(int64_t rows, int64_t k, int64_t n_experts, int64_t width, int64_t shared_width,
                               int64_t hidden) const override;
  size_t attention_work_bytes(int64_t, int64_t, int64_t, int64_t) const override { return 0; }
  size_t vocabulary_work_bytes(int64_t, int64_t, int64_t) const override { return 0; }
  size_t weight_bytes() const override { return weight_bytes_; }
  size_t spare_bytes() const override;
  size_t free_bytes() const override;
  double read_bandwidth() override;

  int64_t capacity(int64_t rows) const override { return rows; }
  void send(const Exchange&, size_t) override {}
  void submit(const SubmitKey* key, const std::function<void()>& work) override;
  void mark(Stage stage) override;
  void fetch(const Exchange&, size_t) override {}
  StageSeconds wait() override { return times_; }

  void embed(const EmbedArgs& args) override;
  void rms_norm(const RmsNormArgs& args) override;
  void linear(const LinearArgs& args) override;
  void copy(const CopyArgs& args) override;
  void mlp(const MlpArgs& args) override;
  void latent_write(const LatentWriteArgs& args) override;
  void mla_attention(const MlaAttentionArgs& args) override;
  void route(const RouteArgs& args) override;
  void experts(const ExpertsArgs& args) override;
  void logits(const LinearArgs& args) override { linear(args); }
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
  void pause(double seconds) override;
  void gather_ranks(const GatherRanksArgs& args) override;

 private:
  // f(i) for every i < n: on this thread when that is cheaper than a fork, else thread t takes i = t, t + threads, ….
  template <class F>
  void for_rows(int64_t n, int64_t fork_from, const F& f) {
    if (n < fork_from || pool_.size() == 1) {
      for (int64_t i = 0; i < n; ++i) f(i, 0);
    } else {
      pool_.run([&](int t) {
        for (int64_t i = t; i < n; i += pool_.size()) f(i, t);
      });
    }
  }
  float* scratch(int thread) const { return scratch_[static_cast<size_t>(thread)].as<float>(); }
  uint32_t* weight_words(size_t bytes);

  ThreadPool pool_;
  std::unique_ptr<RankMeeting> ranks_;
  std::string instruction_set_;
  std::vector<Buffer> scratch_;   // kScratchBytes a thread
  std::vector<Buffer> slabs_;      // of weights
  size_t slab_used_ = 0;           // of the last slab
  size_t weight_bytes_ = 0;
  std::deque<std::vector<Matrix>> groups_;
  StageSeconds times_;             // of the last submission
  StageTimer timer_;
  spec::JointCut joint_cut_;       // keeps its memory
  std::vector<spec::CutTree> cut_trees_;
};

// Untouched pages of it take no memory. Holds prepared INT4 rows, an attention block (attention.cpp) or the
// candidates of one row (vocabulary.cpp); the models check their sizes against kMaxKeyDims and kMaxVocab.
constexpr size_t kScratchBytes = 32 << 20;

}  // namespace kdt::cpu
