// Paged attention on the CPU: the op of paged_attention.py, which says what it computes.
//
// The keys are cut by their positions alone, never by the batch, the chunks of a prompt or the number of threads. So the
// output of a token, of finite keys and values, has the same bits whatever else is in the batch:
//
//   tile       128 keys, with tile registers 256. Scores and values of a tile are two small matrix products, with the
//              online softmax between them.
//   partition  512 keys. Has its own softmax state (maximum, sum, weighted values), which starts at zero.
//   unit       some query tokens of one request times the query heads of one KV head, so a key is read once for all of
//              them. Its result is the states of its partitions, folded in the order of their positions.
//
// A decode is a unit with one token, a prefill one with many (max_query_len is not used here); both sum in the same order.
// A thread computes an item, a range of a unit's partitions. A unit that is one item is folded on the way; if a unit is cut
// into several items, their states are kept and folded afterwards. Where the tables of several requests start with the same
// blocks, an item has the rows of all of them for one partition of these blocks, so a shared prefix is read once for all.
//
// The products take one vector of 16 keys, or of 16 columns of values, at a time, and 32 bits of each: a float, two bf16,
// two fp8 or four int8 that are neighbours along the summed dimension; W below is their number. So that nothing has to
// be transposed or interleaved when it is read, a block of one KV head is kept in the cache as
//
//   keys    [H / W][S][W]      values  [S / W][H][W]
//
// (W is 1 where it does not divide H, or S.) In blocks of whole vectors (S and H multiples of 16) bf16, float and int8 are
// multiplied in place, and fp8, or bf16 without the instruction for it, converted a tile at a time. Other shapes are
// copied element by element, slowly. Rows past a request's length or before its window may have anything in memory, even
// NaN, so they are kept out of all sums: their scores are replaced and floating-point values made zero.
//
// Rows that are a tree see the keys of their own path alone. What a tile holds follows from positions, so a tile that has
// nodes of a tree is made for each branch, with its keys where a chain of them has them: a row has the bits that it has
// in that chain. The tiles before are those of all rows.
//
// Int8 keys and values are multiplied as integers, exactly, with queries and weights in 16 bits.
//
// The kernels (attention_cpu_kernels.h) are compiled for each instruction set. AMX (attention_cpu_amx.h) multiplies lanes
// as the cache has them, one query row or many by the same instruction.

#include <algorithm>
#include <optional>
#include <vector>

#include "attention_cpu_work.h"

namespace {

Tensor paged_attention(
    const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& k_cache,
    const Tensor& v_cache, const std::optional<Tensor>& k_scale, const std::optional<Tensor>& v_scale,
    const Tensor& slot_mapping, const Tensor& block_table, const Tensor& query_start_loc,
    const Tensor& seq_lens, const std::optional<Tensor>& sinks, double sm_scale, int64_t max_query_len,
    int64_t window, double soft_cap, const std::optional<Tensor>& ancestors) {
  CHECK_VALUE(q.dim() == 3 && k_cache.dim() == 4, "q must be [T, N, H] and k_cache [B, K, S, H], got ", q.sizes(),
              " and ", k_cache.sizes());
  const int64_t tokens = q.size(0), heads = q.size(1), head_dim = q.size(2);
  const int64_t blocks = k_cache.size(0), kv_heads = k_cache.size(1), block_size = k_cache.size(2);
  CHECK_VALUE(head_dim > 0 && block_size > 0 && kv_heads > 0 && heads > 0 && heads % kv_heads == 0,
              "the number of query heads must be a multiple of the number of KV heads, got ", heads, " and ",
              kv_heads);
  CHECK_VALUE(head_dim <= 512, "head_dim must be at most 512, got ", head_dim);  // integer sums fit 32 bits
  CHECK_VALUE(sm_scale > 0, "sm_scale must be positive, got ", sm_scale);
  CHECK_VALUE(window >= 0 && soft_cap >= 0, "window and soft_cap must be 0 or positive, got ", window, " and ",
              soft_cap);
  const auto dtype = q.dtype();
  check_queries("q", dtype);
  check_rows(q, "q", dtype, {tokens, heads, head_dim});
  check_rows(k, "k", dtype, {tokens, kv_heads, head_dim});
  check_rows(v, "v", dtype, {tokens, kv_heads, head_dim});
  if (sinks.has_value()) check_contiguous(*sinks, "sinks", kFloat, {heads});
  if (ancestors.has_value()) check_contiguous(*ancestors, "ancestors", kLong, {tokens});
  const bool quantised = check_caches(dtype, k_cache, v_cache, k_scale, v_scale, kv_heads, head_dim, head_dim);
  check_same_strides(k_cache, "k_cache", v_cache, "v_cache");
  CHECK_VALUE(block_table.dim() == 2, "block_table must be [R, M], got ", block_table.sizes());
  const int64_t requests = block_table.size(0), width = block_table.size(1);

  Tensor out = empty({tokens, heads, head_dim}, q.dtype());
  const Problem p{
      q.data(), k.data(), v.data(),
      k_cache.data(), v_cache.data(), out.data(),
      quantised ? k_scale->data<float>() : nullptr, quantised ? v_scale->data<float>() : nullptr,
      sinks.has_value() ? sinks->data<float>() : nullptr,
      int32_data(slot_mapping, "slot_mapping", {tokens}), int32_data(block_table, "block_table", {requests, width}),
      int32_data(query_start_loc, "query_start_loc", {requests + 1}), int32_data(seq_lens, "seq_lens", {requests}),
      ancestors.has_value() ? ancestors->data<const int64_t>() : nullptr,
      q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
      tokens, requests, heads, kv_heads, heads / kv_heads, head_dim, block_size, width,
      k_cache.stride(0), quantised ? k_scale->stride(0) : 0, std::min<int64_t>(window, int64_t{1} << 40),
      static_cast<float>(sm_scale), static_cast<float>(soft_cap)};

  run(p, chosen(), blocks, dtype, k_cache.dtype());
  return out;
}

const std::vector<Op> ops = {{"paged_attention", Boxed<paged_attention>::call, Boxed<paged_attention>::direct}};

}  // namespace
