// Compresses rows of bfloat16 weights, as a model is loaded: compressed_linear.py has the layout.

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "every_cpu.h"

namespace {

constexpr int64_t TILE = 16, GROUP = 4 * TILE, WORD_BYTES = 192, SUBSETS = 8, OUTPUTS = 8;
constexpr int64_t SAMPLES = 512;  // inputs of an output that are counted, about
constexpr uint8_t NONE = 0xff;    // no code of an upper byte
constexpr int32_t END = 0x7fffffff;

typedef uint16_t u16 __attribute__((vector_size(32)));
typedef uint8_t u8 __attribute__((vector_size(16)));

// The 16 most frequent upper bytes of 8 rows of K weights, and the code of each byte that has one.
INLINE void choose(const uint16_t* const (&rows)[OUTPUTS], int64_t K, uint8_t* table, uint8_t (&code_of)[256]) {
  uint32_t counts[2][256] = {};
  const int64_t step = std::max<int64_t>(1, K / SAMPLES);
  for (int64_t i = 0; i < OUTPUTS; i += 2)
    for (int64_t k = 0; k < K; k += step) {
      ++counts[0][rows[i][k] >> 8];
      ++counts[1][rows[i + 1][k] >> 8];
    }
  if (K % 2 != 0) counts[0][0] = 1 << 20;  // of the inputs past K
  uint32_t keys[256];  // the larger, the more frequent; equally frequent ones from the largest on
  for (int byte = 0; byte < 256; ++byte) keys[byte] = (counts[0][byte] + counts[1][byte]) << 8 | byte;
  std::partial_sort(keys, keys + 16, keys + 256, [](uint32_t a, uint32_t b) { return a > b; });
  std::memset(code_of, NONE, sizeof code_of);
  for (int code = 0; code < 16; ++code) code_of[table[code] = static_cast<uint8_t>(keys[code])] = code;
}

// `rows` of them [K], the first ones of a group; the others are zeros. Returns how many exceptions there are: if they are
// `room` or more, too few of them are in `exceptions`, and no END.
FOR_EACH_CPU int64_t compress(const uint16_t* from, int64_t rows, int64_t K, uint8_t* words, uint8_t* tables,
                              int32_t* exceptions, int64_t room, const uint16_t* zeros) {
  int64_t count = 0;
  const int64_t length = (K + 1) / 2;
  for (int64_t subset = 0; subset < SUBSETS; ++subset) {
    const int64_t half = subset / 4, lane = subset % 4, first = half * 64 + lane * 16;
    const uint16_t* of[OUTPUTS];
    for (int64_t i = 0; i < OUTPUTS; ++i) {
      const int64_t row = (half * 2 + i / 4) * TILE + lane * 4 + i % 4;
      of[i] = row < rows ? from + row * K : zeros;
    }
    uint8_t code_of[256];
    choose(of, K, tables + first, code_of);
    for (int64_t p = 0; p < length; ++p) {
      u16 weights;
      uint32_t pairs[OUTPUTS];
      if (2 * p + 1 < K)
        for (int64_t i = 0; i < OUTPUTS; ++i) std::memcpy(&pairs[i], of[i] + 2 * p, sizeof pairs[i]);
      else
        for (int64_t i = 0; i < OUTPUTS; ++i) pairs[i] = of[i][2 * p];
      std::memcpy(&weights, pairs, sizeof weights);
      const u8 lower = __builtin_convertvector(weights & 0xff, u8), upper = __builtin_convertvector(weights >> 8, u8);
      u8 codes;
      for (int i = 0; i < 16; ++i) codes[i] = code_of[upper[i]];
      uint8_t* const word = words + p * WORD_BYTES + lane * 16;
      std::memcpy(word + half * 64, &lower, sizeof lower);
      u8 is_none = codes == NONE ? u8{} + 1 : u8{};
      uint64_t any[2];
      std::memcpy(any, &is_none, sizeof any);
      if ((any[0] | any[1]) != 0) [[unlikely]]
        for (int i = 0; i < 16; ++i)
          if (codes[i] == NONE) {
            codes[i] = 0;
            if (count++ < room) exceptions[count - 1] = static_cast<int32_t>((p * 128 + first + i) << 8 | upper[i]);
          }
      u8 both = codes;
      if (half == 1) {
        std::memcpy(&both, word + 128, sizeof both);
        both |= codes << 4;
      }
      std::memcpy(word + 128, &both, sizeof both);
    }
  }
  if (count < room) {
    std::sort(exceptions, exceptions + count);
    exceptions[count] = END;
  }
  return count;
}

}  // namespace

extern "C" __attribute__((visibility("default"))) int64_t compress_group(const uint16_t* from, int64_t rows, int64_t K,
                                                                         uint8_t* words, uint8_t* tables,
                                                                         int32_t* exceptions, int64_t room,
                                                                         const uint16_t* zeros) {
  return compress(from, rows, K, words, tables, exceptions, room, zeros);
}
