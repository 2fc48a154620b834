// What the row-wise kernels get, for rowwise_cpu.cpp. Pointers are to elements of the dtype that a kernel is for.

#pragma once

#include "../cpu/vector_types.h"

namespace {

enum class Activation { silu, gelu_tanh, gelu, relu2 };

// One row of a norm. Where there is a `delta`, x + delta is normed, and written to `sum`. Layer norms have a `bias`.
struct NormRow {
  const void *x, *delta, *weight, *bias;
  void *sum, *out;
  int64_t size;
  float eps;
};

// One row of a norm with a gate, in groups of `group` elements. The weight's elements start again after `weights`.
struct GatedNormRow {
  const void *x, *gate, *weight;
  void* out;
  int64_t size, group, weights;
  float eps;
  bool norm_first;
};

// The queries or the keys of one token: `heads` heads of `size` elements.
struct HeadsRow {
  const void *x, *weight;  // `weight`: of the norm of each head; null for none
  const float* cos_sin;    // [size]: cosines, then sines
  void* out;
  int64_t heads, size;
  float eps;
};

constexpr int64_t kSumChunk = 1024;  // elements that sums_of_exp adds up

// The kernels for one dtype. Weights of norms are in that dtype or, where the name says so, in float32.
struct RowKernels {
  void (*norm)(const NormRow&);
  void (*norm_float_weight)(const NormRow&);
  void (*layer_norm)(const NormRow&);
  void (*gated_norm)(const GatedNormRow&);
  void (*rope)(const HeadsRow&);
  void (*rope_float_weight)(const HeadsRow&);
  void (*gated)(Activation, const void* gate, const void* up, void* out, int64_t size);
  void (*activate)(Activation, const void* x, void* out, int64_t size);
  void (*clamped_swiglu)(const void* gate, const void* up, float alpha, float limit, void* out, int64_t size);
  void (*soft_cap)(const void* x, float cap, void* out, int64_t size);
  void (*scaled_sum)(const void* x, const void* delta, float scale, void* out, int64_t size);
  void (*sigmoid_gated)(const void* x, const void* gate, int64_t gates, void* out, int64_t size);  // 1 gate, or `size`
  float (*peak)(const void* x, int64_t size);
  // The sum of exp(x - peak) of each kSumChunk elements.
  void (*sums_of_exp)(const void* x, int64_t size, float peak, float* sums);
  void (*widen)(const void* x, float* out, int64_t size);
  // Of the rows `places` of y, `stride` bytes apart; those below 0 add nothing.
  void (*weighted_sum)(const void* y, int64_t stride, const int32_t* places, const float* weights, int64_t count, void* out,
                       int64_t size);
};

struct Kernels {
  RowKernels float32, bfloat16, float16;
};

}  // namespace
