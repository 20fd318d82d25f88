// The ops to time and their shapes: hidden 7168, 384 experts of 256, 8 heads of 128 + 64 over a latent of 512, a vocabulary
// of 163840.
#include <set>

#include "bench.h"

namespace kdt::bench {
namespace {

constexpr int64_t kHidden = 7168, kExperts = 384, kChosen = 8, kWidth = 256, kGroup = 32;
constexpr int64_t kHeads = 8, kNope = 128, kRope = 64, kLora = 512, kVHead = 128, kVocab = 163840;
constexpr int64_t kRows[] = {1, 2, 4, 8, 16, 32, 64, 128, 512, 2048, 4096};   // from 128 on: chunks of prompts
constexpr int64_t kMostRows = 4096, kMostLogits = 64;

std::string by(int64_t n_out, int64_t n_in) { return std::to_string(n_out) + " x " + std::to_string(n_in); }

Matrix upload(Bench& bench, int64_t n_out, int64_t n_in) {
  const MatrixSource source{bench.random_bytes(2 * n_out * n_in), n_out, n_in};
  return bench.ops().upload_matrix({&source, 1});
}

Matrix upload_gate_up(Bench& bench, int64_t width, int64_t n_in) {
  const MatrixSource half{bench.random_bytes(2 * width * n_in), width, n_in};
  return bench.ops().upload_gate_up(half, half);
}

template <class F>
std::vector<Matrix> several(int64_t n, const F& make) {
  std::vector<Matrix> all;
  for (int64_t i = 0; i < n; ++i) all.push_back(make());
  return all;
}

// Distinct choices a row; another set for every layer in turn.
std::vector<int32_t> choices(Bench& bench, int64_t rows) {
  std::vector<int32_t> chosen;
  for (int64_t row = 0; row < rows; ++row) {
    std::set<int32_t> of_row;
    while (static_cast<int64_t>(of_row.size()) < kChosen)
      of_row.insert(static_cast<int32_t>(bench.random()() % kExperts));
    chosen.insert(chosen.end(), of_row.begin(), of_row.end());
  }
  return chosen;
}

void bench_linear(Bench& bench, int64_t n_out, int64_t n_in) {
  const int64_t bytes = 2 * n_out * n_in;
  const auto weights = several(Bench::layers(bytes), [&] { return upload(bench, n_out, n_in); });
  const Act* x = bench.activations(kMostRows, n_in);
  Act* out = bench.space<uint16_t>(kMostRows * n_out);
  for (int64_t rows : kRows)
    if (rows <= kMostLogits || n_out < kVocab / 8) bench.time("linear", by(n_out, n_in), rows, static_cast<double>(bytes), static_cast<int64_t>(weights.size()),
               [&](int64_t i) { bench.ops().linear({rows, x, &weights[static_cast<size_t>(i)], out}); });
}

void bench_mlp(Bench& bench, int64_t width) {
  const int64_t bytes = 6 * width * kHidden;
  const int64_t layers = Bench::layers(bytes);
  const auto gate_up = several(layers, [&] { return upload_gate_up(bench, width, kHidden); });
  const auto down = several(layers, [&] { return upload(bench, kHidden, width); });
  const Act* x = bench.activations(kMostRows, kHidden);
  Act* out = bench.space<uint16_t>(kMostRows * kHidden);
  Act* scratch = bench.space<uint16_t>(kMostRows * width);
  for (int64_t rows : kRows)
    bench.time("mlp", by(kHidden, width), rows, static_cast<double>(bytes), layers, [&](int64_t i) {
      const auto at = static_cast<size_t>(i);
      bench.ops().mlp({rows, x, &gate_up[at], &down[at], scratch, out});
    });
}

void bench_route(Bench& bench) {
  const int64_t bytes = 2 * kExperts * kHidden;
  const auto gates = several(Bench::layers(bytes), [&] { return upload(bench, kExperts, kHidden); });
  const Act* x = bench.activations(kMostRows, kHidden);
  auto* bias = bench.space<float>(kExperts);
  auto* scores = bench.space<float>(kMostRows * kExperts);
  auto* expert = bench.space<int32_t>(kMostRows * kChosen);
  auto* weight = bench.space<float>(kMostRows * kChosen);
  for (int64_t rows : kRows)
    bench.time("route", by(kExperts, kHidden), rows, static_cast<double>(bytes), static_cast<int64_t>(gates.size()),
               [&](int64_t i) {
                 bench.ops().route({rows, x, &gates[static_cast<size_t>(i)], bias, kExperts, kChosen, true, 2.5f, scores,
                                    expert, weight});
               });
}

void bench_row_ops(Bench& bench) {
  const Act* x = bench.activations(kMostRows, kHidden);
  Act* out = bench.space<uint16_t>(kMostRows * kHidden);
  const auto* norm = bench.put(std::vector<float>(kHidden, 1.0f));
  for (int64_t rows : {1, 16, 64}) {
    const auto bytes = static_cast<double>(2 * rows * kHidden);
    bench.time("rms_norm", std::to_string(kHidden), rows, bytes, 50, [&](int64_t) {
      bench.ops().rms_norm({rows, kHidden, x, norm, 1e-6f, out});
    });
    bench.time("copy", std::to_string(kHidden), rows, bytes, 50, [&](int64_t) {
      bench.ops().copy({rows, kHidden, x, out});
    });
  }
}

// Streams with a context each, and a tree of n nodes below each one's root, each of a random earlier one.
struct TreeRows {
  std::vector<int32_t> token, position, stream, parent, visible;
  TreeRows(Bench& bench, int64_t context, int64_t n, int64_t streams = 1) : token(n * streams, 0) {
    for (int64_t s = 0; s < streams; ++s) {
      std::vector<int32_t> depth;
      for (int64_t i = 0; i < n; ++i) {
        const int32_t above = i == 0 ? -1 : static_cast<int32_t>(bench.random()() % static_cast<uint64_t>(i));
        depth.push_back(i == 0 ? 0 : depth[static_cast<size_t>(above)] + 1);
        stream.push_back(static_cast<int32_t>(s));
        parent.push_back(i == 0 ? -1 : static_cast<int32_t>(s * n) + above);
        position.push_back(static_cast<int32_t>(context) + depth.back());
        visible.push_back(static_cast<int32_t>(context) + 1);
      }
    }
  }
  Rows put(Bench& bench) const {
    return {static_cast<int64_t>(token.size()), bench.put(token), bench.put(position), bench.put(stream),
            bench.put(parent), bench.put(visible)};
  }
};

MatrixGroup head_matrices(Bench& bench, int64_t n_out, int64_t n_in) {
  return bench.ops().group(several(kHeads, [&] { return upload(bench, n_out, n_in); }));
}

void bench_mla(Bench& bench, int64_t context, int64_t n_streams, std::vector<int64_t> nodes) {
  Ops& ops = bench.ops();
  const size_t page_bytes = ops.latent_page_bytes(kLora, kRope);
  const int64_t own_pages = (context + 2 * kPageTokens) / kPageTokens, most = own_pages * kPageTokens;
  const int64_t n_pages = own_pages * n_streams, most_rows = n_streams * nodes.back();
  const int64_t kv_bytes = 2 * n_streams * context * (kLora + kRope), head_bytes = 2 * kHeads * kLora * (kNope + kVHead);
  const int64_t layers = Bench::layers(kv_bytes + head_bytes);
  std::vector<StreamPages> of_streams;
  for (int64_t s = 0; s < n_streams; ++s) {
    std::vector<int32_t> table;
    for (int64_t i = 0; i < own_pages; ++i) table.push_back(static_cast<int32_t>(n_pages - 1 - (i * n_streams + s)));
    of_streams.push_back({bench.put(table)});
  }
  const StreamPages* streams = bench.put(of_streams);
  const std::byte* pages = bench.filled(n_pages * layers * static_cast<int64_t>(page_bytes));
  auto* scratch = bench.activations(1, static_cast<int64_t>(ops.latent_scratch_bytes(most_rows, kLora, kRope) / 2));
  const auto* angle = bench.put(std::vector<float>(static_cast<size_t>(most * kRope / 2), 0.7f));
  std::vector<MatrixGroup> uk, uv;
  for (int64_t i = 0; i < layers; ++i) {
    uk.push_back(head_matrices(bench, kLora, kNope));
    uv.push_back(head_matrices(bench, kVHead, kLora));
  }
  auto* work =
      bench.space<std::byte>(static_cast<int64_t>(ops.attention_work_bytes(most_rows, kHeads, kLora + kRope, most)));
  Act* q = bench.activations(most_rows, kHeads * (kNope + kRope));
  Act* out = bench.space<uint16_t>(most_rows * kHeads * kVHead);
  const std::string shape = std::to_string(n_streams) + " streams, context " + std::to_string(context);
  for (int64_t n : nodes) {
    const Rows rows = TreeRows(bench, context, n, n_streams).put(bench);
    bench.time("mla_attention", shape, n * n_streams, static_cast<double>(kv_bytes + head_bytes), layers, [&](int64_t i) {
      MlaAttentionArgs args{};
      args.rows = rows;
      args.streams = streams;
      args.q = q;
      args.w_uk = uk[static_cast<size_t>(i)];
      args.w_uv = uv[static_cast<size_t>(i)];
      args.n_heads = kHeads, args.nope = kNope, args.kv_lora = kLora, args.v_head = kVHead;
      args.rope = {angle, angle, kRope};
      args.scale = 0.1f;
      args.pages = pages + static_cast<size_t>(i) * page_bytes;
      args.page_stride = static_cast<size_t>(layers) * page_bytes;
      args.scratch = scratch;
      args.max_context = most;
      args.work = work;
      args.out = out;
      ops.mla_attention(args);
    });
  }
}

// A chunk of a prompt behind a context of its own.
void bench_chunk(Bench& bench, int64_t context, int64_t n) {
  Ops& ops = bench.ops();
  const size_t page_bytes = ops.latent_page_bytes(kLora, kRope);
  const int64_t most = context + n, n_pages = (most + kPageTokens - 1) / kPageTokens;
  std::vector<int32_t> table, token(static_cast<size_t>(n)), position, stream(static_cast<size_t>(n)), visible;
  const std::vector<int32_t> parent(static_cast<size_t>(n), -1);
  for (int64_t i = 0; i < n_pages; ++i) table.push_back(static_cast<int32_t>(n_pages - 1 - i));
  for (int64_t i = 0; i < n; ++i) position.push_back(static_cast<int32_t>(context + i)), visible.push_back(position.back() + 1);
  const Rows rows{n, bench.put(token), bench.put(position), bench.put(stream), bench.put(parent), bench.put(visible)};
  const StreamPages* streams = bench.put(std::vector<StreamPages>{{bench.put(table)}});
  const std::byte* pages = bench.filled(n_pages * static_cast<int64_t>(page_bytes));
  auto* scratch = bench.activations(1, static_cast<int64_t>(ops.latent_scratch_bytes(n, kLora, kRope) / 2));
  const auto* angle = bench.put(std::vector<float>(static_cast<size_t>(most * kRope / 2), 0.7f));
  const MatrixGroup uk = head_matrices(bench, kLora, kNope), uv = head_matrices(bench, kVHead, kLora);
  auto* work = bench.space<std::byte>(static_cast<int64_t>(ops.attention_work_bytes(n, kHeads, kLora + kRope, most)));
  Act* q = bench.activations(n, kHeads * (kNope + kRope));
  Act* out = bench.space<uint16_t>(n * kHeads * kVHead);
  const int64_t bytes = 2 * (most * (kLora + kRope) + kHeads * kLora * (kNope + kVHead));
  bench.time("mla_attention", "a chunk behind " + std::to_string(context), n, static_cast<double>(bytes), 4, [&](int64_t) {
    MlaAttentionArgs args{};
    args.rows = rows, args.streams = streams, args.q = q, args.w_uk = uk, args.w_uv = uv;
    args.n_heads = kHeads, args.nope = kNope, args.kv_lora = kLora, args.v_head = kVHead;
    args.rope = {angle, angle, kRope};
    args.scale = 0.1f;
    args.pages = pages, args.page_stride = page_bytes, args.scratch = scratch, args.max_context = most;
    args.work = work, args.out = out;
    ops.mla_attention(args);
  });
  bench.forget_memory();
}

}  // namespace

void bench_dense(Bench& bench) {
  if (bench.wants("linear"))
    for (const auto& [n_out, n_in] :
         {std::pair<int64_t, int64_t>{2112, kHidden}, {1536, 1536}, {kHidden, 1024}, {20480, kHidden}})
      bench_linear(bench, n_out, n_in);
  if (bench.wants("mlp"))
    for (int64_t width : {int64_t{256}, int64_t{2304}}) bench_mlp(bench, width);
  if (bench.wants("route")) bench_route(bench);
  bench_row_ops(bench);
}

// One layer's experts: with random choices, layers of experts in turn are so many other experts of one.
void bench_experts(Bench& bench) {
  if (!bench.wants("experts")) return;
  Ops& ops = bench.ops();
  const auto int4 = [&](int64_t n_out, int64_t n_in) {
    return Int4Source{bench.random_bytes(n_out * n_in / 2), bench.random_bytes(2 * n_out * n_in / kGroup), n_out, n_in};
  };
  const MatrixGroup gate_up = ops.group(several(
      kExperts, [&] { return ops.upload_int4_gate_up(int4(kWidth, kHidden), int4(kWidth, kHidden), kGroup); }));
  const MatrixGroup down = ops.group(several(kExperts, [&] { return ops.upload_int4(int4(kHidden, kWidth), kGroup); }));
  const Matrix shared_gate_up = upload_gate_up(bench, kWidth, kHidden), shared_down = upload(bench, kHidden, kWidth);
  const double expert_bytes = 3.0 * kWidth * kHidden * (0.5 + 2.0 / kGroup), shared_bytes = 6.0 * kWidth * kHidden;
  const Act* x = bench.activations(kMostRows, kHidden);
  Act* out = bench.space<uint16_t>(kMostRows * kHidden);
  auto* scratch = bench.space<std::byte>(
      static_cast<int64_t>(ops.experts_scratch_bytes(kMostRows, kChosen, kExperts, kWidth, kWidth, kHidden)));
  const auto* weight = bench.put(std::vector<float>(static_cast<size_t>(kMostRows * kChosen), 0.125f));
  constexpr int64_t kLayers = 24;
  for (int64_t rows : kRows) {
    std::vector<int32_t*> chosen;
    double distinct = 0;
    for (int64_t i = 0; i < kLayers; ++i) {
      const auto of_layer = choices(bench, rows);
      distinct += static_cast<double>(std::set<int32_t>(of_layer.begin(), of_layer.end()).size()) / kLayers;
      chosen.push_back(bench.put(of_layer));
    }
    bench.time("experts", std::to_string(static_cast<int>(distinct + 0.5)) + " of 384, and shared", rows,
               distinct * expert_bytes + shared_bytes, kLayers, [&](int64_t i) {
                 ops.experts({rows, kHidden, x, chosen[static_cast<size_t>(i)], weight, kExperts, kChosen, gate_up, down,
                              kWidth, &shared_gate_up, &shared_down, scratch, out});
               });
  }
}

void bench_attention(Bench& bench) {
  if (!bench.wants("mla_attention")) return;
  for (int64_t context : {1024, 8192, 32768}) {
    bench_mla(bench, context, 1, {1, 16, 64});
    bench.forget_memory();
  }
  for (int64_t context : {1024, 32768}) {
    bench_mla(bench, context, 8, {16});
    bench.forget_memory();
  }
  for (const auto& [context, n] : {std::pair<int64_t, int64_t>{0, 2048}, {0, 4096}, {4096, 4096}}) bench_chunk(bench, context, n);
}

void bench_vocabulary(Bench& bench) {
  Ops& ops = bench.ops();
  if (!bench.wants("top_k") && !bench.wants("sample") && !bench.wants("logprobs")) return;
  std::vector<float> values(static_cast<size_t>(16 * kVocab));
  std::normal_distribution<float> of(0, 3);
  for (float& v : values) v = of(bench.random());
  constexpr int64_t kLayers = 25;            // 16 rows each, of 10 MB
  std::vector<const float*> logits;
  for (int64_t i = 0; i < kLayers; ++i) logits.push_back(bench.put(values));
  auto* work = bench.space<std::byte>(static_cast<int64_t>(ops.vocabulary_work_bytes(16, kVocab, 64)));
  auto* token = bench.space<int32_t>(16 * 64);
  auto* log_q = bench.space<float>(16 * 64);
  const auto* row = bench.put(std::vector<int32_t>{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15});
  Sampling plain{}, hot{1.0, 0.95, 0.0, 0, 7, 0};
  hot.min_p = 0.02;
  const Rows rows_of_16 = TreeRows(bench, 1000, 16).put(bench);
  for (int64_t n : {1, 16}) {
    const auto bytes = static_cast<double>(4 * n * kVocab);
    const std::string shape = std::to_string(kVocab);
    Rows rows = rows_of_16;
    rows.n = n;
    const auto at = [&](int64_t i) { return logits[static_cast<size_t>(i)]; };
    bench.time("top_k", shape + ", k 64", n, bytes, kLayers,
               [&](int64_t i) { ops.top_k({n, kVocab, 64, at(i), nullptr, n, rows.position, work, token, log_q}); });
    const Sampling* noisy = bench.put(std::vector<Sampling>(16, hot));
    bench.time("top_k noisy", shape + ", k 64", n, bytes, kLayers, [&](int64_t i) {
      ops.top_k({n, kVocab, 64, at(i), noisy, n, rows.position, work, token, log_q});
    });
    for (const auto& [name, s] : {std::pair<const char*, Sampling>{"sample greedy", plain}, {"sample top-p", hot}}) {
      const Sampling* sampling = bench.put(std::vector<Sampling>(16, s));
      bench.time(name, shape, n, bytes, kLayers, [&](int64_t i) {
        ops.sample({rows, kVocab, at(i), sampling, nullptr, work, token});
      });
    }
    bench.time("logprobs", shape + ", top 20", n, bytes, kLayers,
               [&](int64_t i) { ops.logprobs({n, kVocab, 20, at(i), row, row, log_q, token, log_q + 64}); });
  }
}

}  // namespace kdt::bench
