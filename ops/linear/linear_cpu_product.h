// The loops of the linear layer around its micro kernels. linear_cpu.cpp explains them.

#pragma once

#include <algorithm>
#include <cstring>

#include "linear_cpu_types.h"
#include "rows.h"

namespace {

constexpr int64_t STREAM_BYTES = 1 << 17;        // of output: more is written past the caches
constexpr int64_t TILED_BLOCK_BYTES = 5 << 18;   // of activations, with tile registers: they stay in L2
constexpr int64_t MANY_ROWS = 256;               // from here on sums are the limit with tile registers, not the weights
constexpr int64_t FEW_ROWS = 4;                  // up to here memory is the limit, where weights come from there
constexpr int64_t CACHED_BYTES = 1 << 20;        // weights of so many or fewer are those of a model that stays in caches
constexpr int64_t SPREAD_ROWS = 24;               // from here on the next weights are fetched while these are used
constexpr int64_t GRAIN_FLOPS = 1 << 18;         // for less, waking a thread takes longer than the work
constexpr int64_t PIECES = 8;                    // of the columns, for each thread

// y = x @ W.T + bias
template <class T>
struct Operands {
  Rows<typename Packing<T>::Input> x;
  int64_t rows, K;
  const typename Packing<T>::Word* w;  // [tiles, words, TILE]
  int64_t tiles, words;
  const T* bias;  // [N], or null
  T* out;         // [rows, N]
  int64_t N;
};

// Interleaves rows, each pair of bfloat16 as two of float32: [words, 2, rows].
inline void widen_rows(const Rows<uint16_t>& from, int64_t rows, int64_t K, uint32_t* to) {
  interleave_rows(from, rows, K, to);
  for (int64_t p = (K + 1) / 2 - 1; p >= 0; --p)  // from the end, so that no pair is overwritten before it is read
    for (int64_t row = 0; row < rows; ++row) {
      const uint32_t pair = to[p * rows + row];
      to[2 * p * rows + row] = pair << 16;
      to[(2 * p + 1) * rows + row] = pair & 0xffff0000u;
    }
}

// `rows` rows of K elements -> [K tiles, row tiles, TILE rows, TILE words], zero where there is no row or no word.
template <class Input>
void tile_rows(const Rows<Input>& from, int64_t rows, int64_t K, uint32_t* to) {
  constexpr int64_t INPUTS = TILE * sizeof(uint32_t) / sizeof(Input);  // of a tile's row
  const int64_t aligned_rows = (rows + TILE - 1) / TILE * TILE;
  for (int64_t k = 0; k < K; k += INPUTS)
    for (int64_t row = 0; row < aligned_rows; ++row, to += TILE) {
      const int64_t count = row < rows ? std::min(INPUTS, K - k) : 0;
      if (count == INPUTS) std::memcpy(to, from[row] + k, INPUTS * sizeof(Input));  // one load and one store
      else {
        std::memset(to, 0, INPUTS * sizeof(Input));
        if (count > 0) std::copy_n(from[row] + k, count, reinterpret_cast<Input*>(to));
      }
    }
}

// Rows [first, end) of an operand -> groups of `group` rows, each as the micro kernel takes it. Each row takes `words`.
template <class T>
void pack_rows(const KernelsOf<T>& kernels, const Operands<T>& of, int64_t first, int64_t end, int64_t group, int64_t words,
               uint32_t* packed) {
  using Input = typename Packing<T>::Input;
  auto pack = kernels.align == 1 ? interleave_rows<Input> : tile_rows<Input>;
  if constexpr (std::is_same_v<T, BFloat16>)
    if (kernels.widens) pack = widen_rows;
  for (int64_t row = first; row < end; row += group)
    pack(of.x.from(row), std::min(group, end - row), of.K, packed + (row - first) * words);
}

// The first row that has to be packed, a multiple of `group`, or `rows`: tiles are loaded from x itself where they are
// whole, and its rows are evenly apart.
template <class T>
int64_t first_packed_row(const Operands<T>& of, int64_t group, int64_t align) {
  const int64_t stride = of.x.stride, rows = of.rows;
  if (align == 1 || of.K % (2 * align) != 0 || stride % 2 != 0 || stride == 0) return 0;
  if (of.x.index != nullptr && rows > 1) return 0;
  return rows < align || rows % align == 0 ? rows : rows / group * group;
}

template <class T>
struct Problem {
  int64_t rows, N, tiles, words;
  const uint32_t* x;     // the rows before `first_packed`, `x_stride` words apart,
  int64_t x_stride, first_packed;
  int64_t x_words;       // and the others as pack_rows made them, with room for this many words each
  const typename Packing<T>::Word* w;  // [tiles, words, TILE]
  const T* bias;   // or null
  T* out;          // [rows, N]
  bool stream;     // past the caches
  bool defer;      // sums are finished while the next ones are added up
  int64_t chunk;   // words
  int64_t group;   // rows of a row group,
  int64_t block;   // of a block of rows
  int64_t cols;    // column tiles of a micro kernel,
  int64_t piece;   // of a piece of the columns
  bool prefetches;  // its own weights, while the first row group takes them,
  bool spreads;     // and the next ones, in all row groups
};

template <class T>
struct Workplace {  // of a thread
  alignas(64) float sums[MAX_SUMS];
  Finish<T> before;         // not finished yet
  uint32_t* x_packed;       // rows of its block from the first packed one on,
  int64_t packed_from;      // which is this one
};

// Rows [row, row + rows) of column tiles [tile, tile + cols). The thread's next weights start at `next`.
template <class T>
void multiply_block(const KernelsOf<T>& kernels, const Problem<T>& problem, Workplace<T>& place, int64_t row, int64_t rows,
                    int64_t tile, int64_t cols, const typename Packing<T>::Word* next) {
  const int64_t groups = (rows + problem.group - 1) / problem.group, w_stride = problem.words * TILE;
  const auto* const w = problem.w + tile * w_stride;
  const int64_t column = tile * TILE, columns = std::min(cols * TILE, problem.N - column);
  for (int64_t word = 0, words; word < problem.words; word += words) {
    words = std::min(problem.chunk, problem.words - word);
    // The next weights, of the next chunk or the next tiles: each row group fetches a part.
    const bool last = word + words == problem.words;
    const auto* later = last ? next : w + (word + words) * TILE;
    const int64_t later_words = std::min(problem.chunk, last ? problem.words : problem.words - word - words);
    const int64_t later_lines = problem.spreads ? (later_words + groups - 1) / groups : 0;
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t m = std::min(problem.group, rows - g * problem.group), start = row + g * problem.group;
      const bool direct = start < problem.first_packed;
      float* group_sums = place.sums + g * problem.group * cols * TILE;
      kernels.multiply[((m - 1) / kernels.align) * kernels.cols + cols - 1]({
          .x = direct ? problem.x + start * problem.x_stride + word
                      : place.x_packed + (start - place.packed_from) * problem.x_words + kernels.x_words(word) * kernels.aligned(m),
          .x_stride = direct ? problem.x_stride : 0,
          .w = w + word * TILE,
          .w_stride = w_stride,
          .words = words,
          .sums = group_sums,
          .first = word == 0,
          .prefetch = g == 0 && problem.prefetches,
          .left = problem.words - word,
          .later = later + g * later_lines * TILE,
          .later_lines = later_lines,
          .before = &place.before,
      });
      place.before.rows = 0;
      if (!last) continue;
      Finish<T> finish = {m, columns, group_sums, cols * TILE, {}, problem.out + start * problem.N + column, problem.N,
                          problem.stream};
      if (problem.bias) std::copy_n(problem.bias + column, columns, finish.bias);
      if (problem.defer && columns == 2 * TILE) place.before = finish;
      else kernels.finish(finish);
    }
  }
}

