// The kernels of quantized_linear_cpu.cpp for one instruction set: compiled once for each by ../cpu/one_isa.cpp, which
// explains the macros.

#include <algorithm>
#include <cstring>

#include "../cpu/vectors.h"
#include "quantized_linear_cpu_types.h"

namespace {
namespace ISA {

INLINE Vec load_scales(const void* from, int64_t at, ScaleType type) {
  if (type == ScaleType::float32) return load_floats(static_cast<const float*>(from) + at);
  if (type == ScaleType::bfloat16) return load_floats(static_cast<const BFloat16*>(from) + at);
  return load_floats(static_cast<const Half*>(from) + at);
}

TARGET inline void finish_tile(int type, const float* sums, int64_t stride, int64_t rows, int64_t count,
                               const float* bias, void* out, int64_t out_stride) {
  for (int64_t row = 0; row < rows; ++row) {
    const Vec y = load(sums + row * stride) + load(bias);
    if (type == 0) store_as(static_cast<float*>(out) + row * out_stride, y, count);
    else if (type == 1) store_as(static_cast<BFloat16*>(out) + row * out_stride, y, count);
    else store_as(static_cast<Half*>(out) + row * out_stride, y, count);
  }
}

#if DOT
// A word of codes is 4 bytes of each of 16 outputs: 2 pairs of inputs of 8 bits (0, 2) and (1, 3), or 4 of 4 bits
// (0, 2), (4, 6), (1, 3), (5, 7).
struct FourBits {
  static constexpr int PAIRS = 4;
  __m512i table;  // twice the 16 values: bit 4 of an index is that of another code

  INLINE explicit FourBits(const Block& block) {
    alignas(64) uint16_t both[32];
    for (int i = 0; i < 32; ++i) both[i] = BFloat16(block.values->of[i % 16]).bits;
    table = _mm512_load_si512(both);
  }
  INLINE void pairs(const uint8_t* from, Vec* to) const {
    const __m512i codes = _mm512_loadu_si512(from);
    to[0] = reinterpret_cast<Vec>(_mm512_permutexvar_epi16(codes, table));
    to[1] = reinterpret_cast<Vec>(_mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 4), table));
    to[2] = reinterpret_cast<Vec>(_mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 8), table));
    to[3] = reinterpret_cast<Vec>(_mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 12), table));
  }
};

INLINE Vec pair_of(__m512 first, __m512 second) {
  const __m512i low = _mm512_srli_epi32(_mm512_castps_si512(first), 16);
  return reinterpret_cast<Vec>(_mm512_mask_blend_epi16(0xaaaaaaaa, low, _mm512_castps_si512(second)));
}

struct Integers {  // of 8 bits, by way of float32
  static constexpr int PAIRS = 2;

  INLINE explicit Integers(const Block&) {}
  INLINE void pairs(const uint8_t* from, Vec* to) const {
    const __m512i codes = _mm512_loadu_si512(from);
    const auto wide = [](__m512i x) TARGET { return _mm512_cvtepi32_ps(_mm512_srai_epi32(x, 24)); };
    to[0] = pair_of(wide(_mm512_slli_epi32(codes, 24)), wide(_mm512_slli_epi32(codes, 8)));
    to[1] = pair_of(wide(_mm512_slli_epi32(codes, 16)), wide(codes));
  }
};

struct EightBits {  // any, from the table
  static constexpr int PAIRS = 2;
  const float* values;

  INLINE explicit EightBits(const Block& block) : values(block.values->of) {}
  INLINE void pairs(const uint8_t* from, Vec* to) const {
    const __m512i codes = _mm512_loadu_si512(from), byte = _mm512_set1_epi32(255);
    const auto look = [&](int shift) TARGET {
      return _mm512_i32gather_ps(_mm512_and_si512(_mm512_srli_epi32(codes, shift), byte), values, 4);
    };
    to[0] = pair_of(look(0), look(16));
    to[1] = pair_of(look(8), look(24));
  }
};

#define TARGET_VBMI \
  __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vnni,avx512vbmi,fma,f16c")))

// By tables of 128 magnitudes, a byte of each at a time; the sign is put in after. Integers lose theirs first.
template <bool INTEGERS>
struct Magnitudes {
  static constexpr int PAIRS = 2;
  __m512i low[2], high[2];

