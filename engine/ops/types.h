// The plain types that cross the seam between what is computed (model, runtime) and how (cpu, cuda).
//
// Pointers are the backend's memory. `Act` is the backend's activation type (CPU: float), which only the backend reads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "base/host_device.h"

namespace kdt {

constexpr int64_t kPageTokens = 64;   // tokens of one page, and the positions of one attention segment

using Act = void;

// Memory of the backend, zero at first, aligned to 64 bytes, freed with the object.
class Buffer {
 public:
  Buffer() : data_(nullptr, Free{nullptr, 0}) {}
  Buffer(void* data, size_t bytes, void (*free)(void*, size_t)) : data_(data, Free{free, bytes}) {}
  void* data() const { return data_.get(); }
  template <class T>
  T* as() const { return static_cast<T*>(data_.get()); }
  size_t bytes() const { return data_.get_deleter().bytes; }

 private:
  struct Free {
    void (*free)(void*, size_t);
    size_t bytes;
    void operator()(void* data) const { free(data, bytes); }
  };
  std::unique_ptr<void, Free> data_;
};

// Memory that the host and the backend both know: the host fills or reads `host`, operations use `device`. Where the backend
// computes in host memory the two are one.
class Exchange {
 public:
  Exchange() = default;
  explicit Exchange(Buffer shared) : host_(std::move(shared)) {}
  Exchange(Buffer host, Buffer device) : host_(std::move(host)), device_(std::move(device)) {}
  std::byte* host() const { return host_.as<std::byte>(); }
  std::byte* device() const { return device_.data() ? device_.as<std::byte>() : host(); }
  size_t bytes() const { return host_.bytes(); }

 private:
  Buffer host_, device_;
};

// How many rows an operation works on: `most`; or, where `live` (the backend's memory) is given, *live of them, at most `most`.
// A backend that replays recorded work sizes it by `most`, reads `live` when it runs, and leaves the rows from there on alone.
struct Count {
  Count(int64_t n = 0, const int32_t* live_rows = nullptr) : most(n), live(live_rows) {}
  int64_t most;
  const int32_t* live;
  int64_t now() const { return live ? *live : most; }   // where the backend's memory is the host's
};

// Which rows of an array an operation works on: row i lies at (index ? index[i] : i) * stride elements; stride 0: dense.
struct RowLayout {
  int64_t stride = 0;
  const int32_t* index = nullptr;
};

// A weight matrix [n_out, n_in] in the layout the backend computes from. Owns nothing when copied as a view.
struct Matrix {
  const void* data = nullptr;
  const void* scales = nullptr;   // INT4 only
  int64_t n_out = 0, n_in = 0;
  int64_t group_size = 0;         // INT4 only: inputs that share a scale
};

// Matrices of one shape that an operation chooses from: heads, experts. Made by Ops::group; lives as long as the backend.
struct MatrixGroup {
  const Matrix* host = nullptr;     // [n]
  const Matrix* device = nullptr;   // the same in the backend's memory
  int64_t n = 0;
};

// The rows of one forward pass, of any mix of streams: prompt tokens, roots and draft nodes.
//
// A committed row (prompt token or root) has parent -1 and writes its latent KV to its stream's page; a draft node has a
// parent row and writes to scratch. A row at position p sees its stream's pages below `visible` and then its own
// ancestors, so that positions 0..p are each seen once: a committed row has visible = p + 1, a draft node its root's.
struct Rows {
  Count n;
  const int32_t* token;      // [n]
  const int32_t* position;   // [n]
  const int32_t* stream;     // [n] index into the streams of the plan
  const int32_t* parent;     // [n] row of the parent node; -1: a committed row
  const int32_t* visible;    // [n] page positions this row sees
};

// Where a stream's committed tokens lie: page_table[position / 64] is a page of every layer's pool.
struct StreamPages {
  const int32_t* page_table;
};

// Rotary embedding table: cos and sin of position × inverse frequency, already multiplied by YaRN's amplitude.
struct RopeTable {
  const float* cos;   // [max_context, dim / 2]
  const float* sin;
  int64_t dim;
};

// What changes a request's logits before its temperature does, in this order. A row's output so far is the history and the
// tokens of the row's own ancestors and itself.
struct LogitAdjust {
  float repetition = 1;              // logits of tokens in prompt or output: / when positive, * when not
  float frequency = 0;               // taken off, times the token's count in the output
  float presence = 0;                // taken off tokens of the output
  const int32_t* seen = nullptr;     // [n_seen] the history: tokens of prompt and output, the root included, each once
  const int32_t* seen_count = nullptr;   // [n_seen] times in the output; 0: in the prompt only
  int64_t n_seen = 0;
  const int32_t* bias_token = nullptr;   // [n_bias]
  const float* bias = nullptr;       // added
  int64_t n_bias = 0;
  const int32_t* banned = nullptr;   // [n_banned] never sampled at positions below banned_until
  int64_t n_banned = 0;
  int32_t banned_until = 0;

  KDT_HOST_DEVICE bool penalises() const { return repetition != 1 || frequency != 0 || presence != 0; }
  KDT_HOST_DEVICE bool changes() const { return penalises() || n_bias > 0 || n_banned > 0; }
};

// The nodes of draft trees, each tree's root first; node indices count within their tree.
struct TreeNodes {
  int32_t* token;
  int32_t* parent;                   // of the root: -1
  int32_t* depth;                    // of the root: 0
  float* weight;                     // log of the path's probability, of the root: 0

  KDT_HOST_DEVICE TreeNodes from(int64_t first) const {
    return {token + first, parent + first, depth + first, weight + first};
  }
};

// One decoding stream of a round, from build to commit. The host writes it.
struct StreamPlan {
  int32_t root;                      // its last committed token
  int32_t length;                    // the root's position
  int32_t first;                     // where its nodes lie in TreeNodes and its path in what accept yields
  int32_t budget;                    // draft nodes at most; 0: no draft
  int32_t draft;                     // its place among the streams that draft
  int32_t depths;                    // of its tree; candidates of deeper rows are not used
  int32_t spine;                     // 1: see build_trees
  int32_t calibration;               // of spec::CutTables; -1: all of its nodes are verified
  int32_t wants_logprobs;            // 1: of the tokens it commits
};

// What a round has besides trees. The host writes it.
struct RoundCounts {
  int32_t n_decode;                  // streams with a tree; prompts' streams are numbered after them
  int32_t n_prompt;                  // prompt rows, the first of the pass
  int32_t n_scored;                  // of them, those whose logits are read but not sampled: the first rows of logits
  int32_t n_prompt_samples;          // of them, those whose next token is sampled: the next rows of logits
};

// One request's sampling settings; noise is a function of (seed, choice, position, token id) alone.
struct Sampling {
  double temperature = 0;    // 0: greedy
  double top_p = 1;
  double min_p = 0;
  int32_t top_k = 0;         // 0: off
  uint64_t seed = 0;
  uint32_t choice = 0;
};

}  // namespace kdt
