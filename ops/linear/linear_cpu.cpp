// Linear layer on packed weights for CPUs. packed_linear.py has the layout, the reference and the schema.
//
//   y[t, n] = bias[n] + sum over k of  x[t, k] * W[n, k]
//
// The inputs are taken word by word: a pair of bfloat16, or one float32 or float16.
//
// Three loops around a micro kernel:
//
//   threads     each takes pieces of the column tiles (16 outputs each), so that no two read the same weights
//   columns     `cols` tiles at a time ...
//   K chunks    ... of which `chunk` words are read from memory once for a block of rows, ...
//   row groups  ... and used from the caches by every group of `rows` rows
//
// The micro kernel holds rows x cols sums of 16 columns in registers and walks through a chunk word by word, or with AMX
// (linear_cpu_amx.h) 16 words at a time.
//
// AMX multiplies faster than L2 delivers: of each product's operands one has to be in L1 (the weights' chunk), the other
// in L2 (the block of rows), and weights have to be fetched from farther away all the time. So every row group fetches
// its part of the next weights, and large outputs are written past the caches.
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

constexpr int64_t STREAM_BYTES = 1 << 20;        // of output: more is not in the caches when it is read
constexpr int64_t TILED_BLOCK_BYTES = 1 << 20;   // of activations, with tile registers: half of L2
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
  const int64_t row_tiles = (rows + TILE - 1) / TILE;
  for (int64_t k = 0; k < K; k += INPUTS)
    for (int64_t row = 0; row < row_tiles * TILE; ++row, to += TILE) {
      const int64_t count = row < rows ? std::min(INPUTS, K - k) : 0;
      if (count != 0) std::memcpy(to, from + row * stride + k, count * sizeof(Input));
      if (count < INPUTS) std::memset(reinterpret_cast<Input*>(to) + count, 0, (INPUTS - count) * sizeof(Input));
    }
}

// Rows of x [T, K] from `first` on -> groups of `group` rows, each as the micro kernel takes it, whatever the strides of x.
// `align` is that of the kernels; each row takes `words`.
template <class Input>
void pack_rows(const Tensor& x, int64_t first, int64_t group, int64_t align, int64_t words, uint32_t* packed) {
  const int64_t T = x.size(0), K = x.size(1), stride = x.stride(0);
  const auto* data = x.data<const Input>();
  const auto pack = align == 1 ? interleave_rows<Input> : tile_rows<Input>;
  const int64_t groups = (T - first + group - 1) / group;
  parallel_for(0, groups, 1 + (1 << 17) / (words * group), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin * group; row < std::min(T - first, end * group); row += group)
      pack(data + (first + row) * stride, stride, std::min(group, T - first - row), K, packed + row * words);
  });
}

// The first row that has to be packed, a multiple of `group`, or T: tiles are loaded from x itself where they are whole.
int64_t first_packed_row(const Tensor& x, int64_t group, int64_t align) {
  const int64_t T = x.size(0);
  if (align == 1 || x.size(1) % (2 * align) != 0 || x.stride(0) % 2 != 0 || x.stride(0) == 0) return 0;
  return T < align || T % align == 0 ? T : T / group * group;
}

template <class T>
struct Problem {
  int64_t rows, N, words;
  const uint32_t* x;     // the rows before `first_packed`, `x_stride` words apart,
  int64_t x_stride, first_packed;
  const uint32_t* x_packed;  // and the others as pack_rows made them, with room for `x_words` words each
  int64_t x_words;
  const typename Packing<T>::Word* w;  // [tiles, words, TILE]
  const T* bias;   // or null
  T* out;          // [rows, N]
  bool stream;     // past the caches
  int64_t chunk;   // words
  int64_t group;   // rows of a row group
};

