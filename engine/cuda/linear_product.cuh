// What the kernels of products with BF16 weights share: how a product is described, and what becomes of its sums.
#pragma once

#include "cuda/linear.cuh"

namespace kdt::cuda {

constexpr int kTokens = 8;            // of a group: columns of an mma
constexpr int kParts = 8;             // ranges of K steps whose sums are added first

// How K is cut into chains: chain i ends before step end(i). Sums of `together` chains are added first, then those sums, all
// ascending. n is a multiple of `together`; the last chains may have no steps.
struct Chains {
  int32_t n, together;
  int32_t steps, of_chains, unit;     // every of_chains chains have `steps` units of so many steps
  __host__ __device__ int end(int i, int all) const { return min((i + 1) * steps / of_chains * unit, all); }
};

struct Product {
  LiveRows n;
  const bf16* x;
  RowLayout x_rows;
  bool copied;                        // rows of x can be copied by 8 bytes
  int32_t n_in;
  const bf16* weight;
  int32_t tiles, steps;
  int32_t ranks, warp_steps;          // kParts * ranks ranges of K, of so many steps
  Chains chains;                      // the same
  void* out;
  RowLayout out_rows;
  int32_t n_out;
  DenseOut kind;
};

// How K and tiles are shared out follows from the weight's shape.
Product describe(const DenseArgs& args);

// An output of a row, from its sums: of `up` where the kind has one.
__device__ inline void put(const Product& p, int64_t at, float sum, float up) {
  auto* out = static_cast<bf16*>(p.out);
  switch (p.kind) {
    case DenseOut::bf16: out[at] = __float2bfloat16_rn(sum); break;
    case DenseOut::add: out[at] = __float2bfloat16_rn(__bfloat162float(out[at]) + sum); break;
    case DenseOut::fp32: static_cast<float*>(p.out)[at] = sum; break;
    case DenseOut::swiglu: out[at] = __float2bfloat16_rn(sum / (1.0f + expf(-sum)) * up); break;
  }
}

__device__ inline uint4 shared16(uint32_t from) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(from) : "memory");
  return v;
}
__device__ inline uint2 shared8(uint32_t from) {
  uint2 v;
  asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(from) : "memory");
  return v;
}

// The product for few rows, of shapes that it is for, where a block has so much shared memory; false: it is for linear.cu's own
// kernel, with the same bits.
bool few_rows(cudaStream_t stream, const Product& product, int64_t shared_limit);
// The same for more rows, up to about a hundred.
bool some_rows(cudaStream_t stream, const Product& product, int64_t shared_limit);
// The same for many rows: whether it is for a product, and the product.
bool takes_many_rows(const Product& product, int64_t shared_limit);
void many_rows(cudaStream_t stream, const Product& product);

}  // namespace kdt::cuda
