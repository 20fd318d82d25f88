// The experts of a few rows: what experts.cu leaves to experts_few.cu, on cards that have clusters.
#pragma once

#include "cuda/moe.cuh"

namespace kdt::cuda {

// Whether a call has the shapes that the kernels are for.
bool takes_few_experts(const ExpertsArgs& args, int64_t shared_limit);

// Queues all of a call, whose routing has no list. hidden: scratch, [pairs][width], and of the shared expert, of rows.
void few_experts(cudaStream_t stream, const ExpertsArgs& args, const Routing& routing, bf16* hidden, bf16* shared_hidden);

}  // namespace kdt::cuda
