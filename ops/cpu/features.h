// The levels of instruction sets: the attribute of a function that is compiled for one, and whether this CPU has it.

#pragma once

#include "tiles.h"

#if defined(__x86_64__)
#define TARGET_AVX2 __attribute__((target("avx2,fma,f16c")))
#define TARGET_AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,fma,f16c")))
#define TARGET_AVX512_BF16 \
  __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vnni,fma,f16c")))
#endif

namespace {

struct Features {
  bool avx2 = false, avx512 = false, avx512_bf16 = false, amx = false;
};

inline const Features& features() {
  static const Features found = [] {
    Features has;
#if defined(__x86_64__)
    has.avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    has.avx512 = has.avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                 __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    has.avx512_bf16 = has.avx512 && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni");
    has.amx = has.avx512_bf16 && HardwareTiles::supported();
#endif
    return has;
  }();
  return found;
}

}  // namespace
