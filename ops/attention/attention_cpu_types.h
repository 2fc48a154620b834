// One call of the op and the pieces that it is cut into, for attention_cpu.cpp, which explains them.

#pragma once

#include <bit>
#include <type_traits>
#include <vector>

#include "../cpu/vector_types.h"

namespace {

constexpr int64_t kPartition = 512;  // keys
constexpr int64_t kUnitRows = 96;    // approximate query rows (tokens times heads) of a unit
// The rows of a unit with tile registers, and how many of them are multiplied at a time.
constexpr int64_t kTiledUnitRows = 256, kTiledRows = 32;
constexpr float kSmallestMaximum = 0x1p-100f;  // as in kv_quant.py

// More vectors that may be stored at any address.
typedef long long LongVec __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint16_t ShortVec __attribute__((vector_size(64), aligned(1), may_alias));
typedef uint8_t ByteVec __attribute__((vector_size(16), aligned(1), may_alias));
typedef uint8_t ByteVec32 __attribute__((vector_size(32), aligned(1), may_alias));

struct Fp8 {  // float8_e4m3fn
  uint8_t code;
};

// Neighbouring elements in the cache: W in attention_cpu.cpp, and cache_width in move_keys_cpu.h.
template <class C>
constexpr int64_t kCacheWidth =
    std::is_same_v<C, int8_t> ? 4 : std::is_same_v<C, BFloat16> || std::is_same_v<C, Fp8> ? 2 : 1;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// One call of the op. Strides are in elements.
struct Problem {
  const void *q, *k, *v;
  void *k_cache, *v_cache, *out;
  float *k_scale, *v_scale;  // null unless the cache is quantised
  const float* sinks;        // may be null
  const int32_t *slots, *table, *starts, *seq_lens;
  const int64_t* ancestors;  // may be null
  int64_t q_token, q_head, k_token, k_head, v_token, v_head;
  int64_t tokens, requests, heads, kv_heads, group, head_dim, block_size, table_width;
  int64_t block_stride, scale_stride;  // from a block to the next, of the cache and of its scales
  int64_t window;
  float sm_scale, soft_cap;

  int64_t padded_dim() const { return ceil_div(head_dim, kLanes) * kLanes; }
  bool in_runs() const { return block_size % kLanes == 0 && head_dim % kLanes == 0; }
  template <class C>
  int64_t key_width() const { return head_dim % kCacheWidth<C> == 0 ? kCacheWidth<C> : 1; }
  template <class C>
  int64_t value_width() const { return block_size % kCacheWidth<C> == 0 ? kCacheWidth<C> : 1; }
  // Where the rows of a block and KV head begin in the cache, and where their scales do.
  int64_t rows(int64_t block, int64_t kv_head) const { return block * block_stride + kv_head * block_size * head_dim; }
  int64_t scales(int64_t block, int64_t kv_head) const { return block * scale_stride + kv_head * block_size; }
  int64_t queries(int64_t request) const { return starts[request + 1] - starts[request]; }
  int64_t context(int64_t request) const { return seq_lens[request] - queries(request); }
  uint64_t nodes_seen(int64_t request, int64_t token) const { return ancestors[starts[request] + token]; }
  // Whether a request's rows are a tree. One whose last row sees all others is a chain, as rows without masks are.
  bool is_tree(int64_t request) const {
    const int64_t count = queries(request);
    return ancestors != nullptr && count > 0 && nodes_seen(request, 0) != 0 &&
           std::popcount(nodes_seen(request, count - 1)) < count;
  }
  // The keys that a row sees before its own.
  int64_t position(int64_t request, int64_t token, bool tree) const {
    return context(request) + (tree ? std::popcount(nodes_seen(request, token)) - 1 : token);
  }
};

struct Unit {
  int64_t request, kv_head, first_token, tokens;  // first_token counts from the request's first
  int64_t first_key, keys;                        // that its tokens see: from the one to before the other
  int64_t shared = 0;                             // partitions that are taken together with other requests
  int64_t state = -1;                             // where the states of its partitions begin, if they are kept

  int64_t first_partition() const { return first_key / kPartition; }
  int64_t rows(const Problem& p) const { return tokens * p.group; }
  int64_t room(const Problem& p) const { return ceil_div(rows(p), kLanes) * kLanes; }  // in memory
  int64_t last_partition() const { return ceil_div(keys, kPartition); }  // one past it
  int64_t partitions() const { return last_partition() - first_partition(); }
};

// A range of partitions, of one unit or of several that share them.
struct Item {
  const Unit* const* units;
  int64_t count, first_partition, last_partition;
};

// The softmax state of some rows over a range of keys: the maximum of the scores, the sum of exp2(score - maximum), and
// the values weighted by the same.
struct State {
  float *values, *maximum, *sum;

  static int64_t size(int64_t rows, int64_t padded_dim) { return ceil_div(rows * (padded_dim + 2), kLanes) * kLanes; }
  State(float* memory, int64_t rows, int64_t padded_dim)
      : values(memory), maximum(memory + rows * padded_dim), sum(maximum + rows) {}
};

// A thread's scratch memory, kept between calls.
float* scratch(int64_t floats) {
  thread_local std::vector<float> memory;
  if (static_cast<int64_t>(memory.size()) < floats + 16) memory.resize(floats + 16);
  return reinterpret_cast<float*>(ceil_div(reinterpret_cast<intptr_t>(memory.data()), 64) * 64);
}

// For one dtype of the queries and one of the cache.
struct PairKernels {
  void (*write)(const Problem&, int64_t begin, int64_t end);  // tokens
  void (*attend)(const Problem&, const Item&, float* states);
  void (*merge)(const Problem&, const Unit&, const float* states);
  int64_t unit_rows;
};

// The kernels of an instruction set, by the dtype of the queries (float32, bfloat16, float16) and of the cache (the same,
// int8, fp8).
struct Kernels {
  PairKernels of[3][3];
};

}  // namespace
