// Tensor maps: what the copy engine of sm_90 needs to bring boxes of BF16 from memory to shared memory, in rows of 128 bytes with
// their chunks swapped about as wgmma wants them, in rows of 64 with theirs swapped about by pairs of rows, or in rows of 512 as they lie.
#pragma once

#include <cuda.h>

#include <initializer_list>

#include "base/error.h"
#include "cuda/barriers.cuh"

namespace kdt::cuda {

constexpr int64_t kSwappedRow = 64, kHalfSwappedRow = 32, kPlainRow = 256;   // elements

// The map of a tensor of three dims, the first contiguous, and of its boxes of `row` elements x box[0] x box[1]. Strides in bytes,
// multiples of 16. Elements outside are read as zeros.
inline CUtensorMap tensor_map(const void* data, std::initializer_list<int64_t> sizes, std::initializer_list<int64_t> strides,
                              std::initializer_list<int64_t> box, int64_t row = kSwappedRow) {
  using Encode = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*,
                              const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                              CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
  static const auto encode = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result{};
    check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result), "tensor_map");
    return reinterpret_cast<Encode>(found);
  }();
  cuuint64_t size[3], stride[2];
  cuuint32_t of_box[3] = {static_cast<cuuint32_t>(row)}, step[3] = {1, 1, 1};
  std::copy(sizes.begin(), sizes.end(), size);
  std::copy(strides.begin(), strides.end(), stride);
  std::copy(box.begin(), box.end(), of_box + 1);
  CUtensorMap map;
  const CUresult made = encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, const_cast<void*>(data), size, stride, of_box, step,
                               CU_TENSOR_MAP_INTERLEAVE_NONE,
                               row == kSwappedRow       ? CU_TENSOR_MAP_SWIZZLE_128B
                               : row == kHalfSwappedRow ? CU_TENSOR_MAP_SWIZZLE_64B
                                                        : CU_TENSOR_MAP_SWIZZLE_NONE,
                               CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (made != CUDA_SUCCESS) fail(Status::internal, "tensor_map", std::to_string(made), "success");
  return map;
}

// Brings the box at (x, y, z); the barrier, of which as many bytes are expected, is told.
__device__ inline void bring_box(SharedAddress to, const CUtensorMap& map, int x, int y, int z, uint64_t* barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];"
               :: "r"(to), "l"(&map), "r"(x), "r"(y), "r"(z), "r"(shared_address(barrier)) : "memory");
#endif
}

}  // namespace kdt::cuda
