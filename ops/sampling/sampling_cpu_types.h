// What the sampling kernels get, for sampling_cpu.cpp.

#pragma once

#include <vector>

#include "../cpu/vector_types.h"

namespace {

constexpr int64_t kChunk = 256;  // tokens
constexpr int64_t kFew = 256;    // weights that are sorted, not searched
constexpr float kMinTemperature = 1e-5f;  // as in reference.py
constexpr int64_t kNoToken = -1;          // the same
constexpr int32_t kDeepest = 1 << 30;     // the same
constexpr int64_t kBlock = 64;            // tokens, as in noise.py
constexpr float kHalving = 1 << 24;       // the same

// The parameters of a row.
struct Choice {
  float temperature = 0, top_p = 1, min_p = 0, top_n_sigma = 0;
  int64_t top_k = 1, seed = 0;
  int32_t position = 0;
};

// A row's memory: of each chunk the largest logit, and for top-k and top-p all weights and of each chunk the largest.
// Weights past the vocabulary are 0. `chunks` in question: memory for the numbers of all, and of four more.
struct Row {
  int64_t vocabulary, num_chunks;
  float *weights, *largest, *peaks;
  int32_t* chunks;
};

// The token of one row. `found` is memory that a thread keeps.
using Sample = int64_t (*)(const void* logits, const Choice&, Row&, std::vector<float>& found);

struct Kernels {
  Sample float32, bfloat16, float16;  // by the dtype of the logits
};

}  // namespace
