// The row-wise ops on the CPU: norms, rotary embeddings, activations, log-sum-exp. reference.py says what they compute.
//
// A row is computed by one thread, in an order that depends on its length alone. So its bits are the same alone and in
// any company, which they are not where a compiler cuts loops by their sizes.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "../attention/move_keys_cpu.h"
#include "../moe/routing_cpu.h"
#include "../parallel/shared_buffers.h"
#include "rowwise_cpu_rows.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace {

constexpr int64_t kStreamedRows = 32;  // with as many, write_slots goes past the caches

// The weight of a norm of x: [size], in the dtype of x or in float32.
const void* weight_of(const Tensor& weight, const Tensor& x, int64_t size, const char* op) {
  CHECK_VALUE(weight.dim() == 1 && weight.size(0) == size && weight.is_contiguous() && weight.is_cpu() &&
                  (weight.dtype() == x.dtype() || weight.dtype() == kFloat),
              op, ": a weight must be a contiguous [", size, "] of ", x.dtype(), " or float32, got ",
              weight.sizes(), " of ", weight.dtype());
  return weight.data();
}

// Of RMS or, where there is a `bias`, a layer norm.
Tensor norm(const Tensor& x, const Tensor* delta, Tensor* sum, const Tensor& weight, const Tensor* bias, double eps,
            const char* op) {
  const RowKernels& kernels = kernels_for(x, op);
  const Rows from = rows_of(x, op, "x");
  const int64_t rows = x.size(0), size = x.size(1);
  const void* w = weight_of(weight, x, size, op);
  const void* b = bias != nullptr ? weight_of(*bias, x, size, op) : nullptr;
  CHECK_VALUE(bias == nullptr || (weight.dtype() == x.dtype() && bias->dtype() == x.dtype()), op,
              ": weight and bias must be of ", x.dtype());
  Tensor out = empty({rows, size}, x.dtype());
  const Rows to = rows_of(out, op, "out");
  Rows added = {}, sums = {};
  if (delta != nullptr) {
    CHECK_VALUE(delta->sizes() == x.sizes() && delta->dtype() == x.dtype(), op,
                ": delta must be like x, ", x.sizes(), " of ", x.dtype(), ", got ", delta->sizes(), " of ",
                delta->dtype());
    *sum = empty({rows, size}, x.dtype());
    added = rows_of(*delta, op, "delta");
    sums = rows_of(*sum, op, "sum");
  }
  const auto kernel = bias != nullptr              ? kernels.layer_norm
                      : weight.dtype() == x.dtype() ? kernels.norm
                                                    : kernels.norm_float_weight;
  for_rows(rows, size, [&](int64_t row) {
    kernel({from[row], delta != nullptr ? added[row] : nullptr, w, b, delta != nullptr ? sums[row] : nullptr, to[row],
            size, static_cast<float>(eps)});
  });
  return out;
}

Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps) {
  return norm(x, nullptr, nullptr, weight, nullptr, eps, "rms_norm");
}

std::tuple<Tensor, Tensor> add_rms_norm(const Tensor& x, const Tensor& delta, const Tensor& weight, double eps) {
  Tensor sum;
  Tensor normed = norm(x, &delta, &sum, weight, nullptr, eps, "add_rms_norm");
  return {std::move(sum), std::move(normed)};
}

Tensor layer_norm(const Tensor& x, const Tensor& weight, const Tensor& bias, double eps) {
  return norm(x, nullptr, nullptr, weight, &bias, eps, "layer_norm");
}

std::tuple<Tensor, Tensor> add_layer_norm(const Tensor& x, const Tensor& delta, const Tensor& weight,
                                          const Tensor& bias, double eps) {
  Tensor sum;
  Tensor normed = norm(x, &delta, &sum, weight, &bias, eps, "add_layer_norm");
  return {std::move(sum), std::move(normed)};
}

