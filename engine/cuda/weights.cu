// Uploads of BF16: weights leave the mapped checkpoint in pieces, and are laid out on the device.
#include "base/error.h"
#include "cuda/linear.cuh"
#include "cuda/upload_ring.h"

namespace kdt::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kQuad = 4;              // inputs of a row that lie together in a fragment

// Where rows of a source go: row r of it is row first + r of every step-th tile, from tile `tile` on.
struct Place {
  int64_t first, tile, step;
};

// One thread lays out four inputs of a row: registers a0 and a2 of its lane, or a1 and a3 where the row is one of the
// tile's upper eight (linear.cuh). `source` is dense, and fits no border but that of an element.
__global__ void __launch_bounds__(kThreads)
pack_kernel(const uint16_t* source, int64_t n_rows, int64_t n_in, Place place, uint32_t* packed) {
  const int64_t steps = steps_of(n_in), quads = steps * (kStepInputs / kQuad);
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= n_rows * quads) return;
  const int64_t source_row = i / quads, quad = i % quads, row = place.first + source_row;
  uint32_t v[kQuad];
#pragma unroll
  for (int j = 0; j < kQuad; ++j) {
    const int64_t k = quad * kQuad + j;
    v[j] = k < n_in ? source[source_row * n_in + k] : 0;
  }
  const int64_t tile = place.tile + row / kTileRows * place.step, step = quad / kQuad;
  const int64_t lane = row % 8 * 4 + quad % kQuad, upper = row % kTileRows / 8;
  uint32_t* to = packed + ((tile * steps + step) * kWarp + lane) * (kFragment / 2);
  to[upper] = v[0] | v[1] << 16;
  to[upper + 2] = v[2] | v[3] << 16;
}

// Rows of a checkpoint's matrix, by way of staging memory. Returns before they are laid out.
void pack(UploadRing& uploads, const MatrixSource& source, Place place, void* packed) {
  const auto row_bytes = static_cast<size_t>(source.n_in) * sizeof(bf16);
  const size_t pitch = source.row_stride > 0 ? static_cast<size_t>(source.row_stride) * sizeof(bf16) : row_bytes;
  if (row_bytes > UploadRing::kSlotBytes)
    fail(Status::unsupported, "matrix", std::to_string(source.n_in) + " inputs",
         "at most " + std::to_string(UploadRing::kSlotBytes / sizeof(bf16)));
  uploads.stage(source.bf16, static_cast<size_t>(source.n_out), row_bytes, pitch,
                [&](const std::byte* staged, size_t first, size_t n, cudaStream_t stream) {
    const auto row = static_cast<int64_t>(first), rows = static_cast<int64_t>(n);
    const int64_t threads = rows * steps_of(source.n_in) * (kStepInputs / kQuad);
    pack_kernel<<<static_cast<unsigned>(divide_up(threads, kThreads)), kThreads, 0, stream>>>(
        reinterpret_cast<const uint16_t*>(staged), rows, source.n_in, {place.first + row, place.tile, place.step},
        static_cast<uint32_t*>(packed));
    launched("pack_kernel");
  });
}

}  // namespace

const void* CudaOps::upload_raw(const std::byte* source, size_t bytes) {
  enter();
  void* memory = weight_memory(bytes);
  uploads().copy(source, bytes, memory);
  return memory;
}

// What rows and inputs fill up stays zero, as weight memory is.
Matrix CudaOps::upload_matrix(std::span<const MatrixSource> stacked) {
  enter();
  int64_t n_out = 0;
  const int64_t n_in = stacked.front().n_in;
  for (const auto& source : stacked) n_out += source.n_out;
  void* packed = weight_memory(static_cast<size_t>(packed_size(tiles_of(n_out), steps_of(n_in))) * sizeof(bf16));
  int64_t row = 0;
  for (const auto& source : stacked) {
    pack(uploads(), source, {row, 0, 1}, packed);
    row += source.n_out;
  }
  return {packed, nullptr, n_out, n_in, 0};
}

Matrix CudaOps::upload_gate_up(const MatrixSource& gate, const MatrixSource& up) {
  enter();
  const int64_t tiles = 2 * tiles_of(gate.n_out);
  void* packed = weight_memory(static_cast<size_t>(packed_size(tiles, steps_of(gate.n_in))) * sizeof(bf16));
  pack(uploads(), gate, {0, 0, 2}, packed);
  pack(uploads(), up, {0, 1, 2}, packed);
  return {packed, nullptr, gate.n_out + up.n_out, gate.n_in, 0};
}

}  // namespace kdt::cuda
