// The types of vectors.h: vectors of the compiler, which may be stored at any address, and the dtypes of 16 bits.

#pragma once

#include <cstdint>
#include <limits>

namespace {

struct BFloat16 {
  uint16_t bits;

  BFloat16() = default;
  // To the nearest, ties to even; NaN becomes 0x7fc0.
  explicit BFloat16(float x) {
    const uint32_t raw = __builtin_bit_cast(uint32_t, x);
    bits = x == x ? static_cast<uint16_t>((raw + 0x7fffu + (raw >> 16 & 1u)) >> 16) : 0x7fc0;
  }
  operator float() const { return __builtin_bit_cast(float, uint32_t{bits} << 16); }
};

// Of 1 sign bit, 5 bits of exponent (15 more than it is) and 10 of mantissa.
struct Half {
  uint16_t bits;

  Half() = default;
  // To the nearest, ties to even.
  explicit Half(float x) {
    const uint32_t raw = __builtin_bit_cast(uint32_t, x), size = raw & 0x7fffffffu;
    uint32_t half;
    if (size > 0x7f800000u) half = 0x7e00u;                           // NaN
    else if (size >= 0x477ff000u) half = 0x7c00u;                     // 65520 and above: infinity
    else if (size >= 0x38800000u) half = (size - 0x38000000u + 0xfffu + (size >> 13 & 1u)) >> 13;
    else half = __builtin_bit_cast(uint32_t, __builtin_bit_cast(float, size) + 0.5f) - 0x3f000000u;  // denormal
    bits = static_cast<uint16_t>(half | (raw >> 16 & 0x8000u));
  }
  operator float() const {
    const uint32_t size = bits & 0x7fffu, sign = (bits & 0x8000u) << 16;
    uint32_t raw = (size << 13) + 0x38000000u;
    if (size >= 0x7c00u) raw = (size << 13) | 0x7f800000u;  // infinity, NaN
    else if (size < 0x400u) raw = __builtin_bit_cast(uint32_t, static_cast<float>(size) * 0x1p-24f);
    return __builtin_bit_cast(float, raw | sign);
  }
};

constexpr int64_t kLanes = 16;
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kLog2E = 1.44269504f;

typedef float Vec __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint32_t UintVec __attribute__((vector_size(64), aligned(4), may_alias));
typedef int32_t IntVec __attribute__((vector_size(64), aligned(4), may_alias));
typedef int32_t Lane __attribute__((may_alias));
typedef uint16_t HalfVec __attribute__((vector_size(32), aligned(1), may_alias));

}  // namespace
