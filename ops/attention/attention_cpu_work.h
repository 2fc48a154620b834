// What every attention op on the CPU checks of its arguments, and the rows that belong to nobody; and how a call of an op
// is cut into items, which all threads run. attention_cpu.cpp explains the pieces.

#pragma once

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <optional>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "attention_cpu_types.h"
#include "../cpu/op.h"

namespace {

void check(const Tensor& x, const char* name, Dtype expected, Shape shape) {
  CHECK_VALUE(x.sizes() == shape, name, " must have shape ", shape, ", got ", x.sizes());
  CHECK_VALUE(x.dtype() == expected, name, " must have dtype ", expected, ", got ", x.dtype());
  CHECK_VALUE(x.is_cpu(), name, " must be on the CPU, got ", x.place());
}

void check_contiguous(const Tensor& x, const char* name, Dtype expected, Shape shape) {
  check(x, name, expected, shape);
  CHECK_VALUE(x.is_contiguous(), name, " must be contiguous, got strides ", x.strides());
}

// New rows, [tokens, heads, size].
void check_rows(const Tensor& x, const char* name, Dtype expected, Shape shape) {
  check(x, name, expected, shape);
  CHECK_VALUE(x.stride(2) == 1 || x.size(2) == 1, "the last stride of ", name, " must be 1, got ", x.strides());
}

void check_queries(const char* name, Dtype dtype) {
  CHECK_VALUE(dtype == kFloat || dtype == kBFloat16 || dtype == kHalf, name,
              " must be float32, bfloat16 or float16, got ", dtype);
}

// Blocks that are contiguous each, and may be apart.
void check_blocks(const Tensor& x, const char* name, Dtype expected, Shape shape) {
  check(x, name, expected, shape);
  CHECK_VALUE(x.has_contiguous_rows(), name, " must have contiguous blocks, got strides ", x.strides());
}

void check_same_strides(const Tensor& x, const char* name, const Tensor& y, const char* other) {
  CHECK_VALUE(x.size(0) < 2 || x.stride(0) == y.stride(0), name, " and ", other, " must have the same strides, got ",
              x.strides(), " and ", y.strides());
}

// The caches, [blocks, KV heads, block size, k_dim or v_dim], and their scales; returns whether they are quantised.
bool check_caches(Dtype dtype, const Tensor& k_cache, const Tensor& v_cache, const std::optional<Tensor>& k_scale,
                  const std::optional<Tensor>& v_scale, int64_t kv_heads, int64_t k_dim, int64_t v_dim) {
  const auto cache_dtype = k_cache.dtype();
  const int64_t blocks = k_cache.size(0), block_size = k_cache.size(2);
  const bool quantised = cache_dtype == kChar || cache_dtype == kFloat8;
  CHECK_VALUE(quantised || cache_dtype == dtype, "k_cache must have the dtype of queries, ", dtype,
              ", or be int8 or float8_e4m3fn, got ", cache_dtype);
  check_blocks(k_cache, "k_cache", cache_dtype, {blocks, kv_heads, block_size, k_dim});
  check_blocks(v_cache, "v_cache", cache_dtype, {blocks, kv_heads, block_size, v_dim});
  for (const auto& [x, name] : {std::tuple{&k_scale, "k_scale"}, {&v_scale, "v_scale"}}) {
    CHECK_VALUE(x->has_value() == quantised, name, quantised ? " is needed" : " must be None", " for a cache of ",
                cache_dtype);
    if (quantised) check_blocks(**x, name, kFloat, {blocks, kv_heads, block_size});
  }
  if (quantised) check_same_strides(*k_scale, "k_scale", *v_scale, "v_scale");
  return quantised;
}

const int32_t* int32_data(const Tensor& x, const char* name, Shape shape) {
  CHECK_VALUE(x.dtype() == kInt, name, " must be int32, got ", x.dtype());
  CHECK_VALUE(x.sizes() == shape, name, " must have shape ", shape, ", got ", x.sizes());
  CHECK_VALUE(x.is_contiguous() && x.is_cpu(), name, " must be contiguous and on the CPU");
  return x.data<const int32_t>();
}

// IndexError for an index that is outside the cache of `blocks` blocks: it would read or write the memory of
// another request. All are checked, they are few.
void check_indices(const Problem& p, int64_t blocks) {
  for (int64_t t = 0; t < p.tokens; ++t)
    CHECK_INDEX(p.slots[t] >= 0 && p.slots[t] < blocks * p.block_size, "slot_mapping[", t, "] is ", p.slots[t],
                ", outside the cache of ", blocks, " blocks of ", p.block_size);
  CHECK_INDEX(p.starts[0] == 0 && p.starts[p.requests] <= p.tokens,
              "query_start_loc must start at 0 and end at or below ", p.tokens, ", got ", p.starts[0], " and ",
              p.starts[p.requests]);
  const int64_t room = p.table_width * p.block_size;
  for (int64_t r = 0; r < p.requests; ++r) {
    const int64_t queries = p.starts[r + 1] - p.starts[r], keys = p.seq_lens[r];
    CHECK_INDEX(queries >= 0 && (keys == 0 || (queries <= keys && keys <= room)), "request ", r, " has ", queries,
                " queries and ", keys, " keys; its block table has room for ", room);
    for (int64_t b = 0; b < ceil_div(keys, p.block_size); ++b) {
      const int32_t block = p.table[r * p.table_width + b];
      CHECK_INDEX(block >= 0 && block < blocks, "block_table[", r, ", ", b, "] is ", block,
                  ", outside the cache of ", blocks, " blocks");
    }
  }
}

// IndexError for masks that are not those of a tree: a row sees itself, and what the row before it on its path sees.
void check_ancestors(const Problem& p) {
  for (int64_t r = 0; p.ancestors != nullptr && r < p.requests; ++r) {
    const int64_t count = p.seq_lens[r] == 0 ? 0 : p.queries(r);
    const bool tree = count > 0 && p.nodes_seen(r, 0) != 0;
    for (int64_t i = 0; i < count; ++i) {
      const uint64_t seen = p.nodes_seen(r, i);
      bool right = !tree && seen == 0;
      if (tree && count <= 64) {
        const uint64_t before = seen & ~(uint64_t{1} << i);
        right = seen >> i == 1 && (i == 0 || (before != 0 && before == p.nodes_seen(r, std::bit_width(before) - 1)));
      }
      CHECK_INDEX(right, "ancestors of row ", i, " of request ", r, " are no path in a tree of at most 64 rows");
    }
  }
}

// Zeros in the output rows of requests without keys, and in those after the last request.
void clear_padding(const Problem& p, int64_t element) {
  const int64_t row = p.heads * p.head_dim * element;
  const auto clear = [&](int64_t begin, int64_t end) {
    if (end > begin) std::memset(static_cast<char*>(p.out) + begin * row, 0, (end - begin) * row);
  };
  for (int64_t r = 0; r < p.requests; ++r)
    if (p.seq_lens[r] == 0) clear(p.starts[r], p.starts[r + 1]);
  clear(p.starts[p.requests], p.tokens);
}

void write_cache(const Problem& p, const PairKernels& kernels) {
  parallel_for(0, p.tokens, ceil_div(16384, p.kv_heads * p.head_dim), [&](int64_t begin, int64_t end) {
    kernels.write(p, begin, end);
  });
}

// Requests whose tables start with the same blocks, and the number of whole partitions of these that all their rows see.
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
      // A request that shares little is not added, since the others would share no more than that.
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

void attend(const Problem& p, const PairKernels& kernels, int64_t element) {
  // The units and their cost: a unit's key is read once, which costs as much as 8 rows, and multiplied with every row.
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
  // Head by head: keys and values of a head that several units read, parts of one prompt or requests that share a prefix,
  // are then still in the caches.
  for (int64_t h = 0; h < p.kv_heads; ++h)
    for (int64_t r = 0; r < p.requests; ++r) {
      const int64_t tokens = p.starts[r + 1] - p.starts[r];
      if (p.seq_lens[r] == 0) continue;
      const bool tree = p.is_tree(r);
      for (int64_t first = 0; first < tokens; first += unit_tokens) {
        const int64_t count = std::min(unit_tokens, tokens - first);
        int64_t keys = p.context(r) + first + count, lowest = keys - count;
        if (tree) {
          keys = 0;
          for (int64_t i = first; i < first + count; ++i) {
            keys = std::max(keys, p.position(r, i, tree) + 1);
            lowest = std::min(lowest, p.position(r, i, tree));
          }
        }
        const int64_t first_key = p.window > 0 ? std::max<int64_t>(lowest - p.window + 1, 0) : 0;
        unit_of[h * p.requests + r] = static_cast<int64_t>(units.size());
        units.push_back({r, h, first, count, first_key, keys, shared[r]});
        total_cost += cost(units.back());
      }
    }

  // The items: what is shared; then each unit, whole, or cut into ranges of partitions if it is a large part of the work.
  const int64_t threads = num_threads(), target = total_cost / (8 * threads) + 1;
  std::vector<Item> items;
  std::vector<const Unit*> members, cut;
  members.reserve(2 * units.size());  // each once alone and once with others; items have pointers into it
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

  // Waking another thread takes longer than work of about 10 us.
  const auto for_each = [&](int64_t count, auto&& work) {
    const bool tiny = total_cost * p.head_dim * element < 1 << 19;
    std::atomic<int64_t> next = 0;
    parallel_for(0, tiny ? 1 : std::min(threads, count), 1, [&](int64_t, int64_t) {
      for (int64_t i = next++; i < count; i = next++) work(i);
    });
  };
  for_each(items.size(), [&](int64_t i) { kernels.attend(p, items[i], kept.get()); });
  for_each(cut.size(), [&](int64_t i) { kernels.merge(p, *cut[i], kept.get()); });
}

// One call of an op, whose arguments were checked.
void run(const Problem& p, const Kernels& all, int64_t blocks, Dtype dtype, Dtype cache_dtype) {
  check_indices(p, blocks);
  check_ancestors(p);
  clear_padding(p, bytes_of(dtype));
  const int64_t by_q = dtype == kFloat ? 0 : dtype == kBFloat16 ? 1 : 2;
  const int64_t by_cache = cache_dtype == dtype ? 0 : cache_dtype == kChar ? 1 : 2;
  const PairKernels& kernels = all.of[by_q][by_cache];
  write_cache(p, kernels);
  attend(p, kernels, bytes_of(dtype));
}

}  // namespace
