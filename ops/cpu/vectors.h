// Vectors of 16 floats for one instruction set. They are the compiler's own, which splits them where registers are
// narrower; intrinsics only where it has no operation for what an instruction does. Included once for each set by
// one_isa.cpp, which explains the macros.

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "vector_types.h"

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#ifndef ISA  // a kernel header by itself, as an editor or a test compiles it
#define ISA portable
#define TARGET
#define WIDTH 128
#define DOT 0
#endif

#define INLINE inline __attribute__((always_inline)) TARGET

namespace {
namespace ISA {

// One register, for sums that must stay in registers: GCC splits wider vectors through memory.
typedef float Register __attribute__((vector_size(WIDTH / 8)));
typedef uint32_t UintRegister __attribute__((vector_size(WIDTH / 8)));

// A Vec is kPartsOfVec of these, registers of the compiler that may be stored at any address. Loops that keep sums, or take many
// steps with a number, are written with them.
#if WIDTH == 512
typedef Vec Part;
typedef IntVec IntPart;
typedef HalfVec HalfPart;
#else
typedef float Part __attribute__((vector_size(WIDTH / 8), aligned(4), may_alias));
typedef int32_t IntPart __attribute__((vector_size(WIDTH / 8), aligned(4), may_alias));
typedef uint16_t HalfPart __attribute__((vector_size(WIDTH / 16), aligned(1), may_alias));
#endif
constexpr int kPartsOfVec = 512 / WIDTH;
constexpr int64_t kPartLanes = WIDTH / 32;

INLINE Part load_part(const float* from) { return *reinterpret_cast<const Part*>(from); }
INLINE void store_part(float* to, Part x) { *reinterpret_cast<Part*>(to) = x; }
INLINE Part broadcast_lane_of_part(const void* from) {
  return reinterpret_cast<Part>(IntPart{} + *static_cast<const Lane*>(from));
}

INLINE Vec broadcast(float x) { return x - Vec{}; }
INLINE Vec load(const void* from) { return *static_cast<const Vec*>(from); }
INLINE void store(void* to, Vec x) { *static_cast<Vec*>(to) = x; }
INLINE IntVec bits(Vec x) { return reinterpret_cast<IntVec>(x); }
INLINE Vec floats(IntVec x) { return reinterpret_cast<Vec>(x); }
INLINE Vec broadcast_lane(const void* from) { return floats(IntVec{} + *static_cast<const Lane*>(from)); }
INLINE Vec convert(IntVec x) { return __builtin_convertvector(x, Vec); }

// Where a is NaN, max(a, b) is b: a NaN in b goes through.
INLINE Vec max(Vec a, Vec b) { return a > b ? a : b; }

#if WIDTH == 512
INLINE float largest_lane(Vec x) { return _mm512_reduce_max_ps(reinterpret_cast<__m512>(x)); }
INLINE float sum_of_lanes(Vec x) { return _mm512_reduce_add_ps(reinterpret_cast<__m512>(x)); }
#else
INLINE Part max(Part a, Part b) { return a > b ? a : b; }

// Of all lanes, by halves.
template <class F>
INLINE float over_lanes(Part x, F&& f) {
#if WIDTH == 256
  x = f(x, __builtin_shufflevector(x, x, 4, 5, 6, 7, 0, 1, 2, 3));
  x = f(x, __builtin_shufflevector(x, x, 2, 3, 0, 1, 6, 7, 4, 5));
  return f(x, __builtin_shufflevector(x, x, 1, 0, 3, 2, 5, 4, 7, 6))[0];
#else
  x = f(x, __builtin_shufflevector(x, x, 2, 3, 0, 1));
  return f(x, __builtin_shufflevector(x, x, 1, 0, 3, 2))[0];
#endif
}

INLINE float largest_lane(Part x) {
  return over_lanes(x, [](Part a, Part b) TARGET { return max(a, b); });
}
INLINE float sum_of_lanes(Part x) {
  return over_lanes(x, [](Part a, Part b) TARGET { return a + b; });
}

INLINE float largest_lane(Vec x) {
  const auto* lanes = reinterpret_cast<const float*>(&x);
  Part largest = load_part(lanes);
  for (int i = 1; i < kPartsOfVec; ++i) largest = max(load_part(lanes + i * kPartLanes), largest);
  return largest_lane(largest);
}

INLINE float sum_of_lanes(Vec x) {
  const auto* lanes = reinterpret_cast<const float*>(&x);
  Part sum = load_part(lanes);
  for (int i = 1; i < kPartsOfVec; ++i) sum += load_part(lanes + i * kPartLanes);
  return sum_of_lanes(sum);
}
#endif

#if defined(__aarch64__)
INLINE Part load_part(const Half* from) {
  return reinterpret_cast<Part>(vcvt_f32_f16(vld1_f16(reinterpret_cast<const float16_t*>(from))));
}
#endif

template <class T>
INLINE Vec load_floats(const T* from) {
  if constexpr (std::is_same_v<T, float>) {
    return load(from);
  } else if constexpr (std::is_same_v<T, BFloat16>) {
    Vec all;
#pragma GCC unroll 4
    for (int64_t i = 0; i < kLanes; i += kPartLanes) {
      const HalfPart part = *reinterpret_cast<const HalfPart*>(from + i);
      store_part(reinterpret_cast<float*>(&all) + i,
                 reinterpret_cast<Part>(__builtin_convertvector(part, IntPart) << 16));
    }
    return all;
  } else {
#if WIDTH == 512
    return reinterpret_cast<Vec>(_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))));
#else
    Vec x;
#if WIDTH == 256
    for (int i = 0; i < 2; ++i)
      reinterpret_cast<__m256*>(&x)[i] = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from) + i));
