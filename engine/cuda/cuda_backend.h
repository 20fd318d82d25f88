// The class behind make_cuda_ops; its operations are spread over the files of this folder by kind.
//
// Activations and KV are BF16, logits and router scores fp32. Everything is queued on one stream; a round with a key is
// captured as a graph once and replayed. Layouts of weights: linear.cuh (BF16), checkpoint/int4_tiles.h (INT4).
#pragma once

#include <cuda_runtime.h>

#include <deque>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "cuda/cuda_ops.h"
#include "ops/ops.h"

namespace kdt::cuda {

// Error naming the call, what went wrong and what to do about it, unless it succeeded.
void check(cudaError_t status, const char* what);

class RankMeeting;
class UploadRing;

class CudaOps final : public Ops {
 public:
  // `ranks` null: the only rank.
  CudaOps(int device, std::unique_ptr<RankMeeting> ranks);
  ~CudaOps() override;
  // A collective call of all ranks, before their work.
  void choose_sums(RankSums sums);

  const char* backend() const override { return "cuda"; }
  const char* instruction_set() const override { return instruction_set_.c_str(); }   // "sm_90"
  int threads() const override { return 1; }
  size_t activation_bytes() const override { return 2; }

  Buffer allocate(size_t bytes) override;
  Buffer allocate_for_ranks(size_t bytes) override;
  void copy_in(Buffer& to, size_t offset, const void* from, size_t bytes) override;
  void copy_out(const Buffer& from, size_t offset, void* to, size_t bytes) override;
  Exchange exchange(size_t bytes) override;
  const void* upload_raw(const std::byte* source, size_t bytes) override;
  Matrix upload_matrix(std::span<const MatrixSource> stacked) override;
  Matrix upload_gate_up(const MatrixSource& gate, const MatrixSource& up) override;
  Matrix upload_int4(const Int4Source& source, int64_t group_size) override;
  Matrix upload_int4_gate_up(const Int4Source& gate, const Int4Source& up, int64_t group_size) override;
  Matrix upload_tiles(const TileSource& source) override;
  Matrix upload_tiles_gate_up(const TileSource& both) override { return upload_tiles(both); }
  MatrixGroup group(std::span<const Matrix> matrices) override;
  size_t latent_page_bytes(int64_t kv_lora, int64_t rope) const override;
  size_t latent_scratch_bytes(int64_t rows, int64_t kv_lora, int64_t rope) const override;
  size_t draft_page_bytes(int64_t n_kv_heads, int64_t head_dim) const override;
  size_t experts_scratch_bytes(int64_t rows, int64_t k, int64_t n_experts, int64_t width, int64_t shared_width,
                               int64_t hidden) const override;
  size_t attention_work_bytes(int64_t rows, int64_t n_heads, int64_t key_dims, int64_t max_context) const override;
  size_t vocabulary_work_bytes(int64_t rows, int64_t vocab, int64_t k) const override;
  size_t weight_bytes() const override { return weight_bytes_; }
  size_t spare_bytes() const override;
  size_t free_bytes() const override;
  double read_bandwidth() override;

  int64_t capacity(int64_t rows) const override;
  void send(const Exchange& from, size_t bytes) override;
  void submit(const SubmitKey* key, const std::function<void()>& work) override;
  void mark(Stage stage) override;
  void fetch(const Exchange& to, size_t bytes) override;
  StageSeconds wait() override;

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
  void pause(double seconds) override;

 private:
  struct Graph {
    cudaGraphExec_t exec = nullptr;    // of rank 0: the work of all ranks; the others' have none
    std::vector<Stage> marks;          // one an event, in their order
  };
  void release();                      // what CUDA made
  void enter() const;                  // this thread's CUDA calls go to device_
  Graph record(const std::function<void()>& work);
  void replay(const Graph& graph);
  void forget(const SubmitKey& key);   // what was recorded under it
  void measure_sums();
  void* weight_memory(size_t bytes);   // zero, 256-byte aligned, freed with the backend
  Matrix upload_tiled(std::span<const Int4Source> stacked, int64_t group_size);
  // Queues tiles and scales to the device.
  Matrix put_tiles(std::span<const std::byte> words, std::span<const std::byte> scales, int64_t n_out, int64_t n_in,
                   int64_t group_size);
  UploadRing& uploads();               // made with the first weights, and gone with the first recorded round

  int device_;
  std::unique_ptr<RankMeeting> ranks_; // null: the only rank
  static constexpr int64_t kNever = std::numeric_limits<int64_t>::max();
  int64_t two_shots_from_ = kNever;    // elements of a sum over ranks
  int n_sms_ = 0;
  size_t shared_limit_ = 0;            // of one block, in bytes
  std::string instruction_set_;
  cudaStream_t stream_ = nullptr;
  cudaEvent_t begin_ = nullptr;
  std::vector<cudaEvent_t> events_;    // events_[i] ends the i-th mark of a submission
  std::vector<Stage> marks_;           // of the last submission
  bool recording_ = false;
  std::map<SubmitKey, Graph> graphs_;
  std::vector<Buffer> slabs_;          // of weights
  size_t slab_used_ = 0;               // of the last slab
  size_t weight_bytes_ = 0;
  std::deque<std::vector<Matrix>> groups_;
  std::unique_ptr<UploadRing> uploads_;
  Buffer router_parts_;                // of the logits of a few rows
  Buffer experts_done_;                // int32: blocks that are done with a part of an experts' call; zeros between calls
};

constexpr size_t kRouterPartsBytes = 2 << 20;   // 8 parts, 64 rows, 1024 experts
constexpr int64_t kExpertsParts = 8192;         // that are counted; a call with more of them counts none

}  // namespace kdt::cuda
