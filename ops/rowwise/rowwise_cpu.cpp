// The row-wise ops on the CPU: norms, rotary embeddings, activations, log-sum-exp. reference.py says what they compute.
//
// A row is computed by one thread, in an order that depends on its length alone. So its bits are the same alone and in
// any company, which they are not where a compiler cuts loops by their sizes.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#define KERNELS "../rowwise/rowwise_cpu_kernels.h"
#define PRODUCTS 0
#include "../cpu/each_isa.h"
#include "../cpu/threads.h"
#include "rowwise_cpu_types.h"

namespace {

using OptionalTensor = std::optional<at::Tensor>;

constexpr int64_t kGrain = 1 << 14;  // elements: with fewer, waking a thread takes longer than the work

const RowKernels& kernels_for(const IsaName& isa, const at::Tensor& x, const char* op) {
  const auto dtype = x.scalar_type();
  TORCH_CHECK_VALUE(dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf, op,
                    ": dtype must be float32, bfloat16 or float16, got ", dtype);
  const Kernels& all = chosen(isa, op);
  return dtype == at::kFloat ? all.float32 : dtype == at::kBFloat16 ? all.bfloat16 : all.float16;
}

// Rows of `size` elements, `stride` bytes apart.
struct Rows {
  char* data;
  int64_t stride;
  char* operator[](int64_t row) const { return data + row * stride; }
};

Rows rows_of(const at::Tensor& x, const char* op, const char* name) {
  TORCH_CHECK_VALUE(x.dim() == 2 && x.is_cpu() && (x.stride(1) == 1 || x.size(1) == 1), op, ": ", name,
                    " must be [rows, size] with the last stride 1, on the CPU, got ", x.sizes(), " with strides ",
                    x.strides(), " on ", x.device());
  return {static_cast<char*>(const_cast<void*>(x.const_data_ptr())), x.stride(0) * x.element_size()};
}

// The weight of a norm of x: [size], in the dtype of x or in float32.
const void* weight_of(const at::Tensor& weight, const at::Tensor& x, int64_t size, const char* op) {
  TORCH_CHECK_VALUE(weight.dim() == 1 && weight.size(0) == size && weight.is_contiguous() && weight.is_cpu() &&
                        (weight.scalar_type() == x.scalar_type() || weight.scalar_type() == at::kFloat),
                    op, ": a weight must be a contiguous [", size, "] of ", x.scalar_type(), " or float32, got ",
                    weight.sizes(), " of ", weight.scalar_type());
  return weight.const_data_ptr();
}

template <class Work>
void for_rows(int64_t rows, int64_t size, const Work& work) {
  team::parallel_for(0, rows, std::max<int64_t>(1, kGrain / std::max<int64_t>(size, 1)), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) work(row);
  });
}

at::Tensor norm(const IsaName& isa, const at::Tensor& x, const at::Tensor* delta, at::Tensor* sum,
                const at::Tensor& weight, double eps, const char* op) {
  const RowKernels& kernels = kernels_for(isa, x, op);
  const Rows from = rows_of(x, op, "x");
  const int64_t rows = x.size(0), size = x.size(1);
  const void* w = weight_of(weight, x, size, op);
  at::Tensor out = at::empty({rows, size}, x.options());
  const Rows to = rows_of(out, op, "out");
  Rows added = {}, sums = {};
  if (delta != nullptr) {
    TORCH_CHECK_VALUE(delta->sizes() == x.sizes() && delta->scalar_type() == x.scalar_type(), op,
                      ": delta must be like x, ", x.sizes(), " of ", x.scalar_type(), ", got ", delta->sizes(), " of ",
                      delta->scalar_type());
    *sum = at::empty({rows, size}, x.options());
    added = rows_of(*delta, op, "delta");
    sums = rows_of(*sum, op, "sum");
  }
  const auto kernel = weight.scalar_type() == x.scalar_type() ? kernels.norm : kernels.norm_float_weight;
  for_rows(rows, size, [&](int64_t row) {
    kernel({from[row], delta != nullptr ? added[row] : nullptr, w, delta != nullptr ? sums[row] : nullptr, to[row], size,
            static_cast<float>(eps)});
  });
  return out;
}

at::Tensor rms_norm(const IsaName& isa, const at::Tensor& x, const at::Tensor& weight, double eps) {
  return norm(isa, x, nullptr, nullptr, weight, eps, "rms_norm");
}

std::tuple<at::Tensor, at::Tensor> add_rms_norm(const IsaName& isa, const at::Tensor& x, const at::Tensor& delta,
                                                const at::Tensor& weight, double eps) {
  at::Tensor sum;
  at::Tensor normed = norm(isa, x, &delta, &sum, weight, eps, "add_rms_norm");
  return {sum, normed};
}

