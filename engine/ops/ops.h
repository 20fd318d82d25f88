// THE SEAM: every operation a backend provides. The models and the round are written once over these.
//
// Rules for a backend (design invariants 1, 2 and 4; docs/numerics.md has every rounding point)
//   - An output row depends on that row's inputs alone, to the bit: never on how many rows there are or who they belong to.
//   - No allocation and no host synchronisation inside an operation; scratch memory is in the arguments.
//   - Operations are queued: they run in order, and the host sees what they did after wait(). Pointers are the backend's
//     memory, those of Exchange::device included, and must stay valid until then.
//   - Rows from Count::live on are neither read nor written, and cost no memory traffic of their own.
//   - Every operation is implemented; there are no defaults.
// Shapes are row-major. `Act` arrays have the backend's activation type (activation_bytes() each).
//
// Of a model over several ranks a backend computes one rank's part. What a rank adds to the residual stream is a `partial`:
// the unrounded fp32 sums, without the residual, dense [n, width], in place of `out`. sum_ranks adds the partials of all ranks.
// With a null `partial`, the only rank, operations are as if there were no ranks.
#pragma once

#include <array>
#include <functional>
#include <span>

#include "base/stage.h"
#include "ops/ranks.h"
#include "ops/types.h"
#include "spec/cut.h"

