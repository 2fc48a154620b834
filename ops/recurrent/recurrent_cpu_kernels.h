// The kernels of layers with a state of a fixed size, for one instruction set: compiled once for each by
// ../cpu/one_isa.cpp, which explains the macros.

#include "mamba2_cpu.h"

namespace {
namespace ISA {

template <class T>
constexpr RecurrentKernels recurrent_kernels() {
  return {convolution<T>, gated_delta<T>, mamba2<T>};
}

inline Kernels kernels() { return {recurrent_kernels<float>(), recurrent_kernels<BFloat16>(), recurrent_kernels<Half>()}; }

}  // namespace ISA
}  // namespace
