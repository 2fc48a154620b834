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
#include "sampling_ranks.h"
#include "../cpu/op.h"

namespace {

template <class T>
const T* row_data(const Tensor& x, const char* name, Dtype dtype, int64_t rows) {
  CHECK_VALUE(x.dim() == 1 && x.size(0) == rows && x.is_contiguous() && x.dtype() == dtype && x.is_cpu(),
              name, " must be a contiguous [", rows, "] of ", dtype, " on the CPU, got ",
              x.sizes(), " of ", x.dtype(), " on ", x.place());
  return x.data<T>();
}

constexpr int64_t kTogether = 8;  // rows that ranks choose the tokens of at once, at least

const RowKernels& kernels_for(const Tensor& logits) {
  const auto dtype = logits.dtype();
  CHECK_VALUE(logits.dim() == 2 && logits.size(1) > 0 && logits.is_cpu() &&
                  (logits.stride(1) == 1 || logits.size(1) == 1),
              "logits must be [R, V] with V > 0 and the last stride 1, on the CPU, got ", logits.sizes(),
              " with strides ", logits.strides(), " on ", logits.place());
  CHECK_VALUE(dtype == kFloat || dtype == kBFloat16 || dtype == kHalf,
              "logits must be float32, bfloat16 or float16, got ", dtype);
  return dtype == kFloat ? chosen().float32 : dtype == kBFloat16 ? chosen().bfloat16 : chosen().float16;
}

// A token for each row of the logits: choice_of(row) gives the parameters.
template <class ChoiceOf>
Tensor choose(const Tensor& logits, const ChoiceOf& choice_of) {
  const auto sample = kernels_for(logits).sample;
  const int64_t rows = logits.size(0), vocabulary = logits.size(1);
  const int64_t num_chunks = (vocabulary + kChunk - 1) / kChunk;
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

// The parameters of all rows, and what they are called in the schema.
class Choices {
 public:
  Choices(const Tensor& logits, const Tensor& temperature, const Tensor& top_k, const Tensor& top_p, const Tensor& min_p,
          const Tensor& top_n_sigma, const Tensor& seed, const Tensor& position) {
    CHECK_VALUE(logits.dim() == 2, "logits must be [R, V], got ", logits.sizes());
    const int64_t rows = logits.size(0);
    temperatures_ = row_data<float>(temperature, "temperature", kFloat, rows);
    top_ks_ = row_data<int32_t>(top_k, "top_k", kInt, rows);
    top_ps_ = row_data<float>(top_p, "top_p", kFloat, rows);
    min_ps_ = row_data<float>(min_p, "min_p", kFloat, rows);
    top_n_sigmas_ = row_data<float>(top_n_sigma, "top_n_sigma", kFloat, rows);
    seeds_ = row_data<int64_t>(seed, "seed", kLong, rows);
    positions_ = row_data<int32_t>(position, "position", kInt, rows);
    for (int64_t r = 0; r < rows; ++r)
      CHECK_VALUE(top_ks_[r] > 0, "sample_tokens: top_k[", r, "] must be at least 1, got ", top_ks_[r]);
  }

  Choice operator()(int64_t r) const {
    return {temperatures_[r], top_ps_[r], min_ps_[r], top_n_sigmas_[r], top_ks_[r], seeds_[r], positions_[r]};
  }

 private:
  const float *temperatures_, *top_ps_, *min_ps_, *top_n_sigmas_;
  const int32_t *top_ks_, *positions_;
  const int64_t* seeds_;
};

Tensor sample_tokens(const Tensor& logits, const Tensor& temperature, const Tensor& top_k, const Tensor& top_p,
                     const Tensor& min_p, const Tensor& top_n_sigma, const Tensor& seed, const Tensor& position) {
  return choose(logits, Choices(logits, temperature, top_k, top_p, min_p, top_n_sigma, seed, position));
}

// Rows that ranks choose the tokens of at once: the same number in all of them, though one may have more threads than another.
int64_t rows_together(Exchange& ranks, int64_t rows) {
  if (rows <= kTogether) return kTogether;
  const int64_t threads = num_threads();
  std::vector<int64_t> of_all(ranks.size);
  share(ranks, reinterpret_cast<const char*>(&threads), sizeof(threads), reinterpret_cast<char*>(of_all.data()));
  return std::max(kTogether, *std::max_element(of_all.begin(), of_all.end()));
}

Tensor sample_tokens_of_ranks(const Tensor& own, const Tensor& temperature, const Tensor& top_k, const Tensor& top_p,
                              const Tensor& min_p, const Tensor& top_n_sigma, const Tensor& seed, const Tensor& position,
                              const Tensor& place, const Tensor& memory, int64_t vocab_size) {
  const Choices choices(own, temperature, top_k, top_p, min_p, top_n_sigma, seed, position);
  const RowKernels& steps = kernels_for(own);
  Exchange ranks(place, memory, "sample_tokens_of_ranks");
  const int64_t width = own.size(1), rows = own.size(0), row_bytes = own.stride(0) * bytes_of(own.dtype());
  CHECK_VALUE(width % kChunk == 0 && vocab_size > 0 && vocab_size <= width * ranks.size,
              "sample_tokens_of_ranks: ranks must have whole chunks of ", kChunk, " tokens, and all of the vocabulary, got ", width,
              " of ", vocab_size, " in each of ", ranks.size, " ranks");
  Tensor out = empty({rows}, kLong);
  static thread_local std::vector<RankRow> memory_of_rows;  // kept: fresh memory costs as much as a pass
  RankRows together(ranks, chosen(), steps, width, vocab_size, memory_of_rows);
  const int64_t most = rows_together(ranks, rows);
  for (int64_t r = 0, begin = 0; r < rows; ++r) {
    together.add(own.data<const char>() + r * row_bytes, choices(r));
    if (r + 1 < rows && together.count() < most) continue;
    together.choose(out.data<int64_t>() + begin);
    begin = r + 1;
  }
  return out;
}

const std::vector<Op> ops = {
    {"greedy_tokens", Boxed<greedy_tokens>::call, Boxed<greedy_tokens>::direct},
    {"sample_tokens", Boxed<sample_tokens>::call, Boxed<sample_tokens>::direct},
    {"sample_tokens_of_ranks", Boxed<sample_tokens_of_ranks>::call, Boxed<sample_tokens_of_ranks>::direct},
};

}  // namespace
