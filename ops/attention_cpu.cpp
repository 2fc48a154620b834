// Paged attention on the CPU: the kernel behind ops/attention.py, which states what it computes.
//
// The keys are cut by their positions alone, never by the batch, the way a prompt was chunked or the number of threads.
// So a token's output is bitwise the same whatever runs beside it:
//
//   tile       64 keys. Scores, online softmax and values of a tile are two small matrix products over packed operands.
//   partition  512 keys. Has its own softmax state (maximum, sum, weighted values), started from nothing.
//   unit       some query tokens of one request times the query heads of one KV head, so a key is read once for all of
//              them. Its result is the states of its partitions, folded in the order of their positions.
//
// Decode is a unit with one token, prefill one with many (max_query_len is of no use here). Both sum in the same order
// and differ only in how the operands reach the registers: packed, or straight from the cache. A thread takes an item,
// a range of a unit's partitions. A unit that is one item folds as it goes; the states of one cut into several are kept
// and folded afterwards.
//
// The cache's format is known to find_rows() and the loads: they turn the scattered rows of a tile into operands, with
// zeros for the rows past a request's length, so what stands in their memory (NaN, perhaps) is never touched.
//
// attention_cpu_kernels.h is included once for each instruction set, with TARGET as the attribute of every function; the
// best set the machine has is chosen at run time. The vectors are the compiler's own, of 16 floats, and it splits them
// where registers are narrower. AMX would be one more set, with its own gemm() and packing.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if defined(__clang__)
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, IntVec{__VA_ARGS__})
#endif

namespace {

constexpr int64_t kTile = 64;        // keys
constexpr int64_t kPartition = 512;  // keys
constexpr int64_t kUnitRows = 96;    // query rows (tokens times heads) of a unit, about
constexpr int64_t kLanes = 16;
constexpr int64_t kDirectRows = 8;   // units of no more rows do without packing where they can
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Vectors that may stand at any address.
typedef float Vec __attribute__((vector_size(64), aligned(4), may_alias));
typedef int32_t IntVec __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint16_t HalfVec __attribute__((vector_size(32), aligned(2), may_alias));
typedef uint16_t ShortVec __attribute__((vector_size(64), aligned(2), may_alias));

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// One call of the op. Strides are in elements.
struct Problem {
  const void *q, *k, *v;
  void *k_cache, *v_cache, *out;
  const int32_t *slots, *table, *starts, *seq_lens;
  int64_t q_token, q_head, k_token, k_head, v_token, v_head;
  int64_t tokens, requests, heads, kv_heads, group, head_dim, block_size, table_width;
  float sm_scale;

  int64_t padded_dim() const { return ceil_div(head_dim, kLanes) * kLanes; }
};

struct Unit {
  int64_t request, kv_head, first_token, tokens;  // first_token counts from the request's first
  int64_t keys;                                   // that its last token sees
  int64_t state = -1;                             // where the states of its partitions begin, if they are kept

