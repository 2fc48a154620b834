// The kernels of quantized_linear_cpu.cpp for one instruction set: compiled once for each by ../cpu/one_isa.cpp, which
// explains the macros.

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "quantized_linear_cpu_types.h"
#include "quantized_zeros.h"

namespace {
namespace ISA {

INLINE Vec load_scales(const void* from, int64_t at, GroupType type) {
  if (type == GroupType::float32) return load_floats(static_cast<const float*>(from) + at);
  if (type == GroupType::bfloat16) return load_floats(static_cast<const BFloat16*>(from) + at);
  return load_floats(static_cast<const Half*>(from) + at);
}

INLINE Vec load_zeros(const void* from, int64_t at, GroupType type) {
  return type == GroupType::int8 ? load_zeros(static_cast<const int8_t*>(from) + at) : load_scales(from, at, type);
}

TARGET inline void finish_tile(int type, const float* sums, int64_t rows, int64_t count, const float* bias, void* out,
                               int64_t out_stride) {
  for (int64_t row = 0; row < rows; ++row) {
    const Vec y = load(sums + row * TILE) + load(bias);
    if (type == 0) store_as(static_cast<float*>(out) + row * out_stride, y, count);
    else if (type == 1) store_as(static_cast<BFloat16*>(out) + row * out_stride, y, count);
    else store_as(static_cast<Half*>(out) + row * out_stride, y, count);
  }
}

#if DOT
// Inputs of each 8 in the order in which codes are decoded: of 8 bits, and of 4.
constexpr uint16_t ORDER[2][8] = {{0, 2, 1, 3, 4, 6, 5, 7}, {0, 2, 4, 6, 1, 3, 5, 7}};
#endif

#ifdef TILES
}  // namespace ISA
}  // namespace
#include "quantized_linear_cpu_amx.h"
namespace {
namespace ISA {

inline Kernels kernels() { return {bf16_kernels(), avx512::float_kernels()}; }

#elif DOT
// A word of codes is 4 bytes of each of 16 outputs: 2 pairs of inputs of 8 bits (0, 2) and (1, 3), or 4 of 4 bits
// (0, 2), (4, 6), (1, 3), (5, 7). Each source turns a word into its pairs of bfloat16.
struct FourBits {  // any, from a table
  static constexpr int PAIRS = 4;
  static constexpr float SCALE = 1;  // what makes its values those of the codes
  __m512i table;  // twice the 16 values: bit 4 of an index is that of another code

  INLINE explicit FourBits(const Values& values) : table(_mm512_load_si512(values.pairs)) {}
  INLINE void pairs(const uint8_t* from, Vec* to) const {
    const __m512i codes = _mm512_loadu_si512(from);
    to[0] = reinterpret_cast<Vec>(_mm512_permutexvar_epi16(codes, table));
    to[1] = reinterpret_cast<Vec>(_mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 4), table));
    to[2] = reinterpret_cast<Vec>(_mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 8), table));
    to[3] = reinterpret_cast<Vec>(_mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 12), table));
  }
};

// Integers of 8 bits, by way of float32: as the highest byte of one of 32 bits each is 2^24 times what it was, of which
// bfloat16 keeps every bit.
struct Integers {
  static constexpr int PAIRS = 2;
  static constexpr float SCALE = 1.f / (1 << 24);
  __m512i highest[4];  // indices for a shuffle that moves byte i to the highest, and zeros elsewhere

  INLINE explicit Integers(const Values&) {
    for (int i = 0; i < 4; ++i)
      highest[i] = _mm512_add_epi32(
          _mm512_broadcast_i32x4(_mm_setr_epi32(0x00808080, 0x04808080, 0x08808080, 0x0c808080)),
          _mm512_set1_epi32(i << 24));
  }
  INLINE __m512i floats_of(__m512i codes, int byte) const {
    return _mm512_castps_si512(_mm512_cvtepi32_ps(_mm512_shuffle_epi8(codes, highest[byte])));
  }
  INLINE void pairs(const uint8_t* from, Vec* to) const {
    const __m512i codes = _mm512_loadu_si512(from);
    for (int i = 0; i < 2; ++i)
      to[i] = reinterpret_cast<Vec>(
          _mm512_or_si512(_mm512_srli_epi32(floats_of(codes, i), 16), floats_of(codes, i + 2)));
  }
};

// Those whose highest bit is the sign, from a table of the 128 magnitudes.
struct Magnitudes {
  static constexpr int PAIRS = 2;
  static constexpr float SCALE = 1;
  __m512i table[4];

