// What the kernels of a linear layer on quantised weights get. quantized_linear_cpu.cpp explains the loops around them.

#pragma once

#include <cstdint>

#include "../cpu/vector_types.h"

namespace {

constexpr int64_t TILE = 16;  // outputs of a tile
constexpr int MAX_ROWS = 8;

enum class Element { int8, int4, fp8, fp4 };
enum class ScaleType { float32, bfloat16, float16 };

// What the 256 bytes, or 16 codes of 4 bits, of an element stand for.
struct Values {
  float of[256];
};

// A block of column tiles, and a chunk of their parts. A part is a group, or 128 inputs where a row is one group.
struct Block {
  const uint8_t* codes;  // of the first tile, `code_stride` bytes from tile to tile
  int64_t code_stride;
  const void* scales;  // of the first tile, `groups` * TILE from tile to tile; zeros likewise, or null
  const void* zeros;
  int64_t groups;
  ScaleType type;
  Element element;
  const Values* values;
  bool whole;          // a row is one group
  int64_t part;        // inputs of a part, a multiple of 8
  int64_t inputs;      // of a row, rounded up to whole words of codes
  int64_t first, end;  // parts of the chunk

  // Inputs of a word, 64 bytes: 4 bytes of each of 16 outputs.
  int64_t word_inputs() const { return element == Element::int4 || element == Element::fp4 ? 8 : 4; }
};

// The products of M rows with a block.
struct Work {
  const Block* block;
  const void* decoded;  // what `decode` made of the chunk; null: from the codes themselves
  const uint32_t* x;    // [words, M]: pairs of bfloat16, or float32; all words of the rows
  const float* x_sums;  // [parts, M]: of the inputs of each part; where there are zeros and pairs
  float* sums;          // [M, C, TILE], added to
  const uint8_t* later;  // codes to fetch into L2 meanwhile, in C tiles,
  int64_t later_lines;   // and the number of words of each
};

struct KernelsOf {
  int64_t rows, cols;      // at most, of a product from decoded weights
  int64_t direct_rows;     // and from codes, a tile at a time; 0: none
  bool pairs;              // of bfloat16
  int64_t word_bytes;      // of decoded weights, for each input and output
  void (*decode)(const Block&, int64_t cols, void* to);
  void (*multiply)(const Work&, int64_t rows, int64_t cols);
  // Rounds [rows, TILE] sums of a tile, `stride` apart, with their bias added: T is 0 float32, 1 bfloat16, 2 float16.
  void (*finish)(int type, const float* sums, int64_t stride, int64_t rows, int64_t count, const float* bias, void* out,
                 int64_t out_stride);
};

struct Kernels {
  KernelsOf bf16, floats;
};

}  // namespace