Tensor gated_rms_norm(const Tensor& x, const Tensor& gate, const Tensor& weight, double eps, int64_t group_size,
                      bool norm_first) {
  const char* op = "gated_rms_norm";
  const RowKernels& kernels = kernels_for(x, op);
  const Rows from = rows_of(x, op, "x"), gates = rows_of(gate, op, "gate");
  const int64_t rows = x.size(0), size = x.size(1);
  CHECK_VALUE(gate.sizes() == x.sizes() && gate.dtype() == x.dtype(), op, ": gate must be like x, ", x.sizes(), " of ",
              x.dtype(), ", got ", gate.sizes(), " of ", gate.dtype());
  CHECK_VALUE(group_size > 0 && size % group_size == 0, op, ": group_size must divide the ", size, " columns, got ",
              group_size);
  const int64_t weights = weight.dim() == 1 && weight.size(0) == group_size ? group_size : size;
  CHECK_VALUE(weight.dtype() == x.dtype(), op, ": weight must be of ", x.dtype(), ", got ", weight.dtype());
  const void* w = weight_of(weight, x, weights, op);
  Tensor out = empty({rows, size}, x.dtype());
  const Rows to = rows_of(out, op, "out");
  for_rows(rows, 4 * size, [&](int64_t row) {
    kernels.gated_norm({from[row], gates[row], w, to[row], size, group_size, weights, static_cast<float>(eps), norm_first});
  });
  return out;
}

std::tuple<Tensor, Tensor> rope(const Tensor& qkv, const Tensor& cos_sin, const OptionalTensor& q_norm,
                                const OptionalTensor& k_norm, int64_t num_heads, int64_t num_kv_heads,
                                double eps) {
  const RowKernels& kernels = kernels_for(qkv, "rope");
  const Rows from = rows_of(qkv, "rope", "qkv"), angles = rows_of(cos_sin, "rope", "cos_sin");
  const int64_t rows = qkv.size(0), size = cos_sin.size(1);
  CHECK_VALUE(cos_sin.dtype() == kFloat && cos_sin.size(0) == rows && size % 2 == 0,
              "rope: cos_sin must be [", rows, ", head_dim] float32 with an even head_dim, got ", cos_sin.sizes(), " of ", cos_sin.dtype());
  CHECK_VALUE(num_heads > 0 && num_kv_heads >= 0 && qkv.size(1) >= (num_heads + num_kv_heads) * size,
              "rope: qkv must have (num_heads + num_kv_heads) * head_dim columns or more, got ", qkv.size(1), " for ",
              num_heads, ", ", num_kv_heads, " and ", size);
  CHECK_VALUE(q_norm.has_value() == k_norm.has_value() &&
                  (!q_norm || q_norm->dtype() == k_norm->dtype()),
              "rope: q_norm and k_norm must be of one dtype, or both None");
  const void* q_weight = q_norm ? weight_of(*q_norm, qkv, size, "rope") : nullptr;
  const void* k_weight = k_norm ? weight_of(*k_norm, qkv, size, "rope") : nullptr;
  const bool same = !q_norm || q_norm->dtype() == qkv.dtype();
  const auto kernel = same ? kernels.rope : kernels.rope_float_weight;
  Tensor q = empty({rows, num_heads, size}, qkv.dtype());
  Tensor k = empty({rows, num_kv_heads, size}, qkv.dtype());
  const int64_t head_bytes = size * bytes_of(qkv.dtype());
  const Rows queries = {q.data<char>(), num_heads * head_bytes};
  const Rows keys = {k.data<char>(), num_kv_heads * head_bytes};
  for_rows(rows, (num_heads + num_kv_heads) * size, [&](int64_t row) {
    const auto* cs = reinterpret_cast<const float*>(angles[row]);
    kernel({from[row], q_weight, cs, queries[row], num_heads, size, static_cast<float>(eps)});
    kernel({from[row] + num_heads * head_bytes, k_weight, cs, keys[row], num_kv_heads, size, static_cast<float>(eps)});
  });
  return {std::move(q), std::move(k)};
}

Activation activation_of(const std::string& name, const char* op) {
  if (name == "silu") return Activation::silu;
  if (name == "gelu_tanh") return Activation::gelu_tanh;
  if (name == "gelu") return Activation::gelu;
  CHECK_VALUE(name == "relu2", op, ": activation must be silu, gelu_tanh, gelu or relu2, got ", name);
  return Activation::relu2;
}

