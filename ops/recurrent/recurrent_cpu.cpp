// Layers with a state of a fixed size on the CPU: the ops of short_convolution.py, gated_delta_rule.py and
// mamba2_scan.py, which say what they compute.
//
// A request's tokens are computed one after the other, in one order of operations, whatever the chunk; and an item of work
// is a request's head, or some columns, rows or channels that do not depend on the others. So a token's bits depend on nothing
// but the tokens before it.

#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "recurrent_cpu_types.h"
#include "../cpu/op.h"

namespace {

using OptionalTensor = std::optional<Tensor>;

constexpr int64_t kGrain = 1 << 15;  // elements: with fewer, waking a thread takes longer than the work

void check(const char* op, const Tensor& x, const char* name, Dtype dtype, Shape shape) {
  CHECK_VALUE(x.sizes() == shape && x.dtype() == dtype && x.is_cpu(), op, ": ", name, " must be ", shape, " of ", dtype,
              " on the CPU, got ", x.sizes(), " of ", x.dtype(), " on ", x.place());
}

void check_contiguous(const char* op, const Tensor& x, const char* name, Dtype dtype, Shape shape) {
  check(op, x, name, dtype, shape);
  CHECK_VALUE(x.is_contiguous(), op, ": ", name, " must be contiguous, got strides ", x.strides());
}

// Slots that are contiguous each, and may be apart.
void check_slots(const char* op, const Tensor& x, Dtype dtype, Shape shape) {
  check(op, x, "state", dtype, shape);
  CHECK_VALUE(x.has_contiguous_rows(), op, ": state must have contiguous slots, got strides ", x.strides());
}

// [T, heads, size], or [T, heads] for size 1.
Heads heads_of(const char* op, const Tensor& x, const char* name, Dtype dtype, Shape shape) {
  check(op, x, name, dtype, shape);
  const int64_t last = shape.dim - 1;
  CHECK_VALUE(x.stride(last) == 1 || shape.values[last] == 1, op, ": the last stride of ", name, " must be 1, got strides ",
              x.strides());
  return {x.data(), x.stride(0), x.stride(1)};
}

const RecurrentKernels& kernels_for(const char* op, const Tensor& x) {
  const auto dtype = x.dtype();
  CHECK_VALUE(dtype == kFloat || dtype == kBFloat16 || dtype == kHalf, op,
              ": dtype must be float32, bfloat16 or float16, got ", dtype);
  const Kernels& all = chosen();
  return dtype == kFloat ? all.float32 : dtype == kBFloat16 ? all.bfloat16 : all.float16;
}

// IndexError for what would read or write the memory of others.
StepRows rows_of(const char* op, int64_t tokens, int64_t slots, const Tensor& query_start_loc, const Tensor& seq_lens,
                 const Tensor& read_slot, const Tensor& write_slot, const Tensor& write_after) {
  CHECK_VALUE(seq_lens.dim() == 1 && write_slot.dim() == 2, op, ": seq_lens must be [R] and write_slot [R, W], got ",
              seq_lens.sizes(), " and ", write_slot.sizes());
  const int64_t requests = seq_lens.size(0), writes = write_slot.size(1);
  check_contiguous(op, query_start_loc, "query_start_loc", kInt, {requests + 1});
  check_contiguous(op, seq_lens, "seq_lens", kInt, {requests});
  check_contiguous(op, read_slot, "read_slot", kInt, {requests});
  check_contiguous(op, write_slot, "write_slot", kInt, {requests, writes});
  check_contiguous(op, write_after, "write_after", kInt, {requests, writes});
  const StepRows rows{query_start_loc.data<const int32_t>(), seq_lens.data<const int32_t>(), read_slot.data<const int32_t>(),
                      write_slot.data<const int32_t>(), write_after.data<const int32_t>(), requests, tokens, slots, writes};
  CHECK_INDEX(rows.starts[0] == 0 && rows.starts[requests] <= tokens, op,
              ": query_start_loc must start at 0 and end at or below ", tokens, ", got ", rows.starts[0], " and ",
              rows.starts[requests]);
  for (int64_t r = 0; r < requests; ++r) {
    const int64_t own = rows.starts[r + 1] - rows.starts[r], all = rows.seq_lens[r];
    CHECK_INDEX(own >= 0 && (all == 0 || own <= all), op, ": request ", r, " has ", own, " tokens in this step and ", all,
                " in all");
    if (all == 0 || own == 0) continue;
    CHECK_INDEX(rows.from_zeros(r) || (rows.read_slot[r] >= 0 && rows.read_slot[r] < slots), op, ": read_slot[", r, "] is ",
                rows.read_slot[r], ", outside the ", slots, " slots");
    for (int64_t w = 0; w < writes; ++w) {
      const int64_t after = rows.write_after[r * writes + w], slot = rows.slot(r, w);
      CHECK_INDEX(after >= 0 && after <= own, op, ": write_after[", r, ", ", w, "] is ", after, ", but request ", r, " has ",
                  own, " tokens in this step");
      CHECK_INDEX(after == 0 || (slot >= 0 && slot < slots), op, ": write_slot[", r, ", ", w, "] is ", slot, ", outside the ",
                  slots, " slots");
    }
  }
  return rows;
}

// Zeros in the output rows of requests that are padding, and in those after the last request.
void clear_padding(const StepRows& rows, const Tensor& out, int64_t row_bytes) {
  const auto clear = [&](int64_t begin, int64_t end) {
    if (end > begin) std::memset(out.data<char>() + begin * row_bytes, 0, (end - begin) * row_bytes);
  };
  for (int64_t r = 0; r < rows.requests; ++r)
    if (rows.seq_lens[r] == 0) clear(rows.starts[r], rows.starts[r + 1]);
  clear(rows.starts[rows.requests], rows.tokens);
}

// The first address from `x` on where a cache line begins.
float* line_of(float* x) { return reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(x) + 63) / 64 * 64); }

