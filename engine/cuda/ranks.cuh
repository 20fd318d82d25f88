// What other files of this folder need of ranks.cu.
#pragma once

#include "cuda/cuda_backend.h"

namespace kdt::cuda {

// An embed with a partial, of at least one row.
void embed_part(cudaStream_t stream, const EmbedArgs& args);

}  // namespace kdt::cuda
