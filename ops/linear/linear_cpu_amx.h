// The linear layer's micro kernel on tile registers. The packed weights are in the order of such tiles already: 16 pairs of
// rows, 16 columns.

#pragma once

#include <algorithm>

#include "../cpu/features.h"

namespace {

// R row tiles (1 or 2) by C column tiles (1 or 2).
//   x     [R * 16 rows, pairs], `x_stride` words from row to row; or PACKED:
//         [ceil(pairs / 16), R, 16 rows, 16 pairs], zero where there is no row or no pair
//   w     [C, pairs, 16 columns], `w_stride` words from column tile to column tile
//   sums  [R * 16, C, 16]; not read if this is the `first` chunk
// Before each 16 pairs it calls `meanwhile`, whose work overlaps with their products. Packed activations come from L2 one
// after the other: loaded as what is not needed again soon, they leave L1 to the weights.
template <class Tiles, bool PACKED, int R, int C, class Meanwhile>
[[gnu::always_inline]] inline TARGET_AVX512_BF16 void multiply_tiles(const uint32_t* x, int64_t x_stride, const uint32_t* w,
                                                                     int64_t w_stride, int64_t pairs, float* sums,
                                                                     bool first, Meanwhile& meanwhile) {
  Tiles tiles;
  constexpr int64_t ROW = 64, SUMS_ROW = C * ROW;  // bytes
  const int64_t x_row = PACKED ? ROW : x_stride * sizeof(uint32_t);
  const int64_t x_tile = TILE_ROWS * (PACKED ? TILE_WORDS : x_stride);  // words from row tile to row tile
  constexpr int64_t x_pair = PACKED ? R * TILE_ROWS : 1;                // and from pair to pair, between tiles
  float* below = sums + TILE_ROWS * C * TILE_WORDS;
  if (first) {
    tiles.template zero<0>();
    if constexpr (C > 1) tiles.template zero<1>();
    if constexpr (R > 1) tiles.template zero<2>();
    if constexpr (R > 1 && C > 1) tiles.template zero<3>();
  } else {
    tiles.template load<0>(sums, SUMS_ROW);
    if constexpr (C > 1) tiles.template load<1>(sums + TILE_WORDS, SUMS_ROW);
    if constexpr (R > 1) tiles.template load<2>(below, SUMS_ROW);
    if constexpr (R > 1 && C > 1) tiles.template load<3>(below + TILE_WORDS, SUMS_ROW);
  }
  const auto multiply_16_pairs = [&](const uint32_t* x_tiles, const uint32_t* w_tile, int64_t stride)
                                     __attribute__((always_inline)) {
    tiles.template load<4, PACKED>(x_tiles, x_row);
    tiles.template load<6>(w_tile, ROW);
    tiles.template multiply<0, 4, 6>();
    if constexpr (C > 1) {
      tiles.template load<7>(w_tile + stride, ROW);
      tiles.template multiply<1, 4, 7>();
    }
    if constexpr (R > 1) {
      tiles.template load<5, PACKED>(x_tiles + x_tile, x_row);
      tiles.template multiply<2, 5, 6>();
    }
    if constexpr (R > 1 && C > 1) tiles.template multiply<3, 5, 7>();
  };
  int64_t p = 0;
  for (; p + TILE_ROWS <= pairs; p += TILE_ROWS) {
    meanwhile();
    multiply_16_pairs(x + p * x_pair, w + p * TILE_WORDS, w_stride);
  }
  if (p < pairs) {  // the last pairs of a K that is no multiple of 32, followed by zero weights
    alignas(64) uint32_t tail[C][TILE_ROWS][TILE_WORDS] = {};
    for (int c = 0; c < C; ++c)
      std::memcpy(tail[c], w + c * w_stride + p * TILE_WORDS, (pairs - p) * sizeof(tail[c][0]));
    multiply_16_pairs(x + p * x_pair, tail[0][0], TILE_ROWS * TILE_WORDS);
  }
  tiles.template store<0>(sums, SUMS_ROW);
  if constexpr (C > 1) tiles.template store<1>(sums + TILE_WORDS, SUMS_ROW);
  if constexpr (R > 1) tiles.template store<2>(below, SUMS_ROW);
  if constexpr (R > 1 && C > 1) tiles.template store<3>(below + TILE_WORDS, SUMS_ROW);
}

}  // namespace
