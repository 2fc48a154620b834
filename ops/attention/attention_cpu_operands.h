// What the products take, the operands, for one instruction set; see attention_cpu_kernels.h.

#include "../cpu/vectors.h"
#include "attention_cpu_types.h"

namespace {
namespace ISA {

// Keys of a tile. With half as many, prefill is a tenth slower, because of what is done once for each row and tile.
#ifdef TILES
constexpr int64_t kTile = 256;
#else
constexpr int64_t kTile = 128;
#endif

INLINE Part tanh(Part x) {
  const Part square = x * x;
  const Part series = x + x * square * (-1.f / 3 + square * (2.f / 15 - square * (17.f / 315)));
  const Part magnitude = x < 0.f ? -x : x, shrunk = exp2(magnitude * (-2.f * kLog2E));
  const Part y = (1.f - shrunk) / (1.f + shrunk);  // loses digits near 0
  return magnitude < 0.2f ? series : x < 0.f ? -y : y;
}

INLINE void prefetch(const void* at) { __builtin_prefetch(at, 0, 2); }  // into L2: in L1 it would push out what is in use

// Of numbers below 2^22; ties to even.
INLINE IntVec nearest(Vec x) { return bits(x + 12582912.f) - bits(broadcast(12582912.f)); }

// ---------------------------------------------------------------------------------------------------- fp8 (e4m3)

// The numbers of 7-bit codes without sign. (NaN, code 127, is never written: a row that holds one gets a scale of NaN.)
INLINE Vec fp8_magnitude(IntVec code) {
  const Vec normal = floats((code << 20) + ((127 - 7) << 23));
  return code < 8 ? convert(code) * 0x1p-9f : normal;
}

INLINE Vec from_fp8(IntVec code) { return floats(bits(fp8_magnitude(code & 127)) | ((code & 128) << 24)); }

// The codes nearest to numbers of at most 448, ties to even.
INLINE IntVec to_fp8(Vec x) {
  const IntVec magnitude = bits(x) & 0x7fffffff;
  const IntVec normal = ((magnitude + 0x7ffff + ((magnitude >> 20) & 1)) >> 20) - ((127 - 7) << 3);
  const IntVec denormal = nearest(floats(magnitude) * 0x1p9f);
  return (floats(magnitude) < 0x1p-6f ? denormal : normal) | ((bits(x) >> 24) & 128);
}

#if DOT
// 32 codes as bf16.
INLINE ShortVec fp8_to_bf16(ByteVec32 codes) {
  const ShortVec wide = __builtin_convertvector(codes, ShortVec), code = wide & 127;
  // The denormal codes 0 to 7 in bf16: 0, 2^-9, 2^-8, 1.5 * 2^-8, ...
  const ShortVec table = {0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60};
  const auto small = reinterpret_cast<ShortVec>(
      _mm512_permutexvar_epi16(reinterpret_cast<__m512i>(code), reinterpret_cast<__m512i>(table)));
  return (code < 8 ? small : (code << 4) + ((127 - 7) << 7)) | ((wide & 128) << 8);
}
#endif

// ---------------------------------------------------------------------------------------------------- operands
//
// A product's operands are lanes of 32 bits, one or more neighbours along the summed dimension: a float, with DOT a pair
// of bf16, or four bytes. Bytes are signed, except in weights of values. Queries and weights, which are not quantised to
// 8 bits already, become 16 bits: a row of high bytes and one of low bytes.

struct Floats {
  using Element = float;
  using Sum = Part;
};
struct Pairs {
  using Element = uint16_t;
#if NEON >= 2
  using Sum = Part;
#else
  using Sum = Vec;
#endif
};
struct Bytes {
  using Element = int8_t;
  using Sum = LongVec;  // of 16 integers; in the type of the instruction, or GCC keeps arrays of sums in memory
};

template <class O>
constexpr int64_t kPerLane = 4 / sizeof(typename O::Element);
template <class O>
constexpr int64_t kRowsOf = std::is_same_v<O, Bytes> ? 2 : 1;

// Weights are written over the scores, but for Bytes, which get rows of their own.
template <class O>
constexpr int64_t kWeightsRow = std::is_same_v<O, Bytes> ? kTile / kPerLane<O> : kTile;

// The operands for queries of type T over a cache of type C.
#if NEON >= 2
template <class T, class C>
using Operand =
    std::conditional_t<std::is_same_v<T, BFloat16> && std::is_same_v<C, BFloat16>, Pairs, Floats>;
#else
template <class T, class C>
using Operand = std::conditional_t<DOT && std::is_same_v<C, int8_t>, Bytes,
                                   std::conditional_t<DOT && std::is_same_v<T, BFloat16>, Pairs, Floats>>;
#endif
// Whether the cache holds the operands as they are.
template <class O, class C>
constexpr bool kRaw = std::is_same_v<O, Bytes> || (std::is_same_v<O, Pairs> && std::is_same_v<C, BFloat16>) ||
                      (std::is_same_v<O, Floats> && std::is_same_v<C, float>);

// sum + x * keys, and sum + x * values, with x the same in all lanes.
template <class O>
INLINE typename O::Sum add_keys(Part x, Part keys, typename O::Sum sum) {
#if DOT
  if constexpr (std::is_same_v<O, Pairs>) return add_products(sum, keys, x);
  // One side of this instruction is unsigned: keys plus 128, which largest_score() subtracts again.
  if constexpr (std::is_same_v<O, Bytes>)
    return _mm512_dpbusd_epi32(sum, reinterpret_cast<__m512i>(bits(keys) ^ static_cast<int32_t>(0x80808080)),
                               reinterpret_cast<__m512i>(x));
#elif NEON >= 2
  if constexpr (std::is_same_v<O, Pairs>) return add_products(sum, keys, x);
#endif
  if constexpr (!std::is_same_v<O, Bytes>) return x * keys + sum;
}

template <class O>
INLINE typename O::Sum add_values(Part x, Part values, typename O::Sum sum) {
#if DOT
  if constexpr (std::is_same_v<O, Bytes>)
    return _mm512_dpbusd_epi32(sum, reinterpret_cast<__m512i>(x), reinterpret_cast<__m512i>(values));
#endif
  if constexpr (!std::is_same_v<O, Bytes>) return add_keys<O>(x, values, sum);
}

// One element as an operand's.
template <class O, class C>
INLINE typename O::Element to_operand(C x) {
  if constexpr (std::is_same_v<O, Bytes>) {
    return x;
  } else {
    float y;
    if constexpr (std::is_same_v<C, Fp8>)
      y = from_fp8(IntVec{x.code})[0];
    else
      y = static_cast<float>(x);
    if constexpr (std::is_same_v<O, Pairs>) return BFloat16(y).bits;
    else return y;
  }
}

// The 16 lanes at `from` in the cache as lanes of operands, one after the other along the summed dimension.
template <class O, class C>
INLINE void convert_lanes(const C* from, Vec* to) {
  if constexpr (std::is_same_v<C, Half>) {
    to[0] = load_floats(from);
  } else if constexpr (std::is_same_v<C, BFloat16>) {
    const IntVec x = bits(load(from));
    to[0] = floats(x << 16);
    to[1] = floats(x & static_cast<int32_t>(0xffff0000));
  } else if constexpr (std::is_same_v<C, Fp8>) {
#if DOT
    if constexpr (std::is_same_v<O, Pairs>) {
      to[0] = reinterpret_cast<Vec>(fp8_to_bf16(*reinterpret_cast<const ByteVec32*>(from)));
      return;
    }
#endif
    const IntVec x = __builtin_convertvector(*reinterpret_cast<const HalfVec*>(from), IntVec);
    to[0] = from_fp8(x & 255);
    to[1] = from_fp8(x >> 8);
  } else if constexpr (std::is_same_v<C, int8_t>) {
    const IntVec x = bits(load(from));
    for (int i = 0; i < 4; ++i) to[i] = convert(x << (24 - 8 * i) >> 24);
  }
}

}  // namespace ISA
}  // namespace
