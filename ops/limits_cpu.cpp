// The limits of a CPU, for compiled_llm/report/machine_limits.py: how fast memory can be read, and how many floating-point
// operations a second its best multiply-add instruction does. Loops that do nothing else, on all threads at once.
// Each is named by an instruction set that the CPU must have.

#include <chrono>
#include <cstdint>
#include <string_view>

#include "cpu/features.h"
#include "cpu/tensor.h"

#if defined(__x86_64__)
#include <immintrin.h>
#define ANY_VECTOR "+x"  // for the assembler: a vector register
#else
#if defined(__aarch64__)
#include <arm_neon.h>
#endif
#define ANY_VECTOR "+w"
#endif

namespace {

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

typedef uint64_t Line __attribute__((vector_size(64)));

// Sums in eight chains, so that the additions never wait for one another.
[[gnu::always_inline]] inline uint64_t sum_lines(const Line* lines, int64_t count) {
  Line sums[8] = {};
  for (int64_t i = 0; i + 8 <= count; i += 8)
    for (int j = 0; j < 8; ++j) sums[j] += lines[i + j];
  for (int j = 1; j < 8; ++j) sums[0] += sums[j];
  uint64_t sum = 0;
  for (int j = 0; j < 8; ++j) sum += sums[0][j];
  return sum;
}

uint64_t sum_portable(const Line* lines, int64_t count) { return sum_lines(lines, count); }
#if defined(__x86_64__)
TARGET_AVX2 uint64_t sum_avx2(const Line* lines, int64_t count) { return sum_lines(lines, count); }
TARGET_AVX512 uint64_t sum_avx512(const Line* lines, int64_t count) { return sum_lines(lines, count); }
#endif

// work(thread) on each of `threads` threads. Seconds.
template <class Work>
double on_threads(int64_t threads, const Work& work) {
  const double started = now();
  parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t thread = begin; thread < end; ++thread) work(thread);
  });
  return now() - started;
}

// A loop of `rounds` times CHAINS independent multiply-adds; gives the operations of a round.
using Loop = void (*)(int64_t rounds);
constexpr int CHAINS = 12;  // more than latency times instructions in a cycle, fewer than registers

template <class Vector>
[[gnu::always_inline]] inline void multiply_add(int64_t rounds) {
  Vector sums[CHAINS] = {}, a = {}, b = {};
  asm volatile("" : ANY_VECTOR(a), ANY_VECTOR(b));
  for (int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 16
    for (int j = 0; j < CHAINS; ++j) {
      sums[j] += a * b;
      asm volatile("" : ANY_VECTOR(sums[j]));
    }
  }
}

struct Peak {
  std::string_view isa;
  double operations;  // of a round
  Loop loop;
};

typedef float F4 __attribute__((vector_size(16)));
void loop_portable(int64_t rounds) { multiply_add<F4>(rounds); }

#if defined(__x86_64__)
typedef float F8 __attribute__((vector_size(32)));
TARGET_AVX2 void loop_avx2(int64_t rounds) { multiply_add<F8>(rounds); }

TARGET_AVX512 void loop_avx512(int64_t rounds) {
  __m512 sums[2 * CHAINS] = {}, a = {}, b = {};
  asm volatile("" : "+v"(a), "+v"(b));
  for (int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 32
    for (int j = 0; j < 2 * CHAINS; ++j) asm volatile("vfmadd231ps %1, %2, %0" : "+v"(sums[j]) : "v"(a), "v"(b));
  }
}

TARGET_AVX512_BF16 void loop_avx512_bf16(int64_t rounds) {
  __m512 sums[2 * CHAINS] = {}, a = {}, b = {};
  asm volatile("" : "+v"(a), "+v"(b));
  for (int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 32
    for (int j = 0; j < 2 * CHAINS; ++j) asm volatile("vdpbf16ps %1, %2, %0" : "+v"(sums[j]) : "v"(a), "v"(b));
  }
}

// Tiles of 16 rows of 64 bytes. Four sums, as a matrix product holds them, and four operands that stay.
void loop_amx(int64_t rounds) {
  HardwareTiles::begin();
  asm volatile("tilezero %tmm0; tilezero %tmm1; tilezero %tmm2; tilezero %tmm3");
  asm volatile("tilezero %tmm4; tilezero %tmm5; tilezero %tmm6; tilezero %tmm7");
  for (int64_t round = 0; round < rounds; ++round) {
    asm volatile("tdpbf16ps %tmm6, %tmm4, %tmm0; tdpbf16ps %tmm7, %tmm4, %tmm1");
    asm volatile("tdpbf16ps %tmm6, %tmm5, %tmm2; tdpbf16ps %tmm7, %tmm5, %tmm3");
  }
  HardwareTiles::end();
}
#endif

#if defined(__aarch64__)
TARGET_NEON_BF16 void loop_neon_bf16(int64_t rounds) {
  float32x4_t sums[CHAINS] = {};
  bfloat16x8_t a = {}, b = {};
  asm volatile("" : "+w"(a), "+w"(b));
  for (int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 16
    for (int j = 0; j < CHAINS; ++j) asm volatile("bfmmla %0.4s, %1.8h, %2.8h" : "+w"(sums[j]) : "w"(a), "w"(b));
  }
}
#endif

constexpr Peak kPeaks[] = {
#if defined(__x86_64__)
    {"amx", 4.0 * 2 * 16 * 16 * 32, loop_amx},
    {"avx512_bf16", 2.0 * CHAINS * 2 * 32, loop_avx512_bf16},
    {"avx512", 2.0 * CHAINS * 2 * 16, loop_avx512},
    {"avx2", 1.0 * CHAINS * 2 * 8, loop_avx2},
#elif defined(__aarch64__)
    {"neon_bf16", 1.0 * CHAINS * 2 * 16, loop_neon_bf16},
    {"neon_dot", 1.0 * CHAINS * 2 * 4, loop_portable},
#endif
    {"portable", 1.0 * CHAINS * 2 * 4, loop_portable},
};

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

// Seconds to read `bytes` from an address that is a multiple of 64, each of `threads` threads a run of its own.
EXPORT double read_seconds(const char* isa, const void* data, int64_t bytes, int64_t threads) {
  const auto* lines = static_cast<const Line*>(data);
  const int64_t count = bytes / static_cast<int64_t>(sizeof(Line));
  auto* sum = sum_portable;
#if defined(__x86_64__)
  const std::string_view name = isa;
  if (name != "portable") sum = name == "avx2" ? sum_avx2 : sum_avx512;
#endif
  return on_threads(threads, [&](int64_t thread) {
    const int64_t begin = count * thread / threads, end = count * (thread + 1) / threads;
    volatile uint64_t keep = sum(lines + begin, end - begin);
    (void)keep;
  });
}

// Seconds for `rounds` rounds on each of `threads` threads, and their operations.
EXPORT double run_peak(const char* isa, int64_t rounds, int64_t threads, double* operations) {
  for (const Peak& peak : kPeaks) {
    if (peak.isa != isa) continue;
    *operations = peak.operations * double(rounds) * double(threads);
    return on_threads(threads, [&](int64_t) { peak.loop(rounds); });
  }
  return 0;
}
