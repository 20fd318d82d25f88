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

// The next run of rows of one stream, at most kRowBlock.
RowRange next_block(const Rows& rows, int64_t begin) {
  int64_t end = begin + 1;
  while (end < rows.n && end - begin < kRowBlock && rows.stream[end] == rows.stream[begin]) ++end;
  return {begin, end};
}

// One thread's working memory for a block of rows × a group of heads.
struct Block {
  float* q;        // [rows][heads][key_dims] the absorbed query and its rotated part
  float* o;        // [rows][heads][value_stride]
  float* side;     // [key_dims][64] keys of a node's ancestors
  float* s;        // [heads][64]
  float* side_s;   // [heads][64]
  float* m;        // [rows][heads]
  float* l;
};

// Folds the tile of positions [64 i, 64 i + 64) into one row's heads.
struct TileFold {
  const MlaAttentionArgs& args;
  LatentLayout layout;
  const Block& block;
  int64_t heads;

  void operator()(int64_t row, int64_t tile, const float* page, float* q, float* o, float* m, float* l) const {
    const Rows& rows = args.rows;
    const int64_t first = tile * kPageTokens;
    const int64_t n = std::min<int64_t>(kPageTokens, rows.position[row] + 1 - first);
    const int64_t in_page = std::clamp<int64_t>(rows.visible[row] - first, 0, n);
    std::array<const float*, kPageTokens> values;
    if (in_page > 0) {
      attention_scores(q, layout.key_dims, heads, layout.key_dims, page, kPageTokens, in_page, args.scale, block.s,
                       kPageTokens);
      const float* value = layout.values(page);
      for (int64_t t = 0; t < in_page; ++t) values[t] = value + t * layout.value_stride;
    }
    if (in_page < n) fold_ancestors(row, first, in_page, n, q, values.data());
    std::array<int64_t, kHeadGroup> lo{}, hi;
    hi.fill(n);
    attention_fold(block.s, heads, lo.data(), hi.data(), values.data(), layout.value_stride, {m, l, o});
  }

  // Scores of slots [from, to): the row's own ancestors (itself the last), which lie in scratch rows.
  void fold_ancestors(int64_t row, int64_t first, int64_t from, int64_t to, const float* q, const float** values) const {
    const Rows& rows = args.rows;
    const auto* scratch = static_cast<const float*>(args.scratch);
    const int64_t count = to - from;
    int64_t node = row;
    while (rows.position[node] >= first + to) node = rows.parent[node];
    for (int64_t t = count - 1; t >= 0; --t, node = rows.parent[node]) {
      const float* key = scratch + node * layout.scratch_stride();
      values[from + t] = key;
      const int64_t kv_lora = layout.key_dims - layout.rope;
      for (int64_t d = 0; d < kv_lora; ++d) block.side[d * kPageTokens + t] = key[d];
      for (int64_t d = 0; d < layout.rope; ++d)
        block.side[(kv_lora + d) * kPageTokens + t] = key[layout.value_stride + d];
    }
    attention_scores(q, layout.key_dims, heads, layout.key_dims, block.side, kPageTokens, count, args.scale, block.side_s,
                     kPageTokens);
    for (int64_t h = 0; h < heads; ++h)
      std::copy_n(block.side_s + h * kPageTokens, count, block.s + h * kPageTokens + from);
  }
};

}  // namespace

size_t CpuOps::latent_page_bytes(int64_t kv_lora, int64_t rope) const {
  return static_cast<size_t>(LatentLayout(kv_lora, rope).page_floats()) * sizeof(float);
}

size_t CpuOps::latent_scratch_bytes(int64_t rows, int64_t kv_lora, int64_t rope) const {
  return static_cast<size_t>(rows * LatentLayout(kv_lora, rope).scratch_stride()) * sizeof(float);
}

void CpuOps::latent_write(const LatentWriteArgs& args) {
  const LatentLayout layout(args.kv_lora, args.rope.dim);
  for_rows(args.rows.n, 32, [&](int64_t i, int t) {
    const float* in = static_cast<const float*>(args.kv) + i * args.kv_stride;
    const int64_t position = args.rows.position[i];
    float* row = scratch(t);   // latent | k_pe
    rms_norm_row(in, args.kv_lora, args.norm_weight, args.eps, row);
    std::copy_n(in + args.kv_lora, args.rope.dim, row + args.kv_lora);
    rotate_interleaved(row + args.kv_lora, args.rope, position);
    if (args.rows.parent[i] >= 0) {
      float* to = static_cast<float*>(args.scratch) + i * layout.scratch_stride();
      std::copy_n(row, args.kv_lora, to);
      std::fill(to + args.kv_lora, to + layout.value_stride, 0.0f);
      std::copy_n(row + args.kv_lora, args.rope.dim, to + layout.value_stride);
      return;
    }
    const int32_t id = args.streams[args.rows.stream[i]].page_table[position / kPageTokens];
    float* page = static_cast<float*>(args.pages) + id * layout.page_floats();
    const int64_t slot = position % kPageTokens;
    for (int64_t d = 0; d < layout.key_dims; ++d) page[d * kPageTokens + slot] = row[d];
    float* value = layout.values(page) + slot * layout.value_stride;
    std::copy_n(row, args.kv_lora, value);
    std::fill(value + args.kv_lora, value + layout.value_stride, 0.0f);
  });
}