std::tuple<at::Tensor, at::Tensor> rope(const IsaName& isa, const at::Tensor& qkv, const at::Tensor& cos_sin,
                                        const OptionalTensor& q_norm, const OptionalTensor& k_norm, int64_t num_heads,
                                        int64_t num_kv_heads, double eps) {
  const RowKernels& kernels = kernels_for(isa, qkv, "rope");
  const Rows from = rows_of(qkv, "rope", "qkv"), angles = rows_of(cos_sin, "rope", "cos_sin");
  const int64_t rows = qkv.size(0), size = cos_sin.size(1);
  TORCH_CHECK_VALUE(cos_sin.scalar_type() == at::kFloat && cos_sin.size(0) == rows && size % 2 == 0,
                    "rope: cos_sin must be [", rows, ", head_dim] float32 with an even head_dim, got ", cos_sin.sizes(), " of ", cos_sin.scalar_type());
  TORCH_CHECK_VALUE(num_heads > 0 && num_kv_heads > 0 && qkv.size(1) == (num_heads + 2 * num_kv_heads) * size,
                    "rope: qkv must have (num_heads + 2 * num_kv_heads) * head_dim columns, got ", qkv.size(1), " for ",
                    num_heads, ", ", num_kv_heads, " and ", size);
  TORCH_CHECK_VALUE(q_norm.has_value() == k_norm.has_value() &&
                        (!q_norm || q_norm->scalar_type() == k_norm->scalar_type()),
                    "rope: q_norm and k_norm must be of one dtype, or both None");
  const void* q_weight = q_norm ? weight_of(*q_norm, qkv, size, "rope") : nullptr;
  const void* k_weight = k_norm ? weight_of(*k_norm, qkv, size, "rope") : nullptr;
  const bool same = !q_norm || q_norm->scalar_type() == qkv.scalar_type();
  const auto kernel = same ? kernels.rope : kernels.rope_float_weight;
  at::Tensor q = at::empty({rows, num_heads, size}, qkv.options());
  at::Tensor k = at::empty({rows, num_kv_heads, size}, qkv.options());
  const int64_t head_bytes = size * qkv.element_size();
  const Rows queries = {static_cast<char*>(q.mutable_data_ptr()), num_heads * head_bytes};
  const Rows keys = {static_cast<char*>(k.mutable_data_ptr()), num_kv_heads * head_bytes};
  for_rows(rows, (num_heads + num_kv_heads) * size, [&](int64_t row) {
    const auto* cs = reinterpret_cast<const float*>(angles[row]);
    kernel({from[row], q_weight, cs, queries[row], num_heads, size, static_cast<float>(eps)});
    kernel({from[row] + num_heads * head_bytes, k_weight, cs, keys[row], num_kv_heads, size, static_cast<float>(eps)});
  });
  return {q, k};
}

at::Tensor gated_activation(const IsaName& isa, const at::Tensor& gate_up, c10::string_view activation) {
  const RowKernels& kernels = kernels_for(isa, gate_up, "gated_activation");
  const bool silu = activation == "silu";
  TORCH_CHECK_VALUE(silu || activation == "gelu_tanh", "gated_activation: activation must be silu or gelu_tanh, got ",
                    activation);
  const Rows from = rows_of(gate_up, "gated_activation", "gate_up");
  TORCH_CHECK_VALUE(gate_up.size(1) % 2 == 0, "gated_activation: gate_up must have an even number of columns, got ",
                    gate_up.size(1));
  const int64_t rows = gate_up.size(0), size = gate_up.size(1) / 2, up = size * gate_up.element_size();
  at::Tensor out = at::empty({rows, size}, gate_up.options());
  const Rows to = rows_of(out, "gated_activation", "out");
  for_rows(rows, 2 * size, [&](int64_t row) {
    kernels.gated(silu ? Activation::silu : Activation::gelu_tanh, from[row], from[row] + up, to[row], size);
  });
  return out;
}

at::Tensor soft_cap(const IsaName& isa, const at::Tensor& x, double cap) {
  const RowKernels& kernels = kernels_for(isa, x, "soft_cap");
  TORCH_CHECK_VALUE(cap > 0, "soft_cap: cap must be above 0, got ", cap);
  const Rows from = rows_of(x, "soft_cap", "x");
  const int64_t rows = x.size(0), size = x.size(1);
  at::Tensor out = at::empty({rows, size}, x.options());
  const Rows to = rows_of(out, "soft_cap", "out");
  for_rows(rows, 2 * size, [&](int64_t row) { kernels.soft_cap(from[row], static_cast<float>(cap), to[row], size); });
  return out;
}

std::tuple<at::Tensor, at::Tensor> log_sum_exp(const IsaName& isa, const at::Tensor& logits) {
  const RowKernels& kernels = kernels_for(isa, logits, "log_sum_exp");
  const Rows from = rows_of(logits, "log_sum_exp", "logits");
  const int64_t rows = logits.size(0), size = logits.size(1);
  at::Tensor peak = at::empty({rows}, logits.options().dtype(at::kFloat)), log_total = at::empty({rows}, peak.options());
  float *peaks = peak.mutable_data_ptr<float>(), *log_totals = log_total.mutable_data_ptr<float>();
  for_rows(rows, 2 * size, [&](int64_t row) { kernels.log_sum_exp(from[row], size, peaks + row, log_totals + row); });
  return {peak, log_total};
}

}  // namespace

// Registered here and not in Python, which would add some 5 us to each call.
TORCH_LIBRARY_IMPL(compiled_llm, CPU, m) {
  m.impl("rms_norm", &Callable<rms_norm>::on_best);
  m.impl("add_rms_norm", &Callable<add_rms_norm>::on_best);
  m.impl("rope", &Callable<rope>::on_best);
  m.impl("gated_activation", &Callable<gated_activation>::on_best);
  m.impl("soft_cap", &Callable<soft_cap>::on_best);
  m.impl("log_sum_exp", &Callable<log_sum_exp>::on_best);
}

template <auto op>
void define(py::module& m, const char* name) {
  const py::call_guard<py::gil_scoped_release> without_gil;
  m.def(name, &Callable<op>::on_best, without_gil);
  m.def(name, &Callable<op>::by_name, without_gil, "On the instruction set of that name.");
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  define<rms_norm>(m, "rms_norm");
  define<add_rms_norm>(m, "add_rms_norm");
  define<rope>(m, "rope");
  define<gated_activation>(m, "gated_activation");
  define<soft_cap>(m, "soft_cap");
  define<log_sum_exp>(m, "log_sum_exp");
  m.def("supported_isas", &supported_isas, "Their names, best first.");
}
