// What every attention op on the CPU checks of its arguments, and the rows that belong to nobody.

#pragma once

#include <cstring>

#include "attention_cpu_types.h"
#include "../cpu/op.h"

namespace {

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

}  // namespace
