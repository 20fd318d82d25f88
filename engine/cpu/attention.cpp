// Multi-head latent attention on the CPU: the latent cache, tree attention over pages and scratch rows, and the commit.
#include <algorithm>
#include <array>
#include <cstring>
#include <limits>

#include "checkpoint/cpu_packing.h"
#include "cpu/cpu_backend.h"
#include "cpu/kernels.h"
#include "cpu/rope.h"

namespace kdt::cpu {
namespace {

constexpr int64_t kHeadGroup = 4;    // queries that share the registers of one kernel call
constexpr int64_t kRowBlock = 16;    // rows that go over a tile of keys while it is in the cache

struct RowRange {
  int64_t begin, end;
};

// The next run of rows of one stream, up to `end`.
RowRange next_run(const Rows& rows, int64_t begin, int64_t end) {
  int64_t at = begin + 1;
  while (at < end && rows.stream[at] == rows.stream[begin]) ++at;
  return {begin, at};
}

// One thread's working memory for a block of rows, of any streams, × a group of heads.
struct Block {
  int64_t begin;   // its first row
  float* q;        // [rows][heads][key_dims] the absorbed query and its rotated part
  float* o;        // [rows][heads][value_dims]
  float* s;        // [rows][heads][64]
  float* side;     // [4][key_dims][16] keys of a node's ancestors
  float* side_s;   // [heads][64]
  float* m;        // [rows][heads]
  float* l;
};

// The keys a row sees of a tile of positions [64 i, 64 i + 64): of the page first, then of its own ancestors (itself the
// last), which lie in scratch rows.
struct Seen {
  int64_t n, in_page;
  Seen(const Rows& rows, int64_t row, int64_t first)
      : n(std::clamp<int64_t>(rows.position[row] + 1 - first, 0, kPageTokens)),
        in_page(std::clamp<int64_t>(rows.visible[row] - first, 0, n)) {}
};

class TileFold {
 public:
  TileFold(const MlaAttentionArgs& args, const LatentLayout& layout, const Block& block, RowRange range, int64_t heads)
      : args_(args), layout_(layout), block_(block), range_(range), heads_(heads) {}

  // Folds one tile into every row's heads. Rows go over a few keys, or values, while those are in the first-level cache.
  void fold(int64_t tile) {
    const Rows& rows = args_.rows;
    const int64_t first = tile * kPageTokens;
    int64_t most = 0;
    for (int64_t row = range_.begin; row < range_.end; ++row) most = std::max(most, Seen(rows, row, first).in_page);
    const float* page = nullptr;
    if (most > 0) {
      const auto id = static_cast<size_t>(args_.streams[rows.stream[range_.begin]].page_table[tile]);
      page = reinterpret_cast<const float*>(static_cast<const std::byte*>(args_.pages) + id * args_.page_stride);
    }
    for (int64_t t = 0; t < most; t += kKeyBlock)
      for (int64_t row = range_.begin; row < range_.end; ++row)
        if (t < Seen(rows, row, first).in_page)
          attention_scores(q(row), layout_.key_dims, heads_, layout_.key_dims, page + t * layout_.key_dims, kKeyBlock,
                           args_.scale, s(row) + t, kPageTokens);
    for (int64_t row = range_.begin; row < range_.end; ++row) {
      const Seen seen(rows, row, first);
      if (seen.n == 0) continue;
      if (seen.in_page < seen.n) score_ancestors(row, first, seen);
      std::array<int64_t, kHeadGroup> lo{}, hi;
      hi.fill(seen.n);
      const int64_t at = (row - block_.begin) * heads_;
      attention_softmax(s(row), heads_, lo.data(), hi.data(), layout_.value_dims, {block_.m + at, block_.l + at, o(row)});
    }
    std::array<const float*, kPageTokens> values;
    for (int64_t t = 0; t < most; ++t) values[t] = page + layout_.key_dims * kPageTokens + t * layout_.value_dims;
    for (int64_t t = 0; t < most; t += kValueRows)
      for (int64_t row = range_.begin; row < range_.end; ++row)
        attention_values(s(row), heads_, values.data(), t, std::min(t + kValueRows, Seen(rows, row, first).in_page),
                         layout_.value_dims, o(row));
    for (int64_t row = range_.begin; row < range_.end; ++row) {
      const Seen seen(rows, row, first);
      if (seen.in_page == seen.n) continue;
      for_each_ancestor(row, first, seen, [&](int64_t t, const float* key) { values[seen.in_page + t] = key; });
      attention_values(s(row), heads_, values.data(), seen.in_page, seen.n, layout_.value_dims, o(row));
    }
  }

