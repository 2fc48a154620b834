// The kernels of low-rank changes for one instruction set: compiled once for each by ../cpu/one_isa.cpp, which explains the
// macros. How many rows are computed at once changes no row's sums: one for each lane over the inputs, and one over ranks.

#include "../cpu/vectors.h"
#include "lora_cpu_types.h"

namespace {
namespace ISA {

template <class T>
INLINE Part part_of(const T* from) {
  if constexpr (std::is_same_v<T, float>) {
    return load_part(from);
  } else if constexpr (std::is_same_v<T, BFloat16>) {
    return reinterpret_cast<Part>(__builtin_convertvector(*reinterpret_cast<const HalfPart*>(from), IntPart) << 16);
  } else {
#if WIDTH == 512
    return load_floats(from);
#elif WIDTH == 256
    return reinterpret_cast<Part>(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
#else
    return Part{from[0], from[1], from[2], from[3]};
#endif
  }
}

template <class T>
TARGET void widen(const void* all, float* out, int64_t size) {
  const T* x = static_cast<const T*>(all);
  for (int64_t i = 0; i < size; i += kLanes) store(out + i, load_floats(x + i, size - i));
}

// M rows of x with J rows of a.
template <class T, int M, int J>
INLINE void multiply(const Shrink& of, int64_t row, int64_t j) {
  Part sums[M][J][kPartsOfVec] = {};
  const T* a = static_cast<const T*>(of.a) + j * of.inputs;
  const float* x = of.x + row * of.stride;
  T last[J][kLanes] = {};
  const auto add = [&](const float* x, const T* a, int64_t stride) __attribute__((always_inline)) TARGET {
#pragma GCC unroll 4
    for (int i = 0; i < kPartsOfVec; ++i)
#pragma GCC unroll 4
      for (int n = 0; n < J; ++n) {
        const Part w = part_of(a + n * stride + i * kPartLanes);
#pragma GCC unroll 4
        for (int m = 0; m < M; ++m) sums[m][n][i] += load_part(x + m * of.stride + i * kPartLanes) * w;
      }
  };
  int64_t k = 0;
  for (; k + kLanes <= of.inputs; k += kLanes) add(x + k, a + k, of.inputs);
  if (k < of.inputs) {
    for (int n = 0; n < J; ++n) std::copy_n(a + n * of.inputs + k, of.inputs - k, last[n]);
    add(x + k, last[0], kLanes);
  }
  for (int m = 0; m < M; ++m)
    for (int n = 0; n < J; ++n) {
      Part sum = sums[m][n][0];
      for (int i = 1; i < kPartsOfVec; ++i) sum += sums[m][n][i];
      of.s[row + m][j + n] = sum_of_lanes(sum) * of.scale;
    }
}

template <class T, int M, int J>
INLINE void multiply_all(const Shrink& of, int64_t row) {
  int64_t j = 0;
  for (; j + J <= of.rank; j += J) multiply<T, M, J>(of, row, j);
  for (; j < of.rank; ++j) multiply<T, M, 1>(of, row, j);
}

template <class T>
TARGET void shrink(const Shrink& of) {
  constexpr int J = WIDTH == 512 ? 4 : WIDTH == 256 ? 2 : 1;
  int64_t row = 0;
  for (; row + 2 <= of.rows; row += 2) multiply_all<T, 2, J>(of, row);
  if (row < of.rows) multiply_all<T, 1, 2 * J>(of, row);
}

template <class T, int M>
INLINE void add_terms(const Expand& of, int64_t row) {
  Part sums[M][kPartsOfVec] = {};
  const T* b = static_cast<const T*>(of.b);
  for (int64_t j = 0; j < of.rank; ++j, b += kLanes)
#pragma GCC unroll 4
    for (int i = 0; i < kPartsOfVec; ++i) {
      const Part w = part_of(b + i * kPartLanes);
#pragma GCC unroll 4
      for (int m = 0; m < M; ++m) sums[m][i] += w * of.s[row + m][j];
    }
  for (int m = 0; m < M; ++m) {
    T* y = static_cast<T*>(of.y[row + m]);
    float all[kLanes];
    for (int i = 0; i < kPartsOfVec; ++i) store_part(all + i * kPartLanes, sums[m][i]);
    store_as(y, load_floats(y, of.count) + load(all), of.count);
  }
}

template <class T>
TARGET void expand(const Expand& of) {
  if (of.rows == kMostRows) return add_terms<T, kMostRows>(of, 0);
  for (int64_t row = 0; row < of.rows; ++row) add_terms<T, 1>(of, row);
}

template <class T>
constexpr LoraKernels lora_kernels() {
  return {widen<T>, shrink<T>, expand<T>};
}

inline Kernels kernels() { return {lora_kernels<float>(), lora_kernels<BFloat16>(), lora_kernels<Half>()}; }

}  // namespace ISA
}  // namespace
