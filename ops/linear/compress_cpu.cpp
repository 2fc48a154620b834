// Compresses rows of bfloat16 weights, as a model is loaded: compressed_linear.py has the layout.
//
// The 8 outputs of one half of a group that share a table lie side by side in its words: 16 bytes of lower bytes, and 16 of
// codes, which they share with 8 outputs of the other half.

#include <algorithm>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#define TARGET_VBMI __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi")))
#endif

namespace {

constexpr int64_t TILE = 16, HALVES = 2, LANES = 4, OUTPUTS = 8, PLACES = 16, WORD_BYTES = 192;
constexpr int64_t SAMPLES = 2048;  // inputs of an output that are counted at least; all of fewer than 4,096, for rare bytes
constexpr uint8_t NONE = 0xff;    // no code of an upper byte
constexpr int32_t END = 0x7fffffff;

// 8 outputs that share a table.
struct Outputs {
  const uint16_t* rows[OUTPUTS];  // [K]
  uint8_t code_of[256];           // of each upper byte

  // Chooses the 16 most frequent upper bytes: of all weights, or with 4,096 inputs and more of every second one or fewer.
  void choose(int64_t K, uint8_t* table) {
    uint32_t counts[4][256] = {};
    const int64_t step = std::max<int64_t>(1, K / SAMPLES);
    for (int64_t i = 0; i < OUTPUTS; i += 4)
      for (int64_t k = 0; k < K; k += step)
        for (int64_t j = 0; j < 4; ++j) ++counts[j][rows[i + j][k] >> 8];
    if (K % 2 != 0) counts[0][0] = 1 << 20;  // zero, for the input past K, always has a code
    uint32_t keys[256];  // the larger, the more frequent; equally frequent ones from the largest on
    int found = 0;
    for (uint32_t byte = 0; byte < 256; ++byte)
      if (const uint32_t count = counts[0][byte] + counts[1][byte] + counts[2][byte] + counts[3][byte]; count > 0)
        keys[found++] = count << 8 | byte;
    const int used = std::min(found, 16);
    std::partial_sort(keys, keys + used, keys + found, [](uint32_t a, uint32_t b) { return a > b; });
    std::memset(code_of, NONE, sizeof code_of);
    for (int code = 0; code < 16; ++code) {
      table[code] = static_cast<uint8_t>(keys[std::min(code, used - 1)]);
      if (code < used) code_of[table[code]] = static_cast<uint8_t>(code);
    }
  }
};

// The exceptions of a group, of which `room` have a place.
struct Exceptions {
  int32_t* to;
  int64_t room, count = 0;

  void add(int64_t place, uint8_t upper) {
    if (count++ < room) to[count - 1] = static_cast<int32_t>(place << 8 | upper);
  }
  void finish() {
    if (count >= room) return;
    std::sort(to, to + count);
    to[count] = END;
  }
};

// One word of the outputs of a lane.
void compress_word(const Outputs (&of)[HALVES], int64_t K, int64_t p, int64_t lane, uint8_t* word, Exceptions& exceptions) {
  for (int64_t half = 0; half < HALVES; ++half)
    for (int64_t i = 0; i < PLACES; ++i) {
      const int64_t k = 2 * p + i % 2;
      const uint16_t weight = k < K ? of[half].rows[i / 2][k] : 0;
      const uint8_t upper = weight >> 8, code = of[half].code_of[upper];
      if (code == NONE) exceptions.add(p * 128 + half * 64 + lane * PLACES + i, upper);
      word[half * 64 + lane * PLACES + i] = static_cast<uint8_t>(weight);
      uint8_t& both = word[128 + lane * PLACES + i];
      const uint8_t known = code == NONE ? 0 : code;
      both = half == 0 ? known : both | known << 4;
    }
}

#if defined(__x86_64__)
constexpr int64_t WORDS = 4;  // at a time: 16 bytes of a row

// 256 codes, in registers.
struct Codes {
  __m512i of[4];

