// What the kernels of quantized_linear_a8 need besides ../cpu/vectors.h, for one instruction set.

#include "quantized_linear_a8_cpu_types.h"
#include "quantized_zeros.h"

namespace {
namespace ISA {

typedef int32_t IntRegister __attribute__((vector_size(WIDTH / 8), may_alias));
typedef int16_t ShortRegister __attribute__((vector_size(WIDTH / 8), may_alias));
typedef uint8_t ByteRegister __attribute__((vector_size(WIDTH / 8), may_alias));

// a * b + c, rounded once.
INLINE Vec fma(Vec a, Vec b, Vec c) {
#if WIDTH == 512
  return reinterpret_cast<Vec>(
      _mm512_fmadd_ps(reinterpret_cast<__m512>(a), reinterpret_cast<__m512>(b), reinterpret_cast<__m512>(c)));
#else
  alignas(64) float x[kLanes], y[kLanes], z[kLanes];
  store(x, a), store(y, b), store(z, c);
#if WIDTH == 256
  for (int i = 0; i < kLanes; i += 8)
    _mm256_store_ps(z + i, _mm256_fmadd_ps(_mm256_load_ps(x + i), _mm256_load_ps(y + i), _mm256_load_ps(z + i)));
#else
  for (int i = 0; i < kLanes; ++i) z[i] = __builtin_fmaf(x[i], y[i], z[i]);
#endif
  return load(z);
#endif
}

INLINE ByteRegister load_bytes(const uint8_t* from) {
  ByteRegister bytes;
  std::memcpy(&bytes, from, sizeof(bytes));
  return bytes;
}

}  // namespace ISA
}  // namespace
