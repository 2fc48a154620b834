// Tile registers of AMX, for the linear and attention kernels: those of the CPU, or a model of them.
//
// A tile register holds up to 16 rows of 64 bytes. One instruction multiplies 16 rows of 32 activations by 32 x 16 weights,
// which are stored as 16 rows of 16 pairs, and adds to 16 x 16 float32 sums. What it adds to a sum depends only on the row
// and the column of that sum. Another multiplies 16 rows of 64 signed bytes by 64 x 16 of them, stored as 16 rows of 16
// groups of four, and adds to 16 x 16 sums of 32 bits.
//
// `SoftwareTiles` does the same in plain C++, so that what is built on tiles is tested on machines without them, too.

#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

constexpr int64_t TILE_ROWS = 16, TILE_WORDS = 16;  // of 32 bits: pairs of bfloat16, or float32

#if defined(__x86_64__)
// The CPU's tiles. A thread may use them after `begin` and before `end`. Tiles 0 to 5, for sums and activations, have `rows`
// rows (1 to 16). Tiles 4 and 5, for activations, have `words` words (1 to 16) in a row, and tiles 6 and 7, for weights, as
// many rows.
struct HardwareTiles {
  struct alignas(64) Config {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  };

  static void begin(int64_t rows = TILE_ROWS, int64_t words = TILE_WORDS) {
    Config config;
    for (int i = 0; i < 6; ++i) config.rows[i] = static_cast<uint8_t>(rows);
    config.row_bytes[4] = config.row_bytes[5] = static_cast<uint16_t>(words * 4);
    config.rows[6] = config.rows[7] = static_cast<uint8_t>(words);
    asm volatile("ldtilecfg %0" ::"m"(config));
  }
  static void end() { asm volatile("tilerelease" ::); }

  template <int I>
  [[gnu::always_inline]] void zero() { asm volatile("tilezero %%tmm%c0" ::"i"(I)); }
  // `stride` bytes from row to row. ONCE: it is not needed again soon, and leaves the L1 cache to the rest.
  template <int I, bool ONCE = false>
  [[gnu::always_inline]] void load(const void* from, int64_t stride) {
    if constexpr (ONCE) asm volatile("tileloaddt1 (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(I) : "memory");
    else asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(I) : "memory");
  }
  template <int I>
  [[gnu::always_inline]] void store(void* to, int64_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(I) : "memory");
  }
  template <int SUMS, int A, int B>
  [[gnu::always_inline]] void multiply() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUMS), "i"(A), "i"(B));
  }
  template <int SUMS, int A, int B>
  [[gnu::always_inline]] void multiply_bytes() {
    asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUMS), "i"(A), "i"(B));
  }

  // Whether CPU and system have them, and products of float16, as all CPUs with tiles do. Linux gives a process the large registers only when it asks.
  static bool supported() {
    unsigned a, b, c, d;
    constexpr unsigned AMX_BF16 = 1u << 22, AVX512_FP16 = 1u << 23, AMX_TILE = 1u << 24;
    constexpr unsigned ALL = AMX_BF16 | AVX512_FP16 | AMX_TILE;
    constexpr unsigned AVX512_VBMI = 1u << 1;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & ALL) != ALL || !(c & AVX512_VBMI)) return false;
    constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
    return __builtin_cpu_supports("avx512f") && syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
  }
  // Whether those that are supported multiply bytes.
  static bool multiplies_bytes() {
    unsigned a, b, c, d;
    constexpr unsigned AMX_INT8 = 1u << 25;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & AMX_INT8);
  }
};
#endif

// The same operations by their definition (Intel's instruction set reference, TDPBF16PS and TDPBSSD): 16 products of even
// and 16 of odd elements are summed apart before both are added. For tests only.
struct SoftwareTiles {
  inline static thread_local int64_t configured = TILE_ROWS, configured_words = TILE_WORDS;
  uint32_t tiles[8][TILE_ROWS][TILE_WORDS];

  static void begin(int64_t rows = TILE_ROWS, int64_t words = TILE_WORDS) { configured = rows, configured_words = words; }
  static void end() {}
  static bool multiplies_bytes() { return true; }
  static int64_t rows_of(int tile) { return tile < 6 ? configured : configured_words; }
  static int64_t bytes_of(int tile) { return 4 * (tile == 4 || tile == 5 ? configured_words : TILE_WORDS); }

  template <int I>
  void zero() { std::memset(tiles[I], 0, sizeof(tiles[I])); }
  template <int I, bool ONCE = false>
  void load(const void* from, int64_t stride) {
    for (int64_t row = 0; row < rows_of(I); ++row)
      std::memcpy(tiles[I][row], static_cast<const char*>(from) + row * stride, bytes_of(I));
  }
  template <int I>
  void store(void* to, int64_t stride) {
    for (int64_t row = 0; row < rows_of(I); ++row)
      std::memcpy(static_cast<char*>(to) + row * stride, tiles[I][row], bytes_of(I));
  }
  template <int SUMS, int A, int B>
  void multiply() {
    const auto even = [](uint32_t pair) { return __builtin_bit_cast(float, pair << 16); };
    const auto odd = [](uint32_t pair) { return __builtin_bit_cast(float, pair & 0xffff0000u); };
    for (int64_t row = 0; row < rows_of(SUMS); ++row)
      for (int column = 0; column < TILE_WORDS; ++column) {
        float evens = 0, odds = 0;
        for (int p = 0; p < configured_words; ++p) {
          evens += even(tiles[A][row][p]) * even(tiles[B][p][column]);
          odds += odd(tiles[A][row][p]) * odd(tiles[B][p][column]);
        }
        uint32_t& sum = tiles[SUMS][row][column];
        sum = __builtin_bit_cast(uint32_t, __builtin_bit_cast(float, sum) + (evens + odds));
      }
  }
  template <int SUMS, int A, int B>
  void multiply_bytes() {
    const auto byte = [](uint32_t word, int i) { return static_cast<int32_t>(static_cast<int8_t>(word >> 8 * i)); };
    for (int64_t row = 0; row < rows_of(SUMS); ++row)
      for (int column = 0; column < TILE_WORDS; ++column)
        for (int p = 0; p < configured_words; ++p)
          for (int i = 0; i < 4; ++i)
            tiles[SUMS][row][column] += static_cast<uint32_t>(byte(tiles[A][row][p], i) * byte(tiles[B][p][column], i));
  }
};

}  // namespace
