// Linear layer on packed bfloat16 weights for CPUs. linear.py holds the layout, the reference and the schema.
//
//   y[t, n] = bias[n] + sum over pairs p of  x[t, 2p] * W[n, 2p] + x[t, 2p + 1] * W[n, 2p + 1]
//
// Three loops around a micro kernel:
//
//   threads     each takes pieces of the column tiles (16 outputs each), so that no two read the same weights
//   columns     `cols` tiles at a time ...
//   K chunks    ... of which `chunk` pairs are read from memory once for a block of rows, ...
//   row groups  ... and used from the caches by every group of `rows` rows
//
// The micro kernel holds rows x cols sums of 16 columns in registers and walks through a chunk pair by pair, or with AMX
// (linear_cpu_amx.h) 16 pairs at a time.
//
// AMX multiplies faster than L2 delivers: of each product's operands one has to be in L1 (the weights' chunk), the other
// in L2 (the block of rows), and what comes from farther away has to be on its way all the time. So every row group
// fetches its part of the weights wanted next, and large outputs are written past the caches.
//
// Batch invariance: every output has one float32 sum, which takes its pairs in order, whatever the number of rows, the
// place of its row, or the number of threads. Chunks do not change that: between two of them a sum rests in memory as
// the float32 it is. So a request gets the same tokens alone or in any batch. Kernels of different instruction sets may
// differ in the last bit (AMX sums 16 even and 16 odd products before it adds them), so one of them serves all shapes: AMX
// also takes single rows, where it has more than enough arithmetic to keep up with memory.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#define TARGET(isa) __attribute__((target(isa)))
#else
#define TARGET(isa)
#endif
#define INLINE inline __attribute__((always_inline))

#include "linear_cpu_amx.h"  // needs TARGET and INLINE

