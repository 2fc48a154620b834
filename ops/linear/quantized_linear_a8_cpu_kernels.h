// The kernels of quantized_linear_a8 for one instruction set: compiled once for each by ../cpu/one_isa.cpp, which
// explains the macros. All sets give the same bits: integer sums are exact, and the steps in float32 are the same ones.
//
// A product takes groups of four inputs. With VNNI these are one instruction, of unsigned weights by signed
// activations: codes of int8 are kept with an offset of 128 there (those of int4 always with 8), and the sums start at
// what makes up for it. AVX2 has one of unsigned by signed bytes to sums of two, in 16 bits. Without, weights and
// activations are widened to 16 bits. ARM multiplies groups of signed bytes. On tile registers blocks of rows are
// multiplied (..._amx.h).

#include <array>
#include <cstring>
#include <utility>

#include "quantized_linear_a8_cpu_amx.h"

namespace {
namespace ISA {

typedef int8_t Codes __attribute__((vector_size(kLanes), aligned(1), may_alias));

constexpr int PARTS = 512 / WIDTH;  // registers of a tile
constexpr int64_t AHEAD = 4096;  // bytes: so far ahead weights are fetched; 2 KiB took 5 to 20% longer, 8 as long
// Of the largest products. Those of short groups keep totals in registers, beside the sums.
constexpr int ROWS = WIDTH == 512 ? 8 : 4, COLS = DOT ? 3 : WIDTH == 512 ? 2 : 1;
constexpr int SHORT_ROWS = DOT ? 6 : ROWS, SHORT_COLS = DOT ? 2 : COLS;

#if DOT
constexpr int32_t OFFSET = 128;
using Bytes = ByteRegister;
INLINE Bytes four(ByteRegister bytes) { return bytes; }
INLINE IntRegister added(IntRegister sum, Bytes w, Bytes x) {
  return reinterpret_cast<IntRegister>(_mm512_dpbusd_epi32(reinterpret_cast<__m512i>(sum), reinterpret_cast<__m512i>(w),
                                                          reinterpret_cast<__m512i>(x)));
}
#elif NEON
constexpr int32_t OFFSET = 0;
using Bytes = ByteRegister;
INLINE Bytes four(ByteRegister bytes) { return bytes; }
INLINE IntRegister added(IntRegister sum, Bytes w, Bytes x) {
  return reinterpret_cast<IntRegister>(
      vdotq_s32(reinterpret_cast<int32x4_t>(sum), reinterpret_cast<int8x16_t>(w), reinterpret_cast<int8x16_t>(x)));
}
#else
constexpr int32_t OFFSET = 0;
struct Bytes {
  ShortRegister even, odd;
};
INLINE Bytes four(ByteRegister bytes) {
  const auto pairs = reinterpret_cast<ShortRegister>(bytes);
  return {(pairs << 8) >> 8, pairs >> 8};
}
INLINE IntRegister added(IntRegister sum, const Bytes& w, const Bytes& x) {
#if WIDTH == 512
  for (auto [a, b] : {std::pair(w.even, x.even), {w.odd, x.odd}})
    sum += reinterpret_cast<IntRegister>(_mm512_madd_epi16(reinterpret_cast<__m512i>(a), reinterpret_cast<__m512i>(b)));
#elif WIDTH == 256
  for (auto [a, b] : {std::pair(w.even, x.even), {w.odd, x.odd}})
    sum += reinterpret_cast<IntRegister>(_mm256_madd_epi16(reinterpret_cast<__m256i>(a), reinterpret_cast<__m256i>(b)));
#else
  const auto pairs = reinterpret_cast<IntRegister>(w.even * x.even + w.odd * x.odd);  // at most 2 * 128 * 127 each
  sum += ((pairs << 16) >> 16) + (pairs >> 16);
#endif
  return sum;
}
#endif

#if WIDTH == 256
// Products of unsigned by signed bytes, and the sums of two neighbours. None saturates: a sum is at most 2 * 15 * 127 of
// codes of 4 bits. Of int8 the sizes are multiplied, and the activations get the signs: 2 * 128 * 127.
struct Signed {
  ByteRegister size, code;
};
INLINE ShortRegister pairs_of(ByteRegister w, ByteRegister x) {
  return reinterpret_cast<ShortRegister>(_mm256_maddubs_epi16(reinterpret_cast<__m256i>(w), reinterpret_cast<__m256i>(x)));
}
INLINE ShortRegister pairs_of(const Signed& w, ByteRegister x) {
  const __m256i with_signs = _mm256_sign_epi8(reinterpret_cast<__m256i>(x), reinterpret_cast<__m256i>(w.code));
  return pairs_of(w.size, reinterpret_cast<ByteRegister>(with_signs));
}
INLINE IntRegister joined_pairs(ShortRegister pairs) {
  return reinterpret_cast<IntRegister>(_mm256_madd_epi16(reinterpret_cast<__m256i>(pairs), _mm256_set1_epi16(1)));
}
template <class W>
INLINE IntRegister added(IntRegister sum, const W& w, ByteRegister x) {
  return sum + joined_pairs(pairs_of(w, x));
}
using Inputs = ByteRegister;
template <int BITS>
using Weights = std::conditional_t<BITS == 4, ByteRegister, Signed>;
#else
using Inputs = Bytes;
template <int BITS>
using Weights = Bytes;
#endif

// The weights of inputs 4 `part` to 4 `part` + 3 of a word.
template <int BITS>
INLINE Weights<BITS> weights(ByteRegister word, int part) {
  const ByteRegister bytes = BITS == 8 ? (DOT ? word ^ 0x80 : word) : part == 0 ? word & 15 : (word >> 4) & 15;
#if WIDTH == 256
  if constexpr (BITS == 4) return bytes;
  else return {reinterpret_cast<ByteRegister>(_mm256_abs_epi8(reinterpret_cast<__m256i>(bytes))), bytes};
#else
  return four(bytes);
#endif
}

INLINE Inputs broadcast_four(const int8_t* from) {
  int32_t word;
  std::memcpy(&word, from, sizeof(word));
  const auto bytes = reinterpret_cast<ByteRegister>(IntRegister{} + word);
#if WIDTH == 256
  return bytes;
#else
  return four(bytes);
#endif
}

INLINE Part part_of(const Vec& x, int i) { return load_part(reinterpret_cast<const float*>(&x) + i * kPartLanes); }

#if NEON >= 2
// Adds eight inputs at a time, of two rows and two outputs by one instruction. Returns the first word that is left.
template <int BITS, int M>
INLINE int64_t multiply_matrices(const Work8& work, int64_t word, int64_t end, IntRegister (&sums)[M][PARTS]) {
  constexpr int WORDS = BITS == 4 ? 1 : 2;
  exchange_halves(sums);
  for (; word + WORDS <= end; word += WORDS) {
    const int8_t* const codes = work.x.codes + word * (8 / WORDS);
    int8x16_t x[M / 2];
#pragma GCC unroll 2
    for (int m = 0; m + 1 < M; m += 2)
      x[m / 2] = vcombine_s8(vld1_s8(codes + m * work.x.stride), vld1_s8(codes + (m + 1) * work.x.stride));
    for (int i = 0; i < WORDS; ++i) __builtin_prefetch(work.later + (word + i) * WORD_BYTES, 0, 2);
#pragma GCC unroll 4
    for (int i = 0; i < PARTS; ++i) {
      const auto raw = [&](int at) TARGET { return load_bytes(work.w + (word + at) * WORD_BYTES + i * (WIDTH / 8)); };
      const ByteRegister a = weights<BITS>(raw(0), 0), b = weights<BITS>(raw(WORDS - 1), 1);
      const auto first = reinterpret_cast<IntRegister>(a), second = reinterpret_cast<IntRegister>(b);
      const auto add = [](IntRegister& sum, int8x16_t rows, IntRegister columns) TARGET {
        sum = reinterpret_cast<IntRegister>(
            vmmlaq_s32(reinterpret_cast<int32x4_t>(sum), rows, reinterpret_cast<int8x16_t>(columns)));
      };
#pragma GCC unroll 2
      for (int m = 0; m + 1 < M; m += 2) {
        add(sums[m][i], x[m / 2], lower_columns(first, second));
        add(sums[m + 1][i], x[m / 2], upper_columns(first, second));
      }
      if constexpr (M % 2 == 1) {
        IntRegister& sum = sums[M - 1][i];
        sum = added(sum, a, broadcast_four(codes + (M - 1) * work.x.stride));
        sum = added(sum, b, broadcast_four(codes + (M - 1) * work.x.stride + 4));
      }
    }
  }
  exchange_halves(sums);
  return word;
}
#endif

#if WIDTH == 256
// Of codes of 4 bits the pairs of four words, eight for each output, fit into 16 bits. Returns the first word that is left.
template <int M, int C>
INLINE int64_t multiply_pairs(const Work8& work, int64_t word, int64_t end, IntRegister (&sums)[M][C * PARTS]) {
  constexpr int WORDS = 4;
  for (; word + WORDS <= end; word += WORDS) {
    ShortRegister pairs[M][C * PARTS] = {};
#pragma GCC unroll 4
    for (int64_t at = word; at < word + WORDS; ++at) {
      ByteRegister raw[C * PARTS];
#pragma GCC unroll 4
      for (int i = 0; i < C * PARTS; ++i)
        raw[i] = load_bytes(work.w + i / PARTS * work.words * WORD_BYTES + at * WORD_BYTES + i % PARTS * (WIDTH / 8));
      for (int c = 0; c < C; ++c) __builtin_prefetch(work.later + (c * work.words + at) * WORD_BYTES, 0, 2);
#pragma GCC unroll 2
      for (int part = 0; part < 2; ++part)
#pragma GCC unroll 8
        for (int m = 0; m < M; ++m) {
          const Inputs x = broadcast_four(work.x.codes + m * work.x.stride + (at * 2 + part) * 4);
#pragma GCC unroll 4
          for (int i = 0; i < C * PARTS; ++i) {
            pairs[m][i] += pairs_of(weights<4>(raw[i], part), x);
            asm("" : "+x"(pairs[m][i]));  // or GCC 12 keeps all products in memory to add them in another order
          }
        }
    }
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
      for (int i = 0; i < C * PARTS; ++i) sums[m][i] += joined_pairs(pairs[m][i]);
  }
  return word;
}
#endif

// Small products hold several sums of each output, so that they do not wait for one another. HELD: totals are in registers
// until all groups are added.
template <int BITS, int M, int C, bool HELD>
TARGET void multiply(const Work8& given, int64_t row) {
  Work8 work = given;  // of its own: no store to totals can change it
  work.x = given.x.from(row);
  constexpr int STEP = BITS == 4 ? 2 : 1, SUMS = M * C * PARTS <= 2 ? 4 : M * C * PARTS <= 6 ? 2 : 1;
  const int64_t groups = work.x.groups, w_stride = work.words * WORD_BYTES;
  Part held[HELD ? M : 1][HELD ? C * PARTS : 1] = {};
  if constexpr (!HELD) std::memset(work.totals, 0, M * C * TILE * sizeof(float));
  for (int64_t g = 0; g < groups; ++g) {
    IntRegister sums[SUMS][M][C * PARTS];
#pragma GCC unroll 4
    for (int s = 0; s < SUMS; ++s)
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
        for (int i = 0; i < C * PARTS; ++i)
          sums[s][m][i] = IntRegister{} + (s == 0 ? work.x.starts[g * work.x.across + m] : 0);
    int64_t word = g * work.group;
    const int64_t end = std::min(word + work.group, work.words);
    const auto take = [&](int s, int64_t at) TARGET __attribute__((always_inline)) {
      ByteRegister raw[C * PARTS];
#pragma GCC unroll 4
      for (int i = 0; i < C * PARTS; ++i)
        raw[i] = load_bytes(work.w + i / PARTS * w_stride + at * WORD_BYTES + i % PARTS * (WIDTH / 8));
#pragma GCC unroll 3
      for (int c = 0; c < C; ++c) __builtin_prefetch(work.later + c * w_stride + at * WORD_BYTES, 0, 2);
#pragma GCC unroll 2
      for (int part = 0; part < STEP; ++part) {
        Weights<BITS> w[C * PARTS];
#pragma GCC unroll 4
        for (int i = 0; i < C * PARTS; ++i) w[i] = weights<BITS>(raw[i], part);
#pragma GCC unroll 8
        for (int m = 0; m < M; ++m) {
          const Inputs x = broadcast_four(work.x.codes + m * work.x.stride + (at * STEP + part) * 4);
#pragma GCC unroll 4
          for (int i = 0; i < C * PARTS; ++i) sums[s][m][i] = added(sums[s][m][i], w[i], x);
        }
      }
    };
#if WIDTH == 256
    if constexpr (BITS == 4) word = multiply_pairs<M, C>(work, word, end, sums[0]);
#endif
#if NEON >= 2
    if constexpr (M > 1) word = multiply_matrices<BITS>(work, word, end, sums[0]);
#endif
    for (; word + SUMS <= end; word += SUMS)
#pragma GCC unroll 4
      for (int s = 0; s < SUMS; ++s) take(s, word + s);
    for (; word < end; ++word) take(0, word);
    const float *const inputs = work.x.inputs + g * work.x.across, *const of_groups = work.x.of_groups + g * work.x.across;
    const auto add = [&](auto zeros) TARGET __attribute__((always_inline)) {
#pragma GCC unroll 12
      for (int i = 0; i < C * PARTS; ++i) {
        const int64_t at = (i / PARTS * groups + g) * TILE + i % PARTS * kPartLanes;
        const Part scale = load_part(work.scales + at), zero = zeros ? load_part(work.zeros + at) : Part{};
#pragma GCC unroll 8
        for (int m = 0; m < M; ++m) {
          IntRegister whole = sums[0][m][i];
#pragma GCC unroll 4
          for (int s = 1; s < SUMS; ++s) whole += sums[s][m][i];
          Part sum = __builtin_convertvector(whole, Part);
          if constexpr (zeros) sum = fma(-zero, inputs[m] - Part{}, sum);
          sum *= of_groups[m] - Part{};
          if constexpr (HELD) {
            held[m][i] = fma(sum, scale, held[m][i]);
          } else {
            float* const total = work.totals + (m * C + i / PARTS) * TILE + i % PARTS * kPartLanes;
            store_part(total, fma(sum, scale, load_part(total)));
          }
        }
      }
    };
    if (work.zeros != nullptr) add(std::true_type());
    else add(std::false_type());
  }
  if constexpr (HELD)
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 12
      for (int i = 0; i < C * PARTS; ++i)
        store_part(work.totals + (m * C + i / PARTS) * TILE + i % PARTS * kPartLanes, held[m][i]);
}

// Few rows, whose time is that of the weights' way from memory: tiles that lie behind each other, as one stream. Sums and
// totals stay in registers, scales are read as they are kept. Of two codes in a byte the upper one is multiplied where
// it lies, as 16 times itself, and its sums are divided. GROUP: words of a group, or 0 where they are not the usual number.
template <int BITS, int M, class S, int GROUP>
TARGET void stream_groups(const Stream8<S>& work) {
  constexpr bool SHIFTED = BITS == 4 && DOT;
  constexpr int SIDES = SHIFTED ? 2 : 1;  // sums of the lower codes, and of the upper ones
  constexpr int STEP = BITS == 4 ? 2 : 1, SUMS = std::max(1, 4 / (M * PARTS * SIDES));
  constexpr int64_t SCALES_AHEAD = AHEAD / (BITS == 4 ? 256 : 512) * TILE;
  const int64_t groups = work.x.groups, group = GROUP == 0 ? work.group : GROUP;
  const uint8_t* w = work.w;
  const S *scales = work.scales, *zeros = work.zeros;
  for (int64_t tile = 0; tile < work.tiles; ++tile) {
    Part totals[M][PARTS] = {};
    for (int64_t g = 0; g < groups; ++g) {
      IntRegister sums[SIDES][SUMS][M][PARTS];
#pragma GCC unroll 2
      for (int side = 0; side < SIDES; ++side)
#pragma GCC unroll 4
        for (int s = 0; s < SUMS; ++s)
#pragma GCC unroll 4
          for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
            for (int i = 0; i < PARTS; ++i)
              sums[side][s][m][i] = IntRegister{} + (s + side == 0 ? work.x.starts[g * work.x.across + m] : 0);
      const auto take = [&](int s, int64_t at) TARGET __attribute__((always_inline)) {
        ByteRegister raw[PARTS];
#pragma GCC unroll 4
        for (int i = 0; i < PARTS; ++i) raw[i] = load_bytes(w + i * (WIDTH / 8));
        __builtin_prefetch(w + AHEAD, 0, 2);
        w += WORD_BYTES;
#pragma GCC unroll 2
        for (int part = 0; part < STEP; ++part) {
          Weights<BITS> codes[PARTS];
#pragma GCC unroll 4
          for (int i = 0; i < PARTS; ++i)
            if constexpr (SHIFTED) codes[i] = part == 1 ? four(raw[i] & 0xf0) : weights<BITS>(raw[i], part);
            else codes[i] = weights<BITS>(raw[i], part);
#pragma GCC unroll 4
          for (int m = 0; m < M; ++m) {
            const Inputs x = broadcast_four(work.x.codes + m * work.x.stride + (at * STEP + part) * 4);
#pragma GCC unroll 4
            for (int i = 0; i < PARTS; ++i) {
              IntRegister& sum = sums[part % SIDES][s][m][i];
              sum = added(sum, codes[i], x);
            }
          }
        }
      };
      int64_t at = g * group;
      if constexpr (GROUP > 0) {
#pragma GCC unroll 8
        for (int word = 0; word < GROUP; ++word) take(word % SUMS, at + word);
      } else {
        const int64_t end = std::min(at + group, work.words);
        for (; at + SUMS <= end; at += SUMS)
#pragma GCC unroll 4
          for (int s = 0; s < SUMS; ++s) take(s, at + s);
        for (; at < end; ++at) take(0, at);
      }
      const Vec scale = load_floats(scales), zero = zeros == nullptr ? Vec{} : load_floats(zeros);
      __builtin_prefetch(scales + SCALES_AHEAD, 0, 2);
      scales += TILE;
      if (zeros != nullptr) {
        __builtin_prefetch(zeros + SCALES_AHEAD, 0, 2);
        zeros += TILE;
      }
#pragma GCC unroll 4
      for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
        for (int i = 0; i < PARTS; ++i) {
          IntRegister whole = sums[0][0][m][i];
#pragma GCC unroll 4
          for (int s = 1; s < SUMS; ++s) whole += sums[0][s][m][i];
          if constexpr (SHIFTED) {
            IntRegister upper = sums[1][0][m][i];
#pragma GCC unroll 4
            for (int s = 1; s < SUMS; ++s) upper += sums[1][s][m][i];
            whole += upper >> 4;
          }
          Part sum = __builtin_convertvector(whole, Part);
          if (zeros != nullptr) sum = fma(-part_of(zero, i), work.x.inputs[g * work.x.across + m] - Part{}, sum);
          if (work.x.by_groups) sum *= work.x.of_groups[g * work.x.across + m] - Part{};
          totals[m][i] = fma(sum, part_of(scale, i), totals[m][i]);
        }
    }
#pragma GCC unroll 4
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
      for (int i = 0; i < PARTS; ++i)
        store_part(work.totals + (m * work.tiles + tile) * TILE + i * kPartLanes, totals[m][i]);
  }
}

template <int BITS, int M, class S>
TARGET void stream(const Stream8<S>& work) {
  constexpr int USUAL = 32 / (BITS == 4 ? 8 : 4);  // words of 32 inputs
  if (work.group == USUAL && work.words % USUAL == 0) stream_groups<BITS, M, S, USUAL>(work);
  else stream_groups<BITS, M, S, 0>(work);
}

template <class S>
constexpr Streams<S> streams() {
  return {{stream<8, 1, S>, stream<8, 2, S>, stream<8, 3, S>, stream<8, 4, S>},
          {stream<4, 1, S>, stream<4, 2, S>, stream<4, 3, S>, stream<4, 4, S>}};
}

// All lanes in one, by halves: one lane after the other takes four times as long.
template <class Join>
INLINE int32_t joined(IntVec lanes, const Join& join) {
  lanes = join(lanes, __builtin_shuffle(lanes, IntVec{8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7}));
  lanes = join(lanes, __builtin_shuffle(lanes, IntVec{4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11}));
  lanes = join(lanes, __builtin_shuffle(lanes, IntVec{2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13}));
  lanes = join(lanes, __builtin_shuffle(lanes, IntVec{1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14}));
  return lanes[0];
}

struct Quantised {
  float scale;
  int32_t sum;  // of the codes
};

// Quantises `count` numbers by one scale: theirs, or the given one. WHOLE: `count` is a multiple of kLanes.
template <bool WHOLE, class T>
INLINE Quantised quantize_numbers(const T* x, int64_t count, const float* given, int8_t* to) {
  const auto numbers = [&](int64_t k) TARGET { return WHOLE ? load_floats(x + k) : load_floats(x + k, count - k); };
  // Numbers that are not finite are those of the largest bits.
  IntVec most = {};
  for (int64_t k = 0; k < count; k += kLanes) {
    const IntVec size = bits(numbers(k)) & 0x7fffffff;
    most = size > most ? size : most;
  }
  const int32_t largest = joined(most, [](IntVec a, IntVec b) TARGET { return a > b ? a : b; });
  const bool finite = largest < 0x7f800000;
  const float scale = given != nullptr ? *given : __builtin_bit_cast(float, largest) / 127.f;
  if (!finite || !(scale > 0)) {
    std::memset(to, 0, count);
    return {finite ? scale : __builtin_nanf(""), 0};
  }
  const Vec divisor = broadcast(scale), limit = broadcast(127.f);
  const Vec magic = broadcast(12582912.f);  // 1.5 * 2^23: adding it rounds to an integer, in the low bits
  IntVec sums = {};
  for (int64_t k = 0; k < count; k += kLanes) {
    Vec codes = numbers(k) / divisor;
    codes = codes > limit ? limit : codes;
    codes = codes < -limit ? -limit : codes;
    const IntVec whole = bits(codes + magic) - bits(magic);
    sums += whole;  // beyond the last number they are 0
    const Codes bytes = __builtin_convertvector(whole, Codes);
    std::memcpy(to + k, &bytes, WHOLE ? kLanes : std::min(kLanes, count - k));
  }
  return {scale, joined(sums, [](IntVec a, IntVec b) TARGET { return a + b; })};
}

template <class T>
INLINE Quantised quantize_together(const T* x, int64_t count, const float* given, int8_t* to) {
  return count % kLanes == 0 ? quantize_numbers<true>(x, count, given, to) : quantize_numbers<false>(x, count, given, to);
}

template <class T>
TARGET void quantize(const T* x, const Quantize& how, const Rows8& to) {
  std::memset(to.codes + how.K, 0, (how.K + 7) / 8 * 8 - how.K);
  to.scales[0] = to.by_groups ? 1 : quantize_together(x, how.K, how.x_scale, to.codes).scale;
  for (int64_t at = 0, k = 0; k < how.K; at += to.across, k += how.group) {
    const int64_t count = std::min(how.group, how.K - k);
    int32_t sum = 0;
    to.of_groups[at] = 1;
    if (to.by_groups) {
      const Quantised group = quantize_together(x + k, count, nullptr, to.codes + k);
      to.of_groups[at] = group.scale;
      sum = group.sum;
    } else {
      for (int64_t i = k; i < k + count; ++i) sum += to.codes[i];
    }
    // The last bits alone: without them it may not fit.
    to.starts[at] = static_cast<int32_t>(-static_cast<uint32_t>(how.offset) * static_cast<uint32_t>(sum));
    to.inputs[at] = static_cast<float>(sum);
  }
}

template <class T>
TARGET void widen(const T* from, int64_t count, float* to) {
  for (int64_t i = 0; i < count; i += kLanes) store(to + i, load_floats(from + i));
}

TARGET inline void widen_bytes(const int8_t* from, int64_t count, float* to) {
  for (int64_t i = 0; i < count; i += kLanes) store(to + i, load_zeros(from + i));
}

template <class T>
TARGET void finish(const Finish8<T>& of) {
  for (int64_t i = 0; i < of.columns; i += TILE) {
    const Vec bias = of.bias == nullptr ? Vec{} : load_floats(of.bias + i, of.columns - i);
    for (int64_t row = 0; row < of.rows; ++row)
      store_as(of.out + row * of.out_stride + i,
               fma(load(of.totals + row * of.stride + i), broadcast(of.x_scales[row]), bias), of.columns - i);
  }
}

template <int BITS, int LARGEST_COLS, bool HELD, size_t... I>
constexpr std::array<void (*)(const Work8&, int64_t), sizeof...(I)> products(std::index_sequence<I...>) {
  return {&multiply<BITS, I / LARGEST_COLS + 1, I % LARGEST_COLS + 1, HELD>...};
}

template <int LARGEST_ROWS, int LARGEST_COLS, bool HELD>
Products products() {
  static_assert(LARGEST_ROWS <= MAX_ROWS && LARGEST_COLS <= MAX_COLS);
  using All = std::make_index_sequence<LARGEST_ROWS * LARGEST_COLS>;
  static constexpr auto int8 = products<8, LARGEST_COLS, HELD>(All()), int4 = products<4, LARGEST_COLS, HELD>(All());
  return {LARGEST_ROWS, LARGEST_COLS, int8.data(), int4.data()};
}

inline Kernels kernels() {
  return {OFFSET, products<ROWS, COLS, false>(), products<SHORT_ROWS, SHORT_COLS, DOT>(), tile_kernels(), widen_bytes,
          {quantize<BFloat16>, widen<BFloat16>, finish<BFloat16>, streams<BFloat16>()},
          {quantize<float>, widen<float>, finish<float>, streams<float>()},
          {quantize<Half>, widen<Half>, finish<Half>, streams<Half>()}};
}

}  // namespace ISA
}  // namespace
