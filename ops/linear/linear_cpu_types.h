// What the micro kernels of a linear layer get, and what they are. linear_cpu.cpp explains the loops around them.

#pragma once

#include <cstdint>
#include <tuple>

#include "../cpu/vector_types.h"

namespace {

constexpr int64_t TILE = 16;  // columns in a tile: a 512-bit register of float32, or of bfloat16 pairs
// At most: column tiles of a micro kernel, and sums of a block of rows.
constexpr int64_t MAX_COLS = 3, MAX_SUMS = 1536 * TILE;

// How a layer of dtype T is packed, word by word: a pair of inputs of bfloat16 (even k in the low half, odd k in the high
// half), or one of float32 or float16. A word of activations is 32 bits, so those of float16 become float32 first.
template <class T>
struct Packing {
  using Word = T;          // of weights
  using Input = uint32_t;  // one activation
};
template <>
struct Packing<BFloat16> {
  using Word = uint32_t;
  using Input = uint16_t;
};

// Sums that are complete: the bias is added, and they are rounded.
template <class T>
struct Finish {
  int64_t rows = 0, columns = 0;  // [rows, columns], without gaps but for the rows, `sums_stride` apart
  const float* sums;
  int64_t sums_stride;
  float bias[MAX_COLS * TILE];
  T* out;
  int64_t out_stride;
  bool stream;  // the output is too large for the caches
};

// What a micro kernel works on.
template <class T>
struct Work {
  using Word = typename Packing<T>::Word;

  const uint32_t* x;    // packed activations: [words, M], [words, 2, M] of float32, or whole tiles for AMX;
  int64_t x_stride;     // AMX: if not 0, rows that are not packed, this far apart
  const Word* w;        // [C, words, TILE] weights, with `w_stride` from tile to tile
  int64_t w_stride;
  int64_t words;
  float* sums;          // [M, C, TILE]
  bool first;           // the sums start at zero, and are not read
  bool prefetch;        // fetch the weights AHEAD of these into L2,
  int64_t left;         // which are in the next C tiles from the `left`-th word on
  const Word* later;    // AMX: weights to fetch into L2 meanwhile, in C tiles,
  int64_t later_lines;  // and the number of cache lines, or words, of each;
  const Finish<T>* before;  // and sums of an earlier call to finish
};

// The kernels of an instruction set for dtype T.
template <class T>
struct KernelsOf {
  int64_t rows, cols;  // of the largest product: activations, and column tiles
  int64_t align;  // activations are packed with rows and words filled up to a multiple of this with zeros: 1 or TILE
  bool widens;        // bfloat16: activations are packed as float32, two words for each pair
  int64_t row_block;  // rows that use a chunk of weights together, at most
  int64_t chunk;      // words of a chunk; with few rows other numbers
  void (*const* multiply)(const Work<T>&);  // [rows / align, cols]: entry [m - 1, c - 1] does m * align rows and c tiles
  bool defers;  // whether `multiply` of packed activations finishes Work::before meanwhile
  void (*finish)(const Finish<T>&);
  void (*begin)(int64_t rows);  // in a thread, before its first product,
  void (*end)();                // and after its last one

  int64_t x_words(int64_t words) const { return words << widens; }  // packed activations of so many words of weights
  int64_t aligned(int64_t count) const { return (count + align - 1) / align * align; }
};

using Kernels = std::tuple<KernelsOf<BFloat16>, KernelsOf<float>, KernelsOf<Half>>;

}  // namespace
