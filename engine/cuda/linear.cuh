// Products with BF16 weights: the layout that upload_matrix and upload_gate_up write, and the product that reads it.
//
// Layout: bf16 [tiles][k_steps][32 lanes][8]. A tile is 16 outputs, a K step 16 inputs; ragged n_out and n_in are filled
// up with zeros. The 16 bytes of a lane are its A fragment of mma.sync m16n8k16, registers a0 … a3 in order, so a warp reads
// 512 contiguous bytes a step. Inputs are permuted within their step so that a lane's B fragment is 8 contiguous bytes of a
// row of activations too. With g = lane / 4 and t = lane % 4, output rows g and g + 8 of the tile, inputs of the step:
//
//       low half, high half      a0: (g, 4t), (g, 4t + 1)            a1: (g + 8, 4t), (g + 8, 4t + 1)
//                                a2: (g, 4t + 2), (g, 4t + 3)        a3: (g + 8, 4t + 2), (g + 8, 4t + 3)
//       token g of the group:    b0: 4t, 4t + 1                      b1: 4t + 2, 4t + 3
//       sums (as ever):          d0: output g, token 2t   d1: g, 2t + 1   d2: g + 8, 2t   d3: g + 8, 2t + 1
//
// Hardware sums the 16 products of a step as one, so the permutation does not show in the bits.
// upload_gate_up: tile 2i holds 16 rows of gate, tile 2i + 1 the same rows of up.
#pragma once

#include "cuda/device.cuh"

namespace kdt::cuda {

constexpr int64_t kTileRows = 16;     // outputs of a tile
constexpr int64_t kStepInputs = 16;   // inputs of a K step
constexpr int64_t kFragment = 8;      // elements of one lane's A fragment

__host__ __device__ constexpr int64_t tiles_of(int64_t n_out) { return divide_up(n_out, kTileRows); }
__host__ __device__ constexpr int64_t steps_of(int64_t n_in) { return divide_up(n_in, kStepInputs); }
// Elements of a packed matrix.
__host__ __device__ constexpr int64_t packed_size(int64_t tiles, int64_t steps) {
  return tiles * steps * kWarp * kFragment;
}

// Where lane's A fragment of a tile and K step lies.
__device__ inline const bf16* fragment_at(const void* data, int64_t tile, int64_t step, int64_t steps, int lane) {
  return static_cast<const bf16*>(data) + ((tile * steps + step) * kWarp + lane) * kFragment;
}

__device__ inline void load_a(uint32_t (&a)[4], const bf16* fragment) {
  const uint4 v = load_once(fragment);
  a[0] = v.x, a[1] = v.y, a[2] = v.z, a[3] = v.w;
}

// Lane's B fragment of token `row` (8-byte aligned, that of token lane / 4), at a K step.
__device__ inline void load_b(uint32_t (&b)[2], const bf16* row, int64_t step, int lane) {
  const uint2 v = *reinterpret_cast<const uint2*>(row + step * kStepInputs + lane % 4 * 4);
  b[0] = v.x, b[1] = v.y;
}

// What becomes of the fp32 sums of a product.
enum class DenseOut {
  bf16,     // out = bf16(sum)
  add,      // out = bf16(float(out) + sum), out bf16
  fp32,     // out = sum, out float
  swiglu,   // a matrix of upload_gate_up, [2 * width, n_in]: out [width] = bf16(silu(gate) * up)
};

struct DenseArgs {
  Count n;
  const bf16* x;             // rows of weight.n_in
  Matrix weight;
  void* out;                 // rows of weight.n_out, swiglu: of half of that
  DenseOut kind = DenseOut::bf16;
  RowLayout x_rows = {}, out_rows = {};
};

// Queues out = x Wᵀ for the live rows. A row's bits depend on the row and the weight alone. Any alignment and stride of
// rows works; rows of x that begin on 8-byte borders with n_in a multiple of 16 are fast. x and out must not overlap.
void dense(cudaStream_t stream, const DenseArgs& args);

}  // namespace kdt::cuda
