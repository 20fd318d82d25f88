#include "model/weights.h"

#include <cstring>

#include "base/bf16.h"
#include "base/error.h"

namespace kdt {

const void* WeightReader::raw_bf16(const std::string& name, int64_t rows, int64_t columns) {
  const TensorView& t = checkpoint_.require(name, DType::bf16, {rows, columns});
  const void* data = ops_.upload_raw(t.data, t.bytes);
  checkpoint_.release(t);
  return data;
}

Buffer WeightReader::vector(const std::string& name, int64_t n, DType dtype) {
  const TensorView& t = checkpoint_.require(name, dtype, {n});
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

Matrix WeightReader::matrix(std::span<const Named> stacked, int64_t n_in) {
  std::vector<MatrixSource> sources;
  std::vector<const TensorView*> tensors;
  for (const auto& [name, n_out] : stacked) {
    tensors.push_back(&checkpoint_.require(name, DType::bf16, {n_out, n_in}));
    sources.push_back({tensors.back()->data, n_out, n_in});
  }
  const Matrix m = ops_.upload_matrix(sources);
  for (const TensorView* t : tensors) checkpoint_.release(*t);
  return m;
}

Matrix WeightReader::matrix(const std::string& name, int64_t n_out, int64_t n_in) {
  const Named one[] = {{name, n_out}};
  return matrix(one, n_in);
}

std::vector<Matrix> WeightReader::column_slices(const std::string& name, int64_t n_out, int64_t n_in, int64_t parts) {
  const TensorView& t = checkpoint_.require(name, DType::bf16, {n_out, n_in});
  const int64_t width = n_in / parts;
  std::vector<Matrix> slices;
  for (int64_t i = 0; i < parts; ++i) {
    const MatrixSource source[] = {{t.data + i * width * 2, n_out, width, n_in}};
    slices.push_back(ops_.upload_matrix(source));
  }
  checkpoint_.release(t);
  return slices;
}

Matrix WeightReader::gate_up(const std::string& prefix, int64_t width, int64_t n_in) {
  const TensorView& gate = checkpoint_.require(prefix + "gate_proj.weight", DType::bf16, {width, n_in});
  const TensorView& up = checkpoint_.require(prefix + "up_proj.weight", DType::bf16, {width, n_in});
  const Matrix m = ops_.upload_gate_up({gate.data, width, n_in}, {up.data, width, n_in});
  checkpoint_.release(gate);
  checkpoint_.release(up);
  return m;
}

WeightReader::Int4Tensors WeightReader::int4_tensors(const std::string& prefix, int64_t n_out, int64_t n_in, int64_t group) {
  const TensorView& packed = checkpoint_.require(prefix + ".weight_packed", DType::i32, {n_out, n_in / 8});
  const TensorView& scale = checkpoint_.require(prefix + ".weight_scale", DType::bf16, {n_out, n_in / group});
  return {packed, scale, {packed.data, scale.data, n_out, n_in}};
}

Matrix WeightReader::int4(const std::string& prefix, int64_t n_out, int64_t n_in, int64_t group) {
  const auto t = int4_tensors(prefix, n_out, n_in, group);
  const Matrix m = ops_.upload_int4(t.source, group);
  checkpoint_.release(t.packed);
  checkpoint_.release(t.scale);
  return m;
}

Matrix WeightReader::int4_gate_up(const std::string& prefix, int64_t width, int64_t n_in, int64_t group) {
  const auto gate = int4_tensors(prefix + "gate_proj", width, n_in, group);
  const auto up = int4_tensors(prefix + "up_proj", width, n_in, group);
  const Matrix m = ops_.upload_int4_gate_up(gate.source, up.source, group);
  for (const TensorView* t : {&gate.packed, &gate.scale, &up.packed, &up.scale}) checkpoint_.release(*t);
  return m;
}

void WeightReader::kv_b(const std::string& name, int64_t n_heads, int64_t nope, int64_t v_head, int64_t kv_lora,
                        std::vector<Matrix>& w_uk, std::vector<Matrix>& w_uv) {
  const TensorView& t = checkpoint_.require(name, DType::bf16, {n_heads * (nope + v_head), kv_lora});
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
