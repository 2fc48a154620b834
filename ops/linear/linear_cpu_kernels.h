// The linear layer's kernels for one instruction set: compiled once for each by ../cpu/one_isa.cpp, which explains the
// macros. A micro kernel holds the sums of `M` rows by `C` column tiles in registers while it walks through a chunk.

#include <algorithm>
#include <array>
#include <utility>

#include "../cpu/vectors.h"
#include "linear_cpu_types.h"

#ifdef TILES
#include "linear_cpu_amx.h"
#endif

namespace {
namespace ISA {

INLINE Register load_register(const float* from) {
  Register x;
  std::memcpy(&x, from, sizeof(x));
  return x;
}

template <class T, int M, int REGISTERS>
INLINE void load_sums(const Work<T>& work, Register (&sums)[M][REGISTERS]) {
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
    for (int i = 0; i < REGISTERS; ++i)
      sums[m][i] = work.first ? Register{} : load_register(work.sums + (m * REGISTERS + i) * (WIDTH / 32));
}

template <class T, int M, int REGISTERS>
INLINE void store_sums(const Register (&sums)[M][REGISTERS], const Work<T>& work) {
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
    for (int i = 0; i < REGISTERS; ++i)
      std::memcpy(work.sums + (m * REGISTERS + i) * (WIDTH / 32), &sums[m][i], sizeof(Register));
}

// Words from a product to the prefetch of its weights: 4 or 8 KiB, which is more than 100 ns of work.
template <int C>
constexpr int64_t AHEAD = C == 1 ? 128 : 64;

// A prefetch never faults, so it may point past the end of the weights.
template <int C, class T>
INLINE void prefetch(const Work<T>& work, int64_t word) {
  const auto* ahead = work.w + (word + AHEAD<C>) * TILE + (word + AHEAD<C> < work.left ? 0 : (C - 1) * work.w_stride);
  for (int c = 0; c < C; ++c) __builtin_prefetch(ahead + c * work.w_stride, 0, 2);
}

// Of the next chunk.
template <int C, class T>
INLINE void prefetch_later(const Work<T>& work, int64_t line) {
  for (int c = 0; c < C; ++c) __builtin_prefetch(work.later + line * TILE + c * work.w_stride, 0, 2);
}

// Row by row, since rows of the output are often whole pages apart: a cache line that is left half written would be gone
// from the caches when its other half comes.
template <class T>
TARGET void finish(const Finish<T>& of) {
  for (int64_t row = 0; row < of.rows; ++row)
    for (int64_t i = 0; i < of.columns; i += TILE)
      store_as(of.out + row * of.out_stride + i, load(of.sums + row * of.sums_stride + i) + load(of.bias + i),
               of.columns - i);
}

#if defined(TILES) || DOT || NEON >= 2
constexpr bool WIDENS = false;
#else
constexpr bool WIDENS = true;
#endif

#ifdef TILES
// Two tiles are a cache line of the output. Where it is too large for the caches, lines are written past them, which
// saves reading them first.
INLINE void finish_line(const Finish<BFloat16>& of, int64_t row) {
  const float* sums = of.sums + row * of.sums_stride;
  BFloat16* out = of.out + row * of.out_stride;
  const Vec line = to_bf16_pairs(load(sums) + load(of.bias), load(sums + TILE) + load(of.bias + TILE));
  if (of.stream) _mm512_stream_si512(reinterpret_cast<__m512i*>(out), reinterpret_cast<__m512i>(line));
  else store(out, line);
}

TARGET void finish_lines(const Finish<BFloat16>& of) {
  if (of.columns != 2 * TILE) return finish(of);
  for (int64_t row = 0; row < of.rows; ++row) finish_line(of, row);
}

// 8 tiles of 16 rows: 2 x 2 of sums, 2 of activations, 2 of weights.
constexpr int ROWS = 2, COLS = 2, ALIGN = TILE;
// 2 tiles x 128 x 64 bytes = 16 KiB, a third of L1, or with many rows twice that; all pairs of a block's rows stay in L2.
constexpr int64_t CHUNK = 128, ROW_BLOCK = 768;

// Each of `steps` parts of the loop fetches a part of the weights wanted later into L2.
template <int C>
struct Fetch {
  const uint32_t* line;
  int64_t w_stride, lines, each;

