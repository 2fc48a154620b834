// Cuts a call of the op into items and runs them on all threads, for attention_cpu.cpp, which explains the pieces.

#pragma once

#include <algorithm>
#include <atomic>
#include <memory>
#include <unordered_map>
#include <vector>

#include "../cpu/tensor.h"
#include "attention_cpu_types.h"

namespace {

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
      for (int64_t first = 0; first < tokens; first += unit_tokens) {
        const int64_t count = std::min(unit_tokens, tokens - first), keys = p.seq_lens[r] - tokens + first + count;
        const int64_t first_key = p.window > 0 ? std::max<int64_t>(keys - count - p.window + 1, 0) : 0;
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
    const bool tiny = total_cost * p.head_dim * element < 1 << 21;
    std::atomic<int64_t> next = 0;
    parallel_for(0, tiny ? 1 : std::min(threads, count), 1, [&](int64_t, int64_t) {
      for (int64_t i = next++; i < count; i = next++) work(i);
    });
  };
  for_each(items.size(), [&](int64_t i) { kernels.attend(p, items[i], kept.get()); });
  for_each(cut.size(), [&](int64_t i) { kernels.merge(p, *cut[i], kept.get()); });
}

}  // namespace
