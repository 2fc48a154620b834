// Decodes the blocks of GGUF files, as models/quantized/ggml.py explains and does it in torch: codes, and of each group
// the scale and, for kinds with a least value, the zero point.

#include <cmath>
#include <cstdint>
#include <cstring>

#include "every_cpu.h"

namespace {

INLINE float half(const uint8_t* from) {
  uint16_t bits;
  std::memcpy(&bits, from, sizeof bits);
  if ((bits & 0x7c00) == 0x7c00) return NAN;  // infinite or NaN, which no model has
  const float size = __builtin_bit_cast(float, (bits & 0x7fffu) << 13) * 0x1p112f;
  return bits & 0x8000 ? -size : size;
}

// The lower four bits of `count` bytes, then the upper ones.
INLINE void nibbles(const uint8_t* from, int count, int less, int8_t* to) {
  for (int i = 0; i < count; ++i) to[i] = static_cast<int8_t>((from[i] & 15) - less);
  for (int i = 0; i < count; ++i) to[count + i] = static_cast<int8_t>((from[i] >> 4) - less);
}

INLINE void add_fifth_bits(const uint8_t* from, int less, int8_t* codes) {
  for (int i = 0; i < 32; ++i)
    codes[i] = static_cast<int8_t>((codes[i] | (from[i / 8] >> i % 8 & 1) << 4) - less);
}

// What a kind has: elements and bytes of a block, elements of a group, whether groups have a least value, and what the
// kernels' codes of 4 bits are less than those of the block.
template <int BYTES_, int SIZE_, int GROUP_, bool LEAST_ = false, int LESS_ = 0>
struct Kind {
  static constexpr int BYTES = BYTES_, SIZE = SIZE_, GROUP = GROUP_, GROUPS = SIZE / GROUP, LESS = LESS_;
  static constexpr bool LEAST = LEAST_;
};

struct Q4_0 : Kind<18, 32, 32> {
  INLINE static void decode(const uint8_t* b, int8_t* codes, float* scales, float*) {
    scales[0] = half(b), nibbles(b + 2, 16, 8, codes);
  }
};

struct Q4_1 : Kind<20, 32, 32, true, 8> {
  INLINE static void decode(const uint8_t* b, int8_t* codes, float* scales, float* least) {
    scales[0] = half(b), least[0] = -half(b + 2), nibbles(b + 4, 16, 0, codes);
  }
};

struct Q5_0 : Kind<22, 32, 32> {
  INLINE static void decode(const uint8_t* b, int8_t* codes, float* scales, float*) {
    scales[0] = half(b), nibbles(b + 6, 16, 0, codes), add_fifth_bits(b + 2, 16, codes);
  }
};

struct Q5_1 : Kind<24, 32, 32, true> {
  INLINE static void decode(const uint8_t* b, int8_t* codes, float* scales, float* least) {
    scales[0] = half(b), least[0] = -half(b + 2), nibbles(b + 8, 16, 0, codes), add_fifth_bits(b + 4, 0, codes);
  }
};

struct Q8_0 : Kind<34, 32, 32> {
  INLINE static void decode(const uint8_t* b, int8_t* codes, float* scales, float*) {
    scales[0] = half(b), std::memcpy(codes, b + 2, 32);
  }
};

struct Q2_K : Kind<84, 256, 16, true, 8> {
  INLINE static void decode(const uint8_t* b, int8_t* codes, float* scales, float* least) {
    for (int g = 0; g < GROUPS; ++g) scales[g] = half(b + 80) * (b[g] & 15), least[g] = half(b + 82) * (b[g] >> 4);
    for (int j = 0; j < 8; ++j)
      for (int i = 0; i < 32; ++i) codes[j * 32 + i] = b[16 + j / 4 * 32 + i] >> j % 4 * 2 & 3;
  }
};

struct Q3_K : Kind<110, 256, 16> {
  INLINE static void decode(const uint8_t* b, int8_t* codes, float* scales, float*) {
    for (int g = 0; g < GROUPS; ++g) {
      const int low = g < 8 ? b[96 + g] & 15 : b[88 + g] >> 4, high = b[104 + g % 4] >> g / 4 * 2 & 3;
      scales[g] = half(b + 108) * static_cast<float>((low | high << 4) - 32);
    }
    for (int j = 0; j < 8; ++j)
      for (int i = 0; i < 32; ++i)
        codes[j * 32 + i] = static_cast<int8_t>(((b[32 + j / 4 * 32 + i] >> j % 4 * 2 & 3) | (b[i] >> j & 1) << 2) - 4);
  }
};

// Of the 8 groups of a block of Q4_K or Q5_K: 6 bits each, in 12 bytes.
INLINE void groups_of_6_bits(const uint8_t* b, float* scales, float* least) {
  const uint8_t* const packed = b + 4;
  for (int g = 0; g < 8; ++g) {
    const int i = g % 4;
    const int scale = g < 4 ? packed[i] & 63 : (packed[8 + i] & 15) | packed[i] >> 6 << 4;
    const int low = g < 4 ? packed[4 + i] & 63 : packed[8 + i] >> 4 | packed[4 + i] >> 6 << 4;
    scales[g] = half(b) * static_cast<float>(scale), least[g] = half(b + 2) * static_cast<float>(low);
  }
}

struct Q4_K : Kind<144, 256, 32, true, 8> {
  INLINE static void decode(const uint8_t* b, int8_t* codes, float* scales, float* least) {
    groups_of_6_bits(b, scales, least);
    for (int q = 0; q < 4; ++q) nibbles(b + 16 + q * 32, 32, 0, codes + q * 64);
  }
};

struct Q5_K : Kind<176, 256, 32, true> {
  INLINE static void decode(const uint8_t* b, int8_t* codes, float* scales, float* least) {
    groups_of_6_bits(b, scales, least);
    for (int q = 0; q < 4; ++q) nibbles(b + 48 + q * 32, 32, 0, codes + q * 64);
    for (int j = 0; j < 8; ++j)
      for (int i = 0; i < 32; ++i) codes[j * 32 + i] |= static_cast<int8_t>((b[16 + i] >> j & 1) << 4);
  }
};

struct Q6_K : Kind<210, 256, 16> {
  INLINE static void decode(const uint8_t* b, int8_t* codes, float* scales, float*) {
    for (int g = 0; g < GROUPS; ++g) scales[g] = half(b + 208) * static_cast<float>(static_cast<int8_t>(b[192 + g]));
    for (int h = 0; h < 2; ++h) nibbles(b + h * 64, 64, 0, codes + h * 128);
    for (int j = 0; j < 8; ++j)
      for (int i = 0; i < 32; ++i) {
        int8_t& code = codes[j * 32 + i];
        code = static_cast<int8_t>((code | (b[128 + j / 4 * 32 + i] >> j % 4 * 2 & 3) << 4) - 32);
      }
  }
};

constexpr int8_t UNEVEN[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

INLINE void uneven(const uint8_t* from, int8_t* codes) {
  for (int i = 0; i < 16; ++i) codes[i] = UNEVEN[from[i] & 15], codes[16 + i] = UNEVEN[from[i] >> 4];
}

struct IQ4_NL : Kind<18, 32, 32> {
  INLINE static void decode(const uint8_t* b, int8_t* codes, float* scales, float*) {
    scales[0] = half(b), uneven(b + 2, codes);
  }
};

struct IQ4_XS : Kind<136, 256, 32> {
  INLINE static void decode(const uint8_t* b, int8_t* codes, float* scales, float*) {
    for (int g = 0; g < GROUPS; ++g) {
      const int low = b[4 + g / 2] >> g % 2 * 4 & 15, high = b[2 + g / 4] >> g % 4 * 2 & 3;
      scales[g] = half(b) * static_cast<float>((low | high << 4) - 32);
      uneven(b + 8 + g * 16, codes + g * 32);
    }
  }
};

struct MXFP4 : Kind<17, 32, 32> {
  INLINE static void decode(const uint8_t* b, int8_t* codes, float* scales, float*) {
    // The exponent of a power of two; 2^-127 has no leading 1, and above 252 six times it is infinite.
    scales[0] = b[0] > 252 ? NAN : __builtin_bit_cast(float, b[0] ? b[0] << 23 : 1 << 22);
    nibbles(b + 1, 16, 0, codes);
  }
};

// Returns whether all scales and least values are at most `most`.
template <class K>
INLINE bool decode_all(const uint8_t* blocks, int64_t count, float most, int8_t* codes, float* scales, float* zeros) {
  bool fits = true;
  for (int64_t n = 0; n < count; ++n, blocks += K::BYTES, codes += K::SIZE, scales += K::GROUPS) {
    float least[K::GROUPS] = {};
    K::decode(blocks, codes, scales, least);
    for (int g = 0; g < K::GROUPS; ++g) {
      fits &= std::abs(scales[g]) <= most && std::abs(least[g]) <= most;
      if constexpr (K::LEAST) {
        int8_t* const own = codes + g * K::GROUP;
        const bool flat = scales[g] == 0;  // such a group is its least value alone
        *zeros++ = flat ? 1 : least[g] / scales[g] - K::LESS;
        if (flat) scales[g] = least[g];
        for (int i = 0; i < K::GROUP; ++i) own[i] = static_cast<int8_t>(flat ? 0 : own[i] - K::LESS);
      }
    }
  }
  return fits;
}

}  // namespace

// One for each kind; the arguments are those of decode_all.
#define EXPORT(KIND)                                                                                               \
  extern "C" __attribute__((visibility("default"))) FOR_EACH_CPU bool decode_##KIND(                               \
      const uint8_t* blocks, int64_t count, float most, int8_t* codes, float* scales, float* zeros) {              \
    return decode_all<KIND>(blocks, count, most, codes, scales, zeros);                                            \
  }

EXPORT(Q4_0)
EXPORT(Q4_1)
EXPORT(Q5_0)
EXPORT(Q5_1)
EXPORT(Q8_0)
EXPORT(Q2_K)
EXPORT(Q3_K)
EXPORT(Q4_K)
EXPORT(Q5_K)
EXPORT(Q6_K)
EXPORT(IQ4_NL)
EXPORT(IQ4_XS)
EXPORT(MXFP4)
