// The compressed linear layer's kernels for one instruction set: compiled by ../cpu/one_isa.cpp, which explains the macros.
// It has products of pairs of bfloat16, or tile registers.
//
// A word of a group becomes four registers, of 16 pairs each: a table of 16 bytes, looked up by a code, has the upper byte of
// a weight, which is then interleaved with the lower one.

#include <algorithm>
#include <cstring>
#include <utility>

#include "../cpu/vectors.h"
#include "compressed_linear_cpu_types.h"

namespace {
namespace ISA {

INLINE __m512i load_bytes(const void* from) { return _mm512_loadu_si512(from); }

// The tables of a group.
struct Tables {
  __m512i halves[2];

  INLINE explicit Tables(const Group& group) : halves{load_bytes(group.table), load_bytes(group.table + 64)} {}
  INLINE void decode(const uint8_t* word, __m512i (&w)[GROUP_TILES]) const {
    const __m512i four_bits = _mm512_set1_epi8(15), codes = load_bytes(word + 128);
    const __m512i of_halves[2] = {_mm512_and_si512(codes, four_bits), _mm512_and_si512(_mm512_srli_epi16(codes, 4), four_bits)};
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      const __m512i lower = load_bytes(word + 64 * i), upper = _mm512_shuffle_epi8(halves[i], of_halves[i]);
      w[2 * i] = _mm512_unpacklo_epi8(lower, upper);
      w[2 * i + 1] = _mm512_unpackhi_epi8(lower, upper);
    }
  }
};

INLINE int64_t word_of(int32_t exception) { return exception >> 15; }
INLINE int tile_of(int32_t exception) { return (exception >> 14 & 1) * 2 + (exception >> 11 & 1); }

// Puts the upper byte of an exception into its word, decoded, whose tiles are `stride` bytes apart.
INLINE void correct(int32_t exception, uint32_t* word, int64_t stride = LINE) {
  const int32_t place = exception >> 8, lane = place >> 4 & 3;
  reinterpret_cast<uint8_t*>(word)[tile_of(exception) * stride + lane * 16 + (place & 7) * 2 + 1] = static_cast<uint8_t>(exception);
}

TARGET void finish(const Finish& of) {
  for (int64_t row = 0; row < of.rows; ++row)
    for (int64_t i = 0; i < of.columns; i += TILE) {
      const int64_t count = std::min(TILE, of.columns - i);
      Vec sums = load(of.sums + row * of.sums_stride + i);
      if (of.bias != nullptr) sums += load_floats(reinterpret_cast<const BFloat16*>(of.bias + i), count);
      store_as(reinterpret_cast<BFloat16*>(of.out + row * of.stride + i), sums, count);
    }
}

#ifdef TILES
}  // namespace ISA
}  // namespace
#include "compressed_linear_cpu_amx.h"
namespace {
namespace ISA {

inline Kernels kernels() {
  static constexpr TileKernels tiles = {[](int64_t rows) { TILES::begin(std::min(rows, TILE)); }, [] {
                                          TILES::end();
                                          _mm_sfence();  // outputs may have been written past the caches
                                        },
                                        multiply_block};
  return {.tiles = &tiles};
}

#else

template <int M>
INLINE void load_sums(const Work& work, Vec (&sums)[M][GROUP_TILES]) {
#pragma GCC unroll 6
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
    for (int i = 0; i < GROUP_TILES; ++i) sums[m][i] = work.first ? Vec{} : load(work.sums + (m * GROUP_TILES + i) * TILE);
}

template <int M>
INLINE void store_sums(const Vec (&sums)[M][GROUP_TILES], const Work& work) {
#pragma GCC unroll 6
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
    for (int i = 0; i < GROUP_TILES; ++i) store(work.sums + (m * GROUP_TILES + i) * TILE, sums[m][i]);
}

template <int M>
INLINE void add_products_of(const uint32_t* x, const __m512i (&w)[GROUP_TILES], Vec (&sums)[M][GROUP_TILES]) {
#pragma GCC unroll 6
  for (int m = 0; m < M; ++m) {
    const Vec pair = broadcast_lane(x + m);
#pragma GCC unroll 4
    for (int i = 0; i < GROUP_TILES; ++i) sums[m][i] = add_products(sums[m][i], pair, reinterpret_cast<Vec>(w[i]));
  }
}

// Fetches some lines with each word. Evenly: memory waits while none are asked for, and the processor where many are at
// once. A prefetch never faults, so it may be past the end of the weights.
struct Fetch {
  const uint8_t *next, *end;
  int64_t at_once;