  INLINE explicit Magnitudes(const Values& values) {
    for (int i = 0; i < 4; ++i) table[i] = _mm512_load_si512(values.pairs + 32 * i);
  }
  INLINE Vec look(__m512i magnitudes, __m512i signs) const {  // of the low and of the highest bits of 16
    const __m512i small = _mm512_permutex2var_epi16(table[0], magnitudes, table[1]);
    const __m512i large = _mm512_permutex2var_epi16(table[2], magnitudes, table[3]);
    const __m512i size = _mm512_mask_mov_epi16(small, _mm512_test_epi16_mask(magnitudes, _mm512_set1_epi16(64)), large);
    // size | (signs & highest bit)
    return reinterpret_cast<Vec>(_mm512_ternarylogic_epi32(size, signs, _mm512_set1_epi16(-32768), 0xf8));
  }
  INLINE void pairs(const uint8_t* from, Vec* to) const {
    const __m512i codes = _mm512_loadu_si512(from);
    to[0] = look(codes, _mm512_slli_epi16(codes, 8));
    to[1] = look(_mm512_srli_epi16(codes, 8), codes);
  }
};

struct Scales {  // of a part
  Vec scale, zero;
  bool zeros;

  // Of tile `col`.
  INLINE Scales(const Work& work, int64_t part, int64_t col, float of_source) : zero{}, zeros(work.zeros != nullptr) {
    const int64_t at = ((work.of->whole ? 0 : part) + col * work.of->groups) * TILE;
    scale = load_scales(work.scales, at, work.of->scale_type) * broadcast(of_source);
    if (zeros) zero = load_zeros(work.zeros, at, work.of->zero_type) * broadcast(1 / of_source);
  }
  INLINE Vec operator()(Vec sum, const float* x_sum) const {
    return (zeros ? sum - zero * broadcast(*x_sum) : sum) * scale;
  }
};

// The pairs of Magnitudes, as `decode_pairs` wrote them.
struct Decoded {
  static constexpr int PAIRS = Magnitudes::PAIRS;
  static constexpr float SCALE = Magnitudes::SCALE;

  INLINE explicit Decoded(const Values&) {}
  INLINE void pairs(const uint8_t* from, Vec* to) const { to[0] = load(from), to[1] = load(from + 64); }
};

TARGET inline void decode_pairs(const Work& work, void* to) {
  const Magnitudes source(*work.of->values);
  auto* at = static_cast<uint8_t*>(to);
  for (int64_t word = 0; word < work.of->tile_bytes() / 64; ++word, at += 128) {
    Vec pairs[2];
    source.pairs(work.codes + word * 64, pairs);
    store(at, pairs[0]);
    store(at + 64, pairs[1]);
  }
}

// M rows by C tiles. A row alone takes several parts at once, and few rows some: a sum waits for its last product.
template <class Source, int M, int C>
TARGET void multiply_pairs(const Work& work) {
  constexpr int64_t PAIRS = Source::PAIRS, AT_ONCE = M * C <= 2 ? 4 : M * C <= 4 ? 2 : 1;
  constexpr bool DECODED = std::is_same_v<Source, Decoded>;
  constexpr int64_t BYTES = DECODED ? 64 * PAIRS : 64;  // of a word
  const Source source(*work.of->values);
  const auto* const from = DECODED ? static_cast<const uint8_t*>(work.decoded) : work.codes;
  const int64_t words = work.of->part / (2 * PAIRS), all = work.of->inputs / (2 * PAIRS);
  const int64_t scale_bytes = work.of->whole ? 0 : TILE * bytes_of(work.of->scale_type);
  const int64_t code_stride = work.of->tile_bytes(), stride = DECODED ? work.of->decoded_bytes() : code_stride;
  Vec totals[C][M] = {};
  const auto add_parts = [&]<int64_t COUNT>(int64_t part, int64_t count, std::integral_constant<int64_t, COUNT>)
                             TARGET __attribute__((always_inline)) {
    Vec sums[COUNT][C][M] = {};
    for (int64_t i = 0; i < count; ++i) {
#pragma GCC unroll 4
      for (int64_t q = 0; q < COUNT; ++q) {
        const int64_t word = (part + q) * words + i;
        Vec w[C][PAIRS];
#pragma GCC unroll 2
        for (int c = 0; c < C; ++c) {
          source.pairs(from + c * stride + word * BYTES, w[c]);
          __builtin_prefetch(work.later + c * code_stride + word * 64, 0, 2);
        }
#pragma GCC unroll 4
        for (int64_t j = 0; j < PAIRS; ++j)
#pragma GCC unroll 12
          for (int m = 0; m < M; ++m) {
            const auto x = broadcast_lane(work.x + (word * PAIRS + j) * M + m);
#pragma GCC unroll 2
            for (int c = 0; c < C; ++c) sums[q][c][m] = add_products(sums[q][c][m], x, w[c][j]);
          }
      }
    }
#pragma GCC unroll 4
    for (int64_t q = 0; q < COUNT; ++q)
#pragma GCC unroll 2
      for (int c = 0; c < C; ++c) {
        const Scales scaled(work, part + q, c, Source::SCALE);
        __builtin_prefetch(work.later_scales + (c * work.of->groups + part + q) * scale_bytes, 0, 2);
#pragma GCC unroll 12
        for (int m = 0; m < M; ++m) totals[c][m] += scaled(sums[q][c][m], work.x_sums + (part + q) * M + m);
      }
  };
  int64_t part = 0;
  for (; (part + AT_ONCE) * words <= all; part += AT_ONCE)
    add_parts(part, words, std::integral_constant<int64_t, AT_ONCE>());
  for (; part * words < all; ++part)
    add_parts(part, std::min(words, all - part * words), std::integral_constant<int64_t, 1>());
#pragma GCC unroll 2
  for (int c = 0; c < C; ++c)
#pragma GCC unroll 12
    for (int m = 0; m < M; ++m) store(work.sums + (c * M + m) * TILE, totals[c][m]);
}

