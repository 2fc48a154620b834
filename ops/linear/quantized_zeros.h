// Zero points of quantised weights that are kept in a byte, as the kernels of both ops read them.

#include "../cpu/vectors.h"

namespace {
namespace ISA {

// 16 of them as floats. GCC takes one step from bytes to integers of 32 bits an element at a time.
INLINE Vec load_zeros(const int8_t* from) {
#if WIDTH == 512
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return reinterpret_cast<Vec>(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes)));
#else
  typedef int8_t Bytes __attribute__((vector_size(kLanes), aligned(1), may_alias));
  typedef int16_t Shorts __attribute__((vector_size(2 * kLanes)));
  const auto shorts = __builtin_convertvector(*reinterpret_cast<const Bytes*>(from), Shorts);
  return convert(__builtin_convertvector(shorts, IntVec));
#endif
}

}  // namespace ISA
}  // namespace
