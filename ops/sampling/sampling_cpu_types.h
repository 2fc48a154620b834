// What the sampling kernels get, for sampling_cpu.cpp.

#pragma once

#include <algorithm>
#include <cmath>
#include <functional>
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
// Of several ranks each has a row of its own tokens; `first` tokens, whole chunks, come before them.
struct Row {
  int64_t vocabulary, num_chunks;
  float *weights, *largest, *peaks;
  int32_t* chunks;
  int64_t first = 0;
};

// The token that is drawn, and its noise less its depth.
struct Drawn {
  int64_t token;
  int32_t sum;
};

// The choice of a row's token, and the steps of it for ranks, which know more between them. By the dtype of the logits.
struct RowKernels {
  // All of it. `found` is memory that a thread keeps.
  int64_t (*sample)(const void* logits, const Choice&, Row&, std::vector<float>& found);
  // Fills the peaks. The largest logit, or NaN if there is one.
  float (*survey)(const void* logits, const Row&);
  // The first token, counted in the row, whose logit is the largest.
  int64_t (*first_of)(const void* logits, const Row&, float maximum);
  // Fills the weights of chunks whose peak is at least `least`, and the largest of each chunk: -1 for other chunks.
  void (*weigh)(const void* logits, const Row&, float maximum, float scale, float least);
  // Of each chunk: the number of logits above -inf, and the sums of their distances from the maximum.
  void (*distances)(const void* logits, const Row&, float maximum, float* counts, float* sums);
  // Of each chunk: the sum of the squares of their distances from the mean.
  void (*squares)(const void* logits, const Row&, float maximum, float mean, float* sums);
  Drawn (*draw)(const void* logits, const Choice&, const Row&, float maximum, float unit, float least_weight, int32_t limit);
};

struct Kernels {
  RowKernels float32, bfloat16, float16;
  // Of each chunk the sum of the weights that are at least `least`; returns how many there are in all.
  double (*kept_of_chunks)(const Row&, float least, float* sums);
  // The weights from `least` to below `end`.
  void (*gather)(const Row&, float least, float end, std::vector<float>& found);
  float (*kth_largest)(const Row&, int64_t k, std::vector<float>& found);
};

// The k-th largest of the numbers of chunks, or -inf if there are fewer.
inline float kth_of_chunks(const float* numbers, int64_t num_chunks, int64_t k, std::vector<float>& found) {
  if (k > num_chunks) return -kInfinity;
  found.assign(numbers, numbers + num_chunks);
  std::nth_element(found.begin(), found.begin() + (k - 1), found.end(), std::greater<>());
  return found[k - 1];
}

// Chunk after chunk.
inline double total_of(const float* sums, int64_t num_chunks) {
  double total = 0;
  for (int64_t c = 0; c < num_chunks; ++c) total += sums[c];
  return total;
}

// The standard deviation of so many numbers; infinite, so that every token stays, where a square overflows.
inline double deviation_of(double squares, double count) {
  return std::isnan(squares) ? kInfinity : std::sqrt(squares / count);
}

// The weight below which all weights of a row together sum to less than top-p lets go.
inline float least_of_top_p(const Choice& choice, double total, int64_t vocabulary) {
  return static_cast<float>((1 - choice.top_p) * total / vocabulary * 0.999);
}

// The largest depth that min-p and top-n-sigma leave.
inline int32_t deepest_kept(const Choice& choice, double deviation, float unit) {
  double limit = kDeepest - 1;
  if (choice.min_p > 0) limit = std::min(limit, -std::log2(double{choice.min_p}) * kHalving);
  if (choice.top_n_sigma > 0) limit = std::min(limit, choice.top_n_sigma * deviation * unit);
  return static_cast<int32_t>(limit);
}

}  // namespace
