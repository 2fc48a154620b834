// The kernels of sums over ranks for one instruction set: compiled once for each by ../cpu/one_isa.cpp, which explains the
// macros. An element's sum depends neither on its place nor on the others.

#include "../cpu/vectors.h"
#include "parallel_cpu_types.h"

namespace {
namespace ISA {

// 16 floats, a register at a time: GCC 12 passes wider vectors through memory.
struct Sums {
  Register parts[kPartsOfVec];
};

template <class T>
INLINE Sums loaded(const T* from) {
  Sums x;
#pragma GCC unroll 4
  for (int i = 0; i < kPartsOfVec; ++i) {
    [[maybe_unused]] const T* part = from + i * kPartLanes;
    if constexpr (std::is_same_v<T, float>) {
      x.parts[i] = reinterpret_cast<Register>(load_part(part));
#if WIDTH == 256
    } else {
      const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(part));
      if constexpr (std::is_same_v<T, Half>) x.parts[i] = reinterpret_cast<Register>(_mm256_cvtph_ps(halves));
      else x.parts[i] = reinterpret_cast<Register>(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
    }
#else
    } else {
      const Vec all = load_floats(from);
      x.parts[i] = reinterpret_cast<Register>(load_part(reinterpret_cast<const float*>(&all) + i * kPartLanes));
    }
#endif
  }
  return x;
}

template <class T>
INLINE void stored(T* to, const Sums& x) {
#if WIDTH == 256
  if constexpr (std::is_same_v<T, BFloat16>) {  // as to_bf16 does it
    __m256i halves[2];
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      const auto raw = reinterpret_cast<UintRegister>(x.parts[i]);
      const UintRegister rounded = (raw + 0x7fffu + ((raw >> 16) & 1u)) >> 16, valid = is_number(raw);
      halves[i] = reinterpret_cast<__m256i>((rounded & valid) | (0x7fc0u & ~valid));
    }
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(halves[0], halves[1]), 0xd8);
    return _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), packed);
  } else if constexpr (std::is_same_v<T, Half>) {
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i)
      _mm_storeu_si128(reinterpret_cast<__m128i*>(to) + i,
                       _mm256_cvtps_ph(reinterpret_cast<__m256>(x.parts[i]), _MM_FROUND_TO_NEAREST_INT));
    return;
  }
#endif
  Vec all;
#pragma GCC unroll 4
  for (int i = 0; i < kPartsOfVec; ++i)
    store_part(reinterpret_cast<float*>(&all) + i * kPartLanes, reinterpret_cast<Part>(x.parts[i]));
  store_as(to, all, kLanes);
}

INLINE Sums added(const Sums& a, const Sums& b) {
  Sums sum;
#pragma GCC unroll 4
  for (int i = 0; i < kPartsOfVec; ++i) sum.parts[i] = a.parts[i] + b.parts[i];
  return sum;
}

template <class T>
TARGET void sum(const void* const* sources, int64_t count, void* to, int64_t size) {
  T* const out = static_cast<T*>(to);
  const T *const first = static_cast<const T*>(sources[0]), *const second = static_cast<const T*>(sources[count - 1]);
  const int64_t whole = size / kLanes * kLanes;
  for (int64_t i = 0; i < whole; i += kLanes) {
    Sums total = loaded(first + i);
    for (int64_t n = 1; n + 1 < count; ++n) total = added(total, loaded(static_cast<const T*>(sources[n]) + i));
    stored(out + i, count > 1 ? added(total, loaded(second + i)) : total);
  }
  for (int64_t i = whole; i < size; ++i) {
    float total = first[i];
    for (int64_t n = 1; n < count; ++n) total += static_cast<const T*>(sources[n])[i];
    out[i] = static_cast<T>(total);
  }
}

template <int COUNT>
INLINE Sums tree_of_lanes(const void* const* sources, int64_t i) {
  if constexpr (COUNT == 1) return loaded(static_cast<const float*>(sources[0]) + i);
  else return added(tree_of_lanes<COUNT / 2>(sources, i), tree_of_lanes<COUNT / 2>(sources + COUNT / 2, i));
}

template <int COUNT>
INLINE float tree(const void* const* sources, int64_t i) {
  if constexpr (COUNT == 1) return static_cast<const float*>(sources[0])[i];
  else return tree<COUNT / 2>(sources, i) + tree<COUNT / 2>(sources + COUNT / 2, i);
}

template <class T, int COUNT>
INLINE void join_all(const void* const* all, T* to, int64_t size) {
  const void* sources[COUNT];  // which stores to `to` cannot change
  for (int n = 0; n < COUNT; ++n) sources[n] = all[n];
  const int64_t whole = size / kLanes * kLanes;
  for (int64_t i = 0; i < whole; i += kLanes) stored(to + i, tree_of_lanes<COUNT>(sources, i));
  for (int64_t i = whole; i < size; ++i) to[i] = static_cast<T>(tree<COUNT>(sources, i));
}

template <class T>
TARGET void join(const void* const* sources, int64_t count, void* to, int64_t size) {
  T* const out = static_cast<T*>(to);
  if (count == 1) join_all<T, 1>(sources, out, size);
  else if (count == 2) join_all<T, 2>(sources, out, size);
  else if (count == 4) join_all<T, 4>(sources, out, size);
  else join_all<T, 8>(sources, out, size);
}

template <class T>
constexpr SumKernels sum_kernels() {
  return {sum<T>, join<T>};
}

inline Kernels kernels() { return {sum_kernels<float>(), sum_kernels<BFloat16>(), sum_kernels<Half>()}; }

}  // namespace ISA
}  // namespace