 private:
  float* q(int64_t row) const { return block_.q + (row - block_.begin) * heads_ * layout_.key_dims; }
  float* o(int64_t row) const { return block_.o + (row - block_.begin) * heads_ * layout_.value_dims; }
  float* s(int64_t row) const { return block_.s + (row - block_.begin) * heads_ * kPageTokens; }

  // f(t, scratch row) for the ancestors in slots in_page + t of the tile.
  template <class G>
  void for_each_ancestor(int64_t row, int64_t first, const Seen& seen, const G& f) const {
    int64_t node = row;
    while (args_.rows.position[node] >= first + seen.n) node = args_.rows.parent[node];
    for (int64_t t = seen.n - seen.in_page - 1; t >= 0; --t, node = args_.rows.parent[node])
      f(t, static_cast<const float*>(args_.scratch) + node * layout_.scratch_stride);
  }

  void score_ancestors(int64_t row, int64_t first, const Seen& seen) const {
    for_each_ancestor(row, first, seen, [&](int64_t t, const float* key) {
      for (int64_t d = 0; d < layout_.key_dims; ++d)
        block_.side[key_offset(t, d, layout_.key_dims)] = layout_.key(key, d);
    });
    const int64_t count = seen.n - seen.in_page;
    attention_scores(q(row), layout_.key_dims, heads_, layout_.key_dims, block_.side, count, args_.scale, block_.side_s,
                     kPageTokens);
    for (int64_t h = 0; h < heads_; ++h)
      std::copy_n(block_.side_s + h * kPageTokens, count, s(row) + h * kPageTokens + seen.in_page);
  }

  const MlaAttentionArgs& args_;
  const LatentLayout& layout_;
  const Block& block_;
  RowRange range_;
  int64_t heads_;
};

// Attention of a block of rows for some groups of heads, in a thread's scratch memory.
class BlockAttention {
 public:
  BlockAttention(const MlaAttentionArgs& args, const LatentLayout& layout, float* scratch)
      : args_(args), layout_(layout), head_dim_(args.nope + args.rope.dim) {
    const auto take = [&scratch](int64_t count) {
      float* taken = scratch;
      scratch += round_up(count, 16);
      return taken;
    };
    shared_.side = take(layout.key_dims * kPageTokens);
    shared_.s = take(kRowBlock * kHeadGroup * kPageTokens);
    shared_.side_s = take(kHeadGroup * kPageTokens);
    groups_ = take(0);
  }

  int64_t groups_at_once(int64_t n_groups) const {
    constexpr int64_t kFloats = (20 << 20) / sizeof(float);   // of a thread's kScratchBytes; the rest is above
    return std::clamp<int64_t>(kFloats / group_floats(), 1, n_groups);
  }

  void begin(RowRange block, int64_t first_group, int64_t n_groups) {
    rows_ = block;
    first_group_ = first_group;
    panel_ = groups_ + n_groups * group_floats();
  }

  // The queries of group g: through W_UK, and rotated.
  void absorb(int64_t g) const {
    const Block block = group(g);
    const int64_t n = rows_.end - rows_.begin, heads = n_heads(g), row_q = heads * layout_.key_dims;
    const int64_t q_stride = args_.n_heads * head_dim_;
    for (int64_t h = 0; h < heads; ++h) {
      const float* q = static_cast<const float*>(args_.q) + rows_.begin * q_stride + (first_head(g) + h) * head_dim_;
      const Matrix& w_uk = args_.w_uk.host[first_head(g) + h];
      linear_panels({{q, q_stride}, n, &w_uk, 0, n_panels(w_uk.n_out), {block.q + h * layout_.key_dims, row_q}, false,
                     panel_});
      for (int64_t i = 0; i < n; ++i) {
        float* rotated = block.q + i * row_q + h * layout_.key_dims + args_.kv_lora;
        std::copy_n(q + i * q_stride + args_.nope, layout_.rope, rotated);
        rotate_interleaved(rotated, args_.rope, args_.rows.position[rows_.begin + i]);
      }
    }
    std::fill_n(block.o, n * heads * layout_.value_dims, 0.0f);
    std::fill_n(block.m, n * heads, -std::numeric_limits<float>::infinity());
    std::fill_n(block.l, n * heads, 0.0f);
  }