namespace {

constexpr int64_t TILE = 16;        // columns in a tile: a 512-bit register of float32, or of bfloat16 pairs
constexpr int64_t MAX_COLS = 3;     // column tiles in a micro kernel, at most
constexpr int64_t CHUNK = 256;      // pairs: 3 tiles x 256 x 64 bytes = 48 KiB, in L2; half of that is 2% slower
constexpr int64_t ROW_BLOCK = 256;  // rows: a chunk of them (256 KiB) and their sums (48 KiB) stay in L2
// The same with AMX: 2 tiles x 128 x 64 bytes = 16 KiB, a third of L1; all pairs of a block's rows stay in L2.
constexpr int64_t TILED_CHUNK = 128, TILED_ROW_BLOCK = 384, TILED_BLOCK_BYTES = 1 << 20;
constexpr int64_t STREAM_BYTES = 1 << 20;  // of output: more is not in the caches when it is read
constexpr int64_t FEW_ROWS = 4;     // up to here memory is the limit even without any prefetch of ours
constexpr int64_t AHEAD = 64;       // pairs from a product to the prefetch of its weights: more than 100 ns of work
constexpr int64_t GRAIN_FLOPS = 1 << 18;  // a thread is not worth waking for less
constexpr int64_t PIECES = 8;       // of the columns, for each thread

// W lanes of 32 bits: a register of the instruction set, since GCC splits wider ones through memory.
template <int W>
struct Lanes {
  typedef float f32 __attribute__((vector_size(W * 4)));
  typedef uint32_t u32 __attribute__((vector_size(W * 4)));
  typedef uint16_t u16 __attribute__((vector_size(W * 2)));
};

// What a micro kernel works on. A uint32_t is a pair of bfloat16: even k in the low half, odd k in the high half.
struct Work {
  const uint32_t* x;       // activations, as the kernels' `pack` has put them: [pairs, M], or whole tiles for AMX;
  int64_t x_stride;        // AMX: or rows as they are, so far apart, if not 0
  const uint32_t* w;       // [C, pairs, TILE] weights, with `w_stride` from tile to tile
  int64_t w_stride;
  int64_t pairs;
  float* sums;             // [M, C, TILE]
  bool first;              // the sums start at zero, and are not read
  bool prefetch;           // fetch the weights AHEAD of these into L2,
  int64_t left;            // which are in the next C tiles from the `left`-th pair on
  const uint32_t* later;   // AMX: weights to fetch into L2 meanwhile, in C tiles,
  int64_t later_lines;     // so many cache lines, or pairs, of each
};

// A prefetch never faults, so it may point past the end of the weights.
template <int C>
INLINE void prefetch(const Work& work, int64_t pair) {
  const uint32_t* ahead = work.w + (pair + AHEAD) * TILE + (pair + AHEAD < work.left ? 0 : (C - 1) * work.w_stride);
  for (int c = 0; c < C; ++c) __builtin_prefetch(ahead + c * work.w_stride, 0, 2);
}

// ---- Micro kernels: one struct for an instruction set ---------------------------------------------------------------

// Any CPU: bfloat16 becomes float32 by a shift.
template <int W, int M, int C>
INLINE void multiply_widened(const Work& work) {
  using f32 = typename Lanes<W>::f32;
  using u32 = typename Lanes<W>::u32;
  constexpr int PARTS = TILE / W;  // of a tile, one to a register
  f32 sums[M][C * PARTS] = {};
  if (!work.first) std::memcpy(sums, work.sums, sizeof(sums));
  for (int64_t p = 0; p < work.pairs; ++p) {
    if (work.prefetch) prefetch<C>(work, p);
    f32 even[C * PARTS], odd[C * PARTS];
    for (int i = 0; i < C * PARTS; ++i) {
      u32 w;
      std::memcpy(&w, work.w + i / PARTS * work.w_stride + p * TILE + i % PARTS * W, sizeof(w));
      even[i] = (f32)(w << 16);
      odd[i] = (f32)(w & 0xffff0000u);
    }
    for (int m = 0; m < M; ++m) {
      const u32 x = u32{} + work.x[p * M + m];
      for (int i = 0; i < C * PARTS; ++i) sums[m][i] += (f32)(x << 16) * even[i];
      for (int i = 0; i < C * PARTS; ++i) sums[m][i] += (f32)(x & 0xffff0000u) * odd[i];
    }
  }
  std::memcpy(work.sums, sums, sizeof(sums));
}

// Adds the bias and rounds to nearest even, for `rows` rows of `columns` outputs, which lie in `sums` without gaps. Row
// by row, since rows of the output are often whole pages apart: a cache line left half written would be gone from the
// caches when its other half comes.
template <int W>
INLINE void finish_rows(const float* sums, int64_t sums_stride, const float* bias, int64_t rows, int64_t columns,
                        uint16_t* out, int64_t out_stride) {
  using u32 = typename Lanes<W>::u32;
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t i = 0; i < columns; i += W) {
      typename Lanes<W>::f32 sum, offset;
      std::memcpy(&sum, sums + row * sums_stride + i, sizeof(sum));
      std::memcpy(&offset, bias + i, sizeof(offset));
      sum += offset;
      const u32 bits = (u32)sum, rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
      const auto result = __builtin_convertvector(sum == sum ? rounded : (bits >> 16) | 0x40u, typename Lanes<W>::u16);
      uint16_t* to = out + row * out_stride + i;
      if (columns - i >= W) std::memcpy(to, &result, sizeof(result));
      else std::memcpy(to, &result, (columns - i) * sizeof(uint16_t));
    }
}

#define FINISH_ARGS                                                                                            \
  const float *sums, int64_t sums_stride, const float *bias, int64_t rows, int64_t columns, uint16_t *out, \
      int64_t out_stride, [[maybe_unused]] bool stream

struct Baseline {
  static constexpr int rows = 4, cols = 1, align = 1;
  template <int M, int C>
  static void multiply(const Work& work) { multiply_widened<4, M, C>(work); }
  static void finish(FINISH_ARGS) { finish_rows<4>(sums, sums_stride, bias, rows, columns, out, out_stride); }
};

#if defined(__x86_64__)
// 16 registers of 256 bits: 4 x 1 x 2 sums, 4 of weights, 2 of activations.
struct Avx2 {
  static constexpr int rows = 4, cols = 1, align = 1;
  template <int M, int C>
  TARGET("avx2,fma") static void multiply(const Work& work) { multiply_widened<8, M, C>(work); }
  TARGET("avx2,fma") static void finish(FINISH_ARGS) {
    finish_rows<8>(sums, sums_stride, bias, rows, columns, out, out_stride);
  }
};