Tensor gated_activation(const Tensor& gate_up, const std::string& activation) {
  const RowKernels& kernels = kernels_for(gate_up, "gated_activation");
  const Activation by = activation_of(activation, "gated_activation");
  const Rows from = rows_of(gate_up, "gated_activation", "gate_up");
  CHECK_VALUE(gate_up.size(1) % 2 == 0, "gated_activation: gate_up must have an even number of columns, got ",
              gate_up.size(1));
  const int64_t rows = gate_up.size(0), size = gate_up.size(1) / 2, up = size * bytes_of(gate_up.dtype());
  Tensor out = empty({rows, size}, gate_up.dtype());
  const Rows to = rows_of(out, "gated_activation", "out");
  for_rows(rows, 2 * size, [&](int64_t row) {
    kernels.gated(by, from[row], from[row] + up, to[row], size);
  });
  return out;
}

Tensor activation(const Tensor& x, const std::string& activation) {
  const RowKernels& kernels = kernels_for(x, "activation");
  const Activation by = activation_of(activation, "activation");
  const Rows from = rows_of(x, "activation", "x");
  const int64_t rows = x.size(0), size = x.size(1);
  Tensor out = empty({rows, size}, x.dtype());
  const Rows to = rows_of(out, "activation", "out");
  for_rows(rows, 2 * size, [&](int64_t row) { kernels.activate(by, from[row], to[row], size); });
  return out;
}

Tensor clamped_swiglu(const Tensor& gate_up, double alpha, double limit) {
  const RowKernels& kernels = kernels_for(gate_up, "clamped_swiglu");
  const Rows from = rows_of(gate_up, "clamped_swiglu", "gate_up");
  CHECK_VALUE(gate_up.size(1) % 2 == 0 && limit > 0, "clamped_swiglu: gate_up must have an even number of columns, and "
              "limit be above 0, got ", gate_up.size(1), " and ", limit);
  const int64_t rows = gate_up.size(0), size = gate_up.size(1) / 2, up = size * bytes_of(gate_up.dtype());
  Tensor out = empty({rows, size}, gate_up.dtype());
  const Rows to = rows_of(out, "clamped_swiglu", "out");
  for_rows(rows, 2 * size, [&](int64_t row) {
    kernels.clamped_swiglu(from[row], from[row] + up, static_cast<float>(alpha), static_cast<float>(limit), to[row], size);
  });
  return out;
}

Tensor soft_cap(const Tensor& x, double cap) {
  const RowKernels& kernels = kernels_for(x, "soft_cap");
  CHECK_VALUE(cap > 0, "soft_cap: cap must be above 0, got ", cap);
  const Rows from = rows_of(x, "soft_cap", "x");
  const int64_t rows = x.size(0), size = x.size(1);
  Tensor out = empty({rows, size}, x.dtype());
  const Rows to = rows_of(out, "soft_cap", "out");
  for_rows(rows, 2 * size, [&](int64_t row) { kernels.soft_cap(from[row], static_cast<float>(cap), to[row], size); });
  return out;
}

Tensor scaled_sum(const Tensor& x, const Tensor& delta, const Tensor& scale) {
  const RowKernels& kernels = kernels_for(x, "scaled_sum");
  CHECK_VALUE(delta.sizes() == x.sizes() && delta.dtype() == x.dtype(), "scaled_sum: delta must be like x, ", x.sizes(),
              " of ", x.dtype(), ", got ", delta.sizes(), " of ", delta.dtype());
  CHECK_VALUE(scale.dim() == 1 && scale.size(0) == 1 && scale.dtype() == kFloat && scale.is_cpu(),
              "scaled_sum: scale must be [1] float32, got ", scale.sizes(), " of ", scale.dtype());
  const Rows from = rows_of(x, "scaled_sum", "x"), added = rows_of(delta, "scaled_sum", "delta");
  const int64_t rows = x.size(0), size = x.size(1);
  Tensor out = empty({rows, size}, x.dtype());
  const Rows to = rows_of(out, "scaled_sum", "out");
  const float factor = *scale.data<float>();
  for_rows(rows, size, [&](int64_t row) { kernels.scaled_sum(from[row], added[row], factor, to[row], size); });
  return out;
}

