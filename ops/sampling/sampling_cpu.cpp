// Choosing tokens on the CPU: the kernel behind ops/sampling/token_sampling.py, which states what it computes.
//
// A row is one thread's work. Its weights stay in L2 while they are searched, so that a search of many passes costs less
// than one sort. What a pass adds up, it adds up in the order of the vocabulary, cut into chunks: by lane within a chunk,
// and then chunk after chunk in double. So a row's token depends on nothing but the row.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "../cpu_vector_types.h"

namespace {

constexpr int64_t kChunk = 256;  // tokens
constexpr int64_t kFew = 256;    // weights that are rather sorted than searched
constexpr float kMinTemperature = 1e-5f;  // as in sampling.py
constexpr int64_t kNoToken = -1;          // likewise

// The parameters of a row.
struct Choice {
  float temperature = 0, top_p = 1, min_p = 0;
  int64_t top_k = 1;
  double uniform = 0;
};

// The weights of a row and, for each chunk, the largest of them and their sum. Weights past the vocabulary are 0.
struct Row {
  int64_t vocabulary, chunks;
  float *weights, *largest;
  double* sums;
};

}  // namespace

// The kernel, compiled for each instruction set.
#define ISA portable
#define TARGET
#define WIDTH 128
#include "sampling_cpu_kernels.h"

#if defined(__x86_64__)
#define ISA avx2
#define TARGET __attribute__((target("avx2,fma,f16c")))
#define WIDTH 256
#include "sampling_cpu_kernels.h"

#define ISA avx512
#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,fma,f16c")))
#define WIDTH 512
#include "sampling_cpu_kernels.h"
#endif  // __x86_64__

