// What the kernels of quantized_linear_a8 get, and what they are. quantized_linear_a8_cpu.cpp explains the loops around
// them.

#pragma once

#include <cstdint>

#include "../cpu/vector_types.h"

namespace {

constexpr int64_t TILE = 16;       // outputs of a tile of the weights
constexpr int64_t WORD_BYTES = 64;  // of a tile: 4 inputs of 16 outputs in int8, 8 inputs in int4
constexpr int64_t MAX_ROWS = 8, MAX_COLS = 3;  // of a product
constexpr int64_t FEW_ROWS = 4;                // up to here a single stream of weights is read the fastest

// Rows of activations. Codes are followed by zeros up to a multiple of 8 inputs.
struct Rows8 {
  int8_t* codes;    // [rows, stride]
  int64_t stride;
  // [groups, across]: those of a product's rows lie side by side
  int32_t* starts;   // what the sum of a group starts at, for codes that are kept with an offset
  float* inputs;     // sums of the codes of a group; for zero points
  float* of_groups;  // scales of groups where each has its own; else 1
  float* scales;     // [rows]; 1 where groups have scales
  int64_t groups, across;
  bool by_groups;

  Rows8 from(int64_t row) const {
    return {codes + row * stride, stride, starts + row, inputs + row, of_groups + row, scales + row, groups, across, by_groups};
  }
};

// How a row is quantised.
struct Quantize {
  int64_t K, group;      // inputs of a row, of a group
  const float* x_scale;  // or null
  int32_t offset;        // of the codes of weights, as they are multiplied
};

// Products of M rows and C column tiles, each over all inputs. One of these serves all groups of M rows: a kernel reads
// several fields at once, and would wait, if they had just been written, until all results before them are in the caches.
struct Work8 {
  Rows8 x;
  const uint8_t* w;    // [C, words, 64]
  int64_t words;
  int64_t group;       // words
  const float* scales;  // [C, groups, TILE]
  const float* zeros;   // [C, groups, TILE], or null
  float* totals;        // [M, C, TILE]
  const uint8_t* later;  // weights of the same shape that are fetched into L2 meanwhile
};

// Products of few rows and column tiles that lie behind each other.
template <class S>
struct Stream8 {
  Rows8 x;
  int64_t tiles;
  const uint8_t* w;  // [tiles, words, 64]
  int64_t words;
  int64_t group;    // words
  const S* scales;  // [tiles, groups, TILE]
  const S* zeros;   // [tiles, groups, TILE], or null
  float* totals;    // [rows, tiles, TILE]
};

template <class S>
struct Streams {  // entry [rows - 1]
  void (*int8[FEW_ROWS])(const Stream8<S>&);
  void (*int4[FEW_ROWS])(const Stream8<S>&);
};

// Products of a block of rows and one or two column tiles, over all inputs.
struct Block8 {
  Rows8 x;             // up to 15 rows after the last are read, codes and what belongs to groups, and not used
  int64_t rows, columns;
  const uint8_t* w;    // [columns, words, 64]
  int64_t words;
  int64_t group;       // words
  const float* scales;  // [columns, groups, TILE]
  const float* zeros;   // [columns, groups, TILE], or null
  float* totals;        // [rows rounded up to 32, columns, TILE]
  int32_t* sums;        // memory for as many
  uint8_t* codes;       // and for `code_bytes`
};

// Those of tile registers. A thread multiplies after `begin` and before `end`.
struct TileKernels {
  void (*begin)(int64_t rows, int64_t group);  // at most `rows` rows if they are fewer than 16; 4 inputs times `group`
  void (*end)();
  void (*int8)(const Block8&);
  void (*int4)(const Block8&);
  int64_t code_bytes;
};

// y = total * sx + bias
template <class T>
struct Finish8 {
  int64_t rows, columns;  // of totals [rows, stride]
  const float* totals;
  int64_t stride;
  const float* x_scales;
  const T* bias;  // [columns], or null
  T* out;
  int64_t out_stride;
};

template <class T>
struct KernelsOf8 {
  void (*quantize)(const T* x, const Quantize& how, const Rows8& to);  // one row
  void (*widen)(const T* from, int64_t count, float* to);              // scales or zeros; a multiple of TILE
  void (*finish)(const Finish8<T>&);
  Streams<T> streams;  // of scales in this dtype
};

// Entry [m - 1, c - 1] of [rows, cols]: m rows from `row` on, c column tiles.
struct Products {
  int64_t rows, cols;  // of the largest one
  void (*const* int8)(const Work8&, int64_t row);
  void (*const* int4)(const Work8&, int64_t row);
};

struct Kernels {
  int32_t offset;  // of codes of int8, as they are multiplied
  Products of_long, of_short;  // groups
  TileKernels tiles;  // nulls where there are none
  void (*widen)(const int8_t* from, int64_t count, float* to);  // zeros; a multiple of TILE
  KernelsOf8<BFloat16> bf16;
  KernelsOf8<float> f32;
  KernelsOf8<Half> f16;
};

}  // namespace