// 32 registers of 512 bits: 8 x 2 sums, 4 of weights, 2 of activations.
struct Avx512 {
  static constexpr int rows = 8, cols = 2, align = 1;
  template <int M, int C>
  TARGET("avx512f") static void multiply(const Work& work) { multiply_widened<16, M, C>(work); }
  TARGET("avx512f") static void finish(FINISH_ARGS) {
    finish_rows<16>(sums, sums_stride, bias, rows, columns, out, out_stride);
  }
};

// 32 registers of 512 bits: 8 x 3 sums, 3 of weights, the others for activations on their way. A pair costs 24 products
// and 11 loads, so the loads hide; an 8-row group fits the usual batch sizes.
struct Avx512Bf16 {
  static constexpr int rows = 8, cols = 3, align = 1;
  template <int M, int C>
  TARGET("avx512f,avx512bf16") static void multiply(const Work& work) {
    __m512 sums[M][C];
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 3
      for (int c = 0; c < C; ++c)
        sums[m][c] = work.first ? _mm512_setzero_ps() : _mm512_loadu_ps(work.sums + (m * C + c) * TILE);
    for (int64_t p = 0; p < work.pairs; ++p) {
      if (work.prefetch) prefetch<C>(work, p);
      __m512bh w[C];
#pragma GCC unroll 3
      for (int c = 0; c < C; ++c) w[c] = (__m512bh)_mm512_loadu_si512(work.w + c * work.w_stride + p * TILE);
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) {
        const __m512bh x = (__m512bh)_mm512_set1_epi32(static_cast<int>(work.x[p * M + m]));
#pragma GCC unroll 3
        for (int c = 0; c < C; ++c) sums[m][c] = _mm512_dpbf16_ps(sums[m][c], x, w[c]);
      }
    }
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 3
      for (int c = 0; c < C; ++c) _mm512_storeu_ps(work.sums + (m * C + c) * TILE, sums[m][c]);
  }
  TARGET("avx512f") static void finish(FINISH_ARGS) {
    finish_rows<16>(sums, sums_stride, bias, rows, columns, out, out_stride);
  }
};

// 8 tiles of 16 rows: 2 x 2 of sums, 2 of activations, 2 of weights.
template <class Tiles>
struct Amx {
  static constexpr int rows = 2 * TILE, cols = 2, align = TILE;
  template <int M, int C>
  static void multiply(const Work& work) {
    multiply_tiles<Tiles, M, C>(work.x, work.x_stride, work.w, work.w_stride, work.pairs, work.sums, work.first, work.later,
                                work.later_lines);
  }
  // Two tiles are a cache line of the output. Where it is too large for the caches, lines are written past them, which
  // saves reading them first.
  TARGET("avx512f,avx512bf16") static void finish(FINISH_ARGS) {
    if (columns != 2 * TILE) return finish_rows<16>(sums, sums_stride, bias, rows, columns, out, out_stride);
    const __m512 low = _mm512_loadu_ps(bias), high = _mm512_loadu_ps(bias + TILE);
    const bool past = stream && reinterpret_cast<uintptr_t>(out) % 64 == 0 && out_stride % (2 * TILE) == 0;
    for (int64_t row = 0; row < rows; ++row, sums += sums_stride, out += out_stride) {
      const auto line = (__m512i)_mm512_cvtne2ps_pbh(_mm512_add_ps(_mm512_loadu_ps(sums + TILE), high),
                                                     _mm512_add_ps(_mm512_loadu_ps(sums), low));
      if (past) _mm512_stream_si512(reinterpret_cast<__m512i*>(out), line);
      else _mm512_storeu_si512(out, line);
    }
  }
};
#endif

// ---- Choice of the kernels ------------------------------------------------------------------------------------------