namespace kdt {

// A BF16 matrix of a checkpoint, row-major [n_out, n_in], not necessarily aligned.
struct MatrixSource {
  const std::byte* bf16;
  int64_t n_out, n_in;
  int64_t row_stride = 0;    // elements from one row to the next; 0: n_in
};

// One expert projection of a checkpoint: compressed-tensors pack-quantized INT4.
struct Int4Source {
  const std::byte* packed;   // int32 [n_out, n_in / 8]: element i of a word in bits 4i..4i+3, stored + 8
  const std::byte* scale;    // bf16 [n_out, n_in / group]
  int64_t n_out, n_in;
};

// The same in whole tiles (checkpoint/int4_tiles.h), as a shard has it: groups of 32.
struct TileSource {
  const std::byte* words;    // int32 [n_in / 16][n_out / 64][128]
  const std::byte* scales;   // bf16 [n_in / 32][n_out]
  int64_t n_out, n_in;
};

struct EmbedArgs {
  Rows rows;
  const void* table;         // bf16 [vocab, hidden], upload_raw
  int64_t hidden;
  Act* out;                  // [n, hidden]
  // Of a rank: the table has rows of the `n_tokens` tokens from first_token on; partial is zero for all others.
  float* partial = nullptr;  // [n, hidden]
  int64_t first_token = 0, n_tokens = 0;
};

struct RmsNormArgs {
  Count n;
  int64_t width;
  const Act* x;              // rows of at least `width`
  const float* weight;       // [width]
  float eps;
  Act* out;                  // rows of at least `width`; may be x
  RowLayout x_rows = {}, out_rows = {};
};

struct LinearArgs {
  Count n;
  const Act* x;              // rows of n_in
  const Matrix* weight;      // [n_out, n_in]
  Act* out;                  // rows of n_out
  bool accumulate = false;   // out += x Wᵀ (the residual), else out = x Wᵀ
  RowLayout x_rows = {}, out_rows = {};
  float* partial = nullptr;  // [n, n_out]
};

struct CopyArgs {
  Count n;
  int64_t width;             // of a row
  const Act* from;
  Act* to;
};

// out += down(silu(gate(x)) * up(x)), for the rows `index` of x and out (null: the first n).
struct MlpArgs {
  Count n;
  const Act* x;              // [n, hidden]
  const Matrix* gate_up;     // upload_gate_up: [2 * width, hidden]
  const Matrix* down;        // [hidden, width]
  Act* scratch;              // [n, width]
  Act* out;                  // [n, hidden]
  const int32_t* index = nullptr;
  float* partial = nullptr;  // [n, hidden], whatever the index
};

// Normalises the latent, rotates k_pe and writes both: committed rows to their page slot, draft nodes to their scratch row.
struct LatentWriteArgs {
  Rows rows;
  const StreamPages* streams;
  const Act* kv;             // [n, kv_stride]: latent kv_lora | k_pe rope, in the first kv_lora + rope of each row
  int64_t kv_stride;
  const float* norm_weight;  // [kv_lora]
  float eps;
  RopeTable rope;            // interleaved pairs
  int64_t kv_lora;
  void* pages;               // this layer's part of page 0; page i is page_stride bytes further for every i
  size_t page_stride;
  void* scratch;             // this layer's scratch rows, latent_scratch_bytes()
  // With q, as rms_norm and linear would: the norm of the queries' latent of the same rows, kv_stride apart too, through q_b.
  const Act* q = nullptr;
  const float* q_norm_weight = nullptr;   // [q_b's n_in]
  const Matrix* q_b = nullptr;
  Act* q_latent = nullptr;   // scratch [n, q_b's n_in]
  Act* q_out = nullptr;      // [n, q_b's n_out]
};

// Absorbed multi-head latent attention, position-ordered: keys are folded in segments of 64 positions, ascending.
struct MlaAttentionArgs {
  Rows rows;
  const StreamPages* streams;
  Act* q;                    // [n, heads * (nope + rope)], before RoPE; overwritten
  MatrixGroup w_uk;          // [heads] of [kv_lora, nope]
  MatrixGroup w_uv;          // [heads] of [v_head, kv_lora]
  int64_t n_heads, nope, kv_lora, v_head;
  RopeTable rope;
  float scale;               // of the scores, YaRN's mscale² included
  const void* pages;         // as in LatentWriteArgs
  size_t page_stride;
  const void* scratch;
  int64_t max_context;       // no position is at or above it
  void* work;                // attention_work_bytes()
  Act* out;                  // [n, heads * v_head]
};

// Sigmoid router with a correction bias: the top `k` of sigmoid(x Wᵀ) + bias, best first, ties to the lower expert.
struct RouteArgs {
  Count n;
  const Act* x;              // [n, hidden]
  const Matrix* gate;        // [n_experts, hidden]
  const float* bias;         // [n_experts]
  int64_t n_experts, k;
  bool normalise;            // weights /= their sum + 1e-20
  float scaling;
  float* scores;             // scratch [n, n_experts]
  int32_t* expert;           // out [n, k]
  float* weight;             // out [n, k]: the scores without the bias
};

// out += Σ_k weight_k · expert_k(x), ascending k in fp32, + shared(x). Experts compute from packed INT4.
struct ExpertsArgs {
  Count n;
  int64_t hidden;
  const Act* x;              // [n, hidden]
  const int32_t* expert;     // [n, k]
  const float* weight;       // [n, k]
  int64_t n_experts, k;
  MatrixGroup gate_up;       // [n_experts], upload_int4_gate_up: [2 * width, hidden]
  MatrixGroup down;          // [n_experts] of [hidden, width] INT4
  int64_t width;
  const Matrix* shared_gate_up;   // BF16, upload_gate_up: [2 * shared width, hidden]
  const Matrix* shared_down;      // BF16 [hidden, shared width]
  void* scratch;             // experts_scratch_bytes()
  Act* out;                  // [n, hidden]
  float* partial = nullptr;  // [n, hidden]
};

constexpr double kDeepNoise = 0.5;   // measured: docs/speculation.md

// Per-position candidates of the drafter: the k best tokens and their log-probabilities.
struct TopKArgs {
  Count n;
  int64_t vocab, k;
  const float* logits;       // [n, vocab]; NaN counts as -inf
  // When not null, and T > 0: ranked by log q + w · T · noise, whose log softmax is the log-probability. w is 1 for a
  // stream's first row and kDeepNoise after it: deeper rows are marginals over paths the noise knows nothing of.
  const Sampling* sampling;  // [n / depths] one a stream
  int64_t depths;            // rows a stream
  const int32_t* position;   // [n] of the candidate token
  void* work;                // vocabulary_work_bytes()
  int32_t* token;            // out [n, k], best first, ties to the lower id
  float* log_q;              // out [n, k]
};

// The target's own token at every row: penalties, bias, temperature, top-k, top-p, min-p, then Gumbel-max by counter noise.
struct SampleArgs {
  Rows rows;                 // parent: a row of these
  int64_t vocab;
  const float* logits;       // [n, vocab]
  const Sampling* sampling;  // by stream
  const LogitAdjust* adjust; // by stream; null: all logits as they are
  void* work;                // vocabulary_work_bytes()
  int32_t* token;            // out [n]: of position + 1
};

// Log-probabilities under the target's own distribution: the log softmax of the logits as they are.
struct LogprobArgs {
  Count n;
  int64_t vocab, n_top;
  const float* logits;       // rows of vocab; NaN counts as -inf
  const int32_t* row;        // [n] which row of logits
  const int32_t* token;      // [n] the token that followed; -1: not wanted, nothing is written
  float* logprob;            // out [n] its own
  int32_t* top_token;        // out [n, n_top] the most probable, best first, ties to the lower id
  float* top_logprob;        // out [n, n_top]
};

// The drafter's context keys and values of committed rows: k_norm, RoPE (half-split), into the stream's draft pages.
struct DraftContextArgs {
  Rows rows;                 // committed rows only
  const StreamPages* streams;
  const Act* kv;             // [n, 2 * kv_heads * head_dim]: keys, then values, of one drafter layer
  const float* k_norm;       // [head_dim]
  float eps;
  RopeTable rope;
  int64_t n_kv_heads, head_dim;
  void* pages;               // this drafter layer's part of page 0
  size_t page_stride;
};

// Non-causal attention of one block a stream over its context (within the window) and the block itself.
struct DraftAttentionArgs {
  Count n_streams;
  int64_t block;             // rows = n_streams * block
  const int32_t* start;      // [n_streams] position of the anchor; context is positions below it
  const StreamPages* streams;
  Act* qkv;                  // [n, (heads + 2 * kv_heads) * head_dim], before norm and RoPE; overwritten
  const float* q_norm;       // [head_dim]
  const float* k_norm;
  float eps;
  RopeTable rope;
  int64_t n_heads, n_kv_heads, head_dim;
  int64_t window;            // 0: all of the context; else a query at p sees keys k with p - k < window
  int64_t first_query, n_queries;   // only these rows of each block are computed
  const void* pages;
  size_t page_stride;
  int64_t max_context;       // no position is at or above it
  void* work;                // attention_work_bytes()
  Act* out;                  // [n, heads * head_dim]
};

// Every stream's tree, in order of weight (spec/tree_build.h). Of a stream without a draft the root alone.
struct BuildTreesArgs {
  Count n_streams;
  const StreamPlan* plan;    // [n_streams]
  int64_t depths, k;         // of the candidates; k <= vocabulary, and enough for every budget
  const int32_t* token;      // [drafts, depths, k] candidates, best first
  const float* log_q;        // [drafts, depths, k], descending in k; NaN counts as -inf
  TreeNodes nodes;           // out, at plan.first: budget + 1 places
  int32_t* n_nodes;          // out [n_streams], without the root
};

// How many nodes of their trees the automatic streams verify, together: expected tokens minus lambda times the round's time is
// largest (spec/cut.h). What is kept of a tree is its beginning.
struct CutArgs {
  Count n_streams;
  const StreamPlan* plan;
  TreeNodes nodes;
  const spec::CutTables* tables;
  int32_t* n_nodes;          // in, out [n_streams]
  double* outlook;           // out [spec::Outlook::kPoints]: its tokens
};

// The rows of the pass behind those of prompts: every stream's root and kept nodes, in the order of streams. Of all arrays the
// first entries, those of prompts, are the host's.
struct LayRowsArgs {
  Count n_streams;
  const StreamPlan* plan;
  const RoundCounts* counts;
  TreeNodes nodes;
  const int32_t* n_nodes;    // [n_streams]
  int32_t *token, *position, *stream, *parent, *visible;   // out [rows], as Rows
  int32_t* logits_row;       // out [logits]: scored rows, sampled rows of prompts, then all rows of trees
  int32_t *sample_token, *sample_position, *sample_stream, *sample_parent;   // out: of logits rows that are sampled, as Rows
  int32_t* first_row;        // out [n_streams]: the root's row
  int32_t *n_rows, *n_logits, *n_sampled;   // out: live counts
};

// Every stream's walk from the root to the first sampled token that is no child (spec/accept.h), and what is kept of the pass:
// rows of prompts, whose entries are the host's, then every path in the order of streams.
struct AcceptArgs {
  Count n_streams;
  const StreamPlan* plan;
  const RoundCounts* counts;
  TreeNodes nodes;
  const int32_t* n_nodes;
  const int32_t* first_row;
  const int32_t* position;   // of the rows of the pass
  const int32_t* sample;     // the target's tokens, by logits row from the first that is sampled
  int32_t* path;             // out, at plan.first: accepted nodes, the root first
  int32_t* token;            // out, at plan.first: what the target said after each: accepted tokens, then the bonus
  int32_t* n_path;           // out [n_streams]
  int32_t *kept_row, *kept_position, *kept_stream;   // out: rows of the pass
  int32_t* n_kept;           // out: live count
  // For logprobs: rows of logits and the token that followed, -1: not wanted. The host has written the entries of prompts; of
  // their samples a 0 where the token is wanted.
  int32_t *scored_row, *scored_token;
  int32_t* n_logprobs;       // out: live count
};

// Copies the latent KV of kept draft nodes (rows with a parent) from scratch rows to page slots, in every layer.
struct CommitArgs {
  Count n;
  const int32_t* row;        // [n] rows of the pass
  Rows rows;
  const StreamPages* streams;
  int64_t n_layers;
  int64_t kv_lora, rope_dim;
  void* pages;                  // layer 0's part of page 0
  size_t page_stride, layer_page_bytes;   // from page to page, and from layer to layer within one
  const void* scratch;
  size_t layer_scratch_bytes;
};

// Distinct experts among the choices of a layer's rows.
struct CountExpertsArgs {
  Count n;
  int64_t n_experts, k;
  const int32_t* expert;     // [n, k]
  int32_t* distinct;         // out
};

// What recorded work depends on besides the contents of memory; equal keys stand for equal work.
using SubmitKey = std::array<int64_t, 12>;

class Ops {
 public:
  virtual ~Ops() = default;

