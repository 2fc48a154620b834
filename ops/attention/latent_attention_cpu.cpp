// Latent attention on the CPU: the op of latent_attention.py, which says what it computes.
//
// It is paged attention (attention_cpu.cpp) of one KV head: the same tiles, partitions, units, items and softmax, so a
// token's output has the same bits whatever else is in the batch. A key has two parts, each in a cache of its own in the
// order of keys there, [H / W][S][W]: their products with the queries are added. The latents are kept once, as keys. A tile of
// them is transposed into the order of values when it is read, which many query heads share.

#include <algorithm>
#include <optional>
#include <tuple>
#include <vector>

#include "attention_cpu_work.h"
#include "latent_attention_cpu_types.h"

namespace {

void check(const Tensor& x, const char* name, Dtype expected, Shape shape) {
  CHECK_VALUE(x.sizes() == shape, name, " must have shape ", shape, ", got ", x.sizes());
  CHECK_VALUE(x.dtype() == expected, name, " must have dtype ", expected, ", got ", x.dtype());
  CHECK_VALUE(x.is_cpu(), name, " must be on the CPU, got ", x.place());
}

Tensor latent_attention(
    const Tensor& q_latent, const Tensor& q_turned, const Tensor& k_turned, const Tensor& latent, const Tensor& k_cache,
    const Tensor& v_cache, const std::optional<Tensor>& k_scale, const std::optional<Tensor>& v_scale,
    const Tensor& slot_mapping, const Tensor& block_table, const Tensor& query_start_loc, const Tensor& seq_lens,
    double sm_scale, int64_t max_query_len, int64_t window) {
  CHECK_VALUE(q_latent.dim() == 3 && q_turned.dim() == 3 && k_cache.dim() == 4,
              "q_latent must be [T, N, C], q_turned [T, N, H] and k_cache [B, 1, S, H], got ", q_latent.sizes(), ", ",
              q_turned.sizes(), " and ", k_cache.sizes());
  const int64_t tokens = q_latent.size(0), heads = q_latent.size(1), dim = q_latent.size(2), turned = q_turned.size(2);
  const int64_t blocks = k_cache.size(0), block_size = k_cache.size(2);
  const auto dtype = q_latent.dtype(), cache_dtype = k_cache.dtype();
  CHECK_VALUE(dtype == kFloat || dtype == kBFloat16 || dtype == kHalf,
              "q_latent must be float32, bfloat16 or float16, got ", dtype);
  const bool quantised = cache_dtype == kChar || cache_dtype == kFloat8;
  CHECK_VALUE(quantised || cache_dtype == dtype, "k_cache must have the dtype of q_latent, ", dtype,
              ", or be int8 or float8_e4m3fn, got ", cache_dtype);
  CHECK_VALUE(dim > 0 && turned > 0 && heads > 0 && block_size > 0, "sizes must be positive, got ", q_latent.sizes(),
              ", ", q_turned.sizes(), " and ", k_cache.sizes());
  CHECK_VALUE(dim <= 512 && turned <= 512, "latents and turned parts must have at most 512 elements, got ", dim, " and ",
              turned);  // integer sums fit 32 bits
  CHECK_VALUE(sm_scale > 0, "sm_scale must be positive, got ", sm_scale);
  CHECK_VALUE(window >= 0, "window must be 0 or positive, got ", window);
  check(q_turned, "q_turned", dtype, {tokens, heads, turned});
  check(k_turned, "k_turned", dtype, {tokens, 1, turned});
  check(latent, "latent", dtype, {tokens, 1, dim});
  for (const auto& [x, name] : {std::tuple{&q_latent, "q_latent"}, {&q_turned, "q_turned"}, {&k_turned, "k_turned"},
                                {&latent, "latent"}})
    CHECK_VALUE(x->stride(2) == 1 || x->size(2) == 1, "the last stride of ", name, " must be 1, got ", x->strides());
  for (const auto& [x, name, size] : {std::tuple{&k_cache, "k_cache", turned}, {&v_cache, "v_cache", dim}}) {
    check(*x, name, cache_dtype, {blocks, 1, block_size, size});
    CHECK_VALUE(x->is_contiguous(), name, " must be contiguous, got strides ", x->strides());
  }
  for (const auto& [x, name] : {std::tuple{&k_scale, "k_scale"}, {&v_scale, "v_scale"}}) {
    CHECK_VALUE(x->has_value() == quantised, name, quantised ? " is needed" : " must be None", " for a cache of ",
                cache_dtype);
    if (!quantised) continue;
    check(**x, name, kFloat, {blocks, 1, block_size});
    CHECK_VALUE((*x)->is_contiguous(), name, " must be contiguous, got strides ", (*x)->strides());
  }
  CHECK_VALUE(block_table.dim() == 2, "block_table must be [R, M], got ", block_table.sizes());
  const int64_t requests = block_table.size(0), width = block_table.size(1);

  Tensor out = empty({tokens, heads, dim}, dtype);
  const LatentProblem p{
      {q_latent.data(), k_turned.data(), latent.data(), k_cache.data(), v_cache.data(), out.data(),
       quantised ? k_scale->data<float>() : nullptr, quantised ? v_scale->data<float>() : nullptr, nullptr,
       int32_data(slot_mapping, "slot_mapping", {tokens}), int32_data(block_table, "block_table", {requests, width}),
       int32_data(query_start_loc, "query_start_loc", {requests + 1}), int32_data(seq_lens, "seq_lens", {requests}),
       nullptr,
       q_latent.stride(0), q_latent.stride(1), k_turned.stride(0), k_turned.stride(1), latent.stride(0), latent.stride(1),
       tokens, requests, heads, 1, heads, dim, block_size, width, std::min<int64_t>(window, int64_t{1} << 40),
       static_cast<float>(sm_scale), 0.f},
      q_turned.data(), q_turned.stride(0), q_turned.stride(1), turned};
  check_indices(p, blocks);
  clear_padding(p, bytes_of(dtype));
  const int64_t by_q = dtype == kFloat ? 0 : dtype == kBFloat16 ? 1 : 2;
  const int64_t by_cache = !quantised ? 0 : cache_dtype == kChar ? 1 : 2;
  const PairKernels& kernels = chosen().of[by_q][by_cache];
  write_cache(p, kernels);
  attend(p, kernels, bytes_of(dtype));
  return out;
}

const std::vector<Op> ops = {{"latent_attention", Boxed<latent_attention>::call, Boxed<latent_attention>::direct}};

}  // namespace
