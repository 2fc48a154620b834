// Words of rows of a matrix -> tiles of 16 rows, the layout of packed_linear.py.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace {

constexpr int64_t TILE = 16;

// 16 rows of `words` words -> [words, TILE], four by four.
void pack_tile(const uint32_t* from, int64_t words, uint32_t* to) {
  typedef uint32_t u32 __attribute__((vector_size(16)));
  int64_t p = 0;
  for (; p + 4 <= words; p += 4)
    for (int64_t row = 0; row < TILE; row += 4) {
      u32 a, b, c, d;
      std::memcpy(&a, from + row * words + p, sizeof a);
      std::memcpy(&b, from + (row + 1) * words + p, sizeof b);
      std::memcpy(&c, from + (row + 2) * words + p, sizeof c);
      std::memcpy(&d, from + (row + 3) * words + p, sizeof d);
      const u32 ab = __builtin_shufflevector(a, b, 0, 4, 1, 5), ab_high = __builtin_shufflevector(a, b, 2, 6, 3, 7);
      const u32 cd = __builtin_shufflevector(c, d, 0, 4, 1, 5), cd_high = __builtin_shufflevector(c, d, 2, 6, 3, 7);
      const u32 columns[4] = {
          __builtin_shufflevector(ab, cd, 0, 1, 4, 5), __builtin_shufflevector(ab, cd, 2, 3, 6, 7),
          __builtin_shufflevector(ab_high, cd_high, 0, 1, 4, 5), __builtin_shufflevector(ab_high, cd_high, 2, 3, 6, 7)};
      for (int64_t i = 0; i < 4; ++i) std::memcpy(to + (p + i) * TILE + row, &columns[i], sizeof(u32));
    }
  for (; p < words; ++p)
    for (int64_t row = 0; row < TILE; ++row) to[p * TILE + row] = from[row * words + p];
}

void pack_tile(const uint16_t* from, int64_t words, uint16_t* to) {
  constexpr int64_t BLOCK = 32;  // words of a row in a cache line
  for (int64_t first = 0; first < words; first += BLOCK)
    for (int64_t row = 0; row < TILE; ++row)
      for (int64_t p = first; p < std::min(words, first + BLOCK); ++p) to[p * TILE + row] = from[row * words + p];
}

// from [rows, words] are the rows `first`, `first` + 1 ... of the matrix; to [tiles, words, TILE] is all of it.
template <class Word>
void pack(const Word* from, int64_t rows, int64_t words, int64_t first, Word* to) {
  for (int64_t row = 0; row < rows;) {
    const int64_t lane = (first + row) % TILE, count = std::min(TILE - lane, rows - row);
    Word* tile = to + (first + row) / TILE * words * TILE;
    if (count == TILE) pack_tile(from + row * words, words, tile);
    else
      for (int64_t j = 0; j < count; ++j)
        for (int64_t p = 0; p < words; ++p) tile[p * TILE + lane + j] = from[(row + j) * words + p];
    row += count;
  }
}

}  // namespace