  virtual const char* backend() const = 0;         // "cpu", "cuda"
  virtual const char* instruction_set() const = 0;
  virtual int threads() const = 0;
  virtual size_t activation_bytes() const = 0;

  // Memory and weights (at start, not in a round). Weights live as long as the backend.
  virtual Buffer allocate(size_t bytes) = 0;
  // What sum_ranks and gather_ranks read: all ranks ask for the same sizes in the same order.
  virtual Buffer allocate_for_ranks(size_t bytes) = 0;
  virtual void copy_in(Buffer& to, size_t offset, const void* from, size_t bytes) = 0;     // from host memory
  virtual void copy_out(const Buffer& from, size_t offset, void* to, size_t bytes) = 0;    // to host memory
  virtual Exchange exchange(size_t bytes) = 0;     // zero at first
  virtual const void* upload_raw(const std::byte* source, size_t bytes) = 0;
  virtual Matrix upload_matrix(std::span<const MatrixSource> stacked) = 0;   // stacked along n_out
  virtual Matrix upload_gate_up(const MatrixSource& gate, const MatrixSource& up) = 0;
  virtual Matrix upload_int4(const Int4Source& source, int64_t group_size) = 0;
  virtual Matrix upload_int4_gate_up(const Int4Source& gate, const Int4Source& up, int64_t group_size) = 0;
  virtual Matrix upload_tiles(const TileSource& source) = 0;
  virtual Matrix upload_tiles_gate_up(const TileSource& both) = 0;   // gate's rows, then as many of up
  virtual MatrixGroup group(std::span<const Matrix> matrices) = 0;
  virtual size_t latent_page_bytes(int64_t kv_lora, int64_t rope) const = 0;      // of one layer
  virtual size_t latent_scratch_bytes(int64_t rows, int64_t kv_lora, int64_t rope) const = 0;  // of one layer
  virtual size_t draft_page_bytes(int64_t n_kv_heads, int64_t head_dim) const = 0;
  virtual size_t experts_scratch_bytes(int64_t rows, int64_t k, int64_t n_experts, int64_t width, int64_t shared_width,
                                       int64_t hidden) const = 0;
  // Working memory of operations that take it; one of them runs at a time.
  virtual size_t attention_work_bytes(int64_t rows, int64_t n_heads, int64_t key_dims, int64_t max_context) const = 0;
  virtual size_t vocabulary_work_bytes(int64_t rows, int64_t vocab, int64_t k) const = 0;
  virtual size_t weight_bytes() const = 0;         // uploaded so far
  virtual size_t spare_bytes() const = 0;          // how much of the memory that is there KV pages may take
  virtual size_t free_bytes() const = 0;           // what could still be allocated, all of it
  virtual double read_bandwidth() = 0;             // bytes a second that work which only reads gets; measures it

