// What the micro kernels of a linear layer get, and what they are. linear_cpu.cpp explains the loops around them.

#pragma once

#include <cstdint>

#include "../cpu/vector_types.h"

namespace {

constexpr int64_t TILE = 16;  // columns in a tile: a 512-bit register of float32, or of bfloat16 pairs
// At most: column tiles of a micro kernel, and sums of a block of rows.
constexpr int64_t MAX_COLS = 3, MAX_SUMS = 768 * TILE;

// What a micro kernel works on. A uint32_t is a pair of bfloat16: even k in the low half, odd k in the high half.
struct Work {
  const uint32_t* x;       // packed activations: [pairs, M], or whole tiles for AMX;
  int64_t x_stride;        // AMX: if not 0, rows that are not packed, this far apart
  const uint32_t* w;       // [C, pairs, TILE] weights, with `w_stride` from tile to tile
  int64_t w_stride;
  int64_t pairs;
  float* sums;             // [M, C, TILE]
  bool first;              // the sums start at zero, and are not read
  bool prefetch;           // fetch the weights AHEAD of these into L2,
  int64_t left;            // which are in the next C tiles from the `left`-th pair on
  const uint32_t* later;   // AMX: weights to fetch into L2 meanwhile, in C tiles,
  int64_t later_lines;     // and the number of cache lines, or pairs, of each
};

// The kernels of an instruction set.
struct Kernels {
  int64_t rows, cols;  // of the largest product: activations, and column tiles
  int64_t align;  // activations are packed with rows and pairs filled up to a multiple of this with zeros: 1 or TILE
  int64_t row_block;  // rows that use a chunk of weights together, at most
  int64_t chunk;      // pairs of a chunk; with few rows other numbers
  void (*const* multiply)(const Work&);  // [rows / align, cols]: entry [m - 1, c - 1] does m * align rows and c tiles
  // Adds the bias to `rows` rows of `columns` sums and rounds them. They are stored without gaps, `sums_stride` apart.
  // `stream` says that the output is too large for the caches.
  void (*finish)(const float* sums, int64_t sums_stride, const float* bias, int64_t rows, int64_t columns, BFloat16* out,
                 int64_t out_stride, bool stream);
  void (*begin)(int64_t rows);  // in a thread, before its first product,
  void (*end)();                // and after its last one

  int64_t aligned(int64_t count) const { return (count + align - 1) / align * align; }
};

}  // namespace
