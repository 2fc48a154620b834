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

struct Magnitudes {  // of 7 bits below a sign, by two tables of bytes
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
    const __m512i codes = _mm512_loadu_si512(from), even = _mm512_set1_epi16(255);
    const __m512i lows = _mm512_permutex2var_epi8(low[0], codes, low[1]);
    const __m512i sign = _mm512_and_si512(codes, _mm512_set1_epi8(-128));
    const __m512i highs = _mm512_or_si512(_mm512_permutex2var_epi8(high[0], codes, high[1]), sign);
    // even ? a : b
    to[0] = reinterpret_cast<Vec>(_mm512_ternarylogic_epi32(even, lows, _mm512_slli_epi16(highs, 8), 0xca));
    to[1] = reinterpret_cast<Vec>(_mm512_ternarylogic_epi32(even, _mm512_srli_epi16(lows, 8), highs, 0xca));
  }
};

template <int P>
struct Decoded {
  static constexpr int PAIRS = P;

  INLINE explicit Decoded(const Block&) {}
  INLINE void pairs(const uint8_t* from, Vec* to) const {
    for (int i = 0; i < P; ++i) to[i] = load(from + i * 64);
  }
};

constexpr int64_t AHEAD = 2048;  // bytes of codes from a product to the prefetch of its codes

// The sums of each part by themselves; then scaled and added up.
#define DEFINE_MULTIPLY(NAME, ATTRIBUTES)                                                                              \
  template <class Source, int M, int C, bool DIRECT>                                                                   \
  ATTRIBUTES void NAME(const Work& work) {                                                                             \
    constexpr int PAIRS = Source::PAIRS;                                                                               \
    const Block& block = *work.block;                                                                                  \
    const Source source(block);                                                                                        \
    const int64_t inputs = 2 * PAIRS, chunk = block.first * block.part / inputs;                                       \
    const int64_t last = std::min(block.end * block.part, block.inputs) / inputs, bytes = DIRECT ? 64 : 64 * PAIRS;     \
    const auto* from = static_cast<const uint8_t*>(DIRECT ? block.codes : work.decoded);                               \
    const int64_t stride = DIRECT ? block.code_stride : (last - chunk) * bytes;                                        \
    if (!DIRECT) from -= chunk * bytes;                                                                                \
    Vec totals[M][C];                                                                                                  \
    for (int m = 0; m < M; ++m)                                                                                        \
      for (int c = 0; c < C; ++c) totals[m][c] = load(work.sums + (m * C + c) * TILE);                                 \
    for (int64_t p = block.first; p < block.end; ++p) {                                                                \
      Vec sums[M][C] = {};                                                                                             \
      const int64_t end = std::min((p + 1) * block.part, block.inputs) / inputs;                                       \
      for (int64_t word = p * block.part / inputs; word < end; ++word) {                                               \
        Vec w[C][PAIRS];                                                                                               \
        _Pragma("GCC unroll 4") for (int c = 0; c < C; ++c) {                                                          \
          source.pairs(from + c * stride + word * bytes, w[c]);                                                        \
          if (DIRECT) __builtin_prefetch(from + c * stride + word * bytes + AHEAD, 0, 2);                              \
        }                                                                                                              \
        _Pragma("GCC unroll 4") for (int i = 0; i < PAIRS; ++i)                                                        \
            _Pragma("GCC unroll 8") for (int m = 0; m < M; ++m) {                                                      \
          const Vec x = broadcast_lane(work.x + (word * PAIRS + i) * M + m);                                           \
          _Pragma("GCC unroll 4") for (int c = 0; c < C; ++c) sums[m][c] = add_products(sums[m][c], x, w[c][i]);       \
        }                                                                                                              \
      }                                                                                                                \
      _Pragma("GCC unroll 4") for (int c = 0; c < C; ++c) {                                                            \
        const int64_t at = (c * block.groups + (block.whole ? 0 : p)) * TILE;                                          \
        const Vec scale = load_scales(block.scales, at, block.type);                                                   \
        const Vec zero = block.zeros != nullptr ? load_scales(block.zeros, at, block.type) : Vec{};                    \
        _Pragma("GCC unroll 8") for (int m = 0; m < M; ++m) {                                                          \
          Vec sum = sums[m][c];                                                                                        \
          if (block.zeros != nullptr) sum = sum - zero * broadcast(work.x_sums[p * M + m]);                            \
          totals[m][c] += sum * scale;                                                                                 \
        }                                                                                                              \
      }                                                                                                                \
    }                                                                                                                  \
    for (int m = 0; m < M; ++m)                                                                                        \
      for (int c = 0; c < C; ++c) store(work.sums + (m * C + c) * TILE, totals[m][c]);                                 \
  }
