// Paged attention on the CPU: the kernel behind ops/attention/paged_attention.py, which states what it computes.
//
// The keys are cut by their positions alone, never by the batch, the way a prompt was chunked or the number of threads.
// So the output of a token, of finite keys and values, is bitwise the same whatever runs beside it:
//
//   tile       128 keys, with tile registers 256. Scores and values of a tile are two small matrix products, with the
//              online softmax between them.
//   partition  512 keys. Has its own softmax state (maximum, sum, weighted values), started from nothing.
//   unit       some query tokens of one request times the query heads of one KV head, so a key is read once for all of
//              them. Its result is the states of its partitions, folded in the order of their positions.
//
// Decode is a unit with one token, prefill one with many (max_query_len is of no use here); both sum in the same order. A
// thread takes an item, a range of a unit's partitions. A unit that is one item folds as it goes; the states of one cut
// into several are kept and folded afterwards. Where the tables of several requests begin with the same blocks, an item
// takes the rows of all of them through a partition of these blocks, so a shared prefix is read once for all.
//
// The products take one vector of 16 keys, or of 16 columns of values, at a time, and 32 bits of each: a float, two bf16,
// two fp8 or four int8 that are neighbours along the summed dimension; W below is their number. So that nothing has to
// be transposed or interleaved when it is read, the cache holds a block of one KV head as
//
//   keys    [H / W][S][W]      values  [S / W][H][W]
//
// (W is 1 where it does not divide H, or S.) In blocks of whole vectors (S and H multiples of 16) bf16, float and int8 are
// multiplied where they lie, and fp8, or bf16 without the instruction for it, converted a tile at a time. Other shapes are
// copied element by element, slowly. Rows past a request's length or before its window, and what stands in their memory
// (NaN, perhaps), have no part in a sum: their scores are replaced and floating-point values made zero.
//
// Int8 keys and values are multiplied as integers, exactly, with queries and weights in 16 bits.
//
// attention_cpu_kernels.h is included once for each instruction set, with TARGET as the attribute of every function; the
// best set the machine has is chosen at run time. The vectors are the compiler's own, of 16 floats, and it splits them
// where registers are narrower. AMX (attention_cpu_amx.h) multiplies lanes as the cache has them, one query row or many by
// the same instruction.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "../cpu_tiles.h"
#include "../cpu_vector_types.h"

namespace {

constexpr int64_t kPartition = 512;  // keys
constexpr int64_t kUnitRows = 96;    // query rows (tokens times heads) of a unit, about
// The same with tile registers, and how many of them are multiplied at a time.
constexpr int64_t kTiledUnitRows = 256, kTiledRows = 32;
constexpr float kSmallestMaximum = 0x1p-100f;  // as in kv_quant.py

// More vectors that may stand at any address.
typedef long long LongVec __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint16_t ShortVec __attribute__((vector_size(64), aligned(1), may_alias));
typedef uint8_t ByteVec __attribute__((vector_size(16), aligned(1), may_alias));
typedef uint8_t ByteVec32 __attribute__((vector_size(32), aligned(1), may_alias));

struct Fp8 {  // float8_e4m3fn
  uint8_t code;
};

// Neighbours in the cache: W of the comment above.
template <class C>
constexpr int64_t kCacheWidth = std::is_same_v<C, int8_t> ? 4 : std::is_same_v<C, at::BFloat16> || std::is_same_v<C, Fp8> ? 2 : 1;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// One call of the op. Strides are in elements.
struct Problem {
  const void *q, *k, *v;
  void *k_cache, *v_cache, *out;
  float *k_scale, *v_scale;  // null unless the cache is quantised
  const float* sinks;        // may be null
  const int32_t *slots, *table, *starts, *seq_lens;
  int64_t q_token, q_head, k_token, k_head, v_token, v_head;
  int64_t tokens, requests, heads, kv_heads, group, head_dim, block_size, table_width;
  int64_t window;
  float sm_scale, soft_cap;

