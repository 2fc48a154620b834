// What the kernels of a compressed linear layer get, and what they are. compressed_linear.py has the layout;
// compressed_linear_cpu.cpp explains the loops around them.

#pragma once

#include <cstdint>

#include "../cpu/vector_types.h"

namespace {

constexpr int64_t TILE = 16;         // outputs of a tile: a 512-bit register of float32
constexpr int64_t GROUP_TILES = 4, GROUP = GROUP_TILES * TILE;  // of a group, whose words lie side by side
constexpr int64_t WORD_BYTES = 192;  // of a group's word, a pair of inputs: lower bytes, then codes
constexpr int64_t LINE = 64;         // bytes that a cache holds together
constexpr int64_t TABLE_BYTES = 128;  // of a group: 16 upper bytes for each 8 outputs
constexpr int64_t ROWS = 6;          // of a product, at most

// An upper byte that no code stands for: (place << 8) | byte, where place = 128 * word + 64 * half + place in the half.
// A group has them in rising order, and after the last one END.
constexpr int32_t END = 0x7fffffff;

// A group of outputs.
struct Group {
  const uint8_t* words;  // [words, WORD_BYTES]
  const uint8_t* table;  // [TABLE_BYTES]
  const int32_t* exceptions;  // rising, then END
};

// Outputs that are complete: the bias is added, and they are rounded.
struct Finish {
  const float* sums;     // [rows, columns], `sums_stride` apart
  int64_t sums_stride;
  const uint16_t* bias;  // [columns] bfloat16, or null
  uint16_t* out;         // [rows, columns] bfloat16, `stride` apart
  int64_t stride, rows, columns;
  bool stream;  // past the caches: tile registers alone, whole lines of aligned outputs
};

// M rows by a group of outputs.
struct Work {
  const uint32_t* x;  // [words, M]
  int64_t words;
  float* sums;  // [M, GROUP]
  bool first;   // the sums start at zero, and are not read
  const uint8_t* later;               // what to fetch into L1 meanwhile:
  int64_t later_lines, lines_at_once;  // of 64 bytes, and how many of them with each word
};

// A block of rows by a group of outputs, on tile registers.
struct TileWork {
  // Words are filled up with zeros to a multiple of TILE, and rows, in groups of two row tiles or one:
  // [row groups, words / TILE, row tiles, TILE rows, TILE words]. Up to TILE rows are not filled up.
  const uint32_t* x;
  int64_t words;
  Group group;
  const uint8_t* next;  // the words that the thread takes after those of the group
  float* sums;          // room for [rows, GROUP], with the rows that were filled up
  uint32_t* expanded;   // room for a chunk, [chunk, GROUP / 2], or two steps, [2, TILE, GROUP]; aligned to a cache line
  int64_t chunk;        // words of a chunk, a multiple of TILE
  Finish finish;
};

// The kernels of a set with tile registers.
struct TileKernels {
  void (*begin)(int64_t rows);  // in a thread, before blocks of so many rows,
  void (*end)();                // and after them
  void (*multiply)(const TileWork&);
};

struct Kernels {
  const TileKernels* tiles;  // or null: then
  // Words of a group from `first` on, whose exceptions start at the first one that is not before them. `expanded`, if not
  // null, gets the words as [words, GROUP] pairs of bfloat16.
  void (*multiply_compressed[ROWS])(const Work&, const Group&, int64_t first, uint32_t* expanded);  // [M - 1]
  void (*multiply[ROWS])(const Work&, const uint32_t* expanded);                                    // [M - 1]
  void (*finish)(const Finish&);
};

}  // namespace