#elif defined(__aarch64__)
    for (int64_t i = 0; i < kLanes; i += kPartLanes) store_part(reinterpret_cast<float*>(&x) + i, load_part(from + i));
#else
    for (int i = 0; i < kLanes; ++i) x[i] = from[i];
#endif
    return x;
#endif
  }
}

// The first `count` of 16, zeros after them.
template <class T>
INLINE Vec load_floats(const T* from, int64_t count) {
  if (count >= kLanes) return load_floats(from);
  T copy[kLanes] = {};
  std::copy_n(from, count, copy);
  return load_floats(copy);
}

#if WIDTH == 256
// Of each register by itself: GCC 12 compares the floats of wider vectors one by one.
INLINE UintRegister half_of(const Vec& x, int i) {
  return reinterpret_cast<UintRegister>(load_part(reinterpret_cast<const float*>(&x) + i * kPartLanes));
}
INLINE UintRegister is_number(UintRegister x) {
  return reinterpret_cast<UintRegister>(reinterpret_cast<Register>(x) == reinterpret_cast<Register>(x));
}
#endif

// To the nearest, ties to even; NaN becomes 0x7fc0, as in torch.
INLINE HalfVec to_bf16(Vec x) {
#if WIDTH == 256
  __m256i halves[2];
  for (int i = 0; i < 2; ++i) {
    const UintRegister raw = half_of(x, i), rounded = (raw + 0x7fffu + ((raw >> 16) & 1u)) >> 16, valid = is_number(raw);
    halves[i] = reinterpret_cast<__m256i>((rounded & valid) | (0x7fc0u & ~valid));
  }
  return reinterpret_cast<HalfVec>(_mm256_permute4x64_epi64(_mm256_packus_epi32(halves[0], halves[1]), 0xd8));
#else
  const UintVec raw = reinterpret_cast<UintVec>(x), rounded = (raw + 0x7fffu + ((raw >> 16) & 1u)) >> 16;
  return __builtin_convertvector(x == x ? rounded : UintVec{} + 0x7fc0u, HalfVec);
#endif
}
// The same as floats again.
INLINE Vec rounded_to_bf16(Vec x) {
#if WIDTH == 256
  Vec all;
  for (int i = 0; i < 2; ++i) {
    const UintRegister raw = half_of(x, i), rounded = raw + 0x7fffu + ((raw >> 16) & 1u), valid = is_number(raw);
    store_part(reinterpret_cast<float*>(&all) + i * kPartLanes,
               reinterpret_cast<Part>((rounded & 0xffff0000u & valid) | (raw & ~valid)));
  }
  return all;
#else
  const UintVec raw = reinterpret_cast<UintVec>(x), rounded = (raw + 0x7fffu + ((raw >> 16) & 1u)) & 0xffff0000u;
  return x == x ? reinterpret_cast<Vec>(rounded) : x;
#endif
}

#if DOT
// 32 numbers by the instruction for it, which is faster and takes denormal numbers for zero.
INLINE Vec to_bf16_pairs(Vec first, Vec second) {
  return reinterpret_cast<Vec>(_mm512_cvtne2ps_pbh(reinterpret_cast<__m512>(second), reinterpret_cast<__m512>(first)));
}

// Adds to each lane of `sum` the two products of the pairs of bf16 in that lane.
INLINE Vec add_products(Vec sum, Vec a, Vec b) {
  return reinterpret_cast<Vec>(
      _mm512_dpbf16_ps(reinterpret_cast<__m512>(sum), reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b)));
}
#endif

#if NEON >= 2
// The same as `add_products` of DOT; each product, their sum and the new sum are rounded to odd.
INLINE Part add_products(Part sum, Part a, Part b) {
  return reinterpret_cast<Part>(vbfdotq_f32(reinterpret_cast<float32x4_t>(sum), reinterpret_cast<bfloat16x8_t>(a),
                                            reinterpret_cast<bfloat16x8_t>(b)));
}

