// The kernels of one op for one instruction set, as a library of their own. ../native.py builds it with
//
//   KERNELS   the path, from this folder, of a header that defines `Kernels kernels()` in the namespace ISA; Kernels is
//             the op's own type
//   NAME      the set, and
//   LEVEL     its number below
//   BASE      the number of another set, whose kernels those of this one are added to; -1 for none
//
// The header is included for each of the two, with these macros. So it has no include guard, nor have the headers that it
// is built on, down to vectors.h; each includes the next one.
//
//   ISA     the namespace
//   TARGET  the attribute of every function
//   WIDTH   bits of the vector registers
//   DOT     whether there are instructions that multiply pairs of bfloat16, and groups of four bytes, and add them up
//   TILES   the tile registers, which multiply the same; not defined where there are none
//   HALVES  with TILES: whether there are instructions that multiply float16
//   NEON    on ARM 1 where there are instructions that multiply groups of four bytes, 2 where others multiply matrices of
//           bytes and of bfloat16, too; not defined where there are none

#include "features.h"

#define WANTED(level) (LEVEL == level || BASE == level)

#if WANTED(0)
#define ISA portable
#define TARGET
#define WIDTH 128
#define DOT 0
#include KERNELS
#undef ISA
#undef TARGET
#undef WIDTH
#undef DOT
#endif

#if WANTED(1)
#define ISA avx2
#define TARGET TARGET_AVX2
#define WIDTH 256
#define DOT 0
#include KERNELS
#undef ISA
#undef TARGET
#undef WIDTH
#undef DOT
#endif

#if WANTED(6)
#define ISA neon_dot
#define TARGET TARGET_NEON_DOT
#define NEON 1
#elif WANTED(7)
#define ISA neon_bf16
#define TARGET TARGET_NEON_BF16
#define NEON 2
#endif
#ifdef NEON
#define WIDTH 128
#define DOT 0
#include KERNELS
#undef ISA
#undef TARGET
#undef WIDTH
#undef DOT
#endif

#define WIDTH 512
#if WANTED(2)
#define ISA avx512
#define TARGET TARGET_AVX512
#define DOT 0
#include KERNELS
#undef ISA
#undef TARGET
#undef DOT
#endif

#define TARGET TARGET_AVX512_BF16
#define DOT 1
#if WANTED(3)
#define ISA avx512_bf16
#include KERNELS
#undef ISA
#endif

#if WANTED(4)
#define ISA amx
#define TILES HardwareTiles
#define HALVES 1
#include KERNELS
#undef ISA
#undef TILES
#undef HALVES
#endif

#if WANTED(5)
#define ISA amx_in_software
#define TILES SoftwareTiles
#define HALVES 0
#include KERNELS
#endif

extern "C" __attribute__((visibility("default"))) const void* kernels() {
  static const Kernels all = NAME::kernels();
  return &all;
}
