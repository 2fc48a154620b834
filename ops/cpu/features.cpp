// Which instruction sets this CPU has, for ../native.py, which chooses among them. Built with nothing of torch.

#include "features.h"

// The number of the best level, as in one_isa.cpp; each has those below. Where it is AMX, this process may use it.
extern "C" __attribute__((visibility("default"))) int best_level() {
#if defined(__x86_64__)
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !__builtin_cpu_supports("f16c")) return 0;
  if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
      !__builtin_cpu_supports("avx512vl") || !__builtin_cpu_supports("avx512dq"))
    return 1;
  if (!__builtin_cpu_supports("avx512bf16") || !__builtin_cpu_supports("avx512vnni")) return 2;
  return HardwareTiles::supported() ? 4 : 3;
#else
  return 0;
#endif
}