// What products of matrices take, two words of two columns: of a first and a second word of four columns.
template <class T>
INLINE T lower_columns(T first, T second) { return __builtin_shufflevector(first, second, 0, 4, 1, 5); }
template <class T>
INLINE T upper_columns(T first, T second) { return __builtin_shufflevector(first, second, 2, 6, 3, 7); }

// And their sums: of each two rows the first two columns of both, and the last two. Done twice it changes nothing.
template <class T, int M, int N>
INLINE void exchange_halves(T (&sums)[M][N]) {
#pragma GCC unroll 2
  for (int m = 0; m + 1 < M; m += 2)
#pragma GCC unroll 4
    for (int i = 0; i < N; ++i) {
      const T first = sums[m][i], second = sums[m + 1][i];
      sums[m][i] = __builtin_shufflevector(first, second, 0, 1, 4, 5);
      sums[m + 1][i] = __builtin_shufflevector(first, second, 2, 3, 6, 7);
    }
}
#endif

// The first `count` lanes as T, rounded as above.
template <class T>
INLINE void store_as(T* to, Vec x, int64_t count) {
  T all[kLanes];
  if constexpr (std::is_same_v<T, float>) {
    store(all, x);
  } else if constexpr (std::is_same_v<T, BFloat16>) {
    *reinterpret_cast<HalfVec*>(all) = to_bf16(x);
  } else {
#if WIDTH == 512
    const __m256i halves = _mm512_cvtps_ph(reinterpret_cast<__m512>(x), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(all), halves);
#elif defined(__aarch64__)
    for (int64_t i = 0; i < kLanes; i += kPartLanes) {
      const Part part = load_part(reinterpret_cast<const float*>(&x) + i);
      vst1_f16(reinterpret_cast<float16_t*>(all + i), vcvt_f16_f32(reinterpret_cast<float32x4_t>(part)));
    }
#else
    for (int64_t i = 0; i < kLanes; ++i) all[i] = static_cast<T>(x[i]);
#endif
  }
  if (count >= kLanes) std::memcpy(static_cast<void*>(to), all, sizeof(all));
  else std::memcpy(static_cast<void*>(to), all, count * sizeof(T));
}

#if WIDTH != 512
INLINE Part exp2(Part x) {
  const Part least = Part{} - 126.f, clamped = least > x ? least : x;
  const Part shifted = clamped + 12582912.f;  // 1.5 * 2^23: adding it rounds to an integer, in the low bits
  const Part f = clamped - (shifted - 12582912.f);  // in [-0.5, 0.5]; below, its Taylor series
  Part y = Part{} + 1.54035304e-4f;
  y = y * f + 1.33335581e-3f;
  y = y * f + 9.61812911e-3f;
  y = y * f + 5.55041087e-2f;
  y = y * f + 2.40226507e-1f;
  y = y * f + 6.93147181e-1f;
  y = y * f + 1.f;
  const Part power = reinterpret_cast<Part>((reinterpret_cast<IntPart>(shifted) << 23) + 0x3f800000);
  return x < -126.f ? Part{} : y * power;  // a product, so that NaN stays NaN
}
#endif

// 2 to the power of x, for x <= 0 (with -inf) or NaN, which stays NaN; 0 below the normal numbers. Relative error 2e-7.
INLINE Vec exp2(Vec x) {
#if WIDTH == 512
  // x less its floor, in [0, 1); a polynomial of the least largest relative error there, 1 at 0; scaled by 2 to the floor.
  const auto f = reinterpret_cast<Vec>(_mm512_reduce_ps(reinterpret_cast<__m512>(x), 0x09));
  Vec p = broadcast(1.86713005e-3f);
  p = p * f + 9.01703071e-3f;
  p = p * f + 5.57999127e-2f;
  p = p * f + 2.40164444e-1f;
  p = p * f + 6.93151295e-1f;
  p = p * f + 1.f;
  return reinterpret_cast<Vec>(_mm512_maskz_scalef_ps(
      _mm512_cmp_ps_mask(reinterpret_cast<__m512>(x), _mm512_set1_ps(-126.f), _CMP_NLT_UQ),
      reinterpret_cast<__m512>(p), reinterpret_cast<__m512>(x)));
#else
  Vec all;
#pragma GCC unroll 4
  for (int i = 0; i < kPartsOfVec; ++i)
    store_part(reinterpret_cast<float*>(&all) + i * kPartLanes,
               exp2(load_part(reinterpret_cast<const float*>(&x) + i * kPartLanes)));
  return all;
#endif
}

INLINE float exp2(float x) { return exp2(broadcast(x))[0]; }

}  // namespace ISA
}  // namespace
