// What kernels over rows of numbers share: a row as vectors, rounding, and functions with exponentials. Included once for
// each instruction set, see vectors.h.

#include <cmath>

#include "vectors.h"

namespace {
namespace ISA {

// The numbers as they are after they were stored as T.
template <class T>
INLINE Vec rounded(Vec x) {
  if constexpr (std::is_same_v<T, float>) {
    return x;
  } else if constexpr (std::is_same_v<T, BFloat16>) {
    return rounded_to_bf16(x);
  } else {
    T stored[kLanes];
    store_as(stored, x, kLanes);
    return load_floats(stored);
  }
}

// Calls visit(i, count) for each vector of a row of `size`: the `count` elements from i on. All but the last have 16.
template <class Visit>
INLINE void for_vectors(int64_t size, const Visit& visit) {
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) visit(i, kLanes);
  if (i < size) visit(i, size - i);
}

// 1 / (1 + exp(-x)), from the exponential of a number that is not positive.
INLINE Vec sigmoid(Vec x) {
  const Vec e = exp2((x > 0 ? -x : x) * kLog2E);
  return (x > 0 ? broadcast(1) : e) / (1 + e);
}

// e to the power of x; infinite above 87. Relative error 4e-7 for |x| up to 4, and as x * 1e-7 beyond.
INLINE Vec exponential(Vec x) {
  const Vec e = exp2((x > 0 ? -x : x) * kLog2E);
  return x > 0 ? 1 / e : e;
}

// log(1 + exp(x)). With e = exp(-|x|) it is max(x, 0) + log(1 + e), and log(1 + e) = 2 atanh(e / (2 + e)) by its series
// up to the power of 17, since the argument is at most 1/3. Relative error 5e-7.
INLINE Vec softplus(Vec x) {
  const Vec e = exp2((x > 0 ? -x : x) * kLog2E), z = e / (2 + e), square = z * z;
  Vec p = broadcast(1.f / 17);
  p = p * square + 1.f / 15;
  p = p * square + 1.f / 13;
  p = p * square + 1.f / 11;
  p = p * square + 1.f / 9;
  p = p * square + 1.f / 7;
  p = p * square + 1.f / 5;
  p = p * square + 1.f / 3;
  p = p * square + 1.f;
  return (x > 0 ? x : x == x ? Vec{} : x) + 2 * z * p;
}

}  // namespace ISA
}  // namespace
