// Quantises rows of a weight matrix into the layout of quantized_weight.py, as pack_cpu.cpp packs those that stay.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "every_cpu.h"
#include "pack_words.h"

namespace {

INLINE float widened(float x) { return x; }
INLINE float widened(uint16_t bfloat16) { return __builtin_bit_cast(float, uint32_t{bfloat16} << 16); }

// largest[g] = max |row[k]| of group g. NaN is larger than all.
template <class T>
INLINE void find_largest(const T* row, int64_t inputs, int64_t group, float* largest) {
  for (int64_t first = 0; first < inputs; first += group) {
    uint32_t most = 0;
    for (int64_t k = first; k < std::min(inputs, first + group); ++k)
      most = std::max(most, __builtin_bit_cast(uint32_t, widened(row[k])) & 0x7fffffffu);
    *largest++ = __builtin_bit_cast(float, most);
  }
}

// codes[k] = round(row[k] / scales[k / group]), halves to even, from `least` to `most`, plus `offset`. What is no number is 0.
template <class T>
INLINE void round_row(const T* row, int64_t inputs, int64_t group, const float* scales, float least, float most,
                      int32_t offset, int8_t* codes) {
  constexpr float MAGIC = 12582912.f;  // 1.5 * 2^23: adding it rounds to an integer, in the low bits
  for (int64_t first = 0; first < inputs; first += group) {
    const float scale = *scales++;
    for (int64_t k = first; k < std::min(inputs, first + group); ++k) {
      float x = widened(row[k]) / scale;
      x = x > most ? most : x;
      x = x < least ? least : x;
      x += MAGIC;
      codes[k] = static_cast<int8_t>(__builtin_bit_cast(int32_t, x) - __builtin_bit_cast(int32_t, MAGIC) + offset);
    }
  }
}

FOR_EACH_CPU void find_largest_of(const float* row, int64_t inputs, int64_t group, float* largest) {
  find_largest(row, inputs, group, largest);
}
FOR_EACH_CPU void find_largest_of(const uint16_t* row, int64_t inputs, int64_t group, float* largest) {
  find_largest(row, inputs, group, largest);
}
FOR_EACH_CPU void round_row_of(const float* row, int64_t inputs, int64_t group, const float* scales, float least, float most,
                               int32_t offset, int8_t* codes) {
  round_row(row, inputs, group, scales, least, most, offset, codes);
}
FOR_EACH_CPU void round_row_of(const uint16_t* row, int64_t inputs, int64_t group, const float* scales, float least,
                               float most, int32_t offset, int8_t* codes) {
  round_row(row, inputs, group, scales, least, most, offset, codes);
}

// Eight codes to a word: four in the low halves of its bytes, four in the high ones.
void join_halves(const int8_t* codes, int64_t words, uint32_t* to) {
  for (int64_t p = 0; p < words; ++p) {
    uint32_t halves[2];
    std::memcpy(halves, codes + p * 8, sizeof halves);
    to[p] = halves[0] | halves[1] << 4;
  }
}

template <class T>
void quantize_rows(const T* from, int64_t rows, int64_t inputs, int64_t group, int64_t bits, const float* scales,
                   int64_t first, uint32_t* to) {
  const int64_t groups = (inputs + group - 1) / group, in_word = 32 / bits, words = (inputs + in_word - 1) / in_word;
  const int32_t offset = bits == 4 ? 8 : 0;
  std::vector<int8_t> codes(words * in_word, static_cast<int8_t>(offset));  // inputs past the last are 0
  std::vector<uint32_t> packed(TILE * words);
  for (int64_t row = 0; row < rows;) {
    const int64_t count = std::min(TILE - (first + row) % TILE, rows - row);
    for (int64_t j = 0; j < count; ++j) {
      const int64_t at = row + j;
      round_row_of(from + at * inputs, inputs, group, scales + at * groups, bits == 4 ? -8.f : -127.f, bits == 4 ? 7.f : 127.f,
                   offset, codes.data());
      if (bits == 4) join_halves(codes.data(), words, packed.data() + j * words);
      else std::memcpy(packed.data() + j * words, codes.data(), words * sizeof(uint32_t));
    }
    pack(packed.data(), count, words, first + row, to);
    row += count;
  }
}

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

// The largest absolute values of groups, [rows, groups]; then the codes under their scales, 4 or 8 bits.
#define QUANTIZING(NAME, T)                                                                                              \
  EXPORT void largest_##NAME(const T* from, int64_t rows, int64_t inputs, int64_t group, float* largest) {              \
    const int64_t groups = (inputs + group - 1) / group;                                                                 \
    for (int64_t row = 0; row < rows; ++row) find_largest_of(from + row * inputs, inputs, group, largest + row * groups); \
  }                                                                                                                      \
  EXPORT void quantize_##NAME(const T* from, int64_t rows, int64_t inputs, int64_t group, int64_t bits,                 \
                              const float* scales, int64_t first, uint32_t* to) {                                       \
    quantize_rows(from, rows, inputs, group, bits, scales, first, to);                                                   \
  }

QUANTIZING(float32, float)
QUANTIZING(bfloat16, uint16_t)