void CpuOps::mla_attention(const MlaAttentionArgs& args) {
  const Rows& rows = args.rows;
  const LatentLayout layout(args.kv_lora, args.rope.dim);
  const int64_t head_dim = args.nope + args.rope.dim, q_stride = args.n_heads * head_dim;
  const int64_t n_groups = (args.n_heads + kHeadGroup - 1) / kHeadGroup;
  pool_.run([&](int t) {
    float* at = scratch(t);
    const auto take = [&at](int64_t count) {
      float* taken = at;
      at += round_up(count, 16);
      return taken;
    };
    Block block;
    block.q = take(kRowBlock * kHeadGroup * layout.key_dims);
    block.o = take(kRowBlock * kHeadGroup * layout.value_stride);
    block.side = take(layout.key_dims * kPageTokens);
    block.s = take(kHeadGroup * kPageTokens);
    block.side_s = take(kHeadGroup * kPageTokens);
    block.m = take(kRowBlock * kHeadGroup);
    block.l = take(kRowBlock * kHeadGroup);
    float* panel = take(0);

    int64_t unit = 0;
    for (RowRange range{0, 0}; range.end < rows.n;) {
      range = next_block(rows, range.end);
      const int64_t n = range.end - range.begin;
      for (int64_t group = 0; group < n_groups; ++group, ++unit) {
        if (unit % pool_.size() != t) continue;
        const int64_t first_head = group * kHeadGroup, heads = std::min(kHeadGroup, args.n_heads - first_head);
        const int64_t row_q = heads * layout.key_dims, row_o = heads * layout.value_stride;
        for (int64_t h = 0; h < heads; ++h) {
          float* q = static_cast<float*>(args.q) + range.begin * q_stride + (first_head + h) * head_dim;
          const Matrix& w_uk = args.w_uk[first_head + h];
          linear_panels({{q, q_stride}, n, &w_uk, 0, n_panels(w_uk.n_out), {block.q + h * layout.key_dims, row_q}, false,
                         panel});
          for (int64_t i = 0; i < n; ++i) {
            float* rotated = block.q + i * row_q + h * layout.key_dims + args.kv_lora;
            std::copy_n(q + i * q_stride + args.nope, args.rope.dim, rotated);
            rotate_interleaved(rotated, args.rope, rows.position[range.begin + i]);
          }
        }
        std::fill_n(block.o, n * row_o, 0.0f);
        std::fill_n(block.m, n * heads, -std::numeric_limits<float>::infinity());
        std::fill_n(block.l, n * heads, 0.0f);
        const TileFold fold{args, layout, block, heads};
        const int32_t* page_table = args.streams[rows.stream[range.begin]].page_table;
        int64_t last = 0;
        for (int64_t i = range.begin; i < range.end; ++i) last = std::max<int64_t>(last, rows.position[i]);
        for (int64_t tile = 0; tile * kPageTokens <= last; ++tile) {
          for (int64_t i = 0; i < n; ++i) {
            const int64_t row = range.begin + i;
            if (tile * kPageTokens > rows.position[row]) continue;
            const bool paged = tile * kPageTokens < rows.visible[row];
            const float* page =
                paged ? static_cast<const float*>(args.pages) + page_table[tile] * layout.page_floats() : nullptr;
            fold(row, tile, page, block.q + i * row_q, block.o + i * row_o, block.m + i * heads, block.l + i * heads);
          }
        }
        for (int64_t i = 0; i < n; ++i)
          for (int64_t h = 0; h < heads; ++h) {
            float* o = block.o + i * row_o + h * layout.value_stride;
            const float sum = block.l[i * heads + h];
            for (int64_t d = 0; d < args.kv_lora; ++d) o[d] /= sum;
          }
        for (int64_t h = 0; h < heads; ++h) {
          const Matrix& w_uv = args.w_uv[first_head + h];
          const int64_t out_stride = args.n_heads * args.v_head;
          float* out = static_cast<float*>(args.out) + range.begin * out_stride + (first_head + h) * args.v_head;
          linear_panels({{block.o + h * layout.value_stride, row_o}, n, &w_uv, 0, n_panels(w_uv.n_out), {out, out_stride},
                         false, panel});
        }
      }
    }
  });
}

// Sources are scratch rows and targets are page slots: they never overlap, so rows may be copied in any order.
void CpuOps::commit(const CommitArgs& args) {
  const LatentLayout layout(args.kv_lora, args.rope_dim);
  for (int64_t layer = 0; layer < args.n_layers; ++layer) {
    auto* pool = reinterpret_cast<float*>(static_cast<std::byte*>(args.pages) +
                                          static_cast<size_t>(layer) * args.layer_pages_bytes);
    const auto* scratch = reinterpret_cast<const float*>(static_cast<const std::byte*>(args.scratch) +
                                                         static_cast<size_t>(layer) * args.layer_scratch_bytes);
    for (int64_t i = 0; i < args.n; ++i) {
      const float* from = scratch + args.scratch_row[i] * layout.scratch_stride();
      const int64_t position = args.position[i], slot = position % kPageTokens;
      float* page = pool + args.stream->page_table[position / kPageTokens] * layout.page_floats();
      for (int64_t d = 0; d < args.kv_lora; ++d) page[d * kPageTokens + slot] = from[d];
      for (int64_t d = 0; d < layout.rope; ++d)
        page[(args.kv_lora + d) * kPageTokens + slot] = from[layout.value_stride + d];
      std::copy_n(from, layout.value_stride, layout.values(page) + slot * layout.value_stride);
    }
  }
}

}  // namespace kdt::cpu