  inline __attribute__((always_inline)) TARGET_VBMI explicit Magnitudes(const Block& block) {
    alignas(64) uint8_t bytes[2][128];
    for (int i = 0; i < 128; ++i) {
      const uint16_t bits = BFloat16(block.values->of[i]).bits;
      bytes[0][i] = static_cast<uint8_t>(bits);
      bytes[1][i] = static_cast<uint8_t>(bits >> 8);
    }
    for (int i = 0; i < 2; ++i) {
      low[i] = _mm512_load_si512(bytes[0] + 64 * i);
      high[i] = _mm512_load_si512(bytes[1] + 64 * i);
    }
  }
  inline __attribute__((always_inline)) TARGET_VBMI void pairs(const uint8_t* from, Vec* to) const {
    const __m512i codes = _mm512_loadu_si512(from), even = _mm512_set1_epi16(255), sign = _mm512_set1_epi8(-128);
    const __m512i sizes = INTEGERS ? _mm512_abs_epi8(codes) : codes;
    const __m512i lows = _mm512_permutex2var_epi8(low[0], sizes, low[1]);
    __m512i highs = _mm512_permutex2var_epi8(high[0], sizes, high[1]);
    highs = _mm512_ternarylogic_epi32(highs, codes, sign, 0xf8);  // a | (b & c)
    // -128 is in no table: its low byte is that of 0, its high byte this.
    if (INTEGERS) highs = _mm512_mask_mov_epi8(highs, _mm512_cmpeq_epi8_mask(codes, sign), _mm512_set1_epi8('\xc3'));
    // even ? a : b
    to[0] = reinterpret_cast<Vec>(_mm512_ternarylogic_epi32(even, lows, _mm512_slli_epi16(highs, 8), 0xca));
    to[1] = reinterpret_cast<Vec>(_mm512_ternarylogic_epi32(even, _mm512_srli_epi16(lows, 8), highs, 0xca));
  }
};

constexpr int64_t AHEAD = 2048;  // bytes at least from codes to the prefetch of others
constexpr int64_t AT_ONCE = 4;   // parts of a product from codes: several sums hide the products' latency

struct Scales {  // of a part of a tile
  Vec scale, zero;
  bool zeros;

  INLINE Scales(const Block& block, int64_t part, int64_t tile) : zero{}, zeros(block.zeros != nullptr) {
    const int64_t at = (tile * block.groups + (block.whole ? 0 : part)) * TILE;
    scale = load_scales(block.scales, at, block.type);
    if (zeros) zero = load_scales(block.zeros, at, block.type);
  }
  INLINE Vec operator()(Vec sum, const float* x_sums, int64_t at) const {
    if (zeros) sum = sum - zero * broadcast(x_sums[at]);
    return sum * scale;
  }
};

// One tile, from codes. Its words are read one after the other, so memory sees one stream.
#define DEFINE_MULTIPLY_CODES(NAME, ATTRIBUTES)                                                                        \
  template <class Source, int M>                                                                                       \
  ATTRIBUTES void NAME(const Work& work) {                                                                             \
    constexpr int64_t PAIRS = Source::PAIRS;                                                                           \
    const Block& block = *work.block;                                                                                  \
    const Source source(block);                                                                                        \
    const int64_t words = block.part / (2 * PAIRS), all = block.inputs / (2 * PAIRS);                                  \
    const int64_t ahead = (AHEAD / (AT_ONCE * words * 64) + 1) * AT_ONCE * words * 64;                                 \
    Vec totals[M] = {};                                                                                                \
    const auto add_parts = [&]<int64_t COUNT>(int64_t part, int64_t count, std::integral_constant<int64_t, COUNT>)     \
                               ATTRIBUTES __attribute__((always_inline)) {                                             \
      Vec sums[COUNT][M] = {};                                                                                         \
      for (int64_t i = 0; i < count; ++i) {                                                                            \
        _Pragma("GCC unroll 4") for (int64_t q = 0; q < COUNT; ++q) {                                                  \
          const int64_t word = (part + q) * words + i;                                                                 \
          Vec w[PAIRS];                                                                                                \
          source.pairs(block.codes + word * 64, w);                                                                    \
          __builtin_prefetch(block.codes + word * 64 + ahead, 0, 2);                                                   \
          _Pragma("GCC unroll 4") for (int64_t j = 0; j < PAIRS; ++j)                                                  \
              _Pragma("GCC unroll 4") for (int m = 0; m < M; ++m) {                                                    \
            sums[q][m] = add_products(sums[q][m], broadcast_lane(work.x + (word * PAIRS + j) * M + m), w[j]);          \
          }                                                                                                            \
        }                                                                                                              \
      }                                                                                                                \
      _Pragma("GCC unroll 4") for (int64_t q = 0; q < COUNT; ++q)                                                      \
          _Pragma("GCC unroll 4") for (int m = 0; m < M; ++m)                                                          \
              totals[m] += Scales(block, part + q, 0)(sums[q][m], work.x_sums, (part + q) * M + m);                        \
    };                                                                                                                 \
    int64_t part = 0;                                                                                                  \
    for (; (part + AT_ONCE) * words <= all; part += AT_ONCE)                                                           \
      add_parts(part, words, std::integral_constant<int64_t, AT_ONCE>());                                              \
    for (; part < block.end; ++part)                                                                                   \
      add_parts(part, std::min(words, all - part * words), std::integral_constant<int64_t, 1>());                      \
    for (int m = 0; m < M; ++m) store(work.sums + m * TILE, totals[m]);                                                \
  }
