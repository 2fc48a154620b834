// The limits of a CPU, for compiled_llm/report/machine_limits.py: how fast memory can be read, and how many floating-point
// operations a second its best multiply-add instruction does. Loops that do nothing else, on all threads at once.
// Without torch's headers, which take half a minute to compile.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <chrono>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "cpu/features.h"

#if defined(__x86_64__)
#include <immintrin.h>
#define ANY_VECTOR "+x"  // for the assembler: a vector register
#else
#define ANY_VECTOR "+w"
#endif

namespace py = pybind11;

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

// Seconds to read an array of one dimension once, each of `threads` threads a run of its own.
double read_seconds(const py::buffer& array, int threads) {
  const py::buffer_info info = array.request();
  if (info.ndim != 1 || info.strides[0] != info.itemsize)
    throw py::value_error("read_seconds: array must have one dimension and be contiguous");
  if (reinterpret_cast<uintptr_t>(info.ptr) % sizeof(Line) != 0)
    throw py::value_error("read_seconds: array must begin at a multiple of 64 bytes");
  const auto* lines = static_cast<const Line*>(info.ptr);
  const int64_t count = info.size * info.itemsize / static_cast<int64_t>(sizeof(Line));
  auto* sum = sum_portable;
#if defined(__x86_64__)
  if (features().avx2) sum = sum_avx2;
  if (features().avx512) sum = sum_avx512;
#endif
  const py::gil_scoped_release release;
  const double started = now();
#pragma omp parallel for num_threads(threads) schedule(static, 1)
  for (int thread = 0; thread < threads; ++thread) {
    const int64_t begin = count * thread / threads, end = count * (thread + 1) / threads;
    volatile uint64_t keep = sum(lines + begin, end - begin);
    (void)keep;
  }
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
  const char* name;
  bool bfloat16;  // whether it multiplies bfloat16; else float32
  bool supported;
  double flops;  // of a round
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

// Best first.
const std::vector<Peak>& all_peaks() {
  static const std::vector<Peak> all = {
#if defined(__x86_64__)
      {"amx", true, features().amx, 4.0 * 2 * 16 * 16 * 32, loop_amx},
      {"avx512_bf16", true, features().avx512_bf16, 2.0 * CHAINS * 2 * 32, loop_avx512_bf16},
      {"avx512", false, features().avx512, 2.0 * CHAINS * 2 * 16, loop_avx512},
      {"avx2", false, features().avx2, 1.0 * CHAINS * 2 * 8, loop_avx2},
#endif
      {"portable", false, true, 1.0 * CHAINS * 2 * 4, loop_portable},
  };
  return all;
}

std::vector<std::string> supported(bool bfloat16) {
  std::vector<std::string> names;
  for (const Peak& peak : all_peaks())
    if (peak.supported && (bfloat16 || !peak.bfloat16)) names.push_back(peak.name);
  return names;
}

// (operations, seconds) of `rounds` rounds of the instruction `name` on each of `threads` threads.
std::pair<double, double> run_peak(const std::string& name, int64_t rounds, int threads) {
  for (const Peak& peak : all_peaks()) {
    if (!peak.supported || name != peak.name) continue;
    const double started = now();
#pragma omp parallel for num_threads(threads) schedule(static, 1)
    for (int thread = 0; thread < threads; ++thread) peak.loop(rounds);
    return {peak.flops * double(rounds) * double(threads), now() - started};
  }
  throw py::value_error("run_peak: instruction '" + name + "' is unknown or not supported by this CPU");
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("read_seconds", &read_seconds, py::arg("array"), py::arg("threads"));
  m.def("run_peak", &run_peak, py::arg("name"), py::arg("rounds"), py::arg("threads"),
        py::call_guard<py::gil_scoped_release>());
  m.def("supported", &supported, py::arg("bfloat16"), "Names for run_peak, best first.");
}
