// Linear layer on packed weights for CPUs. packed_linear.py has the layout, the reference and the schema.
//
//   y[t, n] = bias[n] + sum over k of  x[t, k] * W[n, k]
//
// The inputs are taken word by word: a pair of bfloat16, or one float32 or float16.
//
// Three loops around a micro kernel:
//
//   threads     each takes pieces of the column tiles (16 outputs each) of a block of rows
//   columns     `cols` tiles at a time ...
//   K chunks    ... of which `chunk` words are read from memory once for a block of rows, ...
//   row groups  ... and used from the caches by every group of `rows` rows
//
// The micro kernel holds rows x cols sums of 16 columns in registers and walks through a chunk word by word, or with AMX
// (linear_cpu_amx.h) 16 words at a time.
//
// AMX multiplies faster than L2 delivers: of each product's operands one has to be in L1 (the weights' chunk), the other
// in L2 (the block of rows), and weights have to be fetched from farther away all the time. So every row group fetches
// its part of the next weights; from 65 rows on activations are packed tile by tile, to be read from L2 one line after the
// other; outputs are written past the caches, while the next sums are added up.
//
// Batch invariance: every output has one float32 sum, which takes its words in order, whatever the number of rows, the
// place of its row, or the number of threads. Chunks do not change that: between two of them a sum is kept in memory as
// float32. So a request gets the same tokens alone or in any batch. Kernels of different instruction sets may
// differ in the last bit (AMX sums 16 even and 16 odd products before it adds them), so one of them serves all shapes: AMX
// also takes single rows, where it has more than enough arithmetic to keep up with memory.

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "linear_cpu_types.h"
#include "../cpu/op.h"