DEFINE_MULTIPLY_CODES(multiply_codes, TARGET)
DEFINE_MULTIPLY_CODES(multiply_codes_vbmi, TARGET_VBMI)
#undef DEFINE_MULTIPLY_CODES

// From decoded weights. The sums of each part by themselves; then scaled and added up.
template <int PAIRS, int M, int C>
TARGET void multiply_decoded(const Work& work) {
  const Block& block = *work.block;
  const int64_t inputs = 2 * PAIRS, chunk = block.first * block.part / inputs;
  const int64_t last = std::min(block.end * block.part, block.inputs) / inputs, stride = (last - chunk) * 64 * PAIRS;
  const auto* w = static_cast<const uint8_t*>(work.decoded);
  const uint8_t* later = work.later;
  const uint8_t* const later_end = later + work.later_lines * 64;
  for (int64_t p = block.first; p < block.end; ++p) {
    Vec sums[M][C] = {};
    const int64_t end = std::min((p + 1) * block.part, block.inputs) / inputs;
    for (int64_t word = p * block.part / inputs; word < end; ++word, w += 64 * PAIRS) {
      if (later < later_end) {
        for (int c = 0; c < C; ++c) __builtin_prefetch(later + c * block.code_stride, 0, 2);
        later += 64;
      }
#pragma GCC unroll 4
      for (int i = 0; i < PAIRS; ++i) {
        Vec of[C];
#pragma GCC unroll 4
        for (int c = 0; c < C; ++c) of[c] = load(w + c * stride + i * 64);
#pragma GCC unroll 8
        for (int m = 0; m < M; ++m) {
          const Vec x = broadcast_lane(work.x + (word * PAIRS + i) * M + m);
#pragma GCC unroll 4
          for (int c = 0; c < C; ++c) sums[m][c] = add_products(sums[m][c], x, of[c]);
        }
      }
    }
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) {
      const Scales scaled(block, p, c);
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) {
        float* const total = work.sums + (m * C + c) * TILE;
        store(total, load(total) + scaled(sums[m][c], work.x_sums, p * M + m));
      }
    }
  }
}

#define DEFINE_DECODE(NAME, ATTRIBUTES)                                                                                \
  template <class Source>                                                                                              \
  ATTRIBUTES void NAME(const Block& block, int64_t cols, void* to) {                                                   \
    constexpr int64_t inputs = 2 * Source::PAIRS;                                                                      \
    const Source source(block);                                                                                        \
    const int64_t first = block.first * block.part / inputs;                                                           \
    const int64_t end = std::min(block.end * block.part, block.inputs) / inputs;                                       \
    auto* next = static_cast<Vec*>(to);                                                                                \
    for (int64_t c = 0; c < cols; ++c)                                                                                 \
      for (int64_t word = first; word < end; ++word, next += Source::PAIRS)                                            \
        source.pairs(block.codes + c * block.code_stride + word * 64, next);                                           \
  }
DEFINE_DECODE(decode_with, TARGET)
DEFINE_DECODE(decode_with_vbmi, TARGET_VBMI)
#undef DEFINE_DECODE

inline bool has_vbmi() { return __builtin_cpu_supports("avx512vbmi"); }

TARGET inline void decode_pairs(const Block& block, int64_t cols, void* to) {
  const bool integers = block.element == Element::int8;
  if (block.word_inputs() == 8) decode_with<FourBits>(block, cols, to);
  else if (has_vbmi()) (integers ? decode_with_vbmi<Magnitudes<true>> : decode_with_vbmi<Magnitudes<false>>)(block, cols, to);
  else (integers ? decode_with<Integers> : decode_with<EightBits>)(block, cols, to);
}

