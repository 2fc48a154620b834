// The levels of instruction sets: the attribute of a function that is compiled for one.

#pragma once

#include "tiles.h"

#if defined(__x86_64__)
#define TARGET_AVX2 __attribute__((target("avx2,fma,f16c")))
#define TARGET_AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,fma,f16c")))
#define TARGET_AVX512_BF16 \
  __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vnni,fma,f16c")))
#elif defined(__aarch64__)
#define TARGET_NEON_DOT __attribute__((target("arch=armv8.2-a+dotprod")))
#define TARGET_NEON_BF16 __attribute__((target("arch=armv8.2-a+dotprod+bf16+i8mm")))
#endif