DEFINE_MULTIPLY(multiply, TARGET)
DEFINE_MULTIPLY(multiply_vbmi, TARGET_VBMI)
#undef DEFINE_MULTIPLY

template <class Source>
INLINE void decode_with(const Source& source, const Block& block, int64_t cols, void* to) {
  constexpr int64_t inputs = 2 * Source::PAIRS;
  const int64_t first = block.first * block.part / inputs, end = std::min(block.end * block.part, block.inputs) / inputs;
  auto* next = static_cast<Vec*>(to);
  for (int64_t c = 0; c < cols; ++c)
    for (int64_t word = first; word < end; ++word, next += Source::PAIRS) {
      const uint8_t* const from = block.codes + c * block.code_stride + word * 64;
      source.pairs(from, next);
      __builtin_prefetch(from + AHEAD, 0, 2);
    }
}

TARGET inline void decode_pairs(const Block& block, int64_t cols, void* to) {
  if (block.element == Element::int4 || block.element == Element::fp4) decode_with(FourBits(block), block, cols, to);
  else if (block.element == Element::int8) decode_with(Integers(block), block, cols, to);
  else decode_with(EightBits(block), block, cols, to);
}

inline bool has_vbmi() { return __builtin_cpu_supports("avx512vbmi"); }

template <int M, int C>
void multiply_codes(const Work& work) {
  const Element element = work.block->element;
  if (element == Element::int4 || element == Element::fp4) multiply<FourBits, M, C, true>(work);
  else if (element == Element::int8) multiply<Integers, M, C, true>(work);
  else if (has_vbmi()) multiply_vbmi<Magnitudes, M, C, true>(work);
  else multiply<EightBits, M, C, true>(work);
}

template <int M, int C>
void multiply_decoded(const Work& work) {
  const Element element = work.block->element;
  if (element == Element::int4 || element == Element::fp4) multiply<Decoded<4>, M, C, false>(work);
  else multiply<Decoded<2>, M, C, false>(work);
}

constexpr int DIRECT_ROWS = 4, DIRECT_COLS = 4, COLS = 3;

template <int M = 1>
void multiply_pairs(const Work& work, int64_t rows, int64_t cols) {
  if (rows != M) {
    if constexpr (M < MAX_ROWS) multiply_pairs<M + 1>(work, rows, cols);
    return;
  }
  if (work.decoded != nullptr) return cols == COLS ? multiply_decoded<M, COLS>(work) : multiply_decoded<M, 1>(work);
  if constexpr (M <= DIRECT_ROWS)
    cols == DIRECT_COLS ? multiply_codes<M, DIRECT_COLS>(work) : multiply_codes<M, 1>(work);
}

inline KernelsOf bf16_kernels() {
  return {MAX_ROWS, COLS, DIRECT_ROWS, DIRECT_COLS, true, 2, decode_pairs, multiply_pairs, finish_tile};
}

inline Kernels kernels() { return {bf16_kernels(), avx512::float_kernels()}; }
#else
// Weights less their zeros, [cols, inputs, TILE] float32.
TARGET inline void decode_floats(const Block& block, int64_t cols, void* to) {
  const float* const values = block.values->of;
  const bool four = block.element == Element::int4 || block.element == Element::fp4;
  const int64_t inputs = four ? 8 : 4;
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

inline KernelsOf float_kernels() { return {FLOAT_ROWS, 1, 0, 0, false, 4, decode_floats, multiply_rows, finish_tile}; }

inline Kernels kernels() { return {float_kernels(), float_kernels()}; }
#endif

}  // namespace ISA
}  // namespace
