// What the kernels of sums over ranks get, for parallel_cpu.cpp.

#pragma once

#include "../cpu/vector_types.h"

namespace {

constexpr int64_t kMostSummed = 64;

struct SumKernels {
  // to[i] = the sum of sources[0][i], sources[1][i] and so on in this order, in float32, rounded once. Of one dtype.
  void (*sum)(const void* const* sources, int64_t count, void* to, int64_t size);
  // The same of 1, 2, 4 or 8 sources of float32 by a binary tree of neighbours; rounded to the dtype.
  void (*join)(const void* const* sources, int64_t count, void* to, int64_t size);
};

struct Kernels {
  SumKernels float32, bfloat16, float16;
};

}  // namespace