  // One stream's rows over all tiles they see.
  void fold(RowRange run, int64_t g) const {
    int64_t last = 0;
    for (int64_t row = run.begin; row < run.end; ++row) last = std::max<int64_t>(last, args_.rows.position[row]);
    const Block block = group(g);
    TileFold tiles(args_, layout_, block, run, n_heads(g));
    for (int64_t tile = 0; tile * kPageTokens <= last; ++tile) tiles.fold(tile);
  }

  // Divided by the sums, through W_UV, to the output.
  void project(int64_t g) const {
    const Block block = group(g);
    const int64_t n = rows_.end - rows_.begin, heads = n_heads(g), row_o = heads * layout_.value_dims;
    for (int64_t i = 0; i < n; ++i)
      for (int64_t h = 0; h < heads; ++h) {
        float* o = block.o + i * row_o + h * layout_.value_dims;
        const float sum = block.l[i * heads + h];
        for (int64_t d = 0; d < args_.kv_lora; ++d) o[d] /= sum;
      }
    const int64_t out_stride = args_.n_heads * args_.v_head;
    for (int64_t h = 0; h < heads; ++h) {
      const Matrix& w_uv = args_.w_uv.host[first_head(g) + h];
      float* out = static_cast<float*>(args_.out) + rows_.begin * out_stride + (first_head(g) + h) * args_.v_head;
      linear_panels({{block.o + h * layout_.value_dims, row_o}, n, &w_uv, 0, n_panels(w_uv.n_out), {out, out_stride},
                     false, panel_});
    }
  }

 private:
  static constexpr int64_t kQueries = kRowBlock * kHeadGroup;

  int64_t group_floats() const { return kQueries * (layout_.key_dims + layout_.value_dims + 2); }
  int64_t first_head(int64_t g) const { return (first_group_ + g) * kHeadGroup; }
  int64_t n_heads(int64_t g) const { return std::min(kHeadGroup, args_.n_heads - first_head(g)); }
  // Scores are shared by the groups, which are folded one after the other.
  Block group(int64_t g) const {
    Block block = shared_;
    block.begin = rows_.begin;
    block.o = groups_ + g * group_floats();
    block.m = block.o + kQueries * layout_.value_dims;
    block.l = block.m + kQueries;
    block.q = block.l + kQueries;
    return block;
  }

