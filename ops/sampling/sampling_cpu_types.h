// What the sampling kernels get, for sampling_cpu.cpp.

#pragma once

#include <vector>

#include "../cpu/vector_types.h"

namespace {

constexpr int64_t kChunk = 256;  // tokens
constexpr int64_t kFew = 256;    // weights that are sorted, not searched
constexpr float kMinTemperature = 1e-5f;  // as in reference.py
constexpr int64_t kNoToken = -1;          // the same

// The parameters of a row.
struct Choice {
  float temperature = 0, top_p = 1, min_p = 0, top_n_sigma = 0;
  int64_t top_k = 1;
  double uniform = 0;
};

// The weights of a row and, for each chunk, the largest of them and their sum. Weights past the vocabulary are 0.
struct Row {
  int64_t vocabulary, chunks;
  float *weights, *largest;
  double* sums;
};

// The token of one row. `found` is memory that a thread keeps.
using Sample = int64_t (*)(const void* logits, const Choice&, Row&, std::vector<float>& found);

struct Kernels {
  Sample float32, bfloat16, float16;  // by the dtype of the logits
};

}  // namespace
