// Products of weights alone quantised on tile registers: a row alone too, so that it has the bits that it has among many.
//
// Codes of 4 bits whose groups are whole tiles of 32 inputs stay as they are: `Parts`, at the end of this file. All others
// become bfloat16, scaled, a chunk at a time, which all rows of a block are multiplied by as by weights of packed_linear
// (linear_cpu_amx.h). Of each output, with the largest scale of its groups, `norm`:
//
//   weight = bfloat16(float16((value(code) - zero) * scale * LARGEST / norm))      y = sum * norm / LARGEST + bias
//
// so where a row is one group, weights are exact: values of codes alone. Numbers of 16 bits are multiplied 32 at a time,
// and float16 is the only kind that these CPUs multiply. Its products become bfloat16 by a shift: 3 bits of mantissa are cut
// off, for which scales are a little larger, so that the errors are as often above as below; what has no more than 8 bits
// stays exact. The exponent, whose bias is 112 less, is left as it is: weights are 2^-112 times what they are, so
// activations are multiplied by 2^48, lest products are too small, and sums by what is left.

#include <cmath>

#include "linear_cpu_amx.h"
#include "scaled_sums_amx.h"

namespace {
namespace ISA {

#if HALVES
#define TARGET_HALVES \
  __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vnni,avx512vbmi,avx512fp16,fma,f16c")))
#else
#define TARGET_HALVES TARGET
#endif
#define INLINE_HALVES inline __attribute__((always_inline)) TARGET_HALVES

constexpr float LARGEST = 1 << 15;             // of the products in float16
constexpr float X_FACTOR = 0x1p48f, SUM_FACTOR = 0x1p64f;  // 2^112 together
constexpr float CUT_OFF = 1 + 0.00276f;        // 2^-8.5: half of what is cut off, on average
constexpr int64_t FEW_PAIRS = 32, CHUNK = 128;  // pairs of a chunk of weights: 16 KiB of two tiles,
constexpr int64_t MANY_ROWS = 256;                // and from so many rows on twice that

// Vectors of 32 numbers of float16.
#if HALVES
INLINE_HALVES __m512i add_product(__m512i a, __m512i b, __m512i c) {  // a * b + c, rounded once
  return _mm512_castph_si512(
      _mm512_fmadd_ph(_mm512_castsi512_ph(a), _mm512_castsi512_ph(b), _mm512_castsi512_ph(c)));
}
INLINE_HALVES __m512i halves_of(__m512i integers) { return _mm512_castph_si512(_mm512_cvtepi16_ph(integers)); }
// Bits 4 I to 4 I + 3 of 16, in the lowest bits, with others above them. Not a shift: those wait for the same port as products
// do while tiles are multiplied.
template <int I>
INLINE_HALVES __m512i lowered(__m512i codes) {
  return _mm512_multishift_epi64_epi8(_mm512_set1_epi64(0x3830282018100800 + 4 * I * 0x0101010101010101), codes);
}
#else
// By their definition, for machines that have no such instructions.
inline Half half_of(double x) {  // rounded once: what does not fit into a float makes its last bit 1
  float nearest = static_cast<float>(x);
  if (nearest != x && nearest == nearest) {
    uint32_t raw = __builtin_bit_cast(uint32_t, nearest);
    if (std::fabs(static_cast<double>(nearest)) > std::fabs(x)) --raw;
    nearest = __builtin_bit_cast(float, raw | 1);
  }
  return Half(nearest);
}
TARGET inline __m512i add_product(__m512i a, __m512i b, __m512i c) {
  Half x[32], y[32], z[32];
  std::memcpy(x, &a, sizeof(x)), std::memcpy(y, &b, sizeof(y)), std::memcpy(z, &c, sizeof(z));
  for (int i = 0; i < 32; ++i)
    z[i] = half_of(static_cast<double>(static_cast<float>(x[i])) * static_cast<float>(y[i]) + static_cast<float>(z[i]));
  std::memcpy(&c, z, sizeof(z));
  return c;
}
template <int I>
INLINE __m512i lowered(__m512i codes) { return _mm512_srli_epi16(codes, 4 * I); }
TARGET inline __m512i halves_of(__m512i integers) {
  int16_t from[32];
  Half to[32];
  std::memcpy(from, &integers, sizeof(from));
  for (int i = 0; i < 32; ++i) to[i] = Half(static_cast<float>(from[i]));
  std::memcpy(&integers, to, sizeof(to));
  return integers;
}
#endif

// 16 numbers in float16, each for both inputs of a pair.
INLINE __m512i in_pairs(Vec x) {
  const __m512i words = _mm512_cvtepu16_epi32(
      _mm512_cvtps_ph(reinterpret_cast<__m512>(x), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  return _mm512_or_si512(words, _mm512_slli_epi32(words, 16));
}

// A word of codes is 4 bytes of each of 16 outputs: 2 pairs of inputs of 8 bits (0, 2) and (1, 3), or 4 of 4 bits
// (0, 2), (4, 6), (1, 3), (5, 7). Each source turns a word into pairs of float16, UNIT times the values.
struct TileFourBits {  // any, from a table
  static constexpr int PAIRS = 4;
  static constexpr float VALUES = 8, UNIT = 1;  // values are at most so large
  __m512i table;  // twice the 16 values: bit 4 of an index is that of another code

  INLINE_HALVES explicit TileFourBits(const Values& values) {
    Half each[32];
    for (int i = 0; i < 32; ++i) each[i] = Half(values.of[i % 16]);
    std::memcpy(&table, each, sizeof(each));
  }
  INLINE_HALVES void pairs(__m512i codes, __m512i* to) const {
    to[0] = _mm512_permutexvar_epi16(codes, table);
    to[1] = _mm512_permutexvar_epi16(lowered<1>(codes), table);
    to[2] = _mm512_permutexvar_epi16(lowered<2>(codes), table);
    to[3] = _mm512_permutexvar_epi16(lowered<3>(codes), table);
  }
  INLINE_HALVES static __m512i checked(__m512i weights, __m512i) { return weights; }
};

struct TileIntegers {  // of 8 bits
  static constexpr int PAIRS = 2;
  static constexpr float VALUES = 128, UNIT = 256;

  INLINE_HALVES explicit TileIntegers(const Values&) {}
  INLINE_HALVES void pairs(__m512i codes, __m512i* to) const {
    to[0] = halves_of(_mm512_slli_epi16(codes, 8));
    to[1] = halves_of(_mm512_and_si512(codes, _mm512_set1_epi16(-256)));
  }
  INLINE_HALVES static __m512i checked(__m512i weights, __m512i) { return weights; }
};

struct TileFloats {  // e4m3: the exponent's bias is 8 less than that of float16
  static constexpr int PAIRS = 2;
  static constexpr float VALUES = 512, UNIT = 1.f / 256;

  INLINE_HALVES explicit TileFloats(const Values&) {}
  INLINE_HALVES static __m512i half(__m512i high_bytes) {
    return _mm512_and_si512(_mm512_srai_epi16(high_bytes, 1), _mm512_set1_epi16(static_cast<int16_t>(0xbf80)));
  }
  INLINE_HALVES void pairs(__m512i codes, __m512i* to) const {
    to[0] = half(_mm512_slli_epi16(codes, 8));
    to[1] = half(codes);
  }
  // NaN where the code is one.
  INLINE_HALVES static __m512i checked(__m512i weights, __m512i halves) {
    const __m512i size = _mm512_and_si512(halves, _mm512_set1_epi16(0x7fff));
    return _mm512_mask_mov_epi16(weights, _mm512_cmpeq_epi16_mask(size, _mm512_set1_epi16(0x3f80)),
                                 _mm512_set1_epi16(0x7fc0));
  }
};

// The weights of one or two column tiles.
template <class Source, int C>
struct TileWeights {
  const Block& work;
  const Matrix& of = *work.of;
  const Source source{*of.values};
  const int64_t group = of.whole ? of.inputs : of.part;
  Vec inverse[C];

  TARGET_HALVES explicit TileWeights(const Block& work) : work(work) {
    const Vec values = broadcast(Source::VALUES);
    for (int c = 0; c < C; ++c) {
      Vec norm = {};
      for (int64_t g = 0; g < of.groups; ++g) {
        const Vec size = size_of(scale_at(c, g));
        const Vec with_zero = work.zeros == nullptr ? size : size * (values + size_of(zero_at(c, g))) / values;
        norm = with_zero > norm ? with_zero : norm;
      }
      inverse[c] = norm > Vec{} ? broadcast(CUT_OFF * LARGEST / Source::VALUES) / norm : Vec{};
      store(work.factors + c * TILE, norm * broadcast(Source::VALUES / LARGEST * SUM_FACTOR));
    }
  }

  INLINE_HALVES static Vec size_of(Vec x) { return floats(bits(x) & 0x7fffffff); }
  INLINE_HALVES Vec scale_at(int c, int64_t g) const {
    return load_scales(work.scales, (c * of.groups + g) * TILE, of.scale_type);
  }
  INLINE_HALVES Vec zero_at(int c, int64_t g) const {
    return load_zeros(work.zeros, (c * of.groups + g) * TILE, of.zero_type);
  }

  // Pairs [pair, pair + count) of tile c, which are whole words of codes; zeros after the last.
  TARGET_HALVES void decode(int c, int64_t pair, int64_t count, uint32_t* to) const {
    const int64_t words_of_group = group / (2 * Source::PAIRS), all = of.inputs / (2 * Source::PAIRS);
    const int64_t first = pair / Source::PAIRS, end = std::min(first + count / Source::PAIRS, all);
    const uint8_t* const codes = work.codes + c * of.tile_bytes();
    const uint8_t* const later = work.later + c * of.tile_bytes();
    const int64_t scale_bytes = TILE * bytes_of(of.scale_type), zero_bytes = TILE * bytes_of(of.zero_type);
    const Source source = this->source;
    for (int64_t word = first, g = first / words_of_group; word < end; ++g) {
      __builtin_prefetch(work.later_scales + (c * of.groups + g) * scale_bytes, 0, 2);
      if (work.zeros != nullptr) __builtin_prefetch(work.later_zeros + (c * of.groups + g) * zero_bytes, 0, 2);
      const Vec scale = scale_at(c, g) * inverse[c];
      const __m512i ratio = in_pairs(scale * broadcast(1 / Source::UNIT));
      const __m512i offset = work.zeros == nullptr ? _mm512_setzero_si512() : in_pairs(-(scale * zero_at(c, g)));
      for (const int64_t until = std::min(end, (g + 1) * words_of_group); word < until; ++word, to += Source::PAIRS * TILE) {
        __m512i halves[Source::PAIRS];
        source.pairs(_mm512_loadu_si512(codes + word * 64), halves);
        __builtin_prefetch(later + word * 64, 0, 2);
#pragma GCC unroll 4
        for (int j = 0; j < Source::PAIRS; ++j) {
          const __m512i product = add_product(halves[j], ratio, offset);
          const __m512i weights =
              _mm512_and_si512(_mm512_srai_epi16(product, 3), _mm512_set1_epi16(static_cast<int16_t>(0x8fff)));
          _mm512_store_si512(to + j * TILE, Source::checked(weights, halves[j]));
        }
      }
    }
    std::memset(to, 0, (count - (end - first) * Source::PAIRS) * TILE * sizeof(uint32_t));
  }
};

// Rounds the sums of some rows.
template <int C>
INLINE void finish_rows(const Block& work, int64_t first, int64_t end) {
  const auto y = [&](int64_t row, int64_t c) TARGET __attribute__((always_inline)) {
    return load(work.sums + (row * C + c) * TILE) * load(work.factors + c * TILE) + load(work.bias + c * TILE);
  };
  for (int64_t row = first; row < end; ++row) {
    BFloat16* const out = work.out + row * work.out_stride;
    if (C == 2 && work.count >= 2 * TILE) {
      const Vec line = to_bf16_pairs(y(row, 0), y(row, C - 1));
      if (work.stream) _mm512_stream_si512(reinterpret_cast<__m512i*>(out), reinterpret_cast<__m512i>(line));
      else store(out, line);
    } else {
      for (int c = 0; c < C; ++c) store_as(out + c * TILE, y(row, c), work.count - c * TILE);
    }
  }
}

// Up to 16 rows. Sums stay in tiles, and weights are multiplied as soon as they are decoded.
template <class Source, int C>
INLINE_HALVES void multiply_few(const Block& work, const TileWeights<Source, C>& weights, int64_t all) {
  TILES tiles;
  constexpr int64_t ROW = 64, SUMS_ROW = C * ROW;  // bytes
  tiles.template zero<0>();
  if constexpr (C > 1) tiles.template zero<1>();
  for (int64_t pair = 0, pairs; pair < all; pair += pairs) {
    pairs = std::min(FEW_PAIRS, all - pair);
    for (int c = 0; c < C; ++c) weights.decode(c, pair, pairs, work.decoded + c * FEW_PAIRS * TILE);
    for (int64_t p = 0; p < pairs; p += TILE) {
      tiles.template load<4>(work.x + pair + p, all * sizeof(uint32_t));
      tiles.template load<6>(work.decoded + p * TILE, ROW);
      tiles.template multiply<0, 4, 6>();
      if constexpr (C > 1) {
        tiles.template load<7>(work.decoded + (FEW_PAIRS + p) * TILE, ROW);
        tiles.template multiply<1, 4, 7>();
      }
    }
  }
  tiles.template store<0>(work.sums, SUMS_ROW);
  if constexpr (C > 1) tiles.template store<1>(work.sums + TILE, SUMS_ROW);
  finish_rows<C>(work, 0, work.rows);
}

// What is done beside products, a part each time it is called: a chunk of weights is decoded, which is multiplied next, and
// rows of sums are rounded that are complete.
template <class Source, int C>
struct Meanwhile {
  static constexpr int64_t ROWS = 4;
  const TileWeights<Source, C>& weights;
  const int64_t pair, pairs, each;  // of the chunk; `each` tiles of 16 pairs at a time
  uint32_t* const to;
  int64_t done = 0, row = 0, rows_end = 0;

  TARGET_HALVES void decode(int64_t count) {
    for (const int64_t end = std::min(done + count, C * pairs / TILE); done < end; ++done) {
      const int64_t c = done % C, first = done / C * TILE;
      weights.decode(c, pair + first, TILE, to + (c * pairs + first) * TILE);
    }
  }
  TARGET_HALVES void finish(int64_t count) {
    const int64_t end = std::min(row + count, rows_end);
    finish_rows<C>(weights.work, row, end);
    row = end;
  }
  TARGET_HALVES void operator()() {
    decode(each);
    finish(ROWS);
  }
};

template <class Source, int C>
INLINE_HALVES void multiply_many(const Block& work, const TileWeights<Source, C>& weights, int64_t all) {
  const int64_t chunk = work.rows < MANY_ROWS ? CHUNK : 2 * CHUNK, groups = (work.rows + 2 * TILE - 1) / (2 * TILE);
  const auto buffer = [&](int64_t pair) { return work.decoded + pair / chunk % 2 * C * chunk * TILE; };
  const auto from = [&](int64_t pair) {
    return Meanwhile<Source, C>{weights, pair, std::min(chunk, all - pair), (C + groups - 1) / groups, buffer(pair)};
  };
  from(0).decode(C * chunk);
  for (int64_t pair = 0; pair < all; pair += chunk) {
    const int64_t pairs = std::min(chunk, all - pair), stride = pairs * TILE;
    const bool last = pair + chunk >= all;
    Meanwhile<Source, C> meanwhile = from(std::min(pair + chunk, all));
    for (int64_t row = 0; row < work.rows; row += 2 * TILE) {
      const uint32_t* const x = work.x + row * all;
      float* const sums = work.sums + row * C * TILE;
      if (work.rows - row <= TILE)
        multiply_tiles<TILES, true, 1, C>(x + pair * TILE, 0, buffer(pair), stride, pairs, sums, pair == 0, meanwhile);
      else
        multiply_tiles<TILES, true, 2, C>(x + pair * 2 * TILE, 0, buffer(pair), stride, pairs, sums, pair == 0, meanwhile);
      if (last) {
        meanwhile.finish(2 * TILE);
        meanwhile.rows_end = std::min(row + 2 * TILE, work.rows);
      }
    }
    meanwhile.decode(C * chunk);
    meanwhile.finish(2 * TILE);
  }
}

template <class Source, int C>
TARGET_HALVES void multiply_columns(const Block& work) {
  const TileWeights<Source, C> weights(work);
  const int64_t all = (work.of->inputs / 2 + TILE - 1) / TILE * TILE;  // pairs
  if (work.rows <= TILE) multiply_few<Source, C>(work, weights, all);
  else multiply_many<Source, C>(work, weights, all);
}

template <class Source>
TARGET void multiply_block(const Block& work) {
  if (work.columns == 2) multiply_columns<Source, 2>(work);
  else multiply_columns<Source, 1>(work);
}

// Codes of 4 bits in groups of whole tiles: they stay as they are, and each sum of a part is scaled, as
// quantized_linear_cpu.cpp says. To scale every weight would take a row alone longer than memory does.
template <int C>
struct Parts {
  static constexpr int64_t PARTS_CHUNK = 64;  // pairs of a chunk of weights for many rows: 8 KiB of two tiles
  const Block& work;
  const Matrix& of = *work.of;
  const __m512i table = _mm512_load_si512(of.values->pairs);  // twice the 16 values
  const int64_t pairs = of.part / 2;

  // Pairs [pair, pair + count) of tile c; zeros after the last.
  INLINE_HALVES void decode(int c, int64_t pair, int64_t count, uint32_t* to) const {
    const int64_t end = std::min((pair + count) / 4, of.inputs / 8);
    const uint8_t* const codes = work.codes + c * of.tile_bytes();
    const uint8_t* const later = work.later + c * of.tile_bytes();
    const __m512i table = this->table;
    for (int64_t word = pair / 4; word < end; ++word, to += 4 * TILE) {
      const __m512i all = _mm512_loadu_si512(codes + word * 64);
      __builtin_prefetch(later + word * 64, 0, 2);
      _mm512_store_si512(to, _mm512_permutexvar_epi16(all, table));
      _mm512_store_si512(to + TILE, _mm512_permutexvar_epi16(_mm512_srli_epi16(all, 4), table));
      _mm512_store_si512(to + 2 * TILE, _mm512_permutexvar_epi16(_mm512_srli_epi16(all, 8), table));
      _mm512_store_si512(to + 3 * TILE, _mm512_permutexvar_epi16(_mm512_srli_epi16(all, 12), table));
    }
    if (4 * end < pair + count) std::memset(to, 0, (pair + count - 4 * end) * TILE * sizeof(uint32_t));
  }

  // Adds the sums of a part to the totals of ROWS rows, or of `rows`. x_sums: of the first of them.
  template <int ROWS>
  INLINE void scale(int64_t part, const float* sums, const float* x_sums, int64_t rows, Vec (*totals)[C]) const {
    const auto add = [&](int c, Vec scale, const auto& less) TARGET __attribute__((always_inline)) {
      if constexpr (ROWS > 0) {
#pragma GCC unroll 16
        for (int m = 0; m < ROWS; ++m) totals[m][c] += less(m, load(sums + (m * C + c) * TILE)) * scale;
      } else {
        for (int64_t m = 0; m < rows; ++m) totals[m][c] += less(m, load(sums + (m * C + c) * TILE)) * scale;
      }
    };
    const float* const own = x_sums + part * work.rows;
#pragma GCC unroll 2
    for (int c = 0; c < C; ++c) {
      const int64_t group = (c * of.groups + (of.whole ? 0 : part)) * TILE;
      const Vec scale = load_scales(work.scales, group, of.scale_type);
      if (work.zeros == nullptr) {
        add(c, scale, [](int64_t, Vec sum) TARGET __attribute__((always_inline)) { return sum; });
      } else {
        const Vec zero = load_zeros(work.zeros, group, of.zero_type);
        add(c, scale, [&](int64_t m, Vec sum)
                          TARGET __attribute__((always_inline)) { return sum - zero * broadcast(own[m]); });
      }
    }
  }

  // Scales and zeros of a part of the tiles that come later.
  INLINE void fetch(int64_t part) const {
    for (int c = 0; c < C; ++c) {
      const int64_t group = (c * of.groups + (of.whole ? 0 : part)) * TILE;
      __builtin_prefetch(work.later_scales + group * bytes_of(of.scale_type), 0, 2);
      if (work.zeros != nullptr) __builtin_prefetch(work.later_zeros + group * bytes_of(of.zero_type), 0, 2);
    }
  }

  // A part's products with up to 16 rows, its sums in tiles 2 * PAIR and the next.
  template <int PAIR>
  INLINE void multiply_part(const uint32_t* x, int64_t x_stride, int64_t x_step, const uint32_t* w, int64_t w_stride,
                            int64_t count) const {
    TILES tiles;
    tiles.template zero<2 * PAIR>();
    if constexpr (C > 1) tiles.template zero<2 * PAIR + 1>();
    for (int64_t p = 0; p < count; p += TILE, x += x_step, w += TILE * TILE) {
      tiles.template load<4>(x, x_stride);
      tiles.template load<6>(w, 64);
      tiles.template multiply<2 * PAIR, 4, 6>();
      if constexpr (C > 1) {
        tiles.template load<7>(w + w_stride, 64);
        tiles.template multiply<2 * PAIR + 1, 4, 7>();
      }
    }
  }
  template <int PAIR>
  INLINE void store_part(float* sums) const {
    TILES tiles;
    tiles.template store<2 * PAIR>(sums, C * 64);
    if constexpr (C > 1) tiles.template store<2 * PAIR + 1>(sums + TILE, C * 64);
  }

  // Parts [first, end) of up to 16 rows. While one is multiplied, the sums of the two before it are on their way. x is at
  // the first part, with `x_step` from tile to tile; weights_of(part) gives its weights and their stride.
  template <int ROWS, class WeightsOf>
  INLINE_HALVES void multiply_parts(int64_t first, int64_t end, const uint32_t* x, int64_t x_stride, int64_t x_step,
                                    const WeightsOf& weights_of, const float* x_sums, int64_t rows,
                                    Vec (*totals)[C]) const {
    alignas(64) float sums[2][TILE * C * TILE];
    const int64_t all = (of.inputs / 2 + TILE - 1) / TILE * TILE;
    const auto take = [&]<int PAIR>(int64_t part, std::integral_constant<int, PAIR>)
                          TARGET_HALVES __attribute__((always_inline)) {
      if (part < end) {
        const auto [w, w_stride] = weights_of(part);
        multiply_part<PAIR>(x + (part - first) * pairs / TILE * x_step, x_stride, x_step, w, w_stride,
                            std::min(pairs, all - part * pairs));
      }
      if (part > first + 1) scale<ROWS>(part - 2, sums[PAIR], x_sums, rows, totals);
      if (part > first && part <= end) store_part<1 - PAIR>(sums[1 - PAIR]);
    };
    for (int64_t part = first; part < end + 2; part += 2) {
      take(part, std::integral_constant<int, 0>());
      if (part + 1 < end + 2) take(part + 1, std::integral_constant<int, 1>());
    }
  }

  // Up to 16 rows: each part is decoded while the one before is multiplied.
  template <int ROWS>
  INLINE_HALVES void multiply_few(int64_t all) const {
    const int64_t parts = of.parts(), room = 2 * pairs * TILE;
    const auto decode_part = [&](int64_t part) TARGET_HALVES __attribute__((always_inline)) {
      const int64_t own = std::min(pairs, all - part * pairs);
      for (int c = 0; c < C; ++c) decode(c, part * pairs, own, work.decoded + part % 2 * room + c * own * TILE);
      fetch(part);
    };
    Vec totals[TILE][C] = {};
    decode_part(0);
    multiply_parts<ROWS>(
        0, parts, work.x, all * sizeof(uint32_t), TILE,
        [&](int64_t part) TARGET_HALVES {
          if (part + 1 < parts) decode_part(part + 1);
          return std::pair(work.decoded + part % 2 * room, std::min(pairs, all - part * pairs) * TILE);
        },
        work.x_sums, work.rows, totals);
    std::memcpy(work.sums, totals, sizeof(totals));
  }

  // What GroupProducts (scaled_sums_amx.h) asks for, of more rows; its groups are our parts.
  template <bool ZEROS>
  struct Scaled {
    const Parts& all;
    const int64_t rows = all.work.rows, groups = all.of.parts(), step = all.of.whole ? 0 : 2 * C * TILE;
    const int64_t words = (all.of.inputs / 2 + TILE - 1) / TILE;  // tiles of inputs
    float* const totals = all.work.sums;

    INLINE int64_t steps(int64_t part) const { return std::min(all.pairs / TILE, words - part * (all.pairs / TILE)); }
    INLINE void add(int64_t part, int64_t row, const float* sums, Vec (&totals)[EIGHT][C]) const {
      const float* const numbers = all.work.group_numbers + part * step;
      const float* const own = all.work.x_sums + part * rows + row;
      Vec scales[C], zeros[C];
#pragma GCC unroll 2
      for (int c = 0; c < C; ++c) {
        scales[c] = load(numbers + c * TILE);
        if constexpr (ZEROS) zeros[c] = load(numbers + (C + c) * TILE);
      }
#pragma GCC unroll 8
      for (int m = 0; m < EIGHT; ++m) {
        Vec x_sum = {};
        if constexpr (ZEROS) x_sum = broadcast(own[m]);
#pragma GCC unroll 2
        for (int c = 0; c < C; ++c) {
          Vec sum = load(sums + (m * C + c) * TILE);
          if constexpr (ZEROS) sum -= zeros[c] * x_sum;
          totals[m][c] += sum * scales[c];
          asm volatile("" ::"v"(totals[m][c]));  // or GCC loads all sums first, and has no registers for them
        }
      }
    }
    INLINE void finish(int64_t row, int64_t end) const { finish_rows<C>(all.work, row, end); }
  };

  template <bool ZEROS>
  TARGET_HALVES void multiply_many(int64_t all) const {
    for (int64_t g = 0; g < of.groups; ++g)
      for (int c = 0; c < C; ++c) {
        const int64_t from = (c * of.groups + g) * TILE;
        float* const to = work.group_numbers + (g * 2 * C + c) * TILE;
        store(to, load_scales(work.scales, from, of.scale_type));
        if constexpr (ZEROS) store(to + C * TILE, load_zeros(work.zeros, from, of.zero_type));
      }
    const Scaled<ZEROS> scaled{*this};
    GroupProducts<false, true, C, Scaled<ZEROS>> products{scaled};
    const int64_t parts = of.parts(), together = std::max<int64_t>(1, PARTS_CHUNK / pairs);
    for (int64_t first = 0; first < parts; first += together) {
      const int64_t end = std::min(first + together, parts), begin = first * pairs;
      const int64_t count = std::min(end * pairs, all) - begin;
      for (int c = 0; c < C; ++c) decode(c, begin, count, work.decoded + c * count * TILE);
      for (int64_t part = first; part < end; ++part) fetch(part);
      const auto tiles = [&](int64_t row) { return work.rows - row > TILE ? 2 : 1; };
      products.take(
          first, end,
          [&](int64_t part, int64_t row) -> Tiles2 {
            return {reinterpret_cast<const char*>(work.x + row * all + part * pairs * tiles(row) * TILE),
                    reinterpret_cast<const char*>(work.decoded + (part - first) * pairs * TILE)};
          },
          [&](int64_t row) -> Strides {
            const int64_t x_step = tiles(row) * 1024, steps = pairs / TILE;  // of a part
            return {64, 1024, x_step, steps * x_step, count * 64, 1024, steps * 1024};
          });
    }
    products.finish();
  }

  INLINE_HALVES void multiply() const {
    const int64_t all = (of.inputs / 2 + TILE - 1) / TILE * TILE;  // pairs
    for (int c = 0; c < C; ++c) store(work.factors + c * TILE, broadcast(1));
    if (work.rows > TILE) return work.zeros != nullptr ? multiply_many<true>(all) : multiply_many<false>(all);
    if (work.rows == 1) multiply_few<1>(all);
    else multiply_few<0>(all);
    finish_rows<C>(work, 0, work.rows);
  }
};

template <int C>
TARGET_HALVES void multiply_parts(const Block& work) {
  Parts<C>{work}.multiply();
}

TARGET inline void multiply_block_of_4_bits(const Block& work) {
  if (!work.of->scales_sums()) return multiply_block<TileFourBits>(work);
  if (work.columns == 2) multiply_parts<2>(work);
  else multiply_parts<1>(work);
}

// `count` rows of a block as multiply_columns takes them, in the order in which codes are decoded, X_FACTOR times as large.
// Up to 16 lie row by row; more in groups of 32, tile by tile.
TARGET inline void pack_tiles(const Matrix& of, int64_t K, const BFloat16* const* rows, int64_t count, uint32_t* to) {
  const Vec factor = broadcast(of.scales_sums() ? 1 : X_FACTOR);
  alignas(64) uint16_t order[32];
  for (int i = 0; i < 32; ++i) order[i] = i / 8 * 8 + ORDER[of.word_inputs() == 8][i % 8];
  const int64_t all = (of.inputs / 2 + TILE - 1) / TILE * TILE;
  const auto pack = [&](int64_t m, int64_t k, uint32_t* at) TARGET __attribute__((always_inline)) {
    const uint32_t inside = m >= count ? 0 : K - k >= 32 ? ~0u : K > k ? (1u << (K - k)) - 1 : 0;
    const __m512i pairs =
        _mm512_permutexvar_epi16(_mm512_load_si512(order), _mm512_maskz_loadu_epi16(inside, rows[m < count ? m : 0] + k));
    const Vec even = reinterpret_cast<Vec>(_mm512_slli_epi32(pairs, 16)) * factor;
    const Vec odd = reinterpret_cast<Vec>(_mm512_and_si512(pairs, _mm512_set1_epi32(-65536))) * factor;
    _mm512_storeu_si512(at, _mm512_or_si512(_mm512_srli_epi32(reinterpret_cast<__m512i>(even), 16),
                                            _mm512_and_si512(reinterpret_cast<__m512i>(odd), _mm512_set1_epi32(-65536))));
  };
  if (count <= TILE) {
    for (int64_t m = 0; m < count; ++m)
      for (int64_t p = 0; p < all; p += TILE) pack(m, 2 * p, to + m * all + p);
    return;
  }
  for (int64_t first = 0; first < count; first += 2 * TILE) {
    const int64_t group = count - first <= TILE ? TILE : 2 * TILE;
    for (int64_t p = 0; p < all; p += TILE)
      for (int64_t m = first; m < first + group; ++m, to += TILE) pack(m, 2 * p, to);
  }
}

inline KernelsOf bf16_kernels() {
  static constexpr TileKernels tiles = {
      [](int64_t rows) { TILES::begin(std::min(rows, TILE)); }, [] {
        TILES::end();
        _mm_sfence();  // outputs may have been written past the caches
      }, pack_tiles,
      {multiply_block<TileIntegers>, multiply_block_of_4_bits, multiply_block<TileFloats>, multiply_block_of_4_bits},
      8 * CHUNK * TILE};
  return {.tiles = &tiles};
}

}  // namespace ISA
}  // namespace
