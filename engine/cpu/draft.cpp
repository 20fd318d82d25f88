// The drafter's attention on the CPU: cached context keys and values, and the block that looks at them and at itself.
#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "cpu/cpu_backend.h"
#include "cpu/kernels.h"
#include "cpu/rope.h"

namespace kdt::cpu {
namespace {

constexpr int64_t kQueryGroup = 4;

}  // namespace

size_t CpuOps::draft_page_bytes(int64_t n_kv_heads, int64_t head_dim) const {
  return static_cast<size_t>(DraftLayout(n_kv_heads, head_dim).page_floats()) * sizeof(float);
}

void CpuOps::draft_context(const DraftContextArgs& args) {
  const DraftLayout layout(args.n_kv_heads, args.head_dim);
  const int64_t width = args.n_kv_heads * args.head_dim;
  for_rows(args.rows.n.now(), 16, [&](int64_t i, int t) {
    const float* keys = static_cast<const float*>(args.kv) + i * 2 * width;
    const int64_t position = args.rows.position[i], slot = position % kPageTokens;
    const int32_t id = args.streams[args.rows.stream[i]].page_table[position / kPageTokens];
    auto* page = reinterpret_cast<float*>(static_cast<std::byte*>(args.pages) + static_cast<size_t>(id) * args.page_stride);
    float* key = scratch(t);
    for (int64_t h = 0; h < args.n_kv_heads; ++h) {
      rms_norm_row(keys + h * args.head_dim, args.head_dim, args.k_norm, args.eps, key);
      rotate_half_split(key, args.rope, position);
      float* head = page + h * layout.head_floats();
      for (int64_t d = 0; d < args.head_dim; ++d) head[key_offset(slot, d, args.head_dim)] = key[d];
      float* value = head + args.head_dim * kPageTokens + slot * layout.value_dims;
      std::copy_n(keys + width + h * args.head_dim, args.head_dim, value);
      std::fill(value + args.head_dim, value + layout.value_dims, 0.0f);
    }
  });
}

void CpuOps::draft_attention(const DraftAttentionArgs& args) {
  const DraftLayout layout(args.n_kv_heads, args.head_dim);
  const int64_t dim = args.head_dim, per_kv = args.n_heads / args.n_kv_heads;
  const int64_t row_width = (args.n_heads + 2 * args.n_kv_heads) * dim;
  const float scale = 1.0f / std::sqrt(static_cast<float>(dim));
  const int64_t n_queries = args.n_queries * per_kv;   // of one kv head, row-major
  const int64_t n_streams = args.n_streams.now();
  pool_.run([&](int t) {
    float* at = scratch(t);
    const auto take = [&at](int64_t count) {
      float* taken = at;
      at += round_up(count, 16);
      return taken;
    };
    float* q = take(n_queries * dim);
    float* o = take(n_queries * layout.value_dims);
    float* m = take(n_queries);
    float* l = take(n_queries);
    float* block_keys = take(dim * round_up(args.block, kPageTokens));
    float* block_values = take(args.block * layout.value_dims);
    float* s = take(kQueryGroup * kPageTokens);
    for (int64_t unit = t; unit < n_streams * args.n_kv_heads; unit += pool_.size()) {
      const int64_t stream = unit / args.n_kv_heads, kv_head = unit % args.n_kv_heads;
      const int64_t start = args.start[stream];
      auto* rows = static_cast<float*>(args.qkv) + stream * args.block * row_width;
      // The block's own keys and values.
      for (int64_t i = 0; i < args.block; ++i) {
        float* key = rows + i * row_width + (args.n_heads + kv_head) * dim;
        const float* value = rows + i * row_width + (args.n_heads + args.n_kv_heads + kv_head) * dim;
        rms_norm_row(key, dim, args.k_norm, args.eps, key);
        rotate_half_split(key, args.rope, start + i);
        for (int64_t d = 0; d < dim; ++d) block_keys[key_offset(i, d, dim)] = key[d];
        std::copy_n(value, dim, block_values + i * layout.value_dims);
        std::fill_n(block_values + i * layout.value_dims + dim, layout.value_dims - dim, 0.0f);
      }
      for (int64_t i = 0; i < n_queries; ++i) {
        const int64_t row = args.first_query + i / per_kv;
        const float* from = rows + row * row_width + (kv_head * per_kv + i % per_kv) * dim;
        rms_norm_row(from, dim, args.q_norm, args.eps, q + i * dim);
        rotate_half_split(q + i * dim, args.rope, start + row);
      }
      std::fill_n(o, n_queries * layout.value_dims, 0.0f);
      std::fill_n(m, n_queries, -std::numeric_limits<float>::infinity());
      std::fill_n(l, n_queries, 0.0f);

      // The first key position a query sees.
      const auto first_seen = [&](int64_t query) {
        const int64_t position = start + args.first_query + query / per_kv;
        return args.window > 0 ? std::max<int64_t>(0, position - args.window + 1) : int64_t{0};
      };
      const auto fold = [&](int64_t first, int64_t n, const float* keys, const float* values) {
        std::array<const float*, kPageTokens> value_rows;
        for (int64_t i = 0; i < n; ++i) value_rows[i] = values + i * layout.value_dims;
        for (int64_t query = 0; query < n_queries; query += kQueryGroup) {
          const int64_t count = std::min(kQueryGroup, n_queries - query);
          std::array<int64_t, kQueryGroup> lo, hi;
          for (int64_t i = 0; i < count; ++i) {
            lo[i] = std::clamp<int64_t>(first_seen(query + i) - first, 0, n);
            hi[i] = n;
          }
          attention_scores(q + query * dim, dim, count, dim, keys, n, scale, s, kPageTokens);
          float* sums = o + query * layout.value_dims;
          attention_softmax(s, count, lo.data(), hi.data(), layout.value_dims, {m + query, l + query, sums});
          attention_values(s, count, value_rows.data(), *std::min_element(lo.begin(), lo.begin() + count), n,
                           layout.value_dims, sums);
        }
      };
      const int32_t* page_table = args.streams[stream].page_table;
      for (int64_t tile = first_seen(0) / kPageTokens; tile * kPageTokens < start; ++tile) {
        const auto* page = static_cast<const std::byte*>(args.pages) +
                           static_cast<size_t>(page_table[tile]) * args.page_stride;
        const float* head = reinterpret_cast<const float*>(page) + kv_head * layout.head_floats();
        fold(tile * kPageTokens, std::min<int64_t>(kPageTokens, start - tile * kPageTokens), head,
             head + dim * kPageTokens);
      }
      for (int64_t i = 0; i < args.block; i += kPageTokens)
        fold(start + i, std::min(kPageTokens, args.block - i), block_keys + i * dim,
             block_values + i * layout.value_dims);
      for (int64_t i = 0; i < n_queries; ++i) {
        const int64_t row = args.first_query + i / per_kv;
        float* out = static_cast<float*>(args.out) + (stream * args.block + row) * args.n_heads * dim +
                     (kv_head * per_kv + i % per_kv) * dim;
        for (int64_t d = 0; d < dim; ++d) out[d] = o[i * layout.value_dims + d] / l[i];
      }
    }
  });
}

}  // namespace kdt::cpu