// work(request, head, begin, end, scratch) for each request with tokens and each head: for all blocks of a head, or for one
// where there are few heads.
template <class Problem, class Work>
void for_heads(const Problem& p, int64_t heads, const Work& work) {
  const int64_t blocks = p.blocks(), pairs = p.rows.requests * heads;
  const int64_t parts = pairs < 4 * num_threads() ? blocks : 1, size = blocks / parts;
  parallel_for(0, pairs * parts, 1, [&](int64_t begin, int64_t end) {
    const std::unique_ptr<float[]> memory(new float[p.scratch(size) + kLanes]);
    float* const scratch = line_of(memory.get());
    for (int64_t item = begin; item < end; ++item) {
      const int64_t r = item / parts / heads, head = item / parts % heads, part = item % parts;
      if (p.rows.length(r) > 0) work(r, head, part * size, (part + 1) * size, scratch);
    }
  });
}

Tensor short_convolution(const Tensor& x, const Tensor& weight, const OptionalTensor& bias, const Tensor& state,
                         const Tensor& query_start_loc, const Tensor& seq_lens, const Tensor& read_slot,
                         const Tensor& write_slot, const Tensor& write_after, const OptionalTensor& gate_before,
                         const OptionalTensor& gate_after, bool silu) {
  const char* op = "short_convolution";
  const RecurrentKernels& kernels = kernels_for(op, x);
  CHECK_VALUE(x.dim() == 2 && weight.dim() == 2 && state.dim() == 3, op,
              ": x must be [T, C], weight [C, width] and state [slots, width - 1, C], got ", x.sizes(), ", ", weight.sizes(),
              " and ", state.sizes());
  const int64_t tokens = x.size(0), channels = x.size(1), width = weight.size(1), slots = state.size(0);
  const auto dtype = x.dtype();
  CHECK_VALUE(width >= 2 && width <= kMostWidth, op, ": width must be from 2 to ", kMostWidth, ", got ", width);
  check_contiguous(op, weight, "weight", dtype, {channels, width});
  check_slots(op, state, dtype, {slots, width - 1, channels});
  if (bias) check_contiguous(op, *bias, "bias", dtype, {channels});
  heads_of(op, x, "x", dtype, {tokens, channels});
  for (const auto& [gate, name] : {std::pair{&gate_before, "gate_before"}, {&gate_after, "gate_after"}})
    if (*gate) heads_of(op, **gate, name, dtype, {tokens, channels});
  const StepRows rows = rows_of(op, tokens, slots, query_start_loc, seq_lens, read_slot, write_slot, write_after);
  Tensor out = empty({tokens, channels}, dtype);
  clear_padding(rows, out, channels * bytes_of(dtype));
  const Convolution p{rows, x.data(), gate_before ? gate_before->data() : nullptr, gate_after ? gate_after->data() : nullptr,
                      x.stride(0), gate_before ? gate_before->stride(0) : 0, gate_after ? gate_after->stride(0) : 0,
                      weight.data(), bias ? bias->data() : nullptr, state.data(), out.data(), state.stride(0),
                      channels, width, silu};
  // An item is a request's channels; those of one block follow each other, which turn its weights once.
  const int64_t blocks = ceil_div(channels, kChannels), requests = rows.requests;
  const int64_t grain = std::max<int64_t>(1, kGrain * blocks * requests / std::max<int64_t>(1, tokens * channels * width));
  parallel_for(0, blocks * requests, grain, [&](int64_t begin, int64_t end) {
    while (begin < end) {
      const int64_t block = begin / requests, stop = std::min(end, (block + 1) * requests);
      kernels.convolution(p, block * kChannels, begin - block * requests, stop - block * requests);
      begin = stop;
    }
  });
  return out;
}