// Words j, j + 4, j + 8 and j + 12 of four rows to [words, count].
INLINE void store_fourth(__m512i words, uint32_t* to, int64_t count) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_castsi512_si128(words));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to + 4 * count), _mm512_extracti32x4_epi32(words, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to + 8 * count), _mm512_extracti32x4_epi32(words, 2));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to + 12 * count), _mm512_extracti32x4_epi32(words, 3));
}

// 16 words of each of `count` rows to [16, count].
INLINE void interleave(const __m512i* rows, int64_t count, uint32_t* to) {
  if (count < 4) {
    for (int64_t m = 0; m < count; ++m)
      for (int64_t i = 0; i < 16; ++i) to[i * count + m] = reinterpret_cast<const uint32_t*>(rows + m)[i];
    return;
  }
  for (int64_t start = 0; start < count; start += 4) {
    const int64_t m = std::min(start, count - 4);  // some rows twice
    const __m512i low0 = _mm512_unpacklo_epi32(rows[m], rows[m + 1]);
    const __m512i high0 = _mm512_unpackhi_epi32(rows[m], rows[m + 1]);
    const __m512i low1 = _mm512_unpacklo_epi32(rows[m + 2], rows[m + 3]);
    const __m512i high1 = _mm512_unpackhi_epi32(rows[m + 2], rows[m + 3]);
    store_fourth(_mm512_unpacklo_epi64(low0, low1), to + m, count);
    store_fourth(_mm512_unpackhi_epi64(low0, low1), to + count + m, count);
    store_fourth(_mm512_unpacklo_epi64(high0, high1), to + 2 * count + m, count);
    store_fourth(_mm512_unpackhi_epi64(high0, high1), to + 3 * count + m, count);
  }
}

// Writes `count` rows as [words, count], in the order in which codes are decoded. What is past K is 0.
TARGET inline void pack_pairs(const Matrix& of, int64_t K, const BFloat16* const* rows, int64_t count, uint32_t* to) {
  alignas(64) uint16_t order[32];
  for (int i = 0; i < 32; ++i) order[i] = i / 8 * 8 + ORDER[of.word_inputs() == 8][i % 8];
  for (int64_t k = 0; k < of.inputs; k += 32, to += 16 * count) {
    const uint32_t inside = K - k >= 32 ? ~0u : K > k ? (1u << (K - k)) - 1 : 0;
    alignas(64) __m512i words[MAX_ROWS];
    for (int64_t m = 0; m < count; ++m)
      words[m] = _mm512_permutexvar_epi16(_mm512_load_si512(order), _mm512_maskz_loadu_epi16(inside, rows[m] + k));
    const int64_t wanted = (of.inputs - k) / 2;
    if (wanted >= 16) {
      if (count == 1) _mm512_storeu_si512(to, words[0]);
      else interleave(words, count, to);
      continue;
    }
    uint32_t last[16 * MAX_ROWS];
    interleave(words, count, last);
    std::copy_n(last, wanted * count, to);
  }
}

