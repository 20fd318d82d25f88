// The CPU backend: fp32 activations and KV, BF16 and INT4 weights computed from their packing, Highway kernels.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "ops/ops.h"

namespace kdt {

// `threads` 0: every CPU of this process. `target` "": the best of cpu_targets(), else one of them (process-wide, since
// Highway's choice is). `comm`: of one rank of several, to meet the others; outlives it. Error(invalid_argument) for a
// target this machine does not have.
std::unique_ptr<Ops> make_cpu_ops(int threads, const std::string& target, Communicator* comm = nullptr);

// Instruction sets compiled in that this CPU has, best first: "AVX2", "SSE2", …
std::vector<std::string> cpu_targets();

}  // namespace kdt
