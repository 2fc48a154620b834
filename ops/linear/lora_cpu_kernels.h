// The kernels of low-rank changes for one instruction set: compiled once for each by ../cpu/one_isa.cpp, which explains the
// macros. How many rows are computed at once changes no row's sums: one for each lane over the inputs, and one over ranks.

#include "../cpu/vectors.h"
#include "lora_cpu_types.h"

namespace {
namespace ISA {

constexpr int kRegisters = kPartsOfVec;  // of 16 floats

// As many numbers as a register has. GCC 12 halves a conversion of 256 bits of its own.
template <class T>
INLINE Register register_of(const T* from) {
  if constexpr (std::is_same_v<T, float>) {
    return reinterpret_cast<Register>(load_part(from));
#if WIDTH == 256
  } else {
    const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    if constexpr (std::is_same_v<T, Half>) return reinterpret_cast<Register>(_mm256_cvtph_ps(halves));
    return reinterpret_cast<Register>(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
#else
  } else if constexpr (std::is_same_v<T, BFloat16>) {
    return reinterpret_cast<Register>(__builtin_convertvector(*reinterpret_cast<const HalfPart*>(from), UintRegister) << 16);
  } else {
#if WIDTH == 512
    return reinterpret_cast<Register>(load_floats(from));
#elif defined(__aarch64__)
    return reinterpret_cast<Register>(load_part(from));
#else
    return Register{from[0], from[1], from[2], from[3]};
#endif
#endif
  }
}

// sum + x * y. The compiler moves no sum past another: free to mix steps, GCC 12 has more values at a time than registers.
INLINE Register added(Register sum, Register x, Register y) {
  sum += x * y;
#ifdef __x86_64__
  asm volatile("" : "+x"(sum));
#endif
  return sum;
}

template <class T>
TARGET void widen(const void* all, float* out, int64_t size) {
  const T* x = static_cast<const T*>(all);
  int64_t i = 0;
  for (; i < size / kLanes * kLanes; i += kPartLanes) store_part(out + i, reinterpret_cast<Part>(register_of(x + i)));
  if (i < size) store(out + i, load_floats(x + i, size - i));
}

// 16 inputs of M rows of x and J rows of a.
template <class T, int M, int J>
INLINE void add_inputs(const float* x, int64_t x_stride, const T* a, int64_t a_stride, Register (&sums)[M][J][kRegisters]) {
#pragma GCC unroll 4
  for (int i = 0; i < kRegisters; ++i) {
    Register w[J];
#pragma GCC unroll 8
    for (int n = 0; n < J; ++n) w[n] = register_of(a + n * a_stride + i * kPartLanes);
#pragma GCC unroll 4
    for (int m = 0; m < M; ++m) {
      const Register of_x = register_of(x + m * x_stride + i * kPartLanes);
#pragma GCC unroll 8
      for (int n = 0; n < J; ++n) sums[m][n][i] = added(sums[m][n][i], of_x, w[n]);
    }
  }
}

// M rows of x with J rows of a.
template <class T, int M, int J>
INLINE void multiply(const Shrink& of, int64_t row, int64_t j) {
  Register sums[M][J][kRegisters] = {};
  const T* a = static_cast<const T*>(of.a) + j * of.inputs;
  const float* x = of.x + row * of.stride;
  int64_t k = 0;
  for (; k + kLanes <= of.inputs; k += kLanes) {
    // What comes next lies behind it, a row of a after the other. A prefetch never faults.
#pragma GCC unroll 8
    for (int n = 0; n < J; ++n) __builtin_prefetch(a + (J + n) * of.inputs + k);
    add_inputs<T, M, J>(x + k, of.stride, a + k, of.inputs, sums);
  }
  if (k < of.inputs) {
    T last[J][kLanes] = {};
    for (int n = 0; n < J; ++n) std::copy_n(a + n * of.inputs + k, of.inputs - k, last[n]);
    add_inputs<T, M, J>(x + k, of.stride, last[0], kLanes, sums);
  }
#pragma GCC unroll 4
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 8
    for (int n = 0; n < J; ++n) {
      Register sum = sums[m][n][0];
#pragma GCC unroll 4
      for (int i = 1; i < kRegisters; ++i) sum += sums[m][n][i];
      of.s[row + m][j + n] = sum_of_lanes(reinterpret_cast<Part>(sum)) * of.scale;
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

// Adds sums to 16 outputs.
template <class T>
INLINE void add_to(T* y, const float* sums) {
  store_as(y, load_floats(y) + load(sums), kLanes);
}

constexpr int kAhead = 3;  // groups of tiles from a product to the prefetch of its weights

// A rank of M rows and C tiles.
template <class T, int M, int REGISTERS>
INLINE void add_rank(const float* const* s, int64_t j, const T* b, int64_t stride, Register (&sums)[M][REGISTERS]) {
  Register of_s[M];
#pragma GCC unroll 4
  for (int m = 0; m < M; ++m) of_s[m] = s[m][j] - Register{};
#pragma GCC unroll 16
  for (int i = 0; i < REGISTERS; ++i) {
    if (i % kRegisters == 0) __builtin_prefetch(b + (i / kRegisters + REGISTERS / kRegisters * kAhead) * stride);
    const Register w = register_of(b + i / kRegisters * stride + i % kRegisters * kPartLanes);
#pragma GCC unroll 4
    for (int m = 0; m < M; ++m) sums[m][i] = added(sums[m][i], w, of_s[m]);
  }
}

// C tiles of 16 outputs of M rows, `count` of the last one.
template <class T, int M, int C>
INLINE void add_terms(const Expand& of, int64_t row, int64_t tile, int64_t count) {
  Register sums[M][C * kRegisters] = {};
  const T* b = static_cast<const T*>(of.b) + tile * of.tile_stride;
  for (int64_t j = 0; j < of.rank; ++j) add_rank(of.s + row, j, b + j * kLanes, of.tile_stride, sums);
  float all[M][C * kLanes];
#pragma GCC unroll 4
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 16
    for (int i = 0; i < C * kRegisters; ++i) store_part(all[m] + i * kPartLanes, reinterpret_cast<Part>(sums[m][i]));
  for (int m = 0; m < M; ++m)
    for (int c = 0; c < C; ++c) {
      T *y = static_cast<T*>(of.y[row + m]) + (tile + c) * kLanes, copy[kLanes];
      const int64_t own = c + 1 < C ? kLanes : count;
      if (own < kLanes) std::copy_n(y, own, copy);
      add_to(own < kLanes ? copy : y, all[m] + c * kLanes);
      if (own < kLanes) std::copy_n(copy, own, y);
    }
}

// Some rows, all tiles.
template <class T, int M, int C>
INLINE void add_all(const Expand& of, int64_t row) {
  const int64_t tiles = (of.outputs + kLanes - 1) / kLanes;
  int64_t tile = 0;
  for (; tile + C < tiles; tile += C) add_terms<T, M, C>(of, row, tile, kLanes);
  for (; tile < tiles; ++tile) add_terms<T, M, 1>(of, row, tile, std::min(kLanes, of.outputs - tile * kLanes));
}

template <class T>
TARGET void expand(const Expand& of) {
  constexpr int C = WIDTH == 128 ? 1 : 2;
  int64_t row = 0;
  for (; row + 4 <= of.rows; row += 4) add_all<T, 4, 1>(of, row);
  for (; row + 2 <= of.rows; row += 2) add_all<T, 2, C>(of, row);
  if (row < of.rows) add_all<T, 1, 2 * C>(of, row);
}

template <class T>
constexpr LoraKernels lora_kernels() {
  return {widen<T>, shrink<T>, expand<T>};
}

inline Kernels kernels() { return {lora_kernels<float>(), lora_kernels<BFloat16>(), lora_kernels<Half>()}; }

}  // namespace ISA
}  // namespace