Tensor gated_delta_rule(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& a, const Tensor& b,
                        const Tensor& a_log, const Tensor& dt_bias, const Tensor& state, const Tensor& query_start_loc,
                        const Tensor& seq_lens, const Tensor& read_slot, const Tensor& write_slot, const Tensor& write_after,
                        double eps, int64_t) {
  const char* op = "gated_delta_rule";
  const RecurrentKernels& kernels = kernels_for(op, q);
  CHECK_VALUE(q.dim() == 3 && v.dim() == 3 && state.dim() == 4, op,
              ": q must be [T, HK, dk], v [T, HV, dv] and state [slots, HV, dk, dv], got ", q.sizes(), ", ", v.sizes(), " and ",
              state.sizes());
  const int64_t tokens = q.size(0), key_heads = q.size(1), dk = q.size(2), heads = v.size(1), dv = v.size(2);
  const int64_t slots = state.size(0);
  const auto dtype = q.dtype();
  CHECK_VALUE(key_heads > 0 && heads > 0 && heads % key_heads == 0 && dk > 0 && dv > 0, op,
              ": the number of value heads must be a multiple of that of key heads, got ", heads, " and ", key_heads);
  check_slots(op, state, kFloat, {slots, heads, dk, dv});
  check_contiguous(op, a_log, "A_log", kFloat, {heads});
  check_contiguous(op, dt_bias, "dt_bias", kFloat, {heads});
  const Heads qs = heads_of(op, q, "q", dtype, {tokens, key_heads, dk}), ks = heads_of(op, k, "k", dtype, {tokens, key_heads, dk});
  const Heads vs = heads_of(op, v, "v", dtype, {tokens, heads, dv});
  const Heads as = heads_of(op, a, "a", dtype, {tokens, heads}), bs = heads_of(op, b, "b", dtype, {tokens, heads});
  const StepRows rows = rows_of(op, tokens, slots, query_start_loc, seq_lens, read_slot, write_slot, write_after);
  Tensor out = empty({tokens, heads, dv}, dtype);
  clear_padding(rows, out, heads * dv * bytes_of(dtype));
  const GatedDelta p{rows, qs, ks, vs, as, bs, a_log.data<const float>(), dt_bias.data<const float>(), state.data<float>(),
                     out.data(), state.stride(0), key_heads, heads, dk, dv, static_cast<float>(eps)};
  const int64_t pairs = rows.requests * heads;
  for_heads(p, heads, [&](int64_t r, int64_t head, int64_t begin, int64_t end, float* scratch) {
    // What the next item reads, if it is this request's next head or the next request's first.
    const int64_t item = r * heads + head + 1, next = item / heads;
    const bool reads = begin == 0 && end == p.blocks() && item < pairs && rows.length(next) > 0 && !rows.from_zeros(next);
    kernels.gated_delta(p, r, head, begin, end, reads ? p.at(rows.read_slot[next], item % heads) : nullptr, scratch);
  });
  return out;
}