namespace {

constexpr int64_t STREAM_BYTES = 1 << 17;        // of output: more is written past the caches
constexpr int64_t TILED_BLOCK_BYTES = 5 << 18;   // of activations, with tile registers: they stay in L2
constexpr int64_t MANY_ROWS = 256;               // from here on sums are the limit with tile registers, not the weights
constexpr int64_t FEW_ROWS = 4;                  // up to here memory is the limit even without any prefetch of ours
constexpr int64_t GRAIN_FLOPS = 1 << 18;         // for less, waking a thread takes longer than the work
constexpr int64_t PIECES = 8;                    // of the columns, for each thread

// `rows` rows of K elements -> [words, rows]: what a micro kernel reads in a row. Four rows of four words at a time.
template <class Input>
void interleave_rows(const Input* from, int64_t stride, int64_t rows, int64_t K, uint32_t* to) {
  typedef uint32_t u32 __attribute__((vector_size(16)));
  constexpr int64_t INPUTS = sizeof(uint32_t) / sizeof(Input);  // of a word
  const int64_t words = K / INPUTS;
  int64_t m = 0;
  for (; m + 4 <= rows; m += 4)
    for (int64_t p = 0; p < words / 4 * 4; p += 4) {
      u32 a, b, c, d;
      for (auto [row, lanes] : {std::pair(0, &a), {1, &b}, {2, &c}, {3, &d}})
        std::memcpy(lanes, from + (m + row) * stride + INPUTS * p, sizeof(u32));
      const u32 ab = __builtin_shufflevector(a, b, 0, 4, 1, 5), ab_high = __builtin_shufflevector(a, b, 2, 6, 3, 7);
      const u32 cd = __builtin_shufflevector(c, d, 0, 4, 1, 5), cd_high = __builtin_shufflevector(c, d, 2, 6, 3, 7);
      const u32 columns[4] = {
          __builtin_shufflevector(ab, cd, 0, 1, 4, 5), __builtin_shufflevector(ab, cd, 2, 3, 6, 7),
          __builtin_shufflevector(ab_high, cd_high, 0, 1, 4, 5), __builtin_shufflevector(ab_high, cd_high, 2, 3, 6, 7)};
      for (int64_t i = 0; i < 4; ++i) std::memcpy(to + (p + i) * rows + m, &columns[i], sizeof(u32));
    }
  const auto copy = [&](int64_t row, int64_t first_word) {
    for (int64_t p = first_word; p < words; ++p)
      std::memcpy(to + p * rows + row, from + row * stride + INPUTS * p, sizeof(uint32_t));
    if (K % INPUTS != 0) to[words * rows + row] = from[row * stride + K - 1];
  };
  for (int64_t row = 0; row < rows; ++row) copy(row, row < m ? words / 4 * 4 : 0);
}

// `rows` rows of K elements -> [K tiles, row tiles, TILE rows, TILE words], zero where there is no row or no word.
template <class Input>
void tile_rows(const Input* from, int64_t stride, int64_t rows, int64_t K, uint32_t* to) {
  constexpr int64_t INPUTS = TILE * sizeof(uint32_t) / sizeof(Input);  // of a tile's row
  const int64_t aligned_rows = (rows + TILE - 1) / TILE * TILE;
  for (int64_t k = 0; k < K; k += INPUTS)
    for (int64_t row = 0; row < aligned_rows; ++row, to += TILE) {
      const int64_t count = row < rows ? std::min(INPUTS, K - k) : 0;
      if (count == INPUTS) std::memcpy(to, from + row * stride + k, INPUTS * sizeof(Input));  // one load and one store
      else {
        std::memset(to, 0, INPUTS * sizeof(Input));
        std::copy_n(from + row * stride + k, count, reinterpret_cast<Input*>(to));
      }
    }
}

// Rows [first, end) of x [T, K] -> groups of `group` rows, each as the micro kernel takes it, whatever the strides of x.
// `align` is that of the kernels; each row takes `words`.
template <class Input>
void pack_rows(const Tensor& x, int64_t first, int64_t end, int64_t group, int64_t align, int64_t words,
               uint32_t* packed) {
  const auto* data = x.data<const Input>();
  const auto pack = align == 1 ? interleave_rows<Input> : tile_rows<Input>;
  for (int64_t row = first; row < end; row += group)
    pack(data + row * x.stride(0), x.stride(0), std::min(group, end - row), x.size(1), packed + (row - first) * words);
}

// The first row that has to be packed, a multiple of `group`, or T: tiles are loaded from x itself where they are whole.
int64_t first_packed_row(const Tensor& x, int64_t group, int64_t align) {
  const int64_t T = x.size(0);
  if (align == 1 || x.size(1) % (2 * align) != 0 || x.stride(0) % 2 != 0 || x.stride(0) == 0) return 0;
  return T < align || T % align == 0 ? T : T / group * group;
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
};

template <class T>
struct Workplace {  // of a thread
  alignas(64) float sums[MAX_SUMS];
  Finish<T> before;         // not finished yet
  uint32_t* x_packed;       // rows of its block from the first packed one on,
  int64_t packed_from;      // which is this one
};

// Rows [row, row + rows) of column tiles [tile, tile + cols). The thread's next ones start at `next_tile`.
template <class T>
void multiply_block(const KernelsOf<T>& kernels, const Problem<T>& problem, Workplace<T>& place, int64_t row, int64_t rows,
                    int64_t tile, int64_t cols, int64_t next_tile) {
  const int64_t groups = (rows + problem.group - 1) / problem.group, w_stride = problem.words * TILE;
  const auto* const w = problem.w + tile * w_stride;
  const int64_t column = tile * TILE, columns = std::min(cols * TILE, problem.N - column);
  for (int64_t word = 0, words; word < problem.words; word += words) {
    words = std::min(problem.chunk, problem.words - word);
    // The next weights, of the next chunk or the next tiles: each row group fetches a part.
    const bool last = word + words == problem.words;
    const auto* later = last ? problem.w + next_tile * w_stride : w + (word + words) * TILE;
    const int64_t later_words = std::min(problem.chunk, last ? problem.words : problem.words - word - words);
    const int64_t later_lines = (later_words + groups - 1) / groups;
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t m = std::min(problem.group, rows - g * problem.group), start = row + g * problem.group;
      const bool direct = start < problem.first_packed;
      float* group_sums = place.sums + g * problem.group * cols * TILE;
      kernels.multiply[((m - 1) / kernels.align) * kernels.cols + cols - 1]({
          .x = direct ? problem.x + start * problem.x_stride + word
                      : place.x_packed + (start - place.packed_from) * problem.x_words + word * kernels.aligned(m),
          .x_stride = direct ? problem.x_stride : 0,
          .w = w + word * TILE,
          .w_stride = w_stride,
          .words = words,
          .sums = group_sums,
          .first = word == 0,
          .prefetch = g == 0 && problem.rows > FEW_ROWS,
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

// How it is cut, for a number of threads.
template <class T>
Problem<T> problem_of(const KernelsOf<T>& kernels, const Tensor& x, const Tensor& packed,
                      const std::optional<Tensor>& bias, const Tensor& out, int64_t threads) {
  const int64_t rows = x.size(0), N = out.size(1), tiles = packed.size(0), words = packed.size(1);
  const int64_t x_words = kernels.aligned(words);
  const bool tiled = kernels.align > 1;
  // With few rows a single row tile at a time: it waits less for weights that come from memory.
  const int64_t group = tiled && rows <= 2 * kernels.rows ? kernels.align : kernels.rows;
  // With many, packing pays: in x itself, rows a power of two apart share a few sets of L1.
  const int64_t first_packed = tiled && group == kernels.rows ? 0 : first_packed_row(x, group, kernels.align);
  // With few rows one tile after the other: a single stream of weights, which the hardware's prefetchers follow best.
  // With more, they do not run far enough ahead of the arithmetic, and the first row group prefetches for all.
  const int64_t cols = rows <= FEW_ROWS && !tiled ? 1 : kernels.cols;
  return {
      .rows = rows,
      .N = N,
      .tiles = tiles,
      .words = words,
      .x = x.data<const uint32_t>(),
      .x_stride = x.stride(0) / static_cast<int64_t>(sizeof(uint32_t) / sizeof(typename Packing<T>::Input)),
      .first_packed = first_packed,
      .x_words = x_words,
      .w = packed.data<const typename Packing<T>::Word>(),
      .bias = bias ? bias->data<const T>() : nullptr,
      .out = out.data<T>(),
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
  };
}

// A thread's part of the blocks, from block `own` on: `taken` counts the pieces of each. If it `packs`, it calls `pack` with
// the rows of a block before its first piece, and leaves the last pieces of other threads' blocks to them.
template <class T, class Pack>
void multiply_pieces(const KernelsOf<T>& kernels, const Problem<T>& problem, Workplace<T>& place, int64_t own, bool packs,
                     std::vector<std::atomic<int64_t>>& taken, const Pack& pack) {
  const int64_t blocks = taken.size(), pieces = (problem.tiles + problem.piece - 1) / problem.piece;
  for (int64_t i = 0; i < blocks; ++i) {
    std::atomic<int64_t>& free = taken[(own + i) % blocks];
    if (packs && i > 0 && free > pieces * 3 / 4) continue;
    const int64_t row = (own + i) % blocks * problem.block, rows = std::min(problem.block, problem.rows - row);
    int64_t next, piece = free++;
    if (packs && piece < pieces) pack(row, row + rows);
    for (; piece < pieces; piece = next) {
      next = free++;
      const int64_t end = std::min((piece + 1) * problem.piece, problem.tiles);
      for (int64_t tile = piece * problem.piece; tile < end; tile += problem.cols)
        multiply_block(kernels, problem, place, row, rows, tile, std::min(problem.cols, end - tile),
                       tile + problem.cols < end ? tile + problem.cols : next % pieces * problem.piece);
    }
  }
}

// All of it, with the activations x [T, K] in words of 32 bits.
template <class T>
void multiply(const KernelsOf<T>& kernels, const Tensor& x, const Tensor& packed, const std::optional<Tensor>& bias,
              const Tensor& out) {
  using Input = typename Packing<T>::Input;
  const int64_t rows = x.size(0), flops = rows * packed.size(0) * packed.size(1) * TILE;
  const int64_t threads = std::min(num_threads(), flops / GRAIN_FLOPS + 1);
  const Problem<T> problem = problem_of(kernels, x, packed, bias, out, threads);
  std::vector<std::atomic<int64_t>> taken((rows + problem.block - 1) / problem.block);
  const int64_t blocks = taken.size(), x_words = problem.x_words, group = problem.group, first = problem.first_packed;
  const auto pack = [&](int64_t begin, int64_t end, uint32_t* to) {
    pack_rows<Input>(x, begin, end, group, kernels.align, x_words, to);
  };
  // Where each thread has blocks of its own it packs them, into its own L2; else all rows are packed for all threads.
  const bool each_packs = kernels.align > 1 && blocks >= threads;
  const int64_t all = kernels.aligned(rows - first), room = each_packs ? std::min(problem.block, all) : all;
  const Tensor packs = empty({each_packs ? threads : 1, room, x_words}, kInt);
  auto* const x_packed = packs.data<uint32_t>();
  if (!each_packs)
    parallel_for(0, (rows - first + group - 1) / group, 1 + (1 << 17) / (x_words * group), [&](int64_t begin, int64_t end) {
      pack(first + begin * group, std::min(rows, first + end * group), x_packed + begin * group * x_words);
    });
  // A thread that is free takes the next piece of the columns: cores need not be equally fast.
  parallel_for(0, threads, 1, [&](int64_t thread, int64_t) {
    kernels.begin(rows);
    Workplace<T> place;
    place.x_packed = x_packed + (each_packs ? thread * room * x_words : 0);
    place.packed_from = first;
    const int64_t own = each_packs ? thread * blocks / threads : 0;
    multiply_pieces(kernels, problem, place, own, each_packs, taken, [&](int64_t begin, int64_t end) {
      place.packed_from = std::max(begin, first);
      if (place.packed_from < end) pack(place.packed_from, end, place.x_packed);
    });
    kernels.finish(place.before);
    kernels.end();
  });
}

void check_inputs(const Tensor& x, const Tensor& packed, const std::optional<Tensor>& bias, int64_t N) {
  const auto dtype = x.dtype();
  CHECK_VALUE(dtype == kBFloat16 || dtype == kFloat || dtype == kHalf,
              "packed_linear: x must be bfloat16, float32 or float16, got ", dtype);
  for (const Tensor* tensor : {&x, &packed, bias ? &*bias : &x})
    CHECK_VALUE(tensor->dtype() == dtype && tensor->is_cpu(),
                "packed_linear: x, packed and bias must be of one dtype on the CPU, x is ", dtype, ", got ",
                tensor->dtype(), " on ", tensor->place());
  CHECK_VALUE(x.dim() == 2 && x.size(1) > 0, "packed_linear: x must be [T, K] with K > 0, got ", x.sizes());
  CHECK_VALUE(x.stride(1) == 1 || x.size(1) == 1, "packed_linear: the last stride of x must be 1, got strides ",
              x.strides());
  const int64_t inputs = dtype == kBFloat16 ? 2 : 1;  // of a word
  const std::array<int64_t, 4> expected = {(N + TILE - 1) / TILE, (x.size(1) + inputs - 1) / inputs, TILE, inputs};
  const Shape wanted(expected.data(), 4);
  CHECK_VALUE(N > 0 && packed.sizes() == wanted, "packed_linear: x ", x.sizes(),
              " and out_features ", N, " take packed ", wanted, ", got ", packed.sizes());
  CHECK_VALUE(packed.is_contiguous(), "packed_linear: packed must be contiguous");
  CHECK_VALUE(!bias || (bias->dim() == 1 && bias->size(0) == N && bias->is_contiguous()),
              "packed_linear: bias must be a contiguous [", N, "], got ", bias->sizes());
}

// In float32, contiguous.
Tensor as_floats(const Tensor& x) {
  Tensor floats = empty(x.sizes(), kFloat);
  succeeded(aoti_torch_copy_(floats.get(), x.get(), 0));
  return floats;
}

Tensor packed_linear(const Tensor& x, const Tensor& packed, const std::optional<Tensor>& bias, int64_t out_features) {
  check_inputs(x, packed, bias, out_features);
  const Kernels& kernels = chosen();
  Tensor out = empty({x.size(0), out_features}, x.dtype());
  if (x.size(0) == 0) return out;
  if (x.dtype() == kBFloat16) multiply(std::get<KernelsOf<BFloat16>>(kernels), x, packed, bias, out);
  else if (x.dtype() == kFloat) multiply(std::get<KernelsOf<float>>(kernels), x, packed, bias, out);
  else multiply(std::get<KernelsOf<Half>>(kernels), as_floats(x), packed, bias, out);
  return out;
}

const std::vector<Op> ops = {{"packed_linear", Boxed<packed_linear>::call}};

}  // namespace
