// What the kernels of a linear layer on quantised weights get. quantized_linear_cpu.cpp explains the loops around them.

#pragma once

#include <cstdint>

#include "../cpu/vector_types.h"

namespace {

constexpr int64_t TILE = 16;  // outputs of a tile
constexpr int MAX_ROWS = 12, MAX_COLS = 2;  // of a product

enum class Element { int8, int4, fp8, fp4 };
enum class GroupType { float32, bfloat16, float16, int8 };  // of scales or zeros; int8: of zeros alone

inline int64_t bytes_of(GroupType type) { return type == GroupType::float32 ? 4 : type == GroupType::int8 ? 1 : 2; }

// What the 256 bytes, or 16 codes of 4 bits, of an element stand for.
struct Values {
  float of[256];
  alignas(64) BFloat16 pairs[128];  // the same of the first 128
};

// What all tiles of a matrix have in common. A part is a group, or 128 inputs where a row is one group.
struct Matrix {
  int64_t groups;
  GroupType scale_type, zero_type;
  Element element;
  const Values* values;
  bool whole;      // a row is one group
  int64_t part;    // inputs of a part, a multiple of 8
  int64_t inputs;  // of a row, rounded up to whole words of codes

  // Inputs of a word, 64 bytes: 4 bytes of each of 16 outputs.
  int64_t word_inputs() const { return element == Element::int4 || element == Element::fp4 ? 8 : 4; }
  int64_t tile_bytes() const { return inputs / word_inputs() * 64; }
  int64_t decoded_bytes() const { return inputs / 2 * TILE * 4; }  // of a tile, as pairs of bfloat16
  // Whether tile registers multiply codes as they are.
  bool scales_sums() const { return word_inputs() == 8 && part % 32 == 0; }
  int64_t parts() const { return (inputs + part - 1) / part; }
};

// The products of M rows with C tiles that lie behind each other.
struct Work {
  const Matrix* of;
  const uint8_t* codes;  // of the tiles
  const void* scales;    // [C, groups, TILE]
  const void* zeros;     // [C, groups, TILE], or null
  const void* decoded;   // what `decode` made of the tiles
  const uint32_t* x;     // [words, M]: pairs of bfloat16, or float32; all words of the rows
  const float* x_sums;   // [parts, M]: of the inputs of each part; where there are zeros and pairs
  float* sums;           // [C, M, TILE], written
  const uint8_t* later;  // codes of as many tiles that are fetched meanwhile,
  const char* later_scales;  // and their scales
};

// The products of a block of rows with one or two tiles, rounded, on tile registers.
struct Block {
  const Matrix* of;
  const uint8_t* codes;  // of the tiles; scales and zeros as Work has them
  const void *scales, *zeros;
  int64_t columns;    // tiles,
  int64_t count;      // and their outputs
  const uint32_t* x;  // of `pack`
  const float* x_sums;  // [parts, rows]: of the inputs of each part, where `scales_sums` and there are zeros
  int64_t rows;
  float* sums;        // memory for [rows rounded up to 32, columns, TILE],
  float* factors;     // [columns, TILE],
  uint32_t* decoded;  // for `decoded_words`,
  float* group_numbers;  // and, where `scales_sums`, for [groups, 2, columns, TILE]: scales and zeros
  const float* bias;  // [columns, TILE]
  BFloat16* out;
  int64_t out_stride;
  bool stream;           // the output is too large for the caches
  const uint8_t* later;  // codes that are fetched meanwhile, their scales and zeros
  const char *later_scales, *later_zeros;
};

// Those of tile registers. A thread multiplies after `begin` and before `end`.
struct TileKernels {
  void (*begin)(int64_t rows);
  void (*end)();
  void (*pack)(const Matrix&, int64_t K, const BFloat16* const* rows, int64_t count, uint32_t* to);  // rows of a block
  void (*multiply[4])(const Block&);  // for each Element
  int64_t decoded_words;
};

// For each Element: entry [m - 1], of m rows.
struct Products {
  int64_t rows, cols;  // of the largest; each has so many tiles
  void (*const* multiply[4])(const Work&);
  void (*const* multiply_decoded[4])(const Work&);  // of what `decode` wrote, with the same bits
};

struct KernelsOf {
  const TileKernels* tiles;  // in place of all that follows, or null
  // Writes rows of x, K long each, as `multiply` reads them; null: it reads float32, [inputs, rows].
  void (*pack)(const Matrix&, int64_t K, const BFloat16* const* rows, int64_t count, uint32_t* to);
  Products tall, wide;  // of a tile; and of several, with fewer rows
  // Of each tile: [inputs, TILE] float32, or [inputs / 2, TILE] pairs of bfloat16. Null where `multiply` reads codes alone.
  void (*decode[4])(const Work&, void* to);
  // Rounds [rows, TILE] sums with their bias added: T is 0 float32, 1 bfloat16, 2 float16.
  void (*finish)(int type, const float* sums, int64_t rows, int64_t count, const float* bias, void* out,
                 int64_t out_stride);
};

struct Kernels {
  KernelsOf bf16, floats;
};

}  // namespace
