// Latent attention on the CPU: the op of latent_attention.py, which says what it computes.
//
// It is paged attention (attention_cpu.cpp) of one KV head: the same tiles, partitions, units, items and softmax, so a
// token's output has the same bits whatever else is in the batch. A key has two parts, each in a cache of its own in the
// order of keys there, [H / W][S][W]: their products with the queries are added. The latents are kept once, as keys. A tile of
// them is transposed into the order of values when it is read, which many query heads share.

#include <algorithm>
#include <optional>
#include <vector>

#include "attention_cpu_work.h"
#include "latent_attention_cpu_types.h"

namespace {

Tensor latent_attention(
    const Tensor& q_latent, const Tensor& q_turned, const Tensor& k_turned, const Tensor& latent, const Tensor& k_cache,
    const Tensor& v_cache, const std::optional<Tensor>& k_scale, const std::optional<Tensor>& v_scale,
    const Tensor& slot_mapping, const Tensor& block_table, const Tensor& query_start_loc, const Tensor& seq_lens,
    double sm_scale, int64_t max_query_len, int64_t window, const std::optional<Tensor>& ancestors) {
  CHECK_VALUE(q_latent.dim() == 3 && q_turned.dim() == 3 && k_cache.dim() == 4,
              "q_latent must be [T, N, C], q_turned [T, N, H] and k_cache [B, 1, S, H], got ", q_latent.sizes(), ", ",
              q_turned.sizes(), " and ", k_cache.sizes());
  const int64_t tokens = q_latent.size(0), heads = q_latent.size(1), dim = q_latent.size(2), turned = q_turned.size(2);
  const int64_t blocks = k_cache.size(0), block_size = k_cache.size(2);
  CHECK_VALUE(dim > 0 && turned > 0 && heads > 0 && block_size > 0, "sizes must be positive, got ", q_latent.sizes(),
              ", ", q_turned.sizes(), " and ", k_cache.sizes());
  CHECK_VALUE(dim <= 512 && turned <= 512, "latents and turned parts must have at most 512 elements, got ", dim, " and ",
              turned);  // integer sums fit 32 bits
  CHECK_VALUE(sm_scale > 0, "sm_scale must be positive, got ", sm_scale);
  CHECK_VALUE(window >= 0, "window must be 0 or positive, got ", window);
  const auto dtype = q_latent.dtype();
  check_queries("q_latent", dtype);
  check_rows(q_latent, "q_latent", dtype, {tokens, heads, dim});
  check_rows(q_turned, "q_turned", dtype, {tokens, heads, turned});
  check_rows(k_turned, "k_turned", dtype, {tokens, 1, turned});
  check_rows(latent, "latent", dtype, {tokens, 1, dim});
  if (ancestors.has_value()) check_contiguous(*ancestors, "ancestors", kLong, {tokens});
  const bool quantised = check_caches(dtype, k_cache, v_cache, k_scale, v_scale, 1, turned, dim);
  CHECK_VALUE(block_table.dim() == 2, "block_table must be [R, M], got ", block_table.sizes());
  const int64_t requests = block_table.size(0), width = block_table.size(1);

  Tensor out = empty({tokens, heads, dim}, dtype);
  const LatentProblem p{
      {q_latent.data(), k_turned.data(), latent.data(), k_cache.data(), v_cache.data(), out.data(),
       quantised ? k_scale->data<float>() : nullptr, quantised ? v_scale->data<float>() : nullptr, nullptr,
       int32_data(slot_mapping, "slot_mapping", {tokens}), int32_data(block_table, "block_table", {requests, width}),
       int32_data(query_start_loc, "query_start_loc", {requests + 1}), int32_data(seq_lens, "seq_lens", {requests}),
       ancestors.has_value() ? ancestors->data<const int64_t>() : nullptr,
       q_latent.stride(0), q_latent.stride(1), k_turned.stride(0), k_turned.stride(1), latent.stride(0), latent.stride(1),
       tokens, requests, heads, 1, heads, dim, block_size, width, v_cache.stride(0),
       quantised ? k_scale->stride(0) : 0, std::min<int64_t>(window, int64_t{1} << 40), static_cast<float>(sm_scale), 0.f},
      q_turned.data(), q_turned.stride(0), q_turned.stride(1), turned, k_cache.stride(0)};
  run(p, chosen(), blocks, dtype, k_cache.dtype());
  return out;
}

const std::vector<Op> ops = {{"latent_attention", Boxed<latent_attention>::call, Boxed<latent_attention>::direct}};

}  // namespace
