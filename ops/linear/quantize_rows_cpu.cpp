// Quantises rows of a weight matrix into the layout of quantized_weight.py, as pack_cpu.cpp packs those that stay.

#include <algorithm>
#include <cmath>
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

constexpr float MAGIC = 12582912.f;  // 1.5 * 2^23: adding it rounds to an integer, in the low bits

// codes[k] = round(row[k] / scales[g] + zeros[g]), g = k / group, halves to even, from `least` to `most`, plus `offset`.
// `zeros` may be null. What is no number is 0.
template <class T>
INLINE void round_row(const T* row, int64_t inputs, int64_t group, const float* scales, const float* zeros, float least,
                      float most, int32_t offset, int8_t* codes) {
  for (int64_t first = 0; first < inputs; first += group) {
    const float scale = *scales++, zero = zeros == nullptr ? 0.f : *zeros++;
    for (int64_t k = first; k < std::min(inputs, first + group); ++k) {
      float x = widened(row[k]) / scale + zero;
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
FOR_EACH_CPU void round_row_of(const float* row, int64_t inputs, int64_t group, const float* scales, const float* zeros,
                               float least, float most, int32_t offset, int8_t* codes) {
  round_row(row, inputs, group, scales, zeros, least, most, offset, codes);
}
FOR_EACH_CPU void round_row_of(const uint16_t* row, int64_t inputs, int64_t group, const float* scales,
                               const float* zeros, float least, float most, int32_t offset, int8_t* codes) {
  round_row(row, inputs, group, scales, zeros, least, most, offset, codes);
}

// Elements that are floating-point numbers: the nearest one to a number, halves to the one of even code; and its code.
struct Fp4 {
  static INLINE float nearest(float x) {
    const float size = std::fabs(x) > 6.f ? 6.f : std::fabs(x);
    const float in_halves = size * 2.f + MAGIC - MAGIC, in_ones = size + MAGIC - MAGIC;
    const float in_twos = size * 0.5f + MAGIC - MAGIC;
    return std::copysign(size < 2.f ? in_halves * 0.5f : size < 4.f ? in_ones : in_twos * 2.f, x);
  }
  static INLINE int8_t code(float x) {
    const int32_t halves = static_cast<int32_t>(std::fabs(x) * 2.f);
    const int32_t size = halves <= 4 ? halves : 4 + (halves >= 6) + (halves >= 8) + (halves >= 12);
    return static_cast<int8_t>(size | (std::signbit(x) ? 8 : 0));
  }
};

struct Fp8 {
  static constexpr float LEAST = 1.f / 64, TO_STEPS = 24576.f;  // of numbers with 3 bits behind the first; of 2^-9
  static INLINE float nearest(float x) {
    const float size = std::fabs(x) > 448.f ? 448.f : std::fabs(x);
    const uint32_t bits = __builtin_bit_cast(uint32_t, size);
    const float rounded = __builtin_bit_cast(float, (bits + 0x7ffffu + (bits >> 20 & 1)) & ~0xfffffu);
    return std::copysign(size < LEAST ? size + TO_STEPS - TO_STEPS : rounded, x);
  }
  static INLINE int8_t code(float x) {
    const float size = std::fabs(x);
    const uint32_t bits = __builtin_bit_cast(uint32_t, size);
    const uint32_t code = size < LEAST ? static_cast<uint32_t>(static_cast<int32_t>(size * 512.f)) : (bits >> 20) - (120 << 3);
    return static_cast<int8_t>(code | (std::signbit(x) ? 128u : 0u));
  }
};

template <class Element, class T>
INLINE void round_floats(const T* row, int64_t inputs, int64_t group, const float* scales, int8_t* codes) {
  for (int64_t first = 0; first < inputs; first += group, ++scales)
    for (int64_t k = first; k < std::min(inputs, first + group); ++k)
      codes[k] = Element::code(Element::nearest(widened(row[k]) / *scales));
}

// The scale of each group, of `count` that `candidates` [groups, count] has, with the least squared error.
template <class Element, class T>
INLINE void choose_scales(const T* row, int64_t inputs, int64_t group, const float* candidates, int64_t count,
                          float* scales) {
  constexpr int64_t AT_ONCE = 16;
  for (int64_t first = 0; first < inputs; first += group, candidates += count) {
    const int64_t end = std::min(inputs, first + group);
    double least = INFINITY;
    for (int64_t i = 0; i < count; ++i) {
      const float scale = candidates[i];
      double sums[AT_ONCE] = {}, error = 0;
      const auto off = [&](int64_t k) __attribute__((always_inline)) {
        const float x = widened(row[k]);
        return Element::nearest(x / scale) * scale - x;
      };
      int64_t k = first;
      for (; k + AT_ONCE <= end; k += AT_ONCE)
        for (int64_t j = 0; j < AT_ONCE; ++j) {
          const double one = off(k + j);
          sums[j] += one * one;
        }
      for (; k < end; ++k) error += static_cast<double>(off(k)) * off(k);
      for (const double sum : sums) error += sum;
      if (error < least) least = error, *scales = scale;
    }
    ++scales;
  }
}

#define FOR_FLOATS(ELEMENT, T)                                                                                           \
  FOR_EACH_CPU void round_##ELEMENT(const T* row, int64_t inputs, int64_t group, const float* scales, int8_t* codes) {   \
    round_floats<ELEMENT>(row, inputs, group, scales, codes);                                                            \
  }                                                                                                                      \
  FOR_EACH_CPU void choose_##ELEMENT(const T* row, int64_t inputs, int64_t group, const float* candidates,              \
                                     int64_t count, float* scales) {                                                     \
    choose_scales<ELEMENT>(row, inputs, group, candidates, count, scales);                                               \
  }
FOR_FLOATS(Fp4, float)
FOR_FLOATS(Fp4, uint16_t)
FOR_FLOATS(Fp8, float)
FOR_FLOATS(Fp8, uint16_t)

// -- Scales and zero points of 4 bits that are fitted, as `searched_scales.py` has them; 16 groups at once

constexpr int LANES = 16;
constexpr float LARGEST_ZERO = 1024.f;
typedef float Vec __attribute__((vector_size(LANES * 4)));
typedef int32_t Ints __attribute__((vector_size(LANES * 4)));
typedef uint32_t Bits __attribute__((vector_size(LANES * 4)));
typedef double Wide __attribute__((vector_size(LANES * 8)));

INLINE Vec least_of(Vec a, Vec b) { return a < b ? a : b; }
INLINE Vec most_of(Vec a, Vec b) { return a > b ? a : b; }
INLINE Wide widened(Vec x) { return __builtin_convertvector(x, Wide); }
INLINE Vec in_bfloat16(Vec x) {
  const Bits bits = reinterpret_cast<Bits>(x);
  return reinterpret_cast<Vec>((bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff0000);
}
INLINE Vec kept_scale(Vec x) {
  const Vec kept = in_bfloat16(x);
  return kept > 0 ? kept : Vec{} + 1.f;
}
INLINE Vec kept_zero(Vec x) { return in_bfloat16(least_of(most_of(x, Vec{} - LARGEST_ZERO), Vec{} + LARGEST_ZERO)); }

struct Group16 {
  const float* values;  // [size, LANES]
  int64_t size;
  Vec scale, zero;  // the best ones yet
  Wide least;

  INLINE Vec at(int64_t k) const {
    Vec loaded;
    std::memcpy(&loaded, values + k * LANES, sizeof(Vec));
    return loaded;
  }
  INLINE Vec code(int64_t k, Vec inverse, Vec zero) const {
    const Vec scaled = at(k) * inverse + zero;
    return least_of(most_of(scaled, Vec{} - 8.f), Vec{} + 7.f) + MAGIC - MAGIC;
  }
  INLINE void consider(Vec tried, Vec tried_zero) {
    const Vec inverse = 1.f / tried;
    Wide error = {};
    for (int64_t k = 0; k < size; ++k) {
      const Wide off = widened((code(k, inverse, tried_zero) - tried_zero) * tried - at(k));
      error += off * off;
    }
    const Ints is_less = __builtin_convertvector(error < least, Ints);
    scale = is_less ? tried : scale;
    zero = is_less ? tried_zero : zero;
    least = error < least ? error : least;
  }
  INLINE void fit(Vec first, Vec first_zero, Wide of_values) {
    const Vec inverse = 1.f / first;
    Vec sum = {}, squares = {};  // of integers: exact
    Wide products = {};
    for (int64_t k = 0; k < size; ++k) {
      const Vec c = code(k, inverse, first_zero);
      sum += c;
      squares += c * c;
      products += widened(c) * widened(at(k));
    }
    const Wide of_codes = widened(sum), count = Wide{} + static_cast<double>(size);
    const Wide spread = count * widened(squares) - of_codes * of_codes;
    const Wide slope = (count * products - of_codes * of_values) / spread;
    const Ints fits = __builtin_convertvector((spread > 0) & (slope > 0), Ints);
    const Vec fitted = fits ? kept_scale(__builtin_convertvector(slope, Vec)) : first;
    consider(fitted, kept_zero(__builtin_convertvector((of_codes - of_values / widened(fitted)) / count, Vec)));
  }
  INLINE void search(const float* steps, int64_t count) {
    Vec low = at(0), high = low;
    Wide sum = {};
    for (int64_t k = 0; k < size; ++k) {
      low = least_of(low, at(k));
      high = most_of(high, at(k));
      sum += widened(at(k));
    }
    least = Wide{} + INFINITY;
    consider(kept_scale(most_of(-low, high) / 7.f), Vec{});
    for (int64_t i = 0; i < count; ++i) {
      const Vec first = kept_scale((high - low) / steps[i]), first_zero = kept_zero(-8.f - low / first);
      if (i == 0) consider(first, first_zero);
      fit(first, first_zero, sum);
    }
  }
};

FOR_EACH_CPU void search_groups(const float* values, int64_t size, const float* steps, int64_t count, float* scales,
                                float* zeros) {
  Group16 groups = {values, size, Vec{} + 1.f, {}, {}};
  groups.search(steps, count);
  std::memcpy(scales, &groups.scale, sizeof(Vec));
  std::memcpy(zeros, &groups.zero, sizeof(Vec));
}

template <class T>
void fit_rows(const T* from, int64_t rows, int64_t inputs, int64_t group, const float* steps, int64_t count,
              float* scales, float* zeros) {
  const int64_t in_row = (inputs + group - 1) / group, all = rows * in_row;
  std::vector<float> values(group * LANES);
  for (int64_t first = 0; first < all; first += LANES) {
    for (int64_t lane = 0; lane < LANES; ++lane) {
      const int64_t at = std::min(first + lane, all - 1), k = at % in_row * group, last = std::min(group, inputs - k) - 1;
      const T* const own = from + at / in_row * inputs + k;
      for (int64_t i = 0; i < group; ++i) values[i * LANES + lane] = widened(own[std::min(i, last)]);
    }
    float found[2][LANES];
    search_groups(values.data(), group, steps, count, found[0], found[1]);
    std::copy_n(found[0], std::min<int64_t>(LANES, all - first), scales + first);
    std::copy_n(found[1], std::min<int64_t>(LANES, all - first), zeros + first);
  }
}

// Eight codes to a word: four in the low halves of its bytes, four in the high ones.
void join_halves(const int8_t* codes, int64_t words, uint32_t* to) {
  for (int64_t p = 0; p < words; ++p) {
    uint32_t halves[2];
    std::memcpy(halves, codes + p * 8, sizeof halves);
    to[p] = halves[0] | halves[1] << 4;
  }
}

enum Kind : int64_t { INTEGERS, FP4, FP8 };

template <class T>
void quantize_rows(const T* from, int64_t rows, int64_t inputs, int64_t group, int64_t kind, int64_t bits,
                   const float* scales, const float* zeros, int64_t first, uint32_t* to) {
  const int64_t groups = (inputs + group - 1) / group, in_word = 32 / bits, words = (inputs + in_word - 1) / in_word;
  const int32_t offset = kind == INTEGERS && bits == 4 ? 8 : 0;
  std::vector<int8_t> codes(words * in_word, static_cast<int8_t>(offset));  // inputs past the last are 0
  std::vector<uint32_t> packed(TILE * words);
  for (int64_t row = 0; row < rows;) {
    const int64_t count = std::min(TILE - (first + row) % TILE, rows - row);
    for (int64_t j = 0; j < count; ++j) {
      const T* const own = from + (row + j) * inputs;
      const float* const of_groups = scales + (row + j) * groups;
      if (kind == FP4) round_Fp4(own, inputs, group, of_groups, codes.data());
      else if (kind == FP8) round_Fp8(own, inputs, group, of_groups, codes.data());
      else
        round_row_of(own, inputs, group, of_groups, zeros == nullptr ? nullptr : zeros + (row + j) * groups,
                     bits == 4 ? -8.f : -127.f, bits == 4 ? 7.f : 127.f, offset, codes.data());
      if (bits == 4) join_halves(codes.data(), words, packed.data() + j * words);
      else std::memcpy(packed.data() + j * words, codes.data(), words * sizeof(uint32_t));
    }
    pack(packed.data(), count, words, first + row, to);
    row += count;
  }
}

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

// The largest absolute values of groups, [rows, groups]; scales of groups, chosen or fitted, and their zero points; and
// the codes under them, 4 or 8 bits.
#define QUANTIZING(NAME, T)                                                                                              \
  EXPORT void largest_##NAME(const T* from, int64_t rows, int64_t inputs, int64_t group, float* largest) {              \
    const int64_t groups = (inputs + group - 1) / group;                                                                 \
    for (int64_t row = 0; row < rows; ++row) find_largest_of(from + row * inputs, inputs, group, largest + row * groups); \
  }                                                                                                                      \
  EXPORT void choose_##NAME(const T* from, int64_t rows, int64_t inputs, int64_t group, int64_t kind,                   \
                            const float* candidates, int64_t count, float* scales) {                                    \
    const int64_t groups = (inputs + group - 1) / group;                                                                 \
    for (int64_t row = 0; row < rows; ++row, candidates += groups * count, scales += groups) {                           \
      if (kind == FP4) choose_Fp4(from + row * inputs, inputs, group, candidates, count, scales);                        \
      else choose_Fp8(from + row * inputs, inputs, group, candidates, count, scales);                                    \
    }                                                                                                                    \
  }                                                                                                                      \
  EXPORT void fit_##NAME(const T* from, int64_t rows, int64_t inputs, int64_t group, const float* steps, int64_t count, \
                         float* scales, float* zeros) {                                                                  \
    fit_rows(from, rows, inputs, group, steps, count, scales, zeros);                                                    \
  }                                                                                                                      \
  EXPORT void quantize_##NAME(const T* from, int64_t rows, int64_t inputs, int64_t group, int64_t kind, int64_t bits,   \
                              const float* scales, const float* zeros, int64_t first, uint32_t* to) {                   \
    quantize_rows(from, rows, inputs, group, kind, bits, scales, zeros, first, to);                                      \
  }

QUANTIZING(float32, float)
QUANTIZING(bfloat16, uint16_t)