constexpr int DIRECT_ROWS = 4, COLS = 3;

template <int M = 1>
void multiply_pairs(const Work& work, int64_t rows, int64_t cols) {
  if (rows != M) {
    if constexpr (M < MAX_ROWS) multiply_pairs<M + 1>(work, rows, cols);
    return;
  }
  const bool four_bits = work.block->word_inputs() == 8, integers = work.block->element == Element::int8;
  if (work.decoded != nullptr) {
    if (four_bits) return (cols == COLS ? multiply_decoded<4, M, COLS> : multiply_decoded<4, M, 1>)(work);
    return (cols == COLS ? multiply_decoded<2, M, COLS> : multiply_decoded<2, M, 1>)(work);
  }
  if constexpr (M <= DIRECT_ROWS) {
    if (four_bits) multiply_codes<FourBits, M>(work);
    else if (has_vbmi()) (integers ? multiply_codes_vbmi<Magnitudes<true>, M> : multiply_codes_vbmi<Magnitudes<false>, M>)(work);
    else (integers ? multiply_codes<Integers, M> : multiply_codes<EightBits, M>)(work);
  }
}

inline KernelsOf bf16_kernels() { return {MAX_ROWS, COLS, DIRECT_ROWS, true, 2, decode_pairs, multiply_pairs, finish_tile}; }

inline Kernels kernels() { return {bf16_kernels(), avx512::float_kernels()}; }
#else
// Weights less their zeros, [cols, inputs, TILE] float32.
TARGET inline void decode_floats(const Block& block, int64_t cols, void* to) {
  const float* const values = block.values->of;
  const int64_t inputs = block.word_inputs();
  const bool four = inputs == 8;
  auto* next = static_cast<float*>(to);
  for (int64_t c = 0; c < cols; ++c)
    for (int64_t p = block.first; p < block.end; ++p) {
      float zeros[TILE] = {};
      if (block.zeros != nullptr)
        store(zeros, load_scales(block.zeros, (c * block.groups + (block.whole ? 0 : p)) * TILE, block.type));
      const int64_t end = std::min((p + 1) * block.part, block.inputs) / inputs;
      for (int64_t word = p * block.part / inputs; word < end; ++word) {
        const uint8_t* const codes = block.codes + c * block.code_stride + word * 64;
        for (int64_t i = 0; i < inputs; ++i, next += TILE)
          for (int64_t j = 0; j < TILE; ++j) {
            const uint8_t code = codes[j * 4 + i % 4];
            next[j] = values[four ? (i < 4 ? code & 15 : code >> 4) : code] - zeros[j];
          }
      }
    }
}

template <int M>
TARGET void multiply_floats(const Work& work) {
  constexpr int LANES = WIDTH / 32, PARTS = TILE / LANES;
  const Block& block = *work.block;
  const auto* w = static_cast<const float*>(work.decoded);
  for (int64_t p = block.first; p < block.end; ++p) {
    Register sums[M][PARTS] = {};
    const int64_t end = std::min((p + 1) * block.part, block.inputs);
    for (int64_t k = p * block.part; k < end; ++k, w += TILE) {
      Register of[PARTS];
      std::memcpy(of, w, sizeof(of));
      for (int m = 0; m < M; ++m) {
        const Register x = reinterpret_cast<Register>(UintRegister{} + work.x[k * M + m]);
        for (int i = 0; i < PARTS; ++i) sums[m][i] += x * of[i];
      }
    }
    const Vec scale = load_scales(block.scales, (block.whole ? 0 : p) * TILE, block.type);
    for (int m = 0; m < M; ++m) {
      float part[TILE];
      std::memcpy(part, sums[m], sizeof(part));
      store(work.sums + m * TILE, load(work.sums + m * TILE) + load(part) * scale);
    }
  }
}

constexpr int FLOAT_ROWS = WIDTH == 512 ? 8 : 4;

template <int M = 1>
void multiply_rows(const Work& work, int64_t rows, int64_t cols) {
  if (rows == M) return multiply_floats<M>(work);
  if constexpr (M < FLOAT_ROWS) multiply_rows<M + 1>(work, rows, cols);
}

inline KernelsOf float_kernels() { return {FLOAT_ROWS, 1, 0, false, 4, decode_floats, multiply_rows, finish_tile}; }

inline Kernels kernels() { return {float_kernels(), float_kernels()}; }
#endif

}  // namespace ISA
}  // namespace