  int64_t padded_dim() const { return ceil_div(head_dim, kLanes) * kLanes; }
  bool in_runs() const { return block_size % kLanes == 0 && head_dim % kLanes == 0; }
  template <class C>
  int64_t key_width() const { return head_dim % kCacheWidth<C> == 0 ? kCacheWidth<C> : 1; }
  template <class C>
  int64_t value_width() const { return block_size % kCacheWidth<C> == 0 ? kCacheWidth<C> : 1; }
  // Where the rows of a block and KV head begin, counted in rows.
  int64_t run(int64_t block, int64_t kv_head) const { return (block * kv_heads + kv_head) * block_size; }
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

// What one instruction set offers, for one dtype of the queries and one of the cache.
struct Kernels {
  void (*write)(const Problem&, int64_t token);
  void (*attend)(const Problem&, const Item&, float* states);
  void (*merge)(const Problem&, const Unit&, const float* states);
  int64_t unit_rows;
};

}  // namespace

// The kernels, compiled for each instruction set.
#define ISA portable
#define TARGET
#define WIDTH 128
#define DOT 0
#include "attention_cpu_kernels.h"

#if defined(__x86_64__)
#define ISA avx2
#define TARGET __attribute__((target("avx2,fma,f16c")))
#define WIDTH 256
#define DOT 0
#include "attention_cpu_kernels.h"

#define ISA avx512
#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,fma,f16c")))
#define WIDTH 512
#define DOT 0
#include "attention_cpu_kernels.h"

#define ISA avx512_dot
#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vnni,fma,f16c")))
#define WIDTH 512
#define DOT 1
#include "attention_cpu_kernels.h"

#define ISA amx
#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vnni,fma,f16c")))
#define WIDTH 512
#define DOT 1
#define TILES HardwareTiles
#include "attention_cpu_kernels.h"

#define ISA amx_in_software
#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vnni,fma,f16c")))
#define WIDTH 512
#define DOT 1
#define TILES SoftwareTiles
#include "attention_cpu_kernels.h"
#endif  // __x86_64__

namespace {

#define KERNELS(isa, T, C, unit_rows) {isa::write<T, C>, isa::attend<T, C>, isa::merge<T>, unit_rows}
// By the dtype of the queries (float32, bfloat16, float16) and the cache's (the same, int8, fp8). Those of `pairs`, an
// instruction set too, take what is multiplied as pairs of bf16.
#define ALL_KERNELS(isa, pairs, rows)                                                                             \
  {                                                                                                               \
    {KERNELS(isa, float, float, kUnitRows), KERNELS(isa, float, int8_t, kUnitRows),                               \
     KERNELS(isa, float, Fp8, kUnitRows)},                                                                        \
    {KERNELS(pairs, at::BFloat16, at::BFloat16, rows), KERNELS(isa, at::BFloat16, int8_t, kUnitRows),             \
     KERNELS(pairs, at::BFloat16, Fp8, rows)},                                                                    \
    {KERNELS(isa, at::Half, at::Half, kUnitRows), KERNELS(isa, at::Half, int8_t, kUnitRows),                      \
     KERNELS(isa, at::Half, Fp8, kUnitRows)}                                                                      \
  }

struct InstructionSet {
  const char* name;
  bool available;
  Kernels kernels[3][3];
};

// Best first.
const std::vector<InstructionSet>& instruction_sets() {
  static const std::vector<InstructionSet> sets = [] {
    std::vector<InstructionSet> all;
#if defined(__x86_64__)
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    const bool dot = avx512 && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni");
    all.push_back({"amx", dot && HardwareTiles::supported(), ALL_KERNELS(avx512_dot, amx, kTiledUnitRows)});
    all.push_back({"avx512_dot", dot, ALL_KERNELS(avx512_dot, avx512_dot, kUnitRows)});
    all.push_back({"avx512", avx512, ALL_KERNELS(avx512, avx512, kUnitRows)});
    all.push_back({"avx2", avx2, ALL_KERNELS(avx2, avx2, kUnitRows)});
#endif
    all.push_back({"portable", true, ALL_KERNELS(portable, portable, kUnitRows)});
#if defined(__x86_64__)
    all.push_back({"amx_in_software", dot, ALL_KERNELS(avx512_dot, amx_in_software, kTiledUnitRows)});
#endif
    std::erase_if(all, [](const InstructionSet& set) { return !set.available; });
    return all;
  }();
  return sets;
}

std::atomic<int> selected_set = 0;

std::vector<std::string> available_instruction_sets() {
  std::vector<std::string> names;
  for (const auto& set : instruction_sets()) names.push_back(set.name);
  return names;
}

void select_instruction_set(const std::string& name) {
  const auto names = available_instruction_sets();
  const auto found = std::find(names.begin(), names.end(), name);
  TORCH_CHECK_VALUE(found != names.end(), "instruction set ", name, " is not one of this machine's: ", names);
  selected_set = static_cast<int>(found - names.begin());
}

void write_cache(const Problem& p, const Kernels& kernels) {
  at::parallel_for(0, p.tokens, ceil_div(16384, p.kv_heads * p.head_dim), [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) kernels.write(p, token);
  });
}

// Requests whose tables begin with the same blocks, for so many whole partitions that all their rows see.
struct SharedPrefix {
  std::vector<int64_t> requests;
  int64_t partitions, rows;
};

std::vector<SharedPrefix> shared_prefixes(const Problem& p, int64_t most_rows) {
  std::vector<SharedPrefix> prefixes;
  if (p.requests < 2 || p.window > 0 || kPartition % p.block_size != 0) return prefixes;
  const int64_t blocks = kPartition / p.block_size;
  std::unordered_multimap<int32_t, int64_t> by_first_block;
  for (int64_t r = 0; r < p.requests; ++r) {
    const int64_t tokens = p.starts[r + 1] - p.starts[r], rows = tokens * p.group;
    const int64_t partitions = (p.seq_lens[r] - tokens + 1) / kPartition;
    if (p.seq_lens[r] == 0 || tokens == 0 || partitions == 0 || 2 * rows > most_rows) continue;
    const int32_t* table = p.table + r * p.table_width;
    bool found = false;
    for (auto [at, end] = by_first_block.equal_range(table[0]); at != end && !found; ++at) {
      SharedPrefix& prefix = prefixes[at->second];
      const int64_t most = std::min(prefix.partitions, partitions);
      const int32_t* other = p.table + prefix.requests[0] * p.table_width;
      const int64_t common = (std::mismatch(table, table + most * blocks, other).first - table) / blocks;
      // One that shares little is not let in, since it would take the rest from the others.
      found = common > 0 && 2 * common >= prefix.partitions && prefix.rows + rows <= most_rows;
      if (!found) continue;
      prefix.requests.push_back(r);
      prefix.partitions = common;
      prefix.rows += rows;
    }
    if (found) continue;
    by_first_block.emplace(table[0], prefixes.size());
    prefixes.push_back({{r}, partitions, rows});
  }
  std::erase_if(prefixes, [](const SharedPrefix& prefix) { return prefix.requests.size() < 2; });
  return prefixes;
}

void attend(const Problem& p, const Kernels& kernels, int64_t element) {
  // The units, and their cost: a key of a unit is read once, at the cost of 8 rows, and multiplied with every row.
  std::vector<Unit> units;
  const auto cost = [&](const Unit& unit) {
    return (unit.keys - std::max(unit.first_key, unit.shared * kPartition)) * (unit.tokens * p.group + 8);
  };
  int64_t total_cost = 0;
  const int64_t unit_tokens = std::max<int64_t>(kernels.unit_rows / p.group, 1);
  const std::vector<SharedPrefix> prefixes = shared_prefixes(p, kernels.unit_rows);
  std::vector<int64_t> shared(p.requests);  // partitions
  for (const SharedPrefix& prefix : prefixes) {
    total_cost += p.kv_heads * prefix.partitions * kPartition * (prefix.rows + 8);
    for (const int64_t r : prefix.requests) shared[r] = prefix.partitions;
  }
  std::vector<int64_t> unit_of(p.kv_heads * p.requests, -1);  // the last of a request and head: the only one if it shares
  // Head by head: what several units read of a head's keys and values, the tiles of one prompt or requests that share a
  // prefix, is then still in the caches.
  for (int64_t h = 0; h < p.kv_heads; ++h)
    for (int64_t r = 0; r < p.requests; ++r) {
      const int64_t tokens = p.starts[r + 1] - p.starts[r];
      if (p.seq_lens[r] == 0) continue;
      for (int64_t first = 0; first < tokens; first += unit_tokens) {
        const int64_t count = std::min(unit_tokens, tokens - first), keys = p.seq_lens[r] - tokens + first + count;
        const int64_t first_key = p.window > 0 ? std::max<int64_t>(keys - count - p.window + 1, 0) : 0;
        unit_of[h * p.requests + r] = static_cast<int64_t>(units.size());
        units.push_back({r, h, first, count, first_key, keys, shared[r]});
        total_cost += cost(units.back());
      }
    }

  // The items: what is shared, then a unit whole, or cut into ranges of partitions where it is a large share of all.
  const int64_t threads = at::get_num_threads(), target = total_cost / (8 * threads) + 1;
  std::vector<Item> items;
  std::vector<const Unit*> members, cut;
  members.reserve(2 * units.size());  // each once alone, and once with others; items point into it
  int64_t states = 0;
  for (int64_t u = 0; u < static_cast<int64_t>(units.size()); ++u) {
    Unit& unit = units[u];
    if (u == 0 || unit.kv_head != units[u - 1].kv_head)
      for (const SharedPrefix& prefix : prefixes) {
        const Unit* const* first = members.data() + members.size();
        for (const int64_t r : prefix.requests) members.push_back(&units[unit_of[unit.kv_head * p.requests + r]]);
        for (int64_t i = 0; i < prefix.partitions; ++i)
          items.push_back({first, static_cast<int64_t>(prefix.requests.size()), i, i + 1});
      }
    const int64_t start = std::max(unit.first_partition(), unit.shared), partitions = unit.last_partition() - start;
    const int64_t pieces = threads == 1 ? std::min<int64_t>(partitions, 1)
                                        : std::min(ceil_div(cost(unit), 2 * target), partitions);
    if (pieces > 1 || unit.shared > 0) {
      cut.push_back(&unit);
      unit.state = states;
      states += unit.partitions() * State::size(unit.room(p), p.padded_dim());
    }
    members.push_back(&unit);
    for (int64_t i = 0; i < pieces; ++i)
      items.push_back({&members.back(), 1, start + partitions * i / pieces, start + partitions * (i + 1) / pieces});
  }
  const auto kept = std::make_unique_for_overwrite<float[]>(states);

  // Work below about 10 us of one thread is not worth waking another.
  const auto for_each = [&](int64_t count, auto&& work) {
    const bool tiny = total_cost * p.head_dim * element < 1 << 21;
    std::atomic<int64_t> next = 0;
    at::parallel_for(0, tiny ? 1 : std::min(threads, count), 1, [&](int64_t, int64_t) {
      for (int64_t i = next++; i < count; i = next++) work(i);
    });
  };
  for_each(items.size(), [&](int64_t i) { kernels.attend(p, items[i], kept.get()); });
  for_each(cut.size(), [&](int64_t i) { kernels.merge(p, *cut[i], kept.get()); });
}

const int32_t* int32_data(const at::Tensor& x, const char* name, at::IntArrayRef shape) {
  TORCH_CHECK_VALUE(x.scalar_type() == at::kInt, name, " must be int32, got ", x.scalar_type());
  TORCH_CHECK_VALUE(x.sizes() == shape, name, " must have shape ", shape, ", got ", x.sizes());
  TORCH_CHECK_VALUE(x.is_contiguous() && x.is_cpu(), name, " must be contiguous and on the CPU");
  return x.const_data_ptr<int32_t>();
}

at::Tensor paged_attention(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& k_cache, const at::Tensor& v_cache,
    const std::optional<at::Tensor>& k_scale, const std::optional<at::Tensor>& v_scale, const at::Tensor& slot_mapping,
    const at::Tensor& block_table, const at::Tensor& query_start_loc, const at::Tensor& seq_lens,
    const std::optional<at::Tensor>& sinks, double sm_scale, int64_t max_query_len, int64_t window, double soft_cap) {
  TORCH_CHECK_VALUE(q.dim() == 3 && k_cache.dim() == 4, "q must be [T, N, H] and k_cache [B, K, S, H], got ", q.sizes(),
                    " and ", k_cache.sizes());
  const int64_t tokens = q.size(0), heads = q.size(1), head_dim = q.size(2);
  const int64_t blocks = k_cache.size(0), kv_heads = k_cache.size(1), block_size = k_cache.size(2);
  const auto dtype = q.scalar_type(), cache_dtype = k_cache.scalar_type();
  TORCH_CHECK_VALUE(dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf,
                    "q must be float32, bfloat16 or float16, got ", dtype);
  const bool quantised = cache_dtype == at::kChar || cache_dtype == at::kFloat8_e4m3fn;
  TORCH_CHECK_VALUE(quantised || cache_dtype == dtype, "k_cache must have the dtype of q, ", dtype,
                    ", or be int8 or float8_e4m3fn, got ", cache_dtype);
  TORCH_CHECK_VALUE(head_dim > 0 && block_size > 0 && kv_heads > 0 && heads > 0 && heads % kv_heads == 0,
                    "the number of query heads must be a multiple of the number of KV heads, got ", heads, " and ",
                    kv_heads);
  TORCH_CHECK_VALUE(head_dim <= 512, "head_dim must be at most 512, got ", head_dim);  // integer sums fit 32 bits
  TORCH_CHECK_VALUE(sm_scale > 0, "sm_scale must be positive, got ", sm_scale);
  TORCH_CHECK_VALUE(window >= 0 && soft_cap >= 0, "window and soft_cap must be 0 or positive, got ", window, " and ",
                    soft_cap);
  const auto check = [&](const at::Tensor& x, const char* name, at::ScalarType wanted, at::IntArrayRef shape) {
    TORCH_CHECK_VALUE(x.sizes() == shape, name, " must have shape ", shape, ", got ", x.sizes());
    TORCH_CHECK_VALUE(x.scalar_type() == wanted, name, " must have dtype ", wanted, ", got ", x.scalar_type());
    TORCH_CHECK_VALUE(x.is_cpu(), name, " must be on the CPU, got ", x.device());
  };
  for (const auto& [x, name, n] : {std::tuple{&q, "q", heads}, {&k, "k", kv_heads}, {&v, "v", kv_heads}}) {
    check(*x, name, dtype, {tokens, n, head_dim});
    TORCH_CHECK_VALUE(x->stride(2) == 1 || head_dim == 1, "the last stride of ", name, " must be 1, got ",
                      x->strides());
  }
  for (const auto& [x, name] : {std::tuple{&k_cache, "k_cache"}, {&v_cache, "v_cache"}}) {
    check(*x, name, cache_dtype, {blocks, kv_heads, block_size, head_dim});
    TORCH_CHECK_VALUE(x->is_contiguous(), name, " must be contiguous, got strides ", x->strides());
  }
  for (const auto& [x, name] : {std::tuple{&k_scale, "k_scale"}, {&v_scale, "v_scale"}}) {
    TORCH_CHECK_VALUE(x->has_value() == quantised, name, quantised ? " is needed" : " must be None", " for a cache of ",
                      cache_dtype);
    if (!quantised) continue;
    check(**x, name, at::kFloat, {blocks, kv_heads, block_size});
    TORCH_CHECK_VALUE((*x)->is_contiguous(), name, " must be contiguous, got strides ", (*x)->strides());
  }
  if (sinks.has_value()) {
    check(*sinks, "sinks", at::kFloat, {heads});
    TORCH_CHECK_VALUE(sinks->is_contiguous(), "sinks must be contiguous");
  }
  TORCH_CHECK_VALUE(block_table.dim() == 2, "block_table must be [R, M], got ", block_table.sizes());
  const int64_t requests = block_table.size(0), width = block_table.size(1);

  at::Tensor out = at::empty({tokens, heads, head_dim}, q.options());
  const Problem p{
      q.const_data_ptr(), k.const_data_ptr(), v.const_data_ptr(),
      k_cache.mutable_data_ptr(), v_cache.mutable_data_ptr(), out.mutable_data_ptr(),
      quantised ? k_scale->mutable_data_ptr<float>() : nullptr, quantised ? v_scale->mutable_data_ptr<float>() : nullptr,
      sinks.has_value() ? sinks->const_data_ptr<float>() : nullptr,
      int32_data(slot_mapping, "slot_mapping", {tokens}), int32_data(block_table, "block_table", {requests, width}),
      int32_data(query_start_loc, "query_start_loc", {requests + 1}), int32_data(seq_lens, "seq_lens", {requests}),
      q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
      tokens, requests, heads, kv_heads, heads / kv_heads, head_dim, block_size, width,
      std::min<int64_t>(window, int64_t{1} << 40), static_cast<float>(sm_scale), static_cast<float>(soft_cap)};

  // A wrong index would read or write somebody else's memory: all of them are checked, they are few.
  for (int64_t t = 0; t < tokens; ++t)
    TORCH_CHECK_INDEX(p.slots[t] >= 0 && p.slots[t] < blocks * block_size, "slot_mapping[", t, "] is ", p.slots[t],
                      ", outside the cache of ", blocks, " blocks of ", block_size);
  TORCH_CHECK_INDEX(p.starts[0] == 0 && p.starts[requests] <= tokens,
                    "query_start_loc must start at 0 and end at or below ", tokens, ", got ", p.starts[0], " and ",
                    p.starts[requests]);
  const int64_t element = q.element_size(), row = heads * head_dim * element;
  const auto zero = [&](int64_t begin, int64_t end) {
    if (end > begin) std::memset(static_cast<char*>(p.out) + begin * row, 0, (end - begin) * row);
  };
  for (int64_t r = 0; r < requests; ++r) {
    const int64_t queries = p.starts[r + 1] - p.starts[r], keys = p.seq_lens[r];
    TORCH_CHECK_INDEX(queries >= 0 && (keys == 0 || (queries <= keys && keys <= width * block_size)), "request ", r,
                      " has ", queries, " queries and ", keys, " keys; its block table has room for ",
                      width * block_size);
    for (int64_t b = 0; b < ceil_div(keys, block_size); ++b)
      TORCH_CHECK_INDEX(p.table[r * width + b] >= 0 && p.table[r * width + b] < blocks, "block_table[", r, ", ", b,
                        "] is ", p.table[r * width + b], ", outside the cache of ", blocks, " blocks");
    if (keys == 0) zero(p.starts[r], p.starts[r + 1]);
  }
  zero(p.starts[requests], tokens);

  const int64_t row_kernels = dtype == at::kFloat ? 0 : dtype == at::kBFloat16 ? 1 : 2;
  const int64_t column = !quantised ? 0 : cache_dtype == at::kChar ? 1 : 2;
  const Kernels& kernels = instruction_sets()[selected_set].kernels[row_kernels][column];
  write_cache(p, kernels);
  attend(p, kernels, element);
  return out;
}

}  // namespace

// From here rather than from Python, which would add some 5 us to each call.
TORCH_LIBRARY_IMPL(compiled_llm, CPU, m) { m.impl("paged_attention", &paged_attention); }

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("paged_attention", &paged_attention, py::call_guard<py::gil_scoped_release>());
  m.def("instruction_sets", &available_instruction_sets, "Those of this machine, best first; the first is in use.");
  m.def("select_instruction_set", &select_instruction_set, "For tests.");
}