  int64_t partitions() const { return ceil_div(keys, kPartition); }
};

struct Item {
  int64_t unit, first_partition, last_partition;
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

// What one instruction set offers, for one dtype.
struct Kernels {
  void (*attend)(const Problem&, const Unit&, const Item&, float* states);
  void (*merge)(const Problem&, const Unit&, const float* states);
};

}  // namespace

// The kernels, compiled for each instruction set. BF16_DOT: it multiplies pairs of bf16 and adds them to a float.
#define ISA portable
#define TARGET
#define WIDTH 128
#define BF16_DOT 0
#include "attention_cpu_kernels.h"

#if defined(__x86_64__)
#define ISA avx2
#define TARGET __attribute__((target("avx2,fma,f16c")))
#define WIDTH 256
#define BF16_DOT 0
#include "attention_cpu_kernels.h"

#define ISA avx512
#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,fma,f16c")))
#define WIDTH 512
#define BF16_DOT 0
#include "attention_cpu_kernels.h"

#define ISA avx512_bf16
#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,fma,f16c")))
#define WIDTH 512
#define BF16_DOT 1
#include "attention_cpu_kernels.h"
#endif  // __x86_64__

namespace {

#define KERNELS(isa, T) \
  { isa::attend<T>, isa::merge<T> }

struct InstructionSet {
  const char* name;
  bool available;
  Kernels float32, bfloat16, float16;
};

// Best first. Pairs of bf16 change nothing for the other dtypes, so those are not compiled again for them.
std::vector<InstructionSet>& instruction_sets() {
  static std::vector<InstructionSet> sets = [] {
    std::vector<InstructionSet> all;
#if defined(__x86_64__)
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    all.push_back({"avx512_bf16", avx512 && __builtin_cpu_supports("avx512bf16"),
                   KERNELS(avx512, float), KERNELS(avx512_bf16, at::BFloat16), KERNELS(avx512, at::Half)});
    all.push_back(
        {"avx512", avx512, KERNELS(avx512, float), KERNELS(avx512, at::BFloat16), KERNELS(avx512, at::Half)});
    all.push_back(
        {"avx2", avx2, KERNELS(avx2, float), KERNELS(avx2, at::BFloat16), KERNELS(avx2, at::Half)});
#endif
    all.push_back(
        {"portable", true, KERNELS(portable, float), KERNELS(portable, at::BFloat16), KERNELS(portable, at::Half)});
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

void write_cache(const Problem& p, int64_t element) {
  const int64_t row = p.head_dim * element;
  at::parallel_for(0, p.tokens, ceil_div(65536, p.kv_heads * row), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const int64_t block = p.slots[t] / p.block_size, offset = p.slots[t] % p.block_size;
      for (int64_t h = 0; h < p.kv_heads; ++h) {
        const int64_t to = ((block * p.kv_heads + h) * p.block_size + offset) * row;
        const int64_t k_from = (t * p.k_token + h * p.k_head) * element;
        const int64_t v_from = (t * p.v_token + h * p.v_head) * element;
        std::memcpy(static_cast<char*>(p.k_cache) + to, static_cast<const char*>(p.k) + k_from, row);
        std::memcpy(static_cast<char*>(p.v_cache) + to, static_cast<const char*>(p.v) + v_from, row);
      }
    }
  });
}

void attend(const Problem& p, const Kernels& kernels, int64_t element) {
  // The units, and their cost: a key of a unit is packed once and multiplied with every row.
  std::vector<Unit> units;
  const auto cost = [&](const Unit& unit) { return unit.keys * (unit.tokens * p.group + 8); };
  int64_t total_cost = 0;
  const int64_t unit_tokens = std::max<int64_t>(kUnitRows / p.group, 1);
  for (int64_t r = 0; r < p.requests; ++r) {
    const int64_t tokens = p.starts[r + 1] - p.starts[r];
    if (p.seq_lens[r] == 0) continue;
    for (int64_t first = 0; first < tokens; first += unit_tokens) {
      const int64_t count = std::min(unit_tokens, tokens - first), keys = p.seq_lens[r] - tokens + first + count;
      for (int64_t h = 0; h < p.kv_heads; ++h) {
        units.push_back({r, h, first, count, keys});
        total_cost += cost(units.back());
      }
    }
  }

  // The items: a unit whole, or cut into ranges of partitions where it is a large share of all.
  const int64_t threads = at::get_num_threads(), target = total_cost / (8 * threads) + 1;
  std::vector<Item> items;
  std::vector<int64_t> cut;
  int64_t states = 0;
  for (int64_t u = 0; u < static_cast<int64_t>(units.size()); ++u) {
    Unit& unit = units[u];
    const int64_t partitions = unit.partitions();
    const int64_t pieces = threads == 1 ? 1 : std::min(ceil_div(cost(unit), 2 * target), partitions);
    if (pieces > 1) {
      cut.push_back(u);
      unit.state = states;
      states += partitions * State::size(unit.tokens * p.group, p.padded_dim());
    }
    for (int64_t i = 0; i < pieces; ++i) items.push_back({u, partitions * i / pieces, partitions * (i + 1) / pieces});
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
  for_each(items.size(), [&](int64_t i) { kernels.attend(p, units[items[i].unit], items[i], kept.get()); });
  for_each(cut.size(), [&](int64_t i) { kernels.merge(p, units[cut[i]], kept.get()); });
}

const int32_t* int32_data(const at::Tensor& x, const char* name, at::IntArrayRef shape) {
  TORCH_CHECK_VALUE(x.scalar_type() == at::kInt, name, " must be int32, got ", x.scalar_type());
  TORCH_CHECK_VALUE(x.sizes() == shape, name, " must have shape ", shape, ", got ", x.sizes());
  TORCH_CHECK_VALUE(x.is_contiguous() && x.is_cpu(), name, " must be contiguous and on the CPU");
  return x.const_data_ptr<int32_t>();
}

at::Tensor paged_attention(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& k_cache, const at::Tensor& v_cache,
    const at::Tensor& slot_mapping, const at::Tensor& block_table, const at::Tensor& query_start_loc,
    const at::Tensor& seq_lens, double sm_scale, int64_t max_query_len) {
  TORCH_CHECK_VALUE(q.dim() == 3 && k_cache.dim() == 4, "q must be [T, N, H] and k_cache [B, K, S, H], got ", q.sizes(),
                    " and ", k_cache.sizes());
  const int64_t tokens = q.size(0), heads = q.size(1), head_dim = q.size(2);
  const int64_t blocks = k_cache.size(0), kv_heads = k_cache.size(1), block_size = k_cache.size(2);
  const auto dtype = q.scalar_type();
  TORCH_CHECK_VALUE(dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf,
                    "q must be float32, bfloat16 or float16, got ", dtype);
  TORCH_CHECK_VALUE(head_dim > 0 && block_size > 0 && kv_heads > 0 && heads > 0 && heads % kv_heads == 0,
                    "the number of query heads must be a multiple of the number of KV heads, got ", heads, " and ",
                    kv_heads);
  const auto check = [&](const at::Tensor& x, const char* name, at::IntArrayRef shape) {
    TORCH_CHECK_VALUE(x.sizes() == shape, name, " must have shape ", shape, ", got ", x.sizes());
    TORCH_CHECK_VALUE(x.scalar_type() == dtype, name, " must have the dtype of q, ", dtype, ", got ", x.scalar_type());
    TORCH_CHECK_VALUE(x.is_cpu(), name, " must be on the CPU, got ", x.device());
  };
  for (const auto& [x, name, n] : {std::tuple{&q, "q", heads}, {&k, "k", kv_heads}, {&v, "v", kv_heads}}) {
    check(*x, name, {tokens, n, head_dim});
    TORCH_CHECK_VALUE(x->stride(2) == 1 || head_dim == 1, "the last stride of ", name, " must be 1, got ",
                      x->strides());
  }
  for (const auto& [x, name] : {std::tuple{&k_cache, "k_cache"}, {&v_cache, "v_cache"}}) {
    check(*x, name, {blocks, kv_heads, block_size, head_dim});
    TORCH_CHECK_VALUE(x->is_contiguous(), name, " must be contiguous, got strides ", x->strides());
  }
  TORCH_CHECK_VALUE(block_table.dim() == 2, "block_table must be [R, M], got ", block_table.sizes());
  const int64_t requests = block_table.size(0), width = block_table.size(1);

  at::Tensor out = at::empty({tokens, heads, head_dim}, q.options());
  const Problem p{
      q.const_data_ptr(), k.const_data_ptr(), v.const_data_ptr(),
      k_cache.mutable_data_ptr(), v_cache.mutable_data_ptr(), out.mutable_data_ptr(),
      int32_data(slot_mapping, "slot_mapping", {tokens}), int32_data(block_table, "block_table", {requests, width}),
      int32_data(query_start_loc, "query_start_loc", {requests + 1}), int32_data(seq_lens, "seq_lens", {requests}),
      q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
      tokens, requests, heads, kv_heads, heads / kv_heads, head_dim, block_size, width,
      static_cast<float>(sm_scale)};

  // A wrong index would read or write somebody else's memory: all of them are checked, they are few.
  for (int64_t t = 0; t < tokens; ++t)
    TORCH_CHECK_INDEX(p.slots[t] >= 0 && p.slots[t] < blocks * block_size, "slot_mapping[", t, "] is ", p.slots[t],
                      ", outside the cache of ", blocks, " blocks of ", block_size);
  TORCH_CHECK_INDEX(p.starts[0] == 0 && p.starts[requests] <= tokens,
                    "query_start_loc must start at 0 and end at or below ", tokens, ", got ", p.starts[0], " and ",
                    p.starts[requests]);
  const int64_t element = q.element_size(), row = heads * head_dim * element;
  const auto zero = [&](int64_t begin, int64_t end) {
    std::memset(static_cast<char*>(p.out) + begin * row, 0, (end - begin) * row);
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

  write_cache(p, element);
  const InstructionSet& set = instruction_sets()[selected_set];
  attend(p, dtype == at::kFloat ? set.float32 : dtype == at::kBFloat16 ? set.bfloat16 : set.float16, element);
  return out;
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("paged_attention", &paged_attention, py::call_guard<py::gil_scoped_release>());
  m.def("instruction_sets", &available_instruction_sets, "Those of this machine, best first; the first is in use.");
  m.def("select_instruction_set", &select_instruction_set, "For tests.");
}
