// The experts of many rows: what experts.cu leaves to experts_many.cu, on cards that have wgmma.
#pragma once

#include "cuda/moe.cuh"

namespace kdt::cuda {

constexpr int kManyTokens = 64;   // pairs of an item

// Where things lie in between: of pairs [pairs][width] and [pairs][hidden], of the shared expert the same of rows.
struct ManyScratch {
  int32_t* taken;                 // 0
  bf16 *hidden, *shared_hidden;
  float *out, *shared_out;
};

// Whether the experts of a call have the shapes that the kernels are for.
bool takes_many_experts(const ExpertsArgs& args, int64_t shared_limit);

// Queues the outputs of every pair and of the shared expert, from a list of items. Inputs of gate and up are cut into 2^log_chains
// chains, which are added in fours.
void many_experts(cudaStream_t stream, const ExpertsArgs& args, const Routing& routing, int log_chains, const ManyScratch& scratch);

}  // namespace kdt::cuda