// Rows of a block, for tile registers: as many as stay in L2 with `bytes` each, in about equal blocks.
int64_t tiled_block(int64_t rows, int64_t bytes, int64_t group, int64_t most) {
  const int64_t limit = std::max(std::min(most, TILED_BLOCK_BYTES / bytes), group);
  const int64_t blocks = (rows + limit - 1) / limit, even = (rows + blocks - 1) / blocks;
  return (even + group - 1) / group * group;
}

template <class T>
int64_t weight_bytes(const Operands<T>& of) {
  return of.tiles * of.words * TILE * static_cast<int64_t>(sizeof(*of.w));
}

// How it is cut, for a number of threads. `bytes`: of all weights that the op reads.
template <class T>
Problem<T> problem_of(const KernelsOf<T>& kernels, const Operands<T>& of, int64_t threads, int64_t bytes) {
  const int64_t rows = of.rows, N = of.N, tiles = of.tiles, words = of.words, x_words = kernels.x_words(kernels.aligned(words));
  const bool tiled = kernels.align > 1;
  // With few rows a single row tile at a time: it waits less for weights that come from memory. 8 rows as 4 and 4, not 6
  // and 2: with 256 bits, 1 to 4 rows take as long, each product waiting for the sum before.
  const int64_t group = tiled && rows <= 2 * kernels.rows ? kernels.align
                        : rows > kernels.rows && rows <= 8 ? (rows + 1) / 2
                                                           : kernels.rows;
  // With many, packing pays: in x itself, rows a power of two apart share a few sets of L1.
  const int64_t first_packed = tiled && group == kernels.rows ? 0 : first_packed_row(of, group, kernels.align);
  // With few rows one tile after the other: a single stream of weights, which the hardware's prefetchers follow best. From
  // caches that would be slow, since each product waits for the sum before; several tiles have several sums.
  const bool streams = !tiled && rows <= FEW_ROWS && bytes > CACHED_BYTES;
  const int64_t cols = streams ? 1 : kernels.cols;
  return {
      .rows = rows,
      .N = N,
      .tiles = tiles,
      .words = words,
      .x = reinterpret_cast<const uint32_t*>(of.x[0]),
      .x_stride = of.x.stride / static_cast<int64_t>(sizeof(uint32_t) / sizeof(typename Packing<T>::Input)),
      .first_packed = first_packed,
      .x_words = x_words,
      .w = of.w,
      .bias = of.bias,
      .out = of.out,
      .stream = group == kernels.rows && rows * N * static_cast<int64_t>(sizeof(T)) > STREAM_BYTES && N % (2 * TILE) == 0,
      .defer = kernels.defers && first_packed == 0,
      // One group reads longer runs of memory; with two, the second finds the first one's weights in L1.
      .chunk = rows <= group || (tiled && rows >= MANY_ROWS) ? 2 * kernels.chunk
               : tiled && rows <= 2 * group                  ? kernels.chunk / 2
                                                             : kernels.chunk,
      .group = group,
      .block = tiled ? tiled_block(rows, x_words * 4, kernels.rows, kernels.row_block) : kernels.row_block,
      .cols = cols,
      .piece = threads == 1 ? tiles : (tiles / (PIECES * threads) + cols) / cols * cols,
      .prefetches = !tiled || rows > FEW_ROWS,
      .spreads = tiled || rows >= SPREAD_ROWS,
  };
}

}  // namespace