Tensor sigmoid_gated(const Tensor& x, const Tensor& gate) {
  const char* op = "sigmoid_gated";
  const RowKernels& kernels = kernels_for(x, op);
  const Rows from = rows_of(x, op, "x"), gates = rows_of(gate, op, "gate");
  const int64_t rows = x.size(0), size = x.size(1), columns = gate.size(1);
  CHECK_VALUE(gate.size(0) == rows && (columns == size || columns == 1) && gate.dtype() == x.dtype(), op,
              ": gate must be [", rows, ", ", size, "] or [", rows, ", 1] of ", x.dtype(), ", got ", gate.sizes(), " of ",
              gate.dtype());
  Tensor out = empty({rows, size}, x.dtype());
  const Rows to = rows_of(out, op, "out");
  for_rows(rows, 2 * size, [&](int64_t row) { kernels.sigmoid_gated(from[row], gates[row], columns, to[row], size); });
  return out;
}

// Chunk after chunk in double.
float log_of_sum(const float* sums, int64_t count) {
  double total = 0;
  for (int64_t i = 0; i < count; ++i) total += sums[i];
  return static_cast<float>(std::log(total));
}

std::tuple<Tensor, Tensor> log_sum_exp(const Tensor& logits) {
  const RowKernels& kernels = kernels_for(logits, "log_sum_exp");
  const Rows from = rows_of(logits, "log_sum_exp", "logits");
  const int64_t rows = logits.size(0), size = logits.size(1);
  Tensor peak = empty({rows}, kFloat), log_total = empty({rows}, kFloat);
  float *peaks = peak.data<float>(), *log_totals = log_total.data<float>();
  for_rows(rows, 2 * size, [&](int64_t row) {
    static thread_local std::vector<float> sums;
    sums.resize((size + kSumChunk - 1) / kSumChunk);
    peaks[row] = kernels.peak(from[row], size);
    kernels.sums_of_exp(from[row], size, peaks[row], sums.data());
    log_totals[row] = log_of_sum(sums.data(), sums.size());
  });
  return {std::move(peak), std::move(log_total)};
}

// How many of `size` elements from `first` on come before the next chunk.
int64_t before_chunk(int64_t first, int64_t size) { return std::min((kSumChunk - first % kSumChunk) % kSumChunk, size); }