struct Kernels {
  const char* name;
  bool supported;   // by this CPU
  bool for_users;   // or only for tests, by its name
  int64_t rows, cols;
  int64_t align;    // activations are packed with rows and pairs filled up to this with zeros: 1 or TILE
  int64_t chunk;    // pairs that are multiplied with all rows before the next; with few rows other numbers
  void (*const* multiply)(const Work&);  // [rows / align, cols]: entry [m - 1, c - 1] does m * align rows and c tiles
  void (*finish)(FINISH_ARGS);
  void (*begin)(int64_t rows) = [](int64_t) {};  // in a thread, before its first product, and after its last
  void (*end)() = [] {};

  int64_t aligned(int64_t count) const { return (count + align - 1) / align * align; }
};

template <class Isa, size_t... I>
constexpr std::array<void (*)(const Work&), sizeof...(I)> table_of(std::index_sequence<I...>) {
  return {&Isa::template multiply<I / Isa::cols + 1, I % Isa::cols + 1>...};
}

template <class Isa>
Kernels kernels_of(const char* name, bool supported, bool for_users = true) {
  static constexpr auto table = table_of<Isa>(std::make_index_sequence<Isa::rows / Isa::align * Isa::cols>());
  constexpr int64_t chunk = Isa::align == 1 ? CHUNK : TILED_CHUNK;
  static_assert(Isa::cols <= MAX_COLS && ROW_BLOCK % Isa::rows == 0 && chunk % Isa::align == 0);
  return {name, supported, for_users, Isa::rows, Isa::cols, Isa::align, chunk, table.data(), &Isa::finish};
}

#if defined(__x86_64__)
template <class Tiles>
Kernels amx_kernels_of(const char* name, bool supported, bool for_users) {
  Kernels kernels = kernels_of<Amx<Tiles>>(name, supported, for_users);
  kernels.begin = [](int64_t rows) { Tiles::begin(std::min(rows, TILE)); };
  kernels.end = [] {
    Tiles::end();
    _mm_sfence();  // `finish` may have written past the caches
  };
  return kernels;
}
#endif

