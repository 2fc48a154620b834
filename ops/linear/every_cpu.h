// For libraries that are built once and choose by themselves what the CPU has: plain loops, in several versions each.

#pragma once

#if defined(__x86_64__)
#define FOR_EACH_CPU __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define FOR_EACH_CPU
#endif
#define INLINE inline __attribute__((always_inline))