// Rows [row, row + rows) of column tiles [tile, tile + cols). The thread's next ones start at `next_tile`.
template <class T>
void multiply_block(const KernelsOf<T>& kernels, const Problem<T>& problem, int64_t row, int64_t rows, int64_t tile,
                    int64_t cols, int64_t next_tile) {
  alignas(64) float sums[MAX_SUMS];
  const int64_t groups = (rows + problem.group - 1) / problem.group, w_stride = problem.words * TILE;
  const auto* const w = problem.w + tile * w_stride;
  const int64_t column = tile * TILE, columns = std::min(cols * TILE, problem.N - column);
  float bias[MAX_COLS * TILE] = {};
  if (problem.bias) std::copy_n(problem.bias + column, columns, bias);
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
      float* group_sums = sums + g * problem.group * cols * TILE;
      kernels.multiply[((m - 1) / kernels.align) * kernels.cols + cols - 1]({
          .x = direct ? problem.x + start * problem.x_stride + word
                      : problem.x_packed + (start - problem.first_packed) * problem.x_words + word * kernels.aligned(m),
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
      });
      if (last)  // while the sums are in L1
        kernels.finish(group_sums, cols * TILE, bias, m, columns, problem.out + start * problem.N + column, problem.N,
                       problem.stream);
    }
  }
}

// All of it, with the activations x [T, K] in words of 32 bits.
template <class T>
void multiply(const KernelsOf<T>& kernels, const Tensor& x, const Tensor& packed, const std::optional<Tensor>& bias,
              const Tensor& out) {
  using Input = typename Packing<T>::Input;
  constexpr int64_t INPUTS = sizeof(uint32_t) / sizeof(Input);
  const int64_t rows = x.size(0), N = out.size(1), tiles = packed.size(0), words = packed.size(1);
  const int64_t x_words = kernels.aligned(words);
  const bool tiled = kernels.align > 1;
  const int64_t whole_groups = TILED_BLOCK_BYTES / (x_words * 4) / kernels.rows * kernels.rows;
  const int64_t block = tiled ? std::clamp(whole_groups, kernels.rows, kernels.row_block) : kernels.row_block;
  // With few rows a single row tile at a time: it waits less for weights that come from memory.
  const int64_t group = tiled && rows <= 2 * kernels.rows ? kernels.align : kernels.rows;
  const int64_t first_packed = first_packed_row(x, group, kernels.align);
  Tensor x_packed = empty({kernels.aligned(rows - first_packed), x_words, INPUTS}, x.dtype());
  auto* const packed_rows = x_packed.data<uint32_t>();
  if (first_packed < rows) pack_rows<Input>(x, first_packed, group, kernels.align, x_words, packed_rows);
  const Problem<T> problem = {
      .rows = rows,
      .N = N,
      .words = words,
      .x = x.data<const uint32_t>(),
      .x_stride = x.stride(0) / INPUTS,
      .first_packed = first_packed,
      .x_packed = packed_rows,
      .x_words = x_words,
      .w = packed.data<const typename Packing<T>::Word>(),
      .bias = bias ? bias->data<const T>() : nullptr,
      .out = out.data<T>(),
      .stream = rows * N * static_cast<int64_t>(sizeof(T)) > STREAM_BYTES,
      // One group reads longer runs of memory; with two, the second finds the first one's weights in L1.
      .chunk = rows <= group ? 2 * kernels.chunk : tiled && rows <= 2 * group ? kernels.chunk / 2 : kernels.chunk,
      .group = group,
  };
  // With few rows one tile after the other: a single stream of weights, which the hardware's prefetchers follow best.
  // With more, they do not run far enough ahead of the arithmetic, and the first row group prefetches for all.
  const int64_t cols = rows <= FEW_ROWS && !tiled ? 1 : kernels.cols;
  // A thread that is free takes the next piece of the columns and block of rows: cores need not be equally fast.
  const int64_t threads = std::min(num_threads(), rows * words * tiles * TILE / GRAIN_FLOPS + 1);
  const int64_t piece = threads == 1 ? tiles : (tiles / (PIECES * threads) + cols) / cols * cols;
  const int64_t pieces = (tiles + piece - 1) / piece, items = pieces * ((rows + block - 1) / block);
  std::atomic<int64_t> free = 0;
  parallel_for(0, threads, 1, [&](int64_t, int64_t) {
    kernels.begin(rows);
    for (int64_t item = free++, next; item < items; item = next) {
      next = free++;
      const int64_t row = item / pieces * block, end = std::min((item % pieces + 1) * piece, tiles);
      for (int64_t tile = item % pieces * piece; tile < end; tile += cols)
        multiply_block(kernels, problem, row, std::min(block, rows - row), tile, std::min(cols, end - tile),
                       tile + cols < end ? tile + cols : next % pieces * piece);
    }
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
