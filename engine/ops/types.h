// The plain types that cross the seam between what is computed (model, runtime) and how (cpu, cuda).
//
// Pointers are the backend's memory. `Act` is the backend's activation type (CPU: float), which only the backend reads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

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

// A weight matrix [n_out, n_in] in the layout the backend computes from. Owns nothing when copied as a view.
struct Matrix {
  const void* data = nullptr;
  const void* scales = nullptr;   // INT4 only
  int64_t n_out = 0, n_in = 0;
  int64_t group_size = 0;         // INT4 only: inputs that share a scale
};

// The rows of one forward pass, of any mix of streams: prompt tokens, roots and draft nodes.
//
// A committed row (prompt token or root) has parent -1 and writes its latent KV to its stream's page; a draft node has a
// parent row and writes to scratch. A row at position p sees its stream's pages below `visible` and then its own
// ancestors, so that positions 0..p are each seen once: a committed row has visible = p + 1, a draft node its root's.
struct Rows {
  int64_t n;
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
