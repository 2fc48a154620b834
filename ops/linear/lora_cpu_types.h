// What the kernels of low-rank changes get, for lora_cpu.cpp. Pointers are to elements of the dtype that a kernel is for.

#pragma once

#include "../cpu/vector_types.h"

namespace {

constexpr int64_t kMostRows = 4;  // that share what is read of a slot's weights

// s[m][j] = scale * sum over k of a[j, k] * x[m, k], for `rank` rows of a and `rows` rows of x.
struct Shrink {
  const float* x;  // [rows, stride], zeros behind the inputs
  int64_t rows, stride, inputs, rank;
  const void* a;  // [rank, inputs]
  float scale;
  float* s[kMostRows];
};

// y[m][i] += sum over j of b[i / 16][j, i % 16] * s[m][j], for `outputs` of a part.
struct Expand {
  const float* s[kMostRows];
  int64_t rows, rank, outputs;
  const void* b;  // [tiles, rank, 16], `tile_stride` from tile to tile
  int64_t tile_stride;
  void* y[kMostRows];
};

struct LoraKernels {
  void (*widen)(const void* x, float* out, int64_t size);  // with zeros up to a multiple of 16
  void (*shrink)(const Shrink&);
  void (*expand)(const Expand&);
};

struct Kernels {
  LoraKernels float32, bfloat16, float16;
};

}  // namespace
