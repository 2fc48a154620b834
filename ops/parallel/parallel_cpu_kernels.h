// The kernels of sums over ranks for one instruction set: compiled once for each by ../cpu/one_isa.cpp, which explains the
// macros. An element's sum depends neither on its place nor on the others.

#include "../cpu/vectors.h"
#include "parallel_cpu_types.h"

namespace {
namespace ISA {

// Sums of 16 elements, one register at a time: GCC 12 passes wider vectors through memory.
template <class T>
INLINE void sum_lanes(const void* const* sources, int64_t count, int64_t i, T* to) {
  Vec sum = load_floats(static_cast<const T*>(sources[0]) + i);
  for (int64_t n = 1; n < count; ++n) {
    const Vec next = load_floats(static_cast<const T*>(sources[n]) + i);
    for (int j = 0; j < kPartsOfVec; ++j) {
      float* const part = reinterpret_cast<float*>(&sum) + j * kPartLanes;
      store_part(part, load_part(part) + load_part(reinterpret_cast<const float*>(&next) + j * kPartLanes));
    }
  }
  store_as(to + i, sum, kLanes);
}

template <class T>
TARGET void sum(const void* const* sources, int64_t count, void* to, int64_t size) {
  T* const out = static_cast<T*>(to);
  int64_t i = 0;
  if (count == 2)  // so that the loop over sources is unrolled
    for (; i + kLanes <= size; i += kLanes) sum_lanes<T>(sources, 2, i, out);
  for (; i + kLanes <= size; i += kLanes) sum_lanes<T>(sources, count, i, out);
  for (; i < size; ++i) {
    float total = static_cast<const T*>(sources[0])[i];
    for (int64_t n = 1; n < count; ++n) total += static_cast<const T*>(sources[n])[i];
    out[i] = static_cast<T>(total);
  }
}

template <int COUNT>
INLINE Part tree_of_parts(const void* const* sources, int64_t i) {
  if constexpr (COUNT == 1) return load_part(static_cast<const float*>(sources[0]) + i);
  else return tree_of_parts<COUNT / 2>(sources, i) + tree_of_parts<COUNT / 2>(sources + COUNT / 2, i);
}

template <int COUNT>
INLINE float tree(const void* const* sources, int64_t i) {
  if constexpr (COUNT == 1) return static_cast<const float*>(sources[0])[i];
  else return tree<COUNT / 2>(sources, i) + tree<COUNT / 2>(sources + COUNT / 2, i);
}

template <class T, int COUNT>
INLINE void join_all(const void* const* sources, T* to, int64_t size) {
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    Vec sum;
    for (int j = 0; j < kPartsOfVec; ++j)
      store_part(reinterpret_cast<float*>(&sum) + j * kPartLanes, tree_of_parts<COUNT>(sources, i + j * kPartLanes));
    store_as(to + i, sum, kLanes);
  }
  for (; i < size; ++i) to[i] = static_cast<T>(tree<COUNT>(sources, i));
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
