// Rows of tensors, and the kernels for their dtype: what rowwise_cpu.cpp and ../moe/routing_cpu.h share.

#pragma once

#include <algorithm>
#include <optional>

#include "rowwise_cpu_types.h"
#include "../cpu/op.h"

namespace {

using OptionalTensor = std::optional<Tensor>;

constexpr int64_t kGrain = 1 << 14;  // elements: with fewer, waking a thread takes longer than the work

const RowKernels& kernels_for(const Tensor& x, const char* op) {
  const auto dtype = x.dtype();
  CHECK_VALUE(dtype == kFloat || dtype == kBFloat16 || dtype == kHalf, op,
              ": dtype must be float32, bfloat16 or float16, got ", dtype);
  const Kernels& all = chosen();
  return dtype == kFloat ? all.float32 : dtype == kBFloat16 ? all.bfloat16 : all.float16;
}

// Rows of `size` elements, `stride` bytes apart.
struct Rows {
  char* data;
  int64_t stride;
  char* operator[](int64_t row) const { return data + row * stride; }
};

Rows rows_of(const Tensor& x, const char* op, const char* name) {
  CHECK_VALUE(x.dim() == 2 && x.is_cpu() && (x.stride(1) == 1 || x.size(1) == 1), op, ": ", name,
              " must be [rows, size] with the last stride 1, on the CPU, got ", x.sizes(), " with strides ",
              x.strides(), " on ", x.place());
  return {x.data<char>(), x.stride(0) * bytes_of(x.dtype())};
}

template <class Work>
void for_rows(int64_t rows, int64_t size, const Work& work) {
  parallel_for(0, rows, std::max<int64_t>(1, kGrain / std::max<int64_t>(size, 1)), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) work(row);
  });
}

}  // namespace