  // A round: send, submit, wait. `work` calls operations, marks and fetches, and nothing else of the backend; with a key it may
  // be recorded the first time and replayed when the key comes again, without being called.
  virtual int64_t capacity(int64_t rows) const = 0;   // what work over so many rows is recorded for, at least `rows`
  virtual void send(const Exchange& from, size_t bytes) = 0;   // its first bytes, before what is submitted next
  virtual void submit(const SubmitKey* key, const std::function<void()>& work) = 0;
  virtual void mark(Stage stage) = 0;              // the time since the last mark, or the submit, is this stage's
  virtual void fetch(const Exchange& to, size_t bytes) = 0;    // its first bytes are the host's after wait
  virtual StageSeconds wait() = 0;                 // for all that was submitted; times of the last submission

  virtual void embed(const EmbedArgs& args) = 0;
  virtual void rms_norm(const RmsNormArgs& args) = 0;
  virtual void linear(const LinearArgs& args) = 0;
  virtual void copy(const CopyArgs& args) = 0;
  virtual void mlp(const MlpArgs& args) = 0;
  virtual void latent_write(const LatentWriteArgs& args) = 0;
  virtual void mla_attention(const MlaAttentionArgs& args) = 0;
  virtual void route(const RouteArgs& args) = 0;
  virtual void experts(const ExpertsArgs& args) = 0;
  virtual void logits(const LinearArgs& args) = 0;  // out is float [n, vocab] on every backend
  virtual void top_k(const TopKArgs& args) = 0;
  virtual void sample(const SampleArgs& args) = 0;
  virtual void logprobs(const LogprobArgs& args) = 0;
  virtual void draft_context(const DraftContextArgs& args) = 0;
  virtual void draft_attention(const DraftAttentionArgs& args) = 0;
  virtual void build_trees(const BuildTreesArgs& args) = 0;
  virtual void cut(const CutArgs& args) = 0;
  virtual void lay_rows(const LayRowsArgs& args) = 0;
  virtual void accept(const AcceptArgs& args) = 0;
  virtual void commit(const CommitArgs& args) = 0;
  virtual void count_experts(const CountExpertsArgs& args) = 0;
  virtual void sum_ranks(const SumRanksArgs& args) = 0;
  virtual void gather_ranks(const GatherRanksArgs& args) = 0;
  virtual void pause(double seconds) = 0;          // nothing runs for so long: what a rehearsal does in the place of other ranks
};

}  // namespace kdt
