// Choosing tokens on the CPU: the kernels of the ops of token_sampling.py. reference.py says what they compute.
//
// A row is one thread's work. Its weights stay in L2 while they are searched, so that a search of many passes costs less
// than one sort. What a pass adds up, it adds up in the order of the vocabulary, cut into chunks: by lane within a chunk,
// and then chunk after chunk in double. So a row's token depends on nothing but the row, its seed and its position.

#include <algorithm>
#include <atomic>
#include <string>
#include <vector>

#include "sampling_cpu_types.h"
#include "../cpu/op.h"

namespace {

template <class T>
const T* row_data(const Tensor& x, const char* name, Dtype dtype, int64_t rows) {
  CHECK_VALUE(x.dim() == 1 && x.size(0) == rows && x.is_contiguous() && x.dtype() == dtype && x.is_cpu(),
              name, " must be a contiguous [", rows, "] of ", dtype, " on the CPU, got ",
              x.sizes(), " of ", x.dtype(), " on ", x.place());
  return x.data<T>();
}

// A token for each row of the logits: choice_of(row) gives the parameters.
template <class ChoiceOf>
Tensor choose(const Tensor& logits, const ChoiceOf& choice_of) {
  const auto dtype = logits.dtype();
  CHECK_VALUE(logits.dim() == 2 && logits.size(1) > 0 && logits.is_cpu() &&
                  (logits.stride(1) == 1 || logits.size(1) == 1),
              "logits must be [R, V] with V > 0 and the last stride 1, on the CPU, got ", logits.sizes(),
              " with strides ", logits.strides(), " on ", logits.place());
  CHECK_VALUE(dtype == kFloat || dtype == kBFloat16 || dtype == kHalf,
              "logits must be float32, bfloat16 or float16, got ", dtype);
  const int64_t rows = logits.size(0), vocabulary = logits.size(1);
  const int64_t num_chunks = (vocabulary + kChunk - 1) / kChunk;
  const Kernels& kernels = chosen();
  const Sample sample = dtype == kFloat ? kernels.float32 : dtype == kBFloat16 ? kernels.bfloat16 : kernels.float16;
  Tensor out = empty({rows}, kLong);
  int64_t* tokens = out.data<int64_t>();
  const char* data = logits.data<const char>();
  const int64_t row_bytes = logits.stride(0) * bytes_of(logits.dtype());
  std::atomic<int64_t> free = 0;  // rows take different times
  parallel_for(0, std::min<int64_t>(rows, num_threads()), 1, [&](int64_t, int64_t) {
    static thread_local std::vector<float> weights, largest, peaks, found;  // kept: fresh memory costs as much as a pass
    static thread_local std::vector<int32_t> chunks;
    weights.resize(num_chunks * kChunk);
    largest.resize(num_chunks);
    peaks.resize(num_chunks);
    chunks.resize(num_chunks + 4);
    for (int64_t r; (r = free++) < rows;) {
      Row row{vocabulary, num_chunks, weights.data(), largest.data(), peaks.data(), chunks.data()};
      tokens[r] = sample(data + r * row_bytes, choice_of(r), row, found);
    }
  });
  return out;
}

Tensor greedy_tokens(const Tensor& logits) {
  return choose(logits, [](int64_t) { return Choice{}; });
}

Tensor sample_tokens(const Tensor& logits, const Tensor& temperature, const Tensor& top_k, const Tensor& top_p,
                     const Tensor& min_p, const Tensor& top_n_sigma, const Tensor& seed, const Tensor& position) {
  CHECK_VALUE(logits.dim() == 2, "logits must be [R, V], got ", logits.sizes());
  const int64_t rows = logits.size(0);
  const float* temperatures = row_data<float>(temperature, "temperature", kFloat, rows);
  const int32_t* top_ks = row_data<int32_t>(top_k, "top_k", kInt, rows);
  const float* top_ps = row_data<float>(top_p, "top_p", kFloat, rows);
  const float* min_ps = row_data<float>(min_p, "min_p", kFloat, rows);
  const float* top_n_sigmas = row_data<float>(top_n_sigma, "top_n_sigma", kFloat, rows);
  const int64_t* seeds = row_data<int64_t>(seed, "seed", kLong, rows);
  const int32_t* positions = row_data<int32_t>(position, "position", kInt, rows);
  for (int64_t r = 0; r < rows; ++r)
    CHECK_VALUE(top_ks[r] > 0, "sample_tokens: top_k[", r, "] must be at least 1, got ", top_ks[r]);
  return choose(logits, [&](int64_t r) {
    return Choice{temperatures[r], top_ps[r], min_ps[r], top_n_sigmas[r], top_ks[r], seeds[r], positions[r]};
  });
}

const std::vector<Op> ops = {
    {"greedy_tokens", Boxed<greedy_tokens>::call, Boxed<greedy_tokens>::direct},
    {"sample_tokens", Boxed<sample_tokens>::call, Boxed<sample_tokens>::direct},
};

}  // namespace