  Fetch(const Work<BFloat16>& work, int64_t steps)
      : line(work.later), w_stride(work.w_stride), lines(work.later_lines), each((lines + steps - 1) / steps) {}
  INLINE void operator()() {
    for (int64_t i = 0; i < std::min(lines, each); ++i, line += TILE)
      for (int c = 0; c < C; ++c) __builtin_prefetch(line + c * w_stride, 0, 2);
    lines -= each;
  }
};

// And finishes a part of the earlier sums: the products leave the rest of the core free.
template <int C>
struct FetchAndFinish {
  Fetch<C> fetch;
  const Finish<BFloat16>& before;
  int64_t each, row = 0;

  FetchAndFinish(const Work<BFloat16>& work, int64_t steps)
      : fetch(work, steps), before(*work.before), each((before.rows + steps - 1) / steps) {}
  INLINE void operator()() {
    fetch();
    for (const int64_t end = std::min(row + each, before.rows); row < end; ++row) finish_line(before, row);
  }
  INLINE void finish_all() {  // for a chunk that has no parts
    for (; row < before.rows; ++row) finish_line(before, row);
  }
};

// Aligned to a cache line: where it starts in the middle of one, a decode is 4% slower.
template <int M, int C>
[[gnu::aligned(64)]] TARGET void multiply_bf16(const Work<BFloat16>& work) {
  const int64_t steps = std::max<int64_t>(work.words / TILE, 1);
  if (work.x_stride != 0) {
    Fetch<C> meanwhile(work, steps);
    multiply_tiles<TILES, false, M, C>(work.x, work.x_stride, work.w, work.w_stride, work.words, work.sums, work.first,
                                       meanwhile);
  } else {
    FetchAndFinish<C> meanwhile(work, steps);
    if (work.words < TILE) meanwhile.finish_all();
    multiply_tiles<TILES, true, M, C>(work.x, 0, work.w, work.w_stride, work.words, work.sums, work.first, meanwhile);
  }
}

#else

constexpr int ROWS = WIDTH == 512 ? 8 : WIDTH == 256 ? 6 : 4, COLS = WIDTH == 512 ? 3 : 1, ALIGN = 1;
// 3 tiles x 256 x 64 bytes = 48 KiB, in L2; half of that is 2% slower. A chunk of a block's rows (256 KiB, or 512 as float32)
// and their sums (48 KiB) stay in L2, or come from L3 as fast as they are used.
constexpr int64_t CHUNK = 256, ROW_BLOCK = 256 / ROWS * ROWS;

#if DOT
// 32 registers of 512 bits: 8 x 3 sums, 3 of weights, the others for activations. A pair takes 24 products and 11 loads,
// so the products hide the loads; a group of 8 rows fits the usual batch sizes.
template <int M, int C>
TARGET void multiply_bf16(const Work<BFloat16>& work) {
  Vec sums[M][C];
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 3
    for (int c = 0; c < C; ++c) sums[m][c] = work.first ? Vec{} : load(work.sums + (m * C + c) * TILE);
  for (int64_t p = 0; p < work.words; ++p) {
    if (work.prefetch) prefetch<C>(work, p);
    if (p < work.later_lines) prefetch_later<C>(work, p);
    Vec w[C];
#pragma GCC unroll 3
    for (int c = 0; c < C; ++c) w[c] = load(work.w + c * work.w_stride + p * TILE);
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      const Vec x = broadcast_lane(work.x + p * M + m);
#pragma GCC unroll 3
      for (int c = 0; c < C; ++c) sums[m][c] = add_products(sums[m][c], x, w[c]);
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 3
    for (int c = 0; c < C; ++c) store(work.sums + (m * C + c) * TILE, sums[m][c]);
}

#elif NEON >= 2
// An instruction takes two words of two rows and two columns: four sums, each of which gets what two of `add_products`
// add to it, one after the other (Arm Architecture Reference Manual, BFMMLA and BFDOT). Those take what is left over, a
// last row and a last word, so that a sum has the same bits in any number of rows.
INLINE Register add_matrix(Register sums, UintRegister x, UintRegister w) {
  return reinterpret_cast<Register>(vbfmmlaq_f32(reinterpret_cast<float32x4_t>(sums), reinterpret_cast<bfloat16x8_t>(x),
                                                 reinterpret_cast<bfloat16x8_t>(w)));
}

template <int M, int C>
TARGET void multiply_bf16(const Work<BFloat16>& work) {
  static_assert(C == 1);
  constexpr int LANES = WIDTH / 32, REGISTERS = TILE / LANES;
  const auto weights = [&](int64_t p, int i) TARGET {
    UintRegister w;
    std::memcpy(&w, work.w + p * TILE + i * LANES, sizeof(w));
    return w;
  };
  const auto two_rows = [&](int64_t p, int m) TARGET { return vld1_u32(work.x + p * M + m); };
  Register sums[M][REGISTERS];
  const auto add_word = [&](int64_t p, int m, int i, UintRegister w) TARGET {
    const auto x = UintRegister{} + work.x[p * M + m];
    sums[m][i] = add_products(sums[m][i], reinterpret_cast<Register>(x), reinterpret_cast<Register>(w));
  };
  load_sums(work, sums);
  exchange_halves(sums);
  int64_t p = 0;
  for (; p + 2 <= work.words; p += 2) {
    if (work.prefetch) prefetch<C>(work, p), prefetch<C>(work, p + 1);
    UintRegister x[M / 2 + 1];
#pragma GCC unroll 2
    for (int m = 0; m + 1 < M; m += 2) {
      const uint32x2x2_t pairs = vzip_u32(two_rows(p, m), two_rows(p + 1, m));
      x[m / 2] = reinterpret_cast<UintRegister>(vcombine_u32(pairs.val[0], pairs.val[1]));
    }
#pragma GCC unroll 4
    for (int i = 0; i < REGISTERS; ++i) {
      const UintRegister first = weights(p, i), second = weights(p + 1, i);
#pragma GCC unroll 2
      for (int m = 0; m + 1 < M; m += 2) {
        sums[m][i] = add_matrix(sums[m][i], x[m / 2], lower_columns(first, second));
        sums[m + 1][i] = add_matrix(sums[m + 1][i], x[m / 2], upper_columns(first, second));
      }
      if constexpr (M % 2 == 1) add_word(p, M - 1, i, first), add_word(p + 1, M - 1, i, second);
    }
  }
  exchange_halves(sums);
  if (p < work.words)
#pragma GCC unroll 4
    for (int i = 0; i < REGISTERS; ++i) {
      const UintRegister w = weights(p, i);
#pragma GCC unroll 4
      for (int m = 0; m < M; ++m) add_word(p, m, i, w);
    }
  store_sums(sums, work);
}

#else
// Without an instruction for it bfloat16 becomes float32: weights by a shift as they are loaded, activations as they are
// packed. Registers of 512 bits are 32: 8 x 3 sums, 3 of weights, one of activations, one for the mask; those of 256 bits
// are 16: 6 x 1 x 2, 2, one and one.

// The compiler moves no sum past this. Free to mix the two inputs of a pair, GCC 12 has more values at a time than
// registers: with 256 bits the loop takes 1.9 times as long.
INLINE void keep_order([[maybe_unused]] Register& x) {
#ifdef __x86_64__
  asm volatile("" : "+x"(x));
#endif
}

template <bool ODD, int M, int REGISTERS>
INLINE void add_inputs(const Work<BFloat16>& work, int64_t p, Register (&sums)[M][REGISTERS]) {
  constexpr int LANES = WIDTH / 32, PARTS = TILE / LANES;
  Register w[REGISTERS];
#pragma GCC unroll 4
  for (int i = 0; i < REGISTERS; ++i) {
    UintRegister pairs;
    std::memcpy(&pairs, work.w + i / PARTS * work.w_stride + p * TILE + i % PARTS * LANES, sizeof(pairs));
    w[i] = reinterpret_cast<Register>(ODD ? pairs & 0xffff0000u : pairs << 16);
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
    const Register x = reinterpret_cast<Register>(UintRegister{} + work.x[(2 * p + ODD) * M + m]);
#pragma GCC unroll 4
    for (int i = 0; i < REGISTERS; ++i) keep_order(sums[m][i] += x * w[i]);
  }
}

template <int M, int C>
TARGET void multiply_bf16(const Work<BFloat16>& work) {
  constexpr int LANES = WIDTH / 32, REGISTERS = C * TILE / LANES;
  Register sums[M][REGISTERS];
  load_sums(work, sums);
  for (int64_t p = 0; p < work.words; ++p) {
    if (work.prefetch) prefetch<C>(work, p);
    add_inputs<false>(work, p, sums);
    add_inputs<true>(work, p, sums);
  }
  store_sums(sums, work);
}
#endif  // DOT
#endif  // TILES

#if !DOT
// Registers of 512 bits: 8 x 3 sums, 3 of weights, one of activations; of 256 bits: 6 x 1 x 2, 2 and one.
constexpr int FLOAT_ROWS = WIDTH == 512 ? 8 : WIDTH == 256 ? 6 : 4, FLOAT_COLS = WIDTH == 512 ? 3 : 1;
// A chunk of a row group (16 KiB) stays in L1, that of 3 tiles (96 KiB) in L2. Rows of a block come from L2 or L3, which is
// fast enough for them; with 256 rows, or chunks of 256, 512 rows are 4% slower each.
constexpr int64_t FLOAT_CHUNK = 512, FLOAT_ROW_BLOCK = 512 / FLOAT_ROWS * FLOAT_ROWS;

INLINE Register load_register(const Half* from) {
#if WIDTH == 512
  return load_floats(from);
#elif WIDTH == 256
  return reinterpret_cast<Register>(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
#elif defined(__aarch64__)
  return reinterpret_cast<Register>(load_part(from));
#else
  Register x;
  for (int i = 0; i < WIDTH / 32; ++i) x[i] = from[i];
  return x;
#endif
}

// Weights of float32, or of float16, which are widened as they are loaded. A word is one input.
template <class T, int M, int C>
TARGET void multiply_floats(const Work<T>& work) {
  constexpr int LANES = WIDTH / 32, PARTS = TILE / LANES, REGISTERS = C * PARTS;
  Register sums[M][REGISTERS];
  load_sums(work, sums);
  for (int64_t k = 0; k < work.words; ++k) {
    if (work.prefetch) prefetch<C>(work, k);
    Register w[REGISTERS];
#pragma GCC unroll 4
    for (int i = 0; i < REGISTERS; ++i)
      w[i] = load_register(work.w + i / PARTS * work.w_stride + k * TILE + i % PARTS * LANES);
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      const Register x = reinterpret_cast<Register>(UintRegister{} + work.x[k * M + m]);
#pragma GCC unroll 4
      for (int i = 0; i < REGISTERS; ++i) sums[m][i] += x * w[i];
    }
  }
  store_sums(sums, work);
}
#endif  // !DOT

template <size_t... I>
constexpr std::array<void (*)(const Work<BFloat16>&), sizeof...(I)> products(std::index_sequence<I...>) {
  return {&multiply_bf16<I / COLS + 1, I % COLS + 1>...};
}

inline KernelsOf<BFloat16> bf16_kernels() {
  static constexpr auto table = products(std::make_index_sequence<ROWS * COLS>());
  static_assert(COLS <= MAX_COLS && ROW_BLOCK * COLS * TILE <= MAX_SUMS);
  static_assert(ROW_BLOCK % (ROWS * ALIGN) == 0 && CHUNK % ALIGN == 0);
  KernelsOf<BFloat16> all = {ROWS * ALIGN, COLS,  ALIGN,  WIDENS,         ROW_BLOCK, CHUNK,
                             table.data(), false, finish, [](int64_t) {}, [] {}};
#ifdef TILES
  all.defers = true;
  all.finish = finish_lines;
  all.begin = [](int64_t rows) { TILES::begin(std::min(rows, TILE)); };
  all.end = [] {
    TILES::end();
    _mm_sfence();  // `finish` may have written past the caches
  };
#endif
  return all;
}

#if DOT
// These instructions multiply no float32.
inline Kernels kernels() { return {bf16_kernels(), avx512::float_kernels<float>(), avx512::float_kernels<Half>()}; }
#else
template <class T, size_t... I>
constexpr std::array<void (*)(const Work<T>&), sizeof...(I)> float_products(std::index_sequence<I...>) {
  return {&multiply_floats<T, I / FLOAT_COLS + 1, I % FLOAT_COLS + 1>...};
}

template <class T>
KernelsOf<T> float_kernels() {
  static constexpr auto table = float_products<T>(std::make_index_sequence<FLOAT_ROWS * FLOAT_COLS>());
  static_assert(FLOAT_COLS <= MAX_COLS && FLOAT_ROW_BLOCK * FLOAT_COLS * TILE <= MAX_SUMS);
  return {FLOAT_ROWS, FLOAT_COLS, 1, false, FLOAT_ROW_BLOCK, FLOAT_CHUNK, table.data(), false, finish, [](int64_t) {}, [] {}};
}

inline Kernels kernels() { return {bf16_kernels(), float_kernels<float>(), float_kernels<Half>()}; }
#endif

}  // namespace ISA
}  // namespace