  const MlaAttentionArgs& args_;
  const LatentLayout& layout_;
  int64_t head_dim_;
  Block shared_{};
  RowRange rows_{0, 0};
  int64_t first_group_ = 0;
  float* groups_;
  float* panel_ = nullptr;
};

// Part `part` of `parts` of the rows, each with about as many keys to read.
RowRange share_rows(const Rows& rows, int64_t parts, int64_t part) {
  const auto cost = [&](int64_t row) { return int64_t{rows.position[row]} + kPageTokens; };
  int64_t total = 0;
  for (int64_t row = 0; row < rows.n.now(); ++row) total += cost(row);
  RowRange range{0, 0};
  int64_t sum = 0;
  for (int64_t row = 0; row < rows.n.now(); ++row) {
    const int64_t of = sum * parts / total;   // the part that the row's first key falls into
    sum += cost(row);
    if (of < part) range.begin = row + 1;
    if (of <= part) range.end = row + 1;
  }
  return range;
}

}  // namespace

size_t CpuOps::latent_page_bytes(int64_t kv_lora, int64_t rope) const {
  return static_cast<size_t>(LatentLayout(kv_lora, rope).page_floats()) * sizeof(float);
}

size_t CpuOps::latent_scratch_bytes(int64_t rows, int64_t kv_lora, int64_t rope) const {
  return static_cast<size_t>(rows * LatentLayout(kv_lora, rope).scratch_stride) * sizeof(float);
}

void CpuOps::latent_write(const LatentWriteArgs& args) {
  if (args.q) {
    rms_norm({args.rows.n, args.q_b->n_in, args.q, args.q_norm_weight, args.eps, args.q_latent, {args.kv_stride}});
    linear({args.rows.n, args.q_latent, args.q_b, args.q_out});
  }
  const LatentLayout layout(args.kv_lora, args.rope.dim);
  for_rows(args.rows.n.now(), 32, [&](int64_t i, int t) {
    const float* in = static_cast<const float*>(args.kv) + i * args.kv_stride;
    const int64_t position = args.rows.position[i];
    const bool draft = args.rows.parent[i] >= 0;
    float* row = draft ? static_cast<float*>(args.scratch) + i * layout.scratch_stride : scratch(t);
    rms_norm_row(in, args.kv_lora, args.norm_weight, args.eps, row);
    std::fill(row + args.kv_lora, row + layout.value_dims, 0.0f);
    std::copy_n(in + args.kv_lora, layout.rope, row + layout.value_dims);
    rotate_interleaved(row + layout.value_dims, args.rope, position);
    if (draft) return;
    const auto id = static_cast<size_t>(args.streams[args.rows.stream[i]].page_table[position / kPageTokens]);
    layout.place(row, reinterpret_cast<float*>(static_cast<std::byte*>(args.pages) + id * args.page_stride),
                 position % kPageTokens);
  });
}

void CpuOps::mla_attention(const MlaAttentionArgs& args) {
  const Rows& rows = args.rows;
  if (rows.n.now() == 0) return;
  const LatentLayout layout(args.kv_lora, args.rope.dim);
  const int64_t n_groups = (args.n_heads + kHeadGroup - 1) / kHeadGroup;
  // Threads share out rows first, so that a stream's keys go to one thread, and heads when there are fewer rows.
  const int64_t row_parts = std::min<int64_t>(pool_.size(), rows.n.now());
  const int64_t group_parts = std::min(pool_.size() / row_parts, n_groups);
  pool_.run([&](int t) {
    const int64_t row_part = t % row_parts, group_part = t / row_parts;
    if (group_part >= group_parts) return;
    const RowRange mine = share_rows(rows, row_parts, row_part);
    BlockAttention attention(args, layout, scratch(t));
    const int64_t at_once = attention.groups_at_once(n_groups);
    const int64_t groups_begin = n_groups * group_part / group_parts, groups_end = n_groups * (group_part + 1) / group_parts;
    for (int64_t begin = mine.begin; begin < mine.end; begin += kRowBlock) {
      const RowRange block{begin, std::min(begin + kRowBlock, mine.end)};
      for (int64_t first = groups_begin; first < groups_end; first += at_once) {
        const int64_t n = std::min(at_once, groups_end - first);
        attention.begin(block, first, n);
        for (int64_t g = 0; g < n; ++g) attention.absorb(g);
        for (RowRange run{begin, begin}; run.end < block.end;) {
          run = next_run(rows, run.end, block.end);
          for (int64_t g = 0; g < n; ++g) attention.fold(run, g);
        }
        for (int64_t g = 0; g < n; ++g) attention.project(g);
      }
    }
  });
}

// Sources are scratch rows and targets are page slots: they never overlap, so rows may be copied in any order.
void CpuOps::commit(const CommitArgs& args) {
  const LatentLayout layout(args.kv_lora, args.rope_dim);
  for (int64_t layer = 0; layer < args.n_layers; ++layer) {
    auto* pages = static_cast<std::byte*>(args.pages) + static_cast<size_t>(layer) * args.layer_page_bytes;
    const auto* scratch = reinterpret_cast<const float*>(static_cast<const std::byte*>(args.scratch) +
                                                         static_cast<size_t>(layer) * args.layer_scratch_bytes);
    for (int64_t i = 0; i < args.n.now(); ++i) {
      const int64_t row = args.row[i], position = args.rows.position[row];
      if (args.rows.parent[row] < 0) continue;   // in its page already
      const auto id = static_cast<size_t>(args.streams[args.rows.stream[row]].page_table[position / kPageTokens]);
      auto* page = reinterpret_cast<float*>(pages + id * args.page_stride);
      layout.place(scratch + row * layout.scratch_stride, page, position % kPageTokens);
    }
  }
}

}  // namespace kdt::cpu
