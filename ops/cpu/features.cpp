// Which instruction sets this CPU has, for ../native.py, which chooses among them. Built with nothing of torch.

#include "features.h"

#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

// The number of the best one in kernel_build.levels(); each has those below. Where it is AMX, this process may use it.
extern "C" __attribute__((visibility("default"))) int best_level() {
#if defined(__x86_64__)
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !__builtin_cpu_supports("f16c")) return 0;
  if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
      !__builtin_cpu_supports("avx512vl") || !__builtin_cpu_supports("avx512dq"))
    return 1;
  if (!__builtin_cpu_supports("avx512bf16") || !__builtin_cpu_supports("avx512vnni")) return 2;
  return HardwareTiles::supported() ? 4 : 3;
#elif defined(__aarch64__) && defined(__linux__)
  constexpr unsigned long DOT = 1ul << 20, I8MM = 1ul << 13, BF16 = 1ul << 14;  // as Linux numbers them
  const unsigned long more = getauxval(AT_HWCAP2);
  if (!(getauxval(AT_HWCAP) & DOT)) return 0;
  return (more & I8MM) && (more & BF16) ? 2 : 1;
#else
  return 0;
#endif
}
