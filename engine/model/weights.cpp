#include "model/weights.h"

#include <cstring>

#include "base/bf16.h"
#include "base/error.h"
#include "checkpoint/checksum.h"
#include "checkpoint/int4_tiles.h"

namespace kdt {

const TensorView& WeightReader::require(const std::string& name, DType dtype, const std::vector<int64_t>& shape) const {
  const TensorView& t = checkpoint_.require(name, dtype, shape);
  checkpoint_.await(t);
  if (checkpoint_.checks_sums()) checkpoint_.check_sum(t, checksum_of(t.data, t.bytes));
  return t;
}

const void* WeightReader::raw_bf16(const std::string& name, int64_t rows, int64_t columns) const {
  const TensorView& t = require(name, DType::bf16, {rows, columns});
  const void* data = ops_.upload_raw(t.data, t.bytes);
  checkpoint_.release(t);
  return data;
}

Buffer WeightReader::vector(const std::string& name, int64_t n, DType dtype) const {
  const TensorView& t = require(name, dtype, {n});
  std::vector<float> values(static_cast<size_t>(n));
  for (size_t i = 0; i < values.size(); ++i) {
    if (dtype == DType::f32) {
      std::memcpy(&values[i], t.data + i * 4, 4);
    } else {
      bf16 half;
      std::memcpy(&half, t.data + i * 2, 2);
      values[i] = bf16_to_float(half);
    }
  }
  checkpoint_.release(t);
  Buffer buffer = ops_.allocate(values.size() * sizeof(float));
  ops_.copy_in(buffer, 0, values.data(), values.size() * sizeof(float));
  return buffer;
}

Matrix WeightReader::matrix(const std::string& fused, std::span<const Named> stacked, int64_t n_in) const {
  if (checkpoint_.sharded()) {
    int64_t n_out = 0;
    for (const Named& part : stacked) n_out += part.n_out;
    return matrix(fused, n_out, n_in);
  }
  std::vector<MatrixSource> sources;
  std::vector<const TensorView*> tensors;
  for (const auto& [name, n_out] : stacked) {
    tensors.push_back(&require(name, DType::bf16, {n_out, n_in}));
    sources.push_back({tensors.back()->data, n_out, n_in});
  }
  const Matrix m = ops_.upload_matrix(sources);
  for (const TensorView* t : tensors) checkpoint_.release(*t);
  return m;
}

Matrix WeightReader::matrix(const std::string& name, int64_t n_out, int64_t n_in) const {
  const TensorView& t = require(name, DType::bf16, {n_out, n_in});
  const MatrixSource source[] = {{t.data, n_out, n_in}};
  const Matrix m = ops_.upload_matrix(source);
  checkpoint_.release(t);
  return m;
}

std::vector<Matrix> WeightReader::column_slices(const std::string& name, int64_t n_out, int64_t n_in, int64_t parts) const {
  const TensorView& t = require(name, DType::bf16, {n_out, n_in});
  const int64_t width = n_in / parts;
  std::vector<Matrix> slices;
  for (int64_t i = 0; i < parts; ++i) {
    const MatrixSource source[] = {{t.data + i * width * 2, n_out, width, n_in}};
    slices.push_back(ops_.upload_matrix(source));
  }
  checkpoint_.release(t);
  return slices;
}

Matrix WeightReader::gate_up(const std::string& prefix, int64_t width, int64_t n_in) const {
  if (checkpoint_.sharded()) {
    const TensorView& both = require(prefix + "gate_up_proj.weight", DType::bf16, {2 * width, n_in});
    const Matrix m = ops_.upload_gate_up({both.data, width, n_in}, {both.data + width * n_in * 2, width, n_in});
    checkpoint_.release(both);
    return m;
  }
  const TensorView& gate = require(prefix + "gate_proj.weight", DType::bf16, {width, n_in});
  const TensorView& up = require(prefix + "up_proj.weight", DType::bf16, {width, n_in});
  const Matrix m = ops_.upload_gate_up({gate.data, width, n_in}, {up.data, width, n_in});
  checkpoint_.release(gate);
  checkpoint_.release(up);
  return m;
}

WeightReader::Int4Tensors WeightReader::int4_tensors(const std::string& prefix, int64_t n_out, int64_t n_in,
                                                     int64_t group) const {
  const TensorView& packed = require(prefix + ".weight_packed", DType::i32, {n_out, n_in / 8});
  const TensorView& scale = require(prefix + ".weight_scale", DType::bf16, {n_out, n_in / group});
  return {packed, scale, {packed.data, scale.data, n_out, n_in}};
}

Matrix WeightReader::int4(const std::string& prefix, int64_t n_out, int64_t n_in, int64_t group) const {
  const auto t = int4_tensors(prefix, n_out, n_in, group);
  const Matrix m = ops_.upload_int4(t.source, group);
  checkpoint_.release(t.packed);
  checkpoint_.release(t.scale);
  return m;
}

Matrix WeightReader::int4_gate_up(const std::string& prefix, int64_t width, int64_t n_in, int64_t group) const {
  const auto gate = int4_tensors(prefix + "gate_proj", width, n_in, group);
  const auto up = int4_tensors(prefix + "up_proj", width, n_in, group);
  const Matrix m = ops_.upload_int4_gate_up(gate.source, up.source, group);
  for (const TensorView* t : {&gate.packed, &gate.scale, &up.packed, &up.scale}) checkpoint_.release(*t);
  return m;
}

template <class Upload>
void WeightReader::tiled_experts(const std::string& name, int64_t n_experts, int64_t n_out, int64_t n_in,
                                 const Upload& upload) const {
  if (!fits_tiles(n_out, n_in))
    fail(Status::bad_file, checkpoint_.directory() + ": " + name,
         std::to_string(n_out) + " outputs, " + std::to_string(n_in) + " inputs", "whole tiles of 64 and groups of 32");
  const int64_t n_groups = n_in / kTileGroup, bytes = n_out * n_in / 2, scale_bytes = n_out * n_groups * 2;
  const TensorView& tiles = checkpoint_.require(name, DType::i32, {n_experts, n_in / kTileInputs, n_out * 2});
  const TensorView& scales = checkpoint_.require(name + "_scale", DType::bf16, {n_experts, n_groups, n_out});
  Checksum sum, scale_sum;
  for (int64_t e = 0; e < n_experts; ++e) {
    TensorView tile = tiles, tile_scale = scales;
    tile.data += e * bytes;
    tile.bytes = static_cast<size_t>(bytes);
    tile_scale.data += e * scale_bytes;
    tile_scale.bytes = static_cast<size_t>(scale_bytes);
    checkpoint_.await(tile);
    checkpoint_.await(tile_scale);
    if (checkpoint_.checks_sums()) {
      sum.update(tile.data, tile.bytes);
      scale_sum.update(tile_scale.data, tile_scale.bytes);
    }
    upload(TileSource{tile.data, tile_scale.data, n_out, n_in});
    checkpoint_.release(tile);
    checkpoint_.release(tile_scale);
  }
  if (!checkpoint_.checks_sums()) return;
  checkpoint_.check_sum(tiles, sum.hex());
  checkpoint_.check_sum(scales, scale_sum.hex());
}

void WeightReader::experts(const std::string& prefix, int64_t n_experts, int64_t width, int64_t hidden, int64_t group,
                           std::vector<Matrix>& gate_up, std::vector<Matrix>& down) const {
  if (checkpoint_.sharded()) {
    tiled_experts(prefix + "w13", n_experts, 2 * width, hidden,
                  [&](const TileSource& both) { gate_up.push_back(ops_.upload_tiles_gate_up(both)); });
    tiled_experts(prefix + "w2", n_experts, hidden, width,
                  [&](const TileSource& tiles) { down.push_back(ops_.upload_tiles(tiles)); });
    return;
  }
  for (int64_t e = 0; e < n_experts; ++e) {
    const std::string expert = prefix + std::to_string(e) + ".";
    gate_up.push_back(int4_gate_up(expert, width, hidden, group));
    down.push_back(int4(expert + "down_proj", hidden, width, group));
  }
}

void WeightReader::kv_b(const std::string& prefix, int64_t n_heads, int64_t nope, int64_t v_head, int64_t kv_lora,
                        std::vector<Matrix>& w_uk, std::vector<Matrix>& w_uv) const {
  if (checkpoint_.sharded()) {
    const TensorView& keys = require(prefix + "w_uk", DType::bf16, {n_heads, kv_lora, nope});
    const TensorView& values = require(prefix + "w_uv", DType::bf16, {n_heads, v_head, kv_lora});
    for (int64_t h = 0; h < n_heads; ++h) {
      const MatrixSource uk[] = {{keys.data + h * kv_lora * nope * 2, kv_lora, nope}};
      const MatrixSource uv[] = {{values.data + h * v_head * kv_lora * 2, v_head, kv_lora}};
      w_uk.push_back(ops_.upload_matrix(uk));
      w_uv.push_back(ops_.upload_matrix(uv));
    }
    checkpoint_.release(keys);
    checkpoint_.release(values);
    return;
  }
  const TensorView& t = require(prefix + "kv_b_proj.weight", DType::bf16, {n_heads * (nope + v_head), kv_lora});
  std::vector<bf16> transposed(static_cast<size_t>(kv_lora * nope));
  for (int64_t h = 0; h < n_heads; ++h) {
    const std::byte* head = t.data + h * (nope + v_head) * kv_lora * 2;
    for (int64_t d = 0; d < nope; ++d)
      for (int64_t c = 0; c < kv_lora; ++c)
        std::memcpy(&transposed[static_cast<size_t>(c * nope + d)], head + (d * kv_lora + c) * 2, 2);
    const MatrixSource uk[] = {{reinterpret_cast<const std::byte*>(transposed.data()), kv_lora, nope}};
    const MatrixSource uv[] = {{head + nope * kv_lora * 2, v_head, kv_lora}};
    w_uk.push_back(ops_.upload_matrix(uk));
    w_uv.push_back(ops_.upload_matrix(uv));
  }
  checkpoint_.release(t);
}

}  // namespace kdt