namespace {

using Sample = int64_t (*)(const void* logits, const Choice&, Row&, std::vector<float>& found);

struct InstructionSet {
  const char* name;
  bool available;
  Sample sample[3];  // by the dtype of the logits: float32, bfloat16, float16
};

#define KERNELS(isa) {isa::sample<float>, isa::sample<at::BFloat16>, isa::sample<at::Half>}

// Best first.
const std::vector<InstructionSet>& instruction_sets() {
  static const std::vector<InstructionSet> sets = [] {
    std::vector<InstructionSet> all;
#if defined(__x86_64__)
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    all.push_back({"avx512", avx512, KERNELS(avx512)});
    all.push_back({"avx2", avx2, KERNELS(avx2)});
#endif
    all.push_back({"portable", true, KERNELS(portable)});
    std::erase_if(all, [](const InstructionSet& set) { return !set.available; });
    return all;
  }();
  return sets;
}

const InstructionSet& chosen_set(const std::optional<std::string>& name) {
  for (const InstructionSet& set : instruction_sets())
    if (!name || *name == set.name) return set;
  TORCH_CHECK_VALUE(false, "sample_tokens: isa '", *name, "' is unknown or not supported by this CPU");
}

std::vector<std::string> supported_isas() {
  std::vector<std::string> names;
  for (const InstructionSet& set : instruction_sets()) names.push_back(set.name);
  return names;
}

template <class T>
const T* row_data(const at::Tensor& x, const char* name, at::ScalarType dtype, int64_t rows) {
  TORCH_CHECK_VALUE(x.dim() == 1 && x.size(0) == rows && x.is_contiguous() && x.scalar_type() == dtype && x.is_cpu(),
                    "sample_tokens: ", name, " must be a contiguous [", rows, "] of ", dtype, " on the CPU, got ",
                    x.sizes(), " of ", x.scalar_type(), " on ", x.device());
  return x.const_data_ptr<T>();
}

// A token for each row of the logits: choice_of(row) gives the parameters.
template <class ChoiceOf>
at::Tensor choose(const at::Tensor& logits, const std::optional<std::string>& isa, const ChoiceOf& choice_of) {
  const auto dtype = logits.scalar_type();
  TORCH_CHECK_VALUE(logits.dim() == 2 && logits.size(1) > 0 && logits.is_cpu() &&
                        (logits.stride(1) == 1 || logits.size(1) == 1),
                    "logits must be [R, V] with V > 0 and the last stride 1, on the CPU, got ", logits.sizes(),
                    " with strides ", logits.strides(), " on ", logits.device());
  TORCH_CHECK_VALUE(dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf,
                    "logits must be float32, bfloat16 or float16, got ", dtype);
  const int64_t rows = logits.size(0), vocabulary = logits.size(1), chunks = (vocabulary + kChunk - 1) / kChunk;
  const Sample sample = chosen_set(isa).sample[dtype == at::kFloat ? 0 : dtype == at::kBFloat16 ? 1 : 2];
  at::Tensor out = at::empty({rows}, logits.options().dtype(at::kLong));
  int64_t* tokens = out.mutable_data_ptr<int64_t>();
  const char* data = static_cast<const char*>(logits.const_data_ptr());
  const int64_t row_bytes = logits.stride(0) * logits.element_size();
  std::atomic<int64_t> free = 0;  // rows take different times
  at::parallel_for(0, std::min<int64_t>(rows, at::get_num_threads()), 1, [&](int64_t, int64_t) {
    static thread_local std::vector<float> weights, largest, found;  // kept: fresh memory costs as much as a pass
    static thread_local std::vector<double> sums;
    weights.resize(chunks * kChunk);
    largest.resize(chunks);
    sums.resize(chunks);
    for (int64_t r; (r = free++) < rows;) {
      Row row{vocabulary, chunks, weights.data(), largest.data(), sums.data()};
      tokens[r] = sample(data + r * row_bytes, choice_of(r), row, found);
    }
  });
  return out;
}

at::Tensor greedy_tokens(const at::Tensor& logits, const std::optional<std::string>& isa) {
  return choose(logits, isa, [](int64_t) { return Choice{}; });
}

at::Tensor sample_tokens(const at::Tensor& logits, const at::Tensor& temperature, const at::Tensor& top_k,
                         const at::Tensor& top_p, const at::Tensor& min_p, const at::Tensor& uniform,
                         const std::optional<std::string>& isa) {
  TORCH_CHECK_VALUE(logits.dim() == 2, "logits must be [R, V], got ", logits.sizes());
  const int64_t rows = logits.size(0);
  const float* temperatures = row_data<float>(temperature, "temperature", at::kFloat, rows);
  const int32_t* top_ks = row_data<int32_t>(top_k, "top_k", at::kInt, rows);
  const float* top_ps = row_data<float>(top_p, "top_p", at::kFloat, rows);
  const float* min_ps = row_data<float>(min_p, "min_p", at::kFloat, rows);
  const double* uniforms = row_data<double>(uniform, "uniform", at::kDouble, rows);
  for (int64_t r = 0; r < rows; ++r)
    TORCH_CHECK_VALUE(top_ks[r] > 0, "sample_tokens: top_k[", r, "] must be at least 1, got ", top_ks[r]);
  return choose(logits, isa, [&](int64_t r) {
    return Choice{temperatures[r], top_ps[r], min_ps[r], top_ks[r], uniforms[r]};
  });
}

at::Tensor greedy_tokens_on_best(const at::Tensor& logits) { return greedy_tokens(logits, std::nullopt); }

at::Tensor sample_tokens_on_best(const at::Tensor& logits, const at::Tensor& temperature, const at::Tensor& top_k,
                                 const at::Tensor& top_p, const at::Tensor& min_p, const at::Tensor& uniform) {
  return sample_tokens(logits, temperature, top_k, top_p, min_p, uniform, std::nullopt);
}

}  // namespace

// From here rather than from Python, which would add some 5 us to each call.
TORCH_LIBRARY_IMPL(compiled_llm, CPU, m) {
  m.impl("greedy_tokens", &greedy_tokens_on_best);
  m.impl("sample_tokens", &sample_tokens_on_best);
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("greedy_tokens", &greedy_tokens, py::arg("logits"), py::arg("isa") = py::none(),
        py::call_guard<py::gil_scoped_release>());
  m.def("sample_tokens", &sample_tokens, py::arg("logits"), py::arg("temperature"), py::arg("top_k"), py::arg("top_p"),
        py::arg("min_p"), py::arg("uniform"), py::arg("isa") = py::none(), py::call_guard<py::gil_scoped_release>());
  m.def("supported_isas", &supported_isas, "Names for the argument isa, best first.");
}
