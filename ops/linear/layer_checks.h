// What the ops of linear layers check of their arguments. `experts`: several layers of one shape, so that every tensor of a
// weight has one more dimension in front, and each takes rows of its own.

#pragma once

#include <algorithm>
#include <optional>
#include <vector>

#include "../cpu/tensor.h"

namespace {

using OptionalTensor = std::optional<Tensor>;
using Experts = std::optional<int64_t>;

inline bool is_number(Dtype dtype) { return dtype == kBFloat16 || dtype == kFloat || dtype == kHalf; }

inline Shape with_experts(Experts experts, std::initializer_list<int64_t> sizes) {
  Shape shape(sizes);
  if (!experts) return shape;
  std::copy_backward(shape.values, shape.values + shape.dim, shape.values + shape.dim + 1);
  shape.values[0] = *experts;
  ++shape.dim;
  return shape;
}

inline void check_input(const char* op, const Tensor& x) {
  CHECK_VALUE(is_number(x.dtype()), op, ": x must be bfloat16, float32 or float16, got ", x.dtype());
  CHECK_VALUE(x.dim() == 2 && x.size(1) > 0, op, ": x must be [T, K] with K > 0, got ", x.sizes());
  CHECK_VALUE(x.stride(1) == 1 || x.size(1) == 1, op, ": the last stride of x must be 1, got strides ", x.strides());
}

inline void check_bias(const char* op, const Tensor& x, const OptionalTensor& bias, Experts experts, int64_t N) {
  const Shape wanted = with_experts(experts, {N});
  CHECK_VALUE(!bias || (bias->sizes() == wanted && bias->is_contiguous() && bias->dtype() == x.dtype()), op,
              ": bias must be a contiguous ", wanted, " of ", x.dtype(), ", got ", bias->sizes(), " of ", bias->dtype());
}

inline void check_on_cpu(const char* op, std::initializer_list<const Tensor*> tensors) {
  for (const Tensor* tensor : tensors)
    CHECK_VALUE(tensor->is_cpu(), op, ": all tensors must be on the CPU, got one on ", tensor->place());
}

// The sizes of a quantised weight, quantized_weight.py has its layout.
struct QuantisedSizes {
  int64_t tiles, words, groups;
};

// `tile`: outputs of a tile; `inputs`: of a word of codes, 64 bytes.
inline QuantisedSizes check_quantised(const char* op, const Tensor& x, const Tensor& codes, const Tensor& scales,
                                      const OptionalTensor& zeros, const OptionalTensor& bias, int64_t inputs,
                                      int64_t group_size, int64_t N, Experts experts) {
  constexpr int64_t tile = 16;
  check_input(op, x);
  check_on_cpu(op, {&codes, &scales, zeros ? &*zeros : &x, bias ? &*bias : &x, &x});
  CHECK_VALUE(group_size >= 0 && group_size % 8 == 0, op, ": group_size must be a multiple of 8, or 0, got ", group_size);
  const int64_t K = x.size(1);
  const QuantisedSizes sizes = {(N + tile - 1) / tile, (K + inputs - 1) / inputs,
                                group_size == 0 ? 1 : (K + group_size - 1) / group_size};
  const Shape of_codes = with_experts(experts, {sizes.tiles, sizes.words, tile, 4});
  CHECK_VALUE(N > 0 && codes.sizes() == of_codes && codes.is_contiguous() &&
                  codes.dtype() == Dtype{aoti_torch_dtype_uint8()},
              op, ": x ", x.sizes(), " and out_features ", N, " take contiguous codes ", of_codes, " of uint8, got ",
              codes.sizes(), " of ", codes.dtype());
  const Shape of_groups = with_experts(experts, {sizes.tiles, sizes.groups, tile});
  CHECK_VALUE(scales.sizes() == of_groups && scales.is_contiguous() && is_number(scales.dtype()), op,
              ": scales must be a contiguous ", of_groups, " of float32, bfloat16 or float16, got ", scales.sizes(), " of ",
              scales.dtype());
  CHECK_VALUE(!zeros || (zeros->sizes() == of_groups && zeros->is_contiguous() &&
                         (zeros->dtype() == kChar || is_number(zeros->dtype()))),
              op, ": zeros must be a contiguous ", of_groups, " of int8, float32, bfloat16 or float16, got ",
              zeros->sizes(), " of ", zeros->dtype());
  check_bias(op, x, bias, experts, N);
  return sizes;
}

// The rows that experts take: expert `e` has those from starts[e] to starts[e + 1], counted from row `first` of the result,
// which has `count`. Of x these are the ones that `index` names, or if it is null, those of the same numbers.
struct ExpertRows {
  const int32_t* index;
  int64_t first, count;
  std::vector<int64_t> starts;
};

inline ExpertRows check_experts(const char* op, const Tensor& x, const OptionalTensor& rows, const Tensor& starts,
                                int64_t experts) {
  CHECK_VALUE(!rows || (rows->dim() == 1 && rows->is_contiguous() && rows->dtype() == kInt && rows->is_cpu()), op,
              ": rows must be contiguous and int32 on the CPU, got ", rows->sizes(), " of ", rows->dtype());
  CHECK_VALUE(
      starts.sizes() == Shape{experts + 1} && starts.is_contiguous() && starts.dtype() == kInt && starts.is_cpu(), op,
      ": starts must be a contiguous [", experts + 1, "] of int32 on the CPU, got ", starts.sizes(), " of ",
      starts.dtype());
  const auto* const from = starts.data<const int32_t>();
  ExpertRows all = {rows ? rows->data<const int32_t>() : nullptr, from[0], rows ? rows->size(0) : x.size(0), {}};
  CHECK_INDEX(from[0] >= 0 && std::is_sorted(from, from + experts + 1) && from[experts] <= all.count, op,
              ": starts must rise from at least 0 to at most ", all.count);
  CHECK_INDEX(!rows || std::all_of(all.index + from[0], all.index + from[experts],
                                   [&](int32_t i) { return i >= 0 && i < x.size(0); }),
              op, ": rows must be from 0 to ", x.size(0) - 1);
  for (int64_t e = 0; e <= experts; ++e) all.starts.push_back(from[e] - from[0]);
  return all;
}

}  // namespace