// Of logits of which each rank has those of `width` tokens. A chunk that several ranks have parts of is added up by the first
// of them, which gets the others' parts.
std::tuple<Tensor, Tensor> log_sum_exp_of_ranks(const Tensor& own, const Tensor& place, const Tensor& memory, int64_t vocab_size) {
  const char* op = "log_sum_exp_of_ranks";
  const RowKernels& kernels = kernels_for(own, op);
  const Rows from = rows_of(own, op, "own");
  Exchange ranks(place, memory, op);
  const int64_t rows = own.size(0), width = own.size(1), bytes = bytes_of(own.dtype());
  CHECK_VALUE(width > 0 && vocab_size > 0 && vocab_size <= width * ranks.size, op,
              ": ranks must have all of the vocabulary, got ", width, " of ", vocab_size, " in each of ", ranks.size, " ranks");
  const auto size_of = [&](int64_t rank) { return std::clamp(vocab_size - rank * width, int64_t{0}, width); };
  const auto chunks_of = [&](int64_t rank) {  // that it adds up
    const int64_t size = size_of(rank);
    return (size - before_chunk(rank * width, size) + kSumChunk - 1) / kSumChunk;
  };
  const int64_t size = size_of(ranks.rank), lead = before_chunk(ranks.rank * width, size), chunks = chunks_of(ranks.rank);
  const int64_t most = std::min(kSumChunk, width), most_chunks = width / kSumChunk + 1;

  // The largest of all ranks, and the parts of chunks that begin in an earlier rank.
  Tensor peak = empty({rows}, kFloat), log_total = empty({rows}, kFloat);
  float *peaks = peak.data<float>(), *log_totals = log_total.data<float>();
  const int64_t told = 4 + most * bytes;  // of a row
  std::vector<char> mine(rows * told), all(ranks.size * rows * told);
  for_rows(rows, width, [&](int64_t row) {
    const float largest = kernels.peak(from[row], size);
    std::memcpy(mine.data() + row * told, &largest, 4);
    std::memcpy(mine.data() + row * told + 4, from[row], lead * bytes);
  });
  share(ranks, mine.data(), rows * told, all.data());
  const auto of = [&](int64_t rank, int64_t row) { return all.data() + (rank * rows + row) * told; };

  std::vector<float> sums(rows * most_chunks), of_all(ranks.size * rows * most_chunks);
  for_rows(rows, 2 * width, [&](int64_t row) {
    for (int64_t rank = 0; rank < ranks.size; ++rank) {
      float other;
      std::memcpy(&other, of(rank, row), 4);
      peaks[row] = rank == 0 || other > peaks[row] || std::isnan(other) ? other : peaks[row];
    }
    if (chunks == 0) return;
    const char* const begin = static_cast<const char*>(from[row]) + lead * bytes;
    const int64_t whole = (chunks - 1) * kSumChunk;
    kernels.sums_of_exp(begin, whole, peaks[row], sums.data() + row * most_chunks);
    alignas(64) char last[kSumChunk * 4];
    int64_t filled = size - lead - whole;
    std::memcpy(last, begin + whole * bytes, filled * bytes);
    for (int64_t rank = ranks.rank + 1; rank < ranks.size && filled < kSumChunk; ++rank) {
      const int64_t more = before_chunk(rank * width, size_of(rank));
      std::memcpy(last + filled * bytes, of(rank, row) + 4, more * bytes);
      filled += more;
    }
    kernels.sums_of_exp(last, filled, peaks[row], sums.data() + row * most_chunks + chunks - 1);
  });
  share(ranks, reinterpret_cast<const char*>(sums.data()), rows * most_chunks * 4, reinterpret_cast<char*>(of_all.data()));
  std::vector<float> in_order;
  for (int64_t row = 0; row < rows; ++row) {
    in_order.clear();
    for (int64_t rank = 0; rank < ranks.size; ++rank) {
      const auto first = of_all.begin() + (rank * rows + row) * most_chunks;
      in_order.insert(in_order.end(), first, first + chunks_of(rank));
    }
    log_totals[row] = log_of_sum(in_order.data(), in_order.size());
  }
  return {std::move(peak), std::move(log_total)};
}

// Copies `bytes`, a multiple of 64, to whole lines of memory, which are not read before and which the caches do not keep.
void stream(char* to, const char* from, int64_t bytes) {
#if defined(__SSE2__)
  for (int64_t i = 0; i < bytes; i += 16)
    _mm_stream_si128(reinterpret_cast<__m128i*>(to + i), _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i)));
#else
  std::memcpy(to, from, bytes);
#endif
}

// Rows of x, [T, D], go to their slots of a cache, [B, S, C], from a column on.
std::tuple<> write_slots(const Tensor& cache, const Tensor& slots, const Tensor& x, int64_t column) {
  constexpr auto* op = "write_slots";
  const Rows from = rows_of(x, op, "x");
  const int64_t rows = x.size(0), size = x.size(1);
  CHECK_VALUE(cache.dim() == 3 && cache.is_contiguous() && cache.is_cpu() && cache.dtype() == x.dtype() && column >= 0 &&
                  column + size <= cache.size(2),
              op, ": cache must be a contiguous [blocks, slots, ", column + size, "] or wider of ", x.dtype(),
              " on the CPU, got ", cache.sizes(), " of ", cache.dtype(), " on ", cache.place(), " and column ", column);
  CHECK_VALUE(slots.dim() == 1 && slots.size(0) == rows && slots.dtype() == kInt && slots.is_contiguous() && slots.is_cpu(),
              op, ": slots must be a contiguous [", rows, "] of int32 on the CPU, got ", slots.sizes(), " of ",
              slots.dtype(), " on ", slots.place());
  const auto* slot = slots.data<int32_t>();
  const int64_t count = cache.size(0) * cache.size(1), bytes = bytes_of(x.dtype());
  for (int64_t row = 0; row < rows; ++row)
    CHECK_INDEX(slot[row] >= 0 && slot[row] < count, op, ": slots[", row, "] is ", slot[row], ", and the cache has ", count);
  const Rows to = {cache.data<char>() + column * bytes, cache.size(2) * bytes};
  // What prompts leave is mostly read much later, if at all. 2,048 rows of 1.5 KB took 92 us in the place of 291.
  const bool streams = rows >= kStreamedRows && size > 0 && reinterpret_cast<uintptr_t>(to.data) % 64 == 0 && to.stride % 64 == 0 &&
                       size * bytes % 64 == 0;
  if (!streams) {
    for_rows(rows, size, [&](int64_t row) { std::memcpy(to[slot[row]], from[row], size * bytes); });
    return {};
  }
  parallel_for(0, rows, std::max<int64_t>(1, kGrain / size), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) stream(to[slot[row]], from[row], size * bytes);
#if defined(__SSE2__)
    _mm_sfence();
#endif
  });
  return {};
}

