// Choosing tokens on the CPU: the kernels of the ops of token_sampling.py. reference.py says what they compute.
//
// A row is one thread's work. Its weights stay in L2 while they are searched, so that a search of many passes costs less
// than one sort. What a pass adds up, it adds up in the order of the vocabulary, cut into chunks: by lane within a chunk,
// and then chunk after chunk in double. So a row's token depends on nothing but the row.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <optional>
#include <string>
#include <vector>

#define KERNELS "../sampling/sampling_cpu_kernels.h"
#define PRODUCTS 0
#include "../cpu/each_isa.h"
#include "../cpu/threads.h"
#include "sampling_cpu_types.h"

namespace {

template <class T>
const T* row_data(const at::Tensor& x, const char* name, at::ScalarType dtype, int64_t rows) {
  TORCH_CHECK_VALUE(x.dim() == 1 && x.size(0) == rows && x.is_contiguous() && x.scalar_type() == dtype && x.is_cpu(),
                    "sample_tokens: ", name, " must be a contiguous [", rows, "] of ", dtype, " on the CPU, got ",
                    x.sizes(), " of ", x.scalar_type(), " on ", x.device());
  return x.const_data_ptr<T>();
}

// A token for each row of the logits: choice_of(row) gives the parameters.
template <class ChoiceOf>
at::Tensor choose(const IsaName& isa, const at::Tensor& logits, const ChoiceOf& choice_of) {
  const auto dtype = logits.scalar_type();
  TORCH_CHECK_VALUE(logits.dim() == 2 && logits.size(1) > 0 && logits.is_cpu() &&
                        (logits.stride(1) == 1 || logits.size(1) == 1),
                    "logits must be [R, V] with V > 0 and the last stride 1, on the CPU, got ", logits.sizes(),
                    " with strides ", logits.strides(), " on ", logits.device());
  TORCH_CHECK_VALUE(dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf,
                    "logits must be float32, bfloat16 or float16, got ", dtype);
  const int64_t rows = logits.size(0), vocabulary = logits.size(1), chunks = (vocabulary + kChunk - 1) / kChunk;
  const Kernels& kernels = chosen(isa, "sample_tokens");
  const Sample sample = dtype == at::kFloat ? kernels.float32 : dtype == at::kBFloat16 ? kernels.bfloat16 : kernels.float16;
  at::Tensor out = at::empty({rows}, logits.options().dtype(at::kLong));
  int64_t* tokens = out.mutable_data_ptr<int64_t>();
  const char* data = static_cast<const char*>(logits.const_data_ptr());
  const int64_t row_bytes = logits.stride(0) * logits.element_size();
  std::atomic<int64_t> free = 0;  // rows take different times
  team::parallel_for(0, std::min<int64_t>(rows, at::get_num_threads()), 1, [&](int64_t, int64_t) {
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

at::Tensor greedy_tokens(const IsaName& isa, const at::Tensor& logits) {
  return choose(isa, logits, [](int64_t) { return Choice{}; });
}

at::Tensor sample_tokens(const IsaName& isa, const at::Tensor& logits, const at::Tensor& temperature,
                         const at::Tensor& top_k, const at::Tensor& top_p, const at::Tensor& min_p,
                         const at::Tensor& uniform) {
  TORCH_CHECK_VALUE(logits.dim() == 2, "logits must be [R, V], got ", logits.sizes());
  const int64_t rows = logits.size(0);
  const float* temperatures = row_data<float>(temperature, "temperature", at::kFloat, rows);
  const int32_t* top_ks = row_data<int32_t>(top_k, "top_k", at::kInt, rows);
  const float* top_ps = row_data<float>(top_p, "top_p", at::kFloat, rows);
  const float* min_ps = row_data<float>(min_p, "min_p", at::kFloat, rows);
  const double* uniforms = row_data<double>(uniform, "uniform", at::kDouble, rows);
  for (int64_t r = 0; r < rows; ++r)
    TORCH_CHECK_VALUE(top_ks[r] > 0, "sample_tokens: top_k[", r, "] must be at least 1, got ", top_ks[r]);
  return choose(isa, logits, [&](int64_t r) {
    return Choice{temperatures[r], top_ps[r], min_ps[r], top_ks[r], uniforms[r]};
  });
}

}  // namespace

// Registered here and not in Python, which would add some 5 us to each call.
TORCH_LIBRARY_IMPL(compiled_llm, CPU, m) {
  m.impl("greedy_tokens", &Callable<greedy_tokens>::on_best);
  m.impl("sample_tokens", &Callable<sample_tokens>::on_best);
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  const py::call_guard<py::gil_scoped_release> without_gil;
  m.def("greedy_tokens", &Callable<greedy_tokens>::on_best, without_gil);
  m.def("greedy_tokens", &Callable<greedy_tokens>::by_name, without_gil, "On the instruction set of that name.");
  m.def("sample_tokens", &Callable<sample_tokens>::on_best, without_gil);
  m.def("sample_tokens", &Callable<sample_tokens>::by_name, without_gil, "On the instruction set of that name.");
  m.def("supported_isas", &supported_isas, "Their names, best first.");
}