  INLINE explicit Fetch(const Work& work)
      : next(work.later), end(work.later + work.later_lines * LINE), at_once(work.lines_at_once) {}
  INLINE void operator()() {
    // What the compiler cannot see through: GCC 12 would make two loops of one, and keep sums in memory in both.
    asm volatile("" : "+r"(next));
    if (next >= end) return;
    for (int64_t i = 0; i < at_once; ++i, next += LINE) __builtin_prefetch(next, 0, 3);
  }
};

template <int M>
TARGET void multiply(const Work& work, const uint32_t* expanded) {
  const uint32_t* x = work.x;
  Fetch fetch(work);
  Vec sums[M][GROUP_TILES];
  load_sums(work, sums);
  for (int64_t p = 0; p < work.words; ++p, x += M, expanded += GROUP) {
    fetch();
    __m512i w[GROUP_TILES];
#pragma GCC unroll 4
    for (int i = 0; i < GROUP_TILES; ++i) w[i] = load_bytes(expanded + i * TILE);
    add_products_of(x, w, sums);
  }
  store_sums(sums, work);
}

template <int M, bool EXPAND>
TARGET void multiply_words(const Work& work, const Group& group, int64_t first, uint32_t* expanded) {
  const Tables tables(group);
  const int32_t* exception = group.exceptions;
  const uint8_t *word = group.words + first * WORD_BYTES, *const end = word + work.words * WORD_BYTES;
  const uint32_t* x = work.x;
  Fetch fetch(work);
  Vec sums[M][GROUP_TILES];
  load_sums(work, sums);
  for (;; word += WORD_BYTES, x += M, expanded += EXPAND ? GROUP : 0) {
    __m512i w[GROUP_TILES];
    const uint8_t* const stop = std::min(end, group.words + word_of(*exception) * WORD_BYTES);
    for (; word != stop; word += WORD_BYTES, x += M, expanded += EXPAND ? GROUP : 0) {
      fetch();
      tables.decode(word, w);
      if constexpr (EXPAND)
#pragma GCC unroll 4
        for (int i = 0; i < GROUP_TILES; ++i) _mm512_storeu_si512(expanded + i * TILE, w[i]);
      add_products_of(x, w, sums);
    }
    if (word == end) break;
    fetch();
    uint32_t pairs[GROUP], *const corrected = EXPAND ? expanded : pairs;
    tables.decode(word, w);
    std::memcpy(corrected, w, sizeof w);
    for (const int64_t p = word_of(*exception); word_of(*exception) == p; ++exception) correct(*exception, corrected);
#pragma GCC unroll 4
    for (int i = 0; i < GROUP_TILES; ++i) w[i] = load_bytes(corrected + i * TILE);
    add_products_of(x, w, sums);
  }
  store_sums(sums, work);
}

template <int M>
TARGET void multiply_compressed(const Work& work, const Group& group, int64_t first, uint32_t* expanded) {
  if (expanded == nullptr) multiply_words<M, false>(work, group, first, nullptr);
  else multiply_words<M, true>(work, group, first, expanded);
}

inline Kernels kernels() {
  Kernels all = {};
  [&]<size_t... I>(std::index_sequence<I...>) { ((all.multiply_compressed[I] = multiply_compressed<I + 1>), ...); }
  (std::make_index_sequence<ROWS>());
  [&]<size_t... I>(std::index_sequence<I...>) { ((all.multiply[I] = multiply<I + 1>), ...); }
  (std::make_index_sequence<ROWS>());
  all.finish = finish;
  return all;
}

#endif

}  // namespace ISA
}  // namespace
