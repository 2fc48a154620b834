// The one switch between instruction sets: compiles an op's kernels for each of them, and chooses among them at run time.
// An op's .cpp file includes this once, after it has defined
//
//   KERNELS   the path, from this folder, of a header that defines `Kernels kernels()` in the namespace ISA; Kernels is
//             the op's own type
//   PRODUCTS  1 if there are versions for dot product instructions and for tile registers, too
//
// The header is included once for each set, with these macros. So it has no include guard, nor have the headers that it
// is built on, down to vectors.h; each includes the next one.
//
//   ISA     the namespace
//   TARGET  the attribute of every function
//   WIDTH   bits of the vector registers
//   DOT     whether there are instructions that multiply pairs of bfloat16, and groups of four bytes, and add them up
//   TILES   the tile registers, which multiply pairs of bfloat16; not defined where there are none

#pragma once

#include <c10/util/Exception.h>

#include <optional>
#include <string>
#include <vector>

#include "features.h"

#ifdef KERNELS
#define CHOOSES
#else  // this header by itself: it compiles the vectors
#define KERNELS "vectors.h"
#define PRODUCTS 1
#endif

#define ISA portable
#define TARGET
#define WIDTH 128
#define DOT 0
#include KERNELS
#undef ISA
#undef TARGET
#undef WIDTH

#if defined(__x86_64__)
#define ISA avx2
#define TARGET TARGET_AVX2
#define WIDTH 256
#include KERNELS
#undef ISA
#undef TARGET
#undef WIDTH

#define ISA avx512
#define TARGET TARGET_AVX512
#define WIDTH 512
#include KERNELS
#undef ISA
#undef TARGET
#undef DOT

#if PRODUCTS
#define ISA avx512_bf16
#define TARGET TARGET_AVX512_BF16
#define DOT 1
#include KERNELS
#undef ISA

#define ISA amx
#define TILES HardwareTiles
#include KERNELS
#undef ISA
#undef TILES

#define ISA amx_in_software
#define TILES SoftwareTiles
#include KERNELS
#endif  // PRODUCTS
#endif  // __x86_64__

#ifdef CHOOSES
namespace {

struct InstructionSet {
  const char* name;
  bool supported;  // by this CPU
  Kernels kernels;
};

// Best first; the last one is for tests.
const std::vector<InstructionSet>& instruction_sets() {
  static const std::vector<InstructionSet> sets = {
#if defined(__x86_64__) && PRODUCTS
      {"amx", features().amx, amx::kernels()},
      {"avx512_bf16", features().avx512_bf16, avx512_bf16::kernels()},
#endif
#if defined(__x86_64__)
      {"avx512", features().avx512, avx512::kernels()},
      {"avx2", features().avx2, avx2::kernels()},
#endif
      {"portable", true, portable::kernels()},
#if defined(__x86_64__) && PRODUCTS
      {"amx_in_software", features().avx512_bf16, amx_in_software::kernels()},
#endif
  };
  return sets;
}

using IsaName = std::optional<std::string>;  // none: the best set that this CPU has

const Kernels& chosen(const IsaName& isa, const char* op) {
  for (const InstructionSet& set : instruction_sets())
    if (set.supported && (!isa || *isa == set.name)) return set.kernels;
  TORCH_CHECK_VALUE(false, op, ": isa '", *isa, "' is unknown or not supported by this CPU");
}

std::vector<std::string> supported_isas() {
  std::vector<std::string> names;
  for (const InstructionSet& set : instruction_sets())
    if (set.supported) names.push_back(set.name);
  return names;
}

// An op, which takes the name of a set before its arguments, as callers have it: on the best set, and by a name at the end.
template <auto op>
struct Callable;
template <class Result, class... Args, Result (*op)(const IsaName&, Args...)>
struct Callable<op> {
  static Result on_best(Args... args) { return op(std::nullopt, args...); }
  static Result by_name(Args... args, const std::string& isa) { return op(isa, args...); }
};

}  // namespace
#endif
