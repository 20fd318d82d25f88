// Several ranks of one backend, as threads: sums and a gather in a chain, as a model has them.
#include <limits>
#include <thread>

#include "base/bf16.h"
#include "comm/thread_comm.h"
#include "cpu/cpu_ops.h"
#include "hooks.h"
#include "model/rank_parts.h"
#ifdef KDT_CUDA
#include "cuda/cuda_ops.h"
#endif

using namespace kdt;
using hooks::Array;
using hooks::guarded;

namespace {

constexpr std::chrono::seconds kDeadline{60};

// Every round has the first live[round] of `rows` rows of x, BF16 [rows, width]. Steps times x += Σ_ranks h weight[rank][step]ᵀ
// with h the norm of x, then out[round][rank] = h head[rank]ᵀ of all ranks side by side; rows that are not live are NaN.
struct Chain {
  const bf16* x;
  const float* norm;    // [width]
  float eps;
  const bf16* weight;   // [ranks, steps, width, width]
  const bf16* head;     // [ranks, width / ranks, width]
  float* out;           // [rounds, ranks, rows, width]
  const int32_t* live;
  int64_t ranks, rounds, rows, width, steps;
  bool recorded;        // all rounds under one key
};

void put(Ops& ops, Buffer& to, const bf16* from, size_t n) {
  if (ops.activation_bytes() == sizeof(bf16)) return ops.copy_in(to, 0, from, n * sizeof(bf16));
  std::vector<float> floats(n);
  for (size_t i = 0; i < n; ++i) floats[i] = bf16_to_float(from[i]);
  ops.copy_in(to, 0, floats.data(), n * sizeof(float));
}

void run_rank(const Chain& c, std::unique_ptr<Ops> ops, Communicator& comm) {
  const int64_t rank = comm.rank();
  RankParts parts(*ops, {rank, c.ranks}, c.rows, c.width, c.rows, c.width);
  std::vector<Matrix> weights;
  const auto matrix = [&](const bf16* at, int64_t n_out) {
    const MatrixSource source{reinterpret_cast<const std::byte*>(at), n_out, c.width};
    return ops->upload_matrix({&source, 1});
  };
  for (int64_t i = 0; i < c.steps; ++i)
    weights.push_back(matrix(c.weight + (rank * c.steps + i) * c.width * c.width, c.width));
  const Matrix head = matrix(c.head + rank * (c.width / c.ranks) * c.width, c.width / c.ranks);
  const auto n = static_cast<size_t>(c.rows * c.width);
  Buffer x = ops->allocate(n * ops->activation_bytes()), h = ops->allocate(n * ops->activation_bytes());
  Buffer out = ops->allocate(n * sizeof(float)), norm = ops->allocate(static_cast<size_t>(c.width) * sizeof(float));
  ops->copy_in(norm, 0, c.norm, static_cast<size_t>(c.width) * sizeof(float));
  const Exchange live = ops->exchange(sizeof(int32_t));
  const Count count{c.rows, reinterpret_cast<const int32_t*>(live.device())};
  const std::vector<float> nan(n, std::numeric_limits<float>::quiet_NaN());
  const SubmitKey key{1};
  for (int64_t round = 0; round < c.rounds; ++round) {
    put(*ops, x, c.x, n);
    ops->copy_in(out, 0, nan.data(), n * sizeof(float));
    *reinterpret_cast<int32_t*>(live.host()) = c.live[round];
    ops->send(live, sizeof(int32_t));
    ops->submit(c.recorded ? &key : nullptr, [&] {
      ops->rms_norm({count, c.width, x.data(), norm.as<float>(), c.eps, h.data()});
      for (const Matrix& weight : weights) {
        ops->logits({count, h.data(), &weight, parts.partial()});
        parts.sum(count, x.data(), true, {norm.as<float>(), c.eps, h.data()});
      }
      parts.logits(count, h.data(), head, out.as<float>());
      ops->mark(Stage::verify);
    });
    ops->wait();
    comm.barrier();
    ops->copy_out(out, 0, c.out + static_cast<size_t>(round * c.ranks + rank) * n, n * sizeof(float));
  }
}

std::function<std::unique_ptr<Ops>(Communicator*)> make_ranks(const std::string& target) {
#ifdef KDT_CUDA
  if (target == "cuda") return cuda_ops_of_ranks(0);
  if (target == "cuda two shots") return cuda_ops_of_ranks(0, RankSums::two_shots);
  if (target == "cuda measured") return cuda_ops_of_ranks(0, RankSums::measured);
#endif
  return [target](Communicator* comm) { return make_cpu_ops(1, target, comm); };
}

}  // namespace

KDT_HOOK const char* kdt_hook_rank_chain(const char* target, int64_t ranks, int64_t rows, int64_t width, int64_t steps,
                                         int recorded, float eps, const Array* live, const Array* x,
                                         const Array* norm, const Array* weight, const Array* head, const Array* out) {
  return guarded([&] {
    const Chain chain{static_cast<const bf16*>(x->data), static_cast<const float*>(norm->data), eps,
                      static_cast<const bf16*>(weight->data),
                      static_cast<const bf16*>(head->data), static_cast<float*>(out->data),
                      static_cast<const int32_t*>(live->data), ranks, live->count<int32_t>(), rows, width, steps, recorded != 0};
    const auto comms = make_thread_communicators(static_cast<int>(ranks), kDeadline);
    const auto make = make_ranks(target);
    std::vector<std::exception_ptr> failures(comms.size());
    std::vector<std::thread> threads;
    for (size_t rank = 0; rank < comms.size(); ++rank)
      threads.emplace_back([&, rank] {
        try {
          run_rank(chain, make(comms[rank].get()), *comms[rank]);
        } catch (const std::exception& error) {
          failures[rank] = std::current_exception();
          comms[rank]->fail(error.what());
        }
      });
    for (std::thread& thread : threads) thread.join();
    for (const std::exception_ptr& failure : failures)
      if (failure) std::rethrow_exception(failure);
  });
}