// Some rows of x, [T, D].
Tensor rows_at(const Tensor& x, const Tensor& indices) {
  constexpr auto* op = "rows_at";
  const Rows from = rows_of(x, op, "x");
  const int64_t count = x.size(0), size = x.size(1), bytes = size * bytes_of(x.dtype());
  CHECK_VALUE(indices.dim() == 1 && indices.dtype() == kInt && indices.is_contiguous() && indices.is_cpu(), op,
              ": indices must be a contiguous [rows] of int32 on the CPU, got ", indices.sizes(), " of ", indices.dtype(),
              " on ", indices.place());
  const int64_t rows = indices.size(0);
  const auto* index = indices.data<int32_t>();
  for (int64_t row = 0; row < rows; ++row)
    CHECK_INDEX(index[row] >= 0 && index[row] < count, op, ": indices[", row, "] is ", index[row], ", and x has ", count);
  Tensor out = empty({rows, size}, x.dtype());
  const Rows to = rows_of(out, op, "out");
  for_rows(rows, size, [&](int64_t row) { std::memcpy(to[row], from[index[row]], bytes); });
  return out;
}

const std::vector<Op> ops = {
    {"rms_norm", Boxed<rms_norm>::call, Boxed<rms_norm>::direct},
    {"add_rms_norm", Boxed<add_rms_norm>::call, Boxed<add_rms_norm>::direct},
    {"gated_rms_norm", Boxed<gated_rms_norm>::call, Boxed<gated_rms_norm>::direct},
    {"layer_norm", Boxed<layer_norm>::call, Boxed<layer_norm>::direct},
    {"add_layer_norm", Boxed<add_layer_norm>::call, Boxed<add_layer_norm>::direct},
    {"rope", Boxed<rope>::call, Boxed<rope>::direct},
    {"gated_activation", Boxed<gated_activation>::call, Boxed<gated_activation>::direct},
    {"activation", Boxed<activation>::call, Boxed<activation>::direct},
    {"clamped_swiglu", Boxed<clamped_swiglu>::call, Boxed<clamped_swiglu>::direct},
    {"soft_cap", Boxed<soft_cap>::call, Boxed<soft_cap>::direct},
    {"scaled_sum", Boxed<scaled_sum>::call, Boxed<scaled_sum>::direct},
    {"sigmoid_gated", Boxed<sigmoid_gated>::call, Boxed<sigmoid_gated>::direct},
    {"write_slots", Boxed<write_slots>::call, Boxed<write_slots>::direct},
    {"rows_at", Boxed<rows_at>::call, Boxed<rows_at>::direct},
    {"move_keys", Boxed<move_keys>::call, Boxed<move_keys>::direct},
    {"log_sum_exp", Boxed<log_sum_exp>::call, Boxed<log_sum_exp>::direct},
    {"log_sum_exp_of_ranks", Boxed<log_sum_exp_of_ranks>::call, Boxed<log_sum_exp_of_ranks>::direct},
    {"route", Boxed<route>::call, Boxed<route>::direct},
    {"expert_rows", Boxed<expert_rows>::call, Boxed<expert_rows>::direct},
    {"weighted_sum", Boxed<weighted_sum>::call, Boxed<weighted_sum>::direct},
};

}  // namespace