// 32 registers of 512 bits: 12 sums and their totals, those of weights, and their table. With one tile each product loads
// an input of its own, with two each weight serves fewer rows.
constexpr int ROWS = 12, ROWS_OF_TWO = 6;

template <class Source, int C, size_t... I>
constexpr std::array<void (*)(const Work&), sizeof...(I)> products_of(std::index_sequence<I...>) {
  return {&multiply_pairs<Source, I + 1, C>...};
}

template <int LARGEST, int C>
Products products() {
  constexpr auto rows = std::make_index_sequence<LARGEST>();
  static constexpr auto int8 = products_of<Integers, C>(rows), bits4 = products_of<FourBits, C>(rows);
  static constexpr auto fp8 = products_of<Magnitudes, C>(rows), decoded = products_of<Decoded, C>(rows);
  return {LARGEST, C, {int8.data(), bits4.data(), fp8.data(), bits4.data()}, {nullptr, nullptr, decoded.data(), nullptr}};
}

// To decode beside the products costs nothing, but for fp8: on Zen 4 128 rows took 12% less when it was done once, those of
// int8 and of 4 bits as long and 3% longer.
inline KernelsOf bf16_kernels() {
  return {nullptr, pack_pairs, products<ROWS, 1>(), products<ROWS_OF_TWO, 2>(), {nullptr, nullptr, decode_pairs, nullptr},
          finish_tile};
}

inline Kernels kernels() { return {bf16_kernels(), avx512::float_kernels()}; }
#else
// A tile of weights less their zeros, [inputs, TILE] float32.
TARGET inline void decode_floats(const Work& work, void* decoded) {
  const Matrix& of = *work.of;
  auto* to = static_cast<float*>(decoded);
  const bool four = of.word_inputs() == 8;
  float zeros[TILE] = {};
  for (int64_t k = 0; k < of.inputs; ++k, to += TILE) {
    if (work.zeros != nullptr && k % of.part == 0)
      store(zeros, load_zeros(work.zeros, (of.whole ? 0 : k / of.part) * TILE, of.zero_type));
    const uint8_t* const codes = work.codes + k / of.word_inputs() * 64;
    const int64_t i = k % of.word_inputs();
    for (int64_t j = 0; j < TILE; ++j) {
      const uint8_t code = codes[j * 4 + i % 4];
      to[j] = of.values->of[four ? (i < 4 ? code & 15 : code >> 4) : code] - zeros[j];
    }
  }
}

template <int M>
TARGET void multiply_floats(const Work& work) {
  constexpr int LANES = WIDTH / 32, PARTS = TILE / LANES;
  const Matrix& of = *work.of;
  const auto* w = static_cast<const float*>(work.decoded);
  std::memset(work.sums, 0, M * TILE * sizeof(float));
  for (int64_t p = 0; p * of.part < of.inputs; ++p) {
    Register sums[M][PARTS] = {};
    const int64_t end = std::min((p + 1) * of.part, of.inputs);
    for (int64_t k = p * of.part; k < end; ++k, w += TILE) {
      Register weights[PARTS];
      std::memcpy(weights, w, sizeof(weights));
      for (int m = 0; m < M; ++m) {
        const Register x = reinterpret_cast<Register>(UintRegister{} + work.x[k * M + m]);
        for (int i = 0; i < PARTS; ++i) sums[m][i] += x * weights[i];
      }
    }
    const Vec scale = load_scales(work.scales, (of.whole ? 0 : p) * TILE, of.scale_type);
    for (int m = 0; m < M; ++m) {
      float part[TILE];
      std::memcpy(part, sums[m], sizeof(part));
      store(work.sums + m * TILE, load(work.sums + m * TILE) + load(part) * scale);
    }
  }
}

constexpr int FLOAT_ROWS = WIDTH == 512 ? 8 : 4;

template <size_t... I>
constexpr std::array<void (*)(const Work&), FLOAT_ROWS> float_products(std::index_sequence<I...>) {
  return {&multiply_floats<I + 1>...};
}

inline KernelsOf float_kernels() {
  static constexpr auto all = float_products(std::make_index_sequence<FLOAT_ROWS>());
  constexpr auto decode = decode_floats;
  const Products products = {FLOAT_ROWS, 1, {}, {all.data(), all.data(), all.data(), all.data()}};
  return {nullptr, nullptr, products, products, {decode, decode, decode, decode}, finish_tile};
}

inline Kernels kernels() { return {float_kernels(), float_kernels()}; }
#endif

}  // namespace ISA
}  // namespace