// Best first.
const std::vector<Kernels>& all_kernels() {
  static const std::vector<Kernels> all = {
#if defined(__x86_64__)
      amx_kernels_of<HardwareTiles>("amx", HardwareTiles::supported(), true),
      kernels_of<Avx512Bf16>("avx512_bf16", __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bf16")),
      kernels_of<Avx512>("avx512", __builtin_cpu_supports("avx512f")),
      kernels_of<Avx2>("avx2", __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")),
#endif
      kernels_of<Baseline>("baseline", true),
#if defined(__x86_64__)
      amx_kernels_of<SoftwareTiles>("amx_in_software", __builtin_cpu_supports("avx512f"), false),
#endif
  };
  return all;
}

// The best that this CPU has, or the one named.
const Kernels& choose_kernels(const std::optional<std::string>& name) {
  for (const Kernels& kernels : all_kernels())
    if (kernels.supported && (name ? *name == kernels.name : kernels.for_users)) return kernels;
  TORCH_CHECK_VALUE(false, "packed_linear: isa '", *name, "' is unknown or not supported by this CPU");
}

std::vector<std::string> supported_isas() {
  std::vector<std::string> names;
  for (const Kernels& kernels : all_kernels())
    if (kernels.supported && kernels.for_users) names.push_back(kernels.name);
  return names;
}

// ---- The loops around the micro kernels -----------------------------------------------------------------------------

// `rows` rows of K elements -> [pairs, rows]: what a micro kernel reads in a row. Four rows of four pairs at a time.
void interleave_rows(const uint16_t* from, int64_t stride, int64_t rows, int64_t K, uint32_t* to) {
  using u32 = Lanes<4>::u32;
  const int64_t pairs = K / 2;
  int64_t m = 0;
  for (; m + 4 <= rows; m += 4)
    for (int64_t p = 0; p < pairs / 4 * 4; p += 4) {
      u32 a, b, c, d;
      for (auto [row, lanes] : {std::pair(0, &a), {1, &b}, {2, &c}, {3, &d}})
        std::memcpy(lanes, from + (m + row) * stride + 2 * p, sizeof(u32));
      const u32 ab = __builtin_shufflevector(a, b, 0, 4, 1, 5), ab_high = __builtin_shufflevector(a, b, 2, 6, 3, 7);
      const u32 cd = __builtin_shufflevector(c, d, 0, 4, 1, 5), cd_high = __builtin_shufflevector(c, d, 2, 6, 3, 7);
      const u32 columns[4] = {
          __builtin_shufflevector(ab, cd, 0, 1, 4, 5), __builtin_shufflevector(ab, cd, 2, 3, 6, 7),
          __builtin_shufflevector(ab_high, cd_high, 0, 1, 4, 5), __builtin_shufflevector(ab_high, cd_high, 2, 3, 6, 7)};
      for (int64_t i = 0; i < 4; ++i) std::memcpy(to + (p + i) * rows + m, &columns[i], sizeof(u32));
    }
  const auto copy = [&](int64_t row, int64_t first_pair) {
    for (int64_t p = first_pair; p < pairs; ++p)
      std::memcpy(to + p * rows + row, from + row * stride + 2 * p, sizeof(uint32_t));
    if (K % 2 != 0) to[pairs * rows + row] = from[row * stride + K - 1];
  };
  for (int64_t row = 0; row < rows; ++row) copy(row, row < m ? pairs / 4 * 4 : 0);
}

// `rows` rows of K elements -> [K tiles, row tiles, TILE rows, TILE pairs], zero where there is no row or no pair.
void tile_rows(const uint16_t* from, int64_t stride, int64_t rows, int64_t K, uint32_t* to) {
  const int64_t row_tiles = (rows + TILE - 1) / TILE;
  for (int64_t k = 0; k < K; k += 2 * TILE)
    for (int64_t row = 0; row < row_tiles * TILE; ++row, to += TILE) {
      const int64_t count = row < rows ? std::min(2 * TILE, K - k) : 0;
      if (count != 0) std::memcpy(to, from + row * stride + k, count * sizeof(uint16_t));
      if (count < 2 * TILE) std::memset(reinterpret_cast<uint16_t*>(to) + count, 0, (2 * TILE - count) * sizeof(uint16_t));
    }
}

// Rows of x [T, K] from `first` on -> groups of `group` rows, each as the micro kernel takes it, whatever the strides of x.
void pack_rows(const Kernels& kernels, const at::Tensor& x, int64_t first, int64_t group, uint32_t* packed) {
  const int64_t T = x.size(0), K = x.size(1), stride = x.stride(0);
  const int64_t pairs = kernels.aligned((K + 1) / 2);
  const auto* data = static_cast<const uint16_t*>(x.const_data_ptr());
  const auto pack = kernels.align == 1 ? interleave_rows : tile_rows;
  const int64_t groups = (T - first + group - 1) / group;
  at::parallel_for(0, groups, 1 + (1 << 17) / (pairs * group), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin * group; row < std::min(T - first, end * group); row += group)
      pack(data + (first + row) * stride, stride, std::min(group, T - first - row), K, packed + row * pairs);
  });
}

// The first row that has to be packed, a multiple of `group`, or T: tiles are loaded from x itself where they are whole.
int64_t first_packed_row(const Kernels& kernels, const at::Tensor& x, int64_t group) {
  const int64_t T = x.size(0), align = kernels.align;
  if (align == 1 || x.size(1) % (2 * align) != 0 || x.stride(0) % 2 != 0 || x.stride(0) == 0) return 0;
  return T < align || T % align == 0 ? T : T / group * group;
}

struct Problem {
  int64_t T, N, pairs;
  const uint32_t* x;     // the rows before `first_packed`, `x_stride` words apart,
  int64_t x_stride, first_packed;
  const uint32_t* x_packed;  // and the others as pack_rows made them, with room for `x_pairs` pairs each
  int64_t x_pairs;
  const uint32_t* w;     // [tiles, pairs, TILE]
  const uint16_t* bias;  // or null
  uint16_t* out;         // [T, N]
  bool stream;           // past the caches
  int64_t chunk;         // pairs
  int64_t rows;          // of a row group
};

