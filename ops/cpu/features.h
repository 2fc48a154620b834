// The levels of instruction sets: the attribute of a function that is compiled for one, and whether this CPU has it.
//
// The environment variable COMPILED_LLM_ISA names the best level that may be used (amx, avx512_bf16, avx512, avx2,
// portable), for checks and comparisons: the CPU then counts as one that has no better.

#pragma once

#include <c10/util/Exception.h>

#include <cstdlib>
#include <iterator>
#include <string>

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

// The number of the best level that may be used; 0 is portable.
inline int most_level() {
  const char* const levels[] = {"portable", "avx2", "avx512", "avx512_bf16", "amx"};
  const int last = static_cast<int>(std::size(levels)) - 1;
  const char* asked = std::getenv("COMPILED_LLM_ISA");
  if (asked == nullptr) return last;
  for (int level = 0; level <= last; ++level)
    if (std::string(asked) == levels[level]) return level;
  TORCH_CHECK_VALUE(false, "COMPILED_LLM_ISA must be amx, avx512_bf16, avx512, avx2 or portable, given '", asked, "'");
}

inline const Features& features() {
  static const Features found = [] {
    Features has;
    [[maybe_unused]] const int most = most_level();
#if defined(__x86_64__)
    has.avx2 = most >= 1 && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
               __builtin_cpu_supports("f16c");
    has.avx512 = most >= 2 && has.avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                 __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    has.avx512_bf16 = most >= 3 && has.avx512 && __builtin_cpu_supports("avx512bf16") &&
                      __builtin_cpu_supports("avx512vnni");
    has.amx = most >= 4 && has.avx512_bf16 && HardwareTiles::supported();
#endif
    return has;
  }();
  return found;
}

}  // namespace