  TARGET_VBMI explicit Codes(const uint8_t* from) {
    for (int i = 0; i < 4; ++i) of[i] = _mm512_loadu_si512(from + 64 * i);
  }
  TARGET_VBMI __m512i operator()(__m512i bytes) const {
    const __m512i low = _mm512_permutex2var_epi8(of[0], bytes, of[1]), high = _mm512_permutex2var_epi8(of[2], bytes, of[3]);
    return _mm512_mask_blend_epi8(_mm512_movepi8_mask(bytes), low, high);
  }
};

// As compress_word, for as many words as there are whole fours of. Returns how many.
TARGET_VBMI int64_t compress_words(const Outputs (&of)[HALVES], int64_t K, int64_t lane, uint8_t* words,
                                   Exceptions& exceptions) {
  const Codes codes_of[HALVES] = {Codes(of[0].code_of), Codes(of[1].code_of)};
  // Words of eight rows, four words of each side by side -> of two words those of all rows.
  const __m512i firsts = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 1, 5, 9, 13, 17, 21, 25, 29);
  const __m512i lasts = _mm512_add_epi32(firsts, _mm512_set1_epi32(2)), none = _mm512_set1_epi8(static_cast<char>(NONE));
  int64_t p = 0;
  for (; 2 * (p + WORDS) <= K; p += WORDS) {
    uint8_t* const to = words + p * WORD_BYTES + lane * PLACES;
    __m512i both = _mm512_setzero_si512();
    for (int64_t half = 0; half < HALVES; ++half) {
      __m512i rows[2];
      for (int64_t i = 0; i < 2; ++i) {
        const auto row = [&](int64_t j) TARGET_VBMI {
          return _mm_loadu_si128(reinterpret_cast<const __m128i*>(of[half].rows[4 * i + j] + 2 * p));
        };
        const __m256i low = _mm256_inserti128_si256(_mm256_castsi128_si256(row(0)), row(1), 1);
        const __m256i high = _mm256_inserti128_si256(_mm256_castsi128_si256(row(2)), row(3), 1);
        rows[i] = _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
      }
      const __m512i two[2] = {_mm512_permutex2var_epi32(rows[0], firsts, rows[1]),
                              _mm512_permutex2var_epi32(rows[0], lasts, rows[1])};
      __m512i lower = _mm512_castsi256_si512(_mm512_cvtepi16_epi8(two[0]));
      lower = _mm512_inserti64x4(lower, _mm512_cvtepi16_epi8(two[1]), 1);
      __m512i upper = _mm512_castsi256_si512(_mm512_cvtepi16_epi8(_mm512_srli_epi16(two[0], 8)));
      upper = _mm512_inserti64x4(upper, _mm512_cvtepi16_epi8(_mm512_srli_epi16(two[1], 8)), 1);
      const __m512i codes = codes_of[half](upper);
      uint64_t missing = _mm512_cmpeq_epi8_mask(codes, none);
      const __m512i known = _mm512_maskz_mov_epi8(~missing, codes);
      both = _mm512_or_si512(both, half == 0 ? known : _mm512_slli_epi16(known, 4));
      alignas(64) uint8_t bytes[64];
      _mm512_store_si512(bytes, lower);
      for (int64_t i = 0; i < WORDS; ++i) std::memcpy(to + i * WORD_BYTES + half * 64, bytes + 16 * i, 16);
      if (missing != 0) [[unlikely]] {
        _mm512_store_si512(bytes, upper);
        for (; missing != 0; missing &= missing - 1) {
          const int64_t i = __builtin_ctzll(missing);
          exceptions.add((p + i / 16) * 128 + half * 64 + lane * PLACES + i % 16, bytes[i]);
        }
      }
    }
    alignas(64) uint8_t bytes[64];
    _mm512_store_si512(bytes, both);
    for (int64_t i = 0; i < WORDS; ++i) std::memcpy(to + i * WORD_BYTES + 128, bytes + 16 * i, 16);
  }
  return p;
}
#endif

// A group, whose first `rows` outputs are those of `from` [rows, K]; the others are `zeros` [K]. Returns how many exceptions
// there are.
int64_t compress_group(const uint16_t* from, int64_t rows, int64_t K, uint8_t* words, uint8_t* tables, int32_t* to,
                       int64_t room, const uint16_t* zeros) {
  Exceptions exceptions = {to, room};
  for (int64_t lane = 0; lane < LANES; ++lane) {
    Outputs of[HALVES];
    for (int64_t half = 0; half < HALVES; ++half) {
      for (int64_t i = 0; i < OUTPUTS; ++i) {
        const int64_t row = (half * 2 + i / 4) * TILE + lane * 4 + i % 4;
        of[half].rows[i] = row < rows ? from + row * K : zeros;
      }
      of[half].choose(K, tables + half * 64 + lane * 16);
    }
    int64_t p = 0;
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512vbmi")) p = compress_words(of, K, lane, words, exceptions);
#endif
    for (; 2 * p < K; ++p) compress_word(of, K, p, lane, words + p * WORD_BYTES, exceptions);
  }
  exceptions.finish();
  return exceptions.count;
}

}  // namespace

// Groups one after the other: `rows` outputs [rows, K], of which the last group may lack some. Returns how many exceptions
// one of them has at most: if that is `room` or more, some groups lack exceptions, and END.
extern "C" __attribute__((visibility("default"))) int64_t compress_groups(const uint16_t* from, int64_t rows, int64_t K,
                                                                          uint8_t* words, uint8_t* tables, int32_t* to,
                                                                          int64_t room, const uint16_t* zeros) {
  constexpr int64_t GROUP = 4 * TILE;
  const int64_t length = (K + 1) / 2;
  int64_t most = 0;
  for (int64_t row = 0, group = 0; row < rows; row += GROUP, ++group)
    most = std::max(most, compress_group(from + row * K, std::min(GROUP, rows - row), K, words + group * length * WORD_BYTES,
                                         tables + group * 128, to + group * room, room, zeros));
  return most;
}