// Rows [row, row + rows) of column tiles [tile, tile + cols). The thread's next ones begin at `next_tile`.
void multiply_block(const Kernels& kernels, const Problem& problem, int64_t row, int64_t rows, int64_t tile,
                    int64_t cols, int64_t next_tile) {
  alignas(64) float sums[std::max(ROW_BLOCK * MAX_COLS, TILED_ROW_BLOCK * 2) * TILE];
  const int64_t groups = (rows + problem.rows - 1) / problem.rows, w_stride = problem.pairs * TILE;
  const uint32_t* w = problem.w + tile * w_stride;
  const int64_t column = tile * TILE, columns = std::min(cols * TILE, problem.N - column);
  float bias[MAX_COLS * TILE] = {};
  for (int64_t j = 0; problem.bias && j < columns; ++j)
    bias[j] = __builtin_bit_cast(float, static_cast<uint32_t>(problem.bias[column + j]) << 16);
  for (int64_t pair = 0, pairs; pair < problem.pairs; pair += pairs) {
    pairs = std::min(problem.chunk, problem.pairs - pair);
    // The weights wanted next, of the next chunk or the next tiles: each row group fetches a part.
    const bool last = pair + pairs == problem.pairs;
    const uint32_t* later = last ? problem.w + next_tile * w_stride : w + (pair + pairs) * TILE;
    const int64_t later_pairs = std::min(problem.chunk, last ? problem.pairs : problem.pairs - pair - pairs);
    const int64_t later_lines = (later_pairs + groups - 1) / groups;
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t m = std::min(problem.rows, rows - g * problem.rows), start = row + g * problem.rows;
      const bool direct = start < problem.first_packed;
      float* group_sums = sums + g * problem.rows * cols * TILE;
      kernels.multiply[((m - 1) / kernels.align) * kernels.cols + cols - 1]({
          .x = direct ? problem.x + start * problem.x_stride + pair
                      : problem.x_packed + (start - problem.first_packed) * problem.x_pairs + pair * kernels.aligned(m),
          .x_stride = direct ? problem.x_stride : 0,
          .w = w + pair * TILE,
          .w_stride = w_stride,
          .pairs = pairs,
          .sums = group_sums,
          .first = pair == 0,
          .prefetch = g == 0 && problem.T > FEW_ROWS,
          .left = problem.pairs - pair,
          .later = later + g * later_lines * TILE,
          .later_lines = later_lines,
      });
      if (last)  // while the sums are in L1
        kernels.finish(group_sums, cols * TILE, bias, m, columns, problem.out + start * problem.N + column, problem.N,
                       problem.stream);
    }
  }
}

void check_inputs(const at::Tensor& x, const at::Tensor& packed, const std::optional<at::Tensor>& bias, int64_t N) {
  TORCH_CHECK_VALUE(x.dim() == 2 && x.size(1) > 0, "packed_linear: x must be [T, K] with K > 0, got ", x.sizes());
  TORCH_CHECK_VALUE(x.stride(1) == 1 || x.size(1) == 1, "packed_linear: the last stride of x must be 1, got strides ",
                    x.strides());
  const std::array<int64_t, 4> expected = {(N + TILE - 1) / TILE, (x.size(1) + 1) / 2, TILE, 2};
  TORCH_CHECK_VALUE(N > 0 && packed.sizes() == at::IntArrayRef(expected), "packed_linear: x ", x.sizes(),
                    " and out_features ", N, " take packed ", at::IntArrayRef(expected), ", got ", packed.sizes());
  TORCH_CHECK_VALUE(packed.is_contiguous(), "packed_linear: packed must be contiguous");
  TORCH_CHECK_VALUE(!bias || (bias->dim() == 1 && bias->size(0) == N && bias->is_contiguous()),
                    "packed_linear: bias must be a contiguous [", N, "], got ", bias->sizes());
  for (const at::Tensor& tensor : {x, packed, bias.value_or(x)})
    TORCH_CHECK_VALUE(tensor.scalar_type() == at::kBFloat16 && tensor.device().is_cpu(),
                      "packed_linear: x, packed and bias must be bfloat16 on the CPU, got ", tensor.scalar_type(),
                      " on ", tensor.device());
}

