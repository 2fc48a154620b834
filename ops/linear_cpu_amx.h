// The AMX micro kernel of linear_cpu.cpp, and the registers that it stands on: those of the CPU, or a model of them.
//
// A tile register holds 16 rows of 64 bytes. One instruction multiplies 16 rows of 32 activations by 32 x 16 weights and
// adds to 16 x 16 float32 sums. The packed weights are in the order of such tiles already: 16 pairs of rows, 16 columns.
//
// `SoftwareTiles` does the same in plain C++, so that this kernel, its packing and its tails are tested on any machine.

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace {

constexpr int64_t TILE_ROWS = 16, TILE_WORDS = 16;  // of 32 bits: pairs of bfloat16, or float32

// The CPU's tiles. A thread may use them between `begin` and `end`.
struct HardwareTiles {
  struct alignas(64) Config {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  };

  static void begin() {
    const Config config;
    asm volatile("ldtilecfg %0" ::"m"(config));
  }
  static void end() { asm volatile("tilerelease" ::); }

  template <int I>
  INLINE void zero() { asm volatile("tilezero %%tmm%c0" ::"i"(I)); }
  template <int I>
  INLINE void load(const void* from, int64_t stride) {  // bytes from row to row
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(I) : "memory");
  }
  template <int I>
  INLINE void store(void* to, int64_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(I) : "memory");
  }
  template <int SUMS, int A, int B>
  INLINE void multiply() { asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUMS), "i"(A), "i"(B)); }

  // Whether CPU and system have them. Linux gives a process the large registers only when it asks.
  static bool supported() {
    unsigned a, b, c, d;
    constexpr unsigned AMX_BF16 = 1u << 22, AMX_TILE = 1u << 24;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d & AMX_BF16) || !(d & AMX_TILE)) return false;
    constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
    return __builtin_cpu_supports("avx512f") && syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
  }
};

// The same operations by their definition (Intel's instruction set reference, TDPBF16PS): 16 products of even and 16 of
// odd elements are summed apart before both are added. For tests only.
struct SoftwareTiles {
  uint32_t tiles[8][TILE_ROWS][TILE_WORDS];

  static void begin() {}
  static void end() {}

  template <int I>
  void zero() { std::memset(tiles[I], 0, sizeof(tiles[I])); }
  template <int I>
  void load(const void* from, int64_t stride) {
    for (int row = 0; row < TILE_ROWS; ++row)
      std::memcpy(tiles[I][row], static_cast<const char*>(from) + row * stride, sizeof(tiles[I][row]));
  }
  template <int I>
  void store(void* to, int64_t stride) {
    for (int row = 0; row < TILE_ROWS; ++row)
      std::memcpy(static_cast<char*>(to) + row * stride, tiles[I][row], sizeof(tiles[I][row]));
  }
  template <int SUMS, int A, int B>
  void multiply() {
    const auto even = [](uint32_t pair) { return __builtin_bit_cast(float, pair << 16); };
    const auto odd = [](uint32_t pair) { return __builtin_bit_cast(float, pair & 0xffff0000u); };
    for (int row = 0; row < TILE_ROWS; ++row)
      for (int column = 0; column < TILE_WORDS; ++column) {
        float evens = 0, odds = 0;
        for (int p = 0; p < TILE_ROWS; ++p) {
          evens += even(tiles[A][row][p]) * even(tiles[B][p][column]);
          odds += odd(tiles[A][row][p]) * odd(tiles[B][p][column]);
        }
        uint32_t& sum = tiles[SUMS][row][column];
        sum = __builtin_bit_cast(uint32_t, __builtin_bit_cast(float, sum) + (evens + odds));
      }
  }
};

// R row tiles (1 or 2) by C column tiles (1 or 2).
//   x     [ceil(pairs / 16), R, 16 rows, 16 pairs]: zero where there is no row or no pair
//   w     [C, pairs, 16 columns], `w_stride` words from column tile to column tile
//   sums  [R * 16, C, 16]; not read if this is the `first` chunk
// `ahead` words behind each weight tile is what to fetch for later; 0 for nothing.
template <class Tiles, int R, int C>
INLINE void multiply_tiles(const uint32_t* x, const uint32_t* w, int64_t w_stride, int64_t pairs, float* sums,
                           bool first, int64_t ahead) {
  Tiles tiles;
  constexpr int64_t ROW = 64, SUMS_ROW = C * ROW;  // bytes
  float* below = sums + TILE_ROWS * C * TILE_WORDS;
  if (first) {
    tiles.template zero<0>();
    if constexpr (C > 1) tiles.template zero<1>();
    if constexpr (R > 1) tiles.template zero<2>();
    if constexpr (R > 1 && C > 1) tiles.template zero<3>();
  } else {
    tiles.template load<0>(sums, SUMS_ROW);
    if constexpr (C > 1) tiles.template load<1>(sums + TILE_WORDS, SUMS_ROW);
    if constexpr (R > 1) tiles.template load<2>(below, SUMS_ROW);
    if constexpr (R > 1 && C > 1) tiles.template load<3>(below + TILE_WORDS, SUMS_ROW);
  }
  const auto multiply_16_pairs = [&](const uint32_t* x_tiles, const uint32_t* w_tile, int64_t stride) __attribute__((always_inline)) {
    tiles.template load<4>(x_tiles, ROW);
    tiles.template load<6>(w_tile, ROW);
    tiles.template multiply<0, 4, 6>();
    if constexpr (C > 1) {
      tiles.template load<7>(w_tile + stride, ROW);
      tiles.template multiply<1, 4, 7>();
    }
    if constexpr (R > 1) {
      tiles.template load<5>(x_tiles + TILE_ROWS * TILE_WORDS, ROW);
      tiles.template multiply<2, 5, 6>();
    }
    if constexpr (R > 1 && C > 1) tiles.template multiply<3, 5, 7>();
  };
  int64_t p = 0;
  for (; p + TILE_ROWS <= pairs; p += TILE_ROWS) {
    if (ahead != 0)
      for (int c = 0; c < C; ++c)
        for (int row = 0; row < TILE_ROWS; ++row)
          __builtin_prefetch(w + c * w_stride + (p + row) * TILE_WORDS + ahead, 0, 2);
    multiply_16_pairs(x + p * R * TILE_ROWS, w + p * TILE_WORDS, w_stride);
  }
  if (p < pairs) {  // the last pairs of a K that is no multiple of 32, with zero weights behind them
    alignas(64) uint32_t tail[C][TILE_ROWS][TILE_WORDS] = {};
    for (int c = 0; c < C; ++c)
      std::memcpy(tail[c], w + c * w_stride + p * TILE_WORDS, (pairs - p) * sizeof(tail[c][0]));
    multiply_16_pairs(x + p * R * TILE_ROWS, tail[0][0], TILE_ROWS * TILE_WORDS);
  }
  tiles.template store<0>(sums, SUMS_ROW);
  if constexpr (C > 1) tiles.template store<1>(sums + TILE_WORDS, SUMS_ROW);
  if constexpr (R > 1) tiles.template store<2>(below, SUMS_ROW);
  if constexpr (R > 1 && C > 1) tiles.template store<3>(below + TILE_WORDS, SUMS_ROW);
}

}  // namespace
#endif