Tensor mamba2_scan(const Tensor& x, const Tensor& dt, const Tensor& b, const Tensor& c, const Tensor& a_log, const Tensor& d,
                   const Tensor& dt_bias, const Tensor& state, const Tensor& query_start_loc, const Tensor& seq_lens,
                   const Tensor& read_slot, const Tensor& write_slot, const Tensor& write_after, double dt_min, double dt_max,
                   int64_t) {
  const char* op = "mamba2_scan";
  const RecurrentKernels& kernels = kernels_for(op, x);
  CHECK_VALUE(x.dim() == 3 && b.dim() == 3 && state.dim() == 4, op,
              ": x must be [T, H, P], B [T, G, N] and state [slots, H, P, N], got ", x.sizes(), ", ", b.sizes(), " and ",
              state.sizes());
  const int64_t tokens = x.size(0), heads = x.size(1), head_dim = x.size(2), groups = b.size(1), size = b.size(2);
  const int64_t slots = state.size(0);
  const auto dtype = x.dtype();
  CHECK_VALUE(groups > 0 && heads > 0 && heads % groups == 0 && head_dim > 0 && size > 0, op,
              ": the number of heads must be a multiple of that of groups, got ", heads, " and ", groups);
  CHECK_VALUE(dt_min <= dt_max, op, ": dt_min must be at most dt_max, got ", dt_min, " and ", dt_max);
  check_slots(op, state, kFloat, {slots, heads, head_dim, size});
  for (const auto& [of_heads, name] : {std::pair{&a_log, "A_log"}, {&d, "D"}, {&dt_bias, "dt_bias"}})
    check_contiguous(op, *of_heads, name, kFloat, {heads});
  const Heads xs = heads_of(op, x, "x", dtype, {tokens, heads, head_dim}), dts = heads_of(op, dt, "dt", dtype, {tokens, heads});
  const Heads bs = heads_of(op, b, "B", dtype, {tokens, groups, size}), cs = heads_of(op, c, "C", dtype, {tokens, groups, size});
  const StepRows rows = rows_of(op, tokens, slots, query_start_loc, seq_lens, read_slot, write_slot, write_after);
  Tensor out = empty({tokens, heads, head_dim}, dtype);
  clear_padding(rows, out, heads * head_dim * bytes_of(dtype));
  const std::vector<float> zeros(size + kLanes);
  const Mamba2 p{rows, xs, dts, bs, cs, a_log.data<const float>(), d.data<const float>(), dt_bias.data<const float>(),
                 zeros.data(), state.data<float>(), out.data(), state.stride(0), heads, head_dim, groups, size,
                 static_cast<float>(dt_min), static_cast<float>(dt_max)};
  for_heads(p, heads, [&](int64_t r, int64_t head, int64_t begin, int64_t end, float* scratch) {
    kernels.mamba2(p, r, head, begin, end, scratch);
  });
  return out;
}

const std::vector<Op> ops = {
    {"short_convolution", Boxed<short_convolution>::call, Boxed<short_convolution>::direct},
    {"gated_delta_rule", Boxed<gated_delta_rule>::call, Boxed<gated_delta_rule>::direct},
    {"mamba2_scan", Boxed<mamba2_scan>::call, Boxed<mamba2_scan>::direct},
};

}  // namespace