at::Tensor packed_linear(const at::Tensor& x, const at::Tensor& packed, const std::optional<at::Tensor>& bias,
                         int64_t out_features, const std::optional<std::string>& isa) {
  check_inputs(x, packed, bias, out_features);
  const Kernels& kernels = choose_kernels(isa);
  const int64_t T = x.size(0), tiles = packed.size(0), pairs = packed.size(1);
  at::Tensor out = at::empty({T, out_features}, x.options());
  if (T == 0) return out;
  const int64_t x_pairs = kernels.aligned(pairs);
  const bool tiled = kernels.align > 1;
  const int64_t whole_groups = TILED_BLOCK_BYTES / (x_pairs * 4) / kernels.rows * kernels.rows;
  const int64_t block = tiled ? std::clamp(whole_groups, kernels.rows, TILED_ROW_BLOCK) : ROW_BLOCK;
  // With few rows a single row tile at a time: it waits less for weights that come from memory.
  const int64_t group = tiled && T <= 2 * kernels.rows ? kernels.align : kernels.rows;
  const int64_t first_packed = first_packed_row(kernels, x, group);
  at::Tensor x_packed = at::empty({kernels.aligned(T - first_packed), x_pairs, 2}, x.options());
  if (first_packed < T) pack_rows(kernels, x, first_packed, group, static_cast<uint32_t*>(x_packed.mutable_data_ptr()));
  const Problem problem = {
      .T = T,
      .N = out_features,
      .pairs = pairs,
      .x = static_cast<const uint32_t*>(x.const_data_ptr()),
      .x_stride = x.stride(0) / 2,
      .first_packed = first_packed,
      .x_packed = static_cast<const uint32_t*>(x_packed.const_data_ptr()),
      .x_pairs = x_pairs,
      .w = static_cast<const uint32_t*>(packed.const_data_ptr()),
      .bias = bias ? static_cast<const uint16_t*>(bias->const_data_ptr()) : nullptr,
      .out = static_cast<uint16_t*>(out.mutable_data_ptr()),
      .stream = T * out_features * 2 > STREAM_BYTES,
      // One group reads longer runs of memory; with two, the second finds the first one's weights in L1.
      .chunk = T <= group ? 2 * kernels.chunk : tiled && T <= 2 * group ? kernels.chunk / 2 : kernels.chunk,
      .rows = group,
  };
  // With few rows one tile after the other: a single stream of weights, which the hardware's prefetchers follow best.
  // With more, they do not run far enough ahead of the arithmetic, and the first row group prefetches for all.
  const int64_t cols = T <= FEW_ROWS && !tiled ? 1 : kernels.cols;
  // A piece of the columns and a block of rows at a time goes to whichever thread is free: cores need not be equally fast.
  const int64_t threads = std::min<int64_t>(at::get_num_threads(), T * pairs * tiles * TILE / GRAIN_FLOPS + 1);
  const int64_t piece = threads == 1 ? tiles : (tiles / (PIECES * threads) + cols) / cols * cols;
  const int64_t pieces = (tiles + piece - 1) / piece, items = pieces * ((T + block - 1) / block);
  std::atomic<int64_t> free = 0;
  at::parallel_for(0, threads, 1, [&](int64_t, int64_t) {
    kernels.begin(T);
    for (int64_t item = free++, next; item < items; item = next) {
      next = free++;
      const int64_t row = item / pieces * block, end = std::min((item % pieces + 1) * piece, tiles);
      for (int64_t tile = item % pieces * piece; tile < end; tile += cols)
        multiply_block(kernels, problem, row, std::min(block, T - row), tile, std::min(cols, end - tile),
                       tile + cols < end ? tile + cols : next % pieces * piece);
    }
    kernels.end();
  });
  return out;
}

at::Tensor packed_linear_on_best(const at::Tensor& x, const at::Tensor& packed, const std::optional<at::Tensor>& bias,
                                 int64_t out_features) {
  return packed_linear(x, packed, bias, out_features, std::nullopt);
}

}  // namespace

// From here rather than from Python, which would add some 5 us to each call.
TORCH_LIBRARY_IMPL(compiled_llm, CPU, m) { m.impl("packed_linear", &packed_linear_on_best); }

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("packed_linear", &packed_linear, py::arg("x"), py::arg("packed"), py::arg("bias"), py::arg("out_features"),
        py::arg("isa") = py::none(), py::call_guard<py::gil_scoped_release>());
  m.def("supported_isas", &supported_isas, "Names for the argument isa, best first.");
}
