// Vectors and operands for one instruction set; the first part of attention_cpu_kernels.h, which says how it is included.

#define INLINE inline __attribute__((always_inline)) TARGET

namespace {
namespace ISA {

// Keys of a tile. Half as many cost prefill a tenth, for what is done once for each row and tile.
#ifdef TILES
constexpr int64_t kTile = 256;
#else
constexpr int64_t kTile = 128;
#endif

// ---------------------------------------------------------------------------------------------------- vectors

INLINE Vec broadcast(float x) { return x - Vec{}; }
INLINE Vec load(const void* from) { return *static_cast<const Vec*>(from); }
INLINE void store(void* to, Vec x) { *static_cast<Vec*>(to) = x; }
INLINE IntVec bits(Vec x) { return reinterpret_cast<IntVec>(x); }
INLINE Vec floats(IntVec x) { return reinterpret_cast<Vec>(x); }
INLINE Vec broadcast_lane(const float* from) { return floats(IntVec{} + *reinterpret_cast<const Lane*>(from)); }
INLINE Vec convert(IntVec x) { return __builtin_convertvector(x, Vec); }

// Where a is NaN, max(a, b) is b: a NaN in b goes through.
INLINE Vec max(Vec a, Vec b) { return a > b ? a : b; }

INLINE float largest_lane(Vec x) {
#if WIDTH == 512
  return _mm512_reduce_max_ps(reinterpret_cast<__m512>(x));
#else
  float largest = x[0];
  for (int i = 1; i < kLanes; ++i) largest = x[i] > largest ? x[i] : largest;
  return largest;
#endif
}

INLINE float sum_of_lanes(Vec x) {
#if WIDTH == 512
  return _mm512_reduce_add_ps(reinterpret_cast<__m512>(x));
#else
  float sum = 0;
  for (int i = 0; i < kLanes; ++i) sum += x[i];
  return sum;
#endif
}

template <class T>
INLINE Vec load_floats(const T* from) {
  if constexpr (std::is_same_v<T, float>) {
    return load(from);
  } else if constexpr (std::is_same_v<T, at::BFloat16>) {
    return floats(__builtin_convertvector(*reinterpret_cast<const HalfVec*>(from), IntVec) << 16);
  } else {
#if WIDTH == 512
    return reinterpret_cast<Vec>(_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))));
#else
    Vec x;
    for (int i = 0; i < kLanes; ++i) {
#if WIDTH == 256
      x[i] = _cvtsh_ss(from[i].x);
#else
      x[i] = from[i];
#endif
    }
    return x;
#endif
  }
}

// The first `count` of 16, zeros after them.
template <class T>
INLINE Vec load_floats(const T* from, int64_t count) {
  if (count >= kLanes) return load_floats(from);
  T copy[kLanes] = {};
  std::copy_n(from, count, copy);
  return load_floats(copy);
}

// The first `count` lanes as T, to the nearest, ties to even.
template <class T>
INLINE void store_as(T* to, Vec x, int64_t count) {
  T all[kLanes];
  if constexpr (std::is_same_v<T, float>) {
    store(all, x);
  } else if constexpr (std::is_same_v<T, at::BFloat16>) {
    const UintVec raw = reinterpret_cast<UintVec>(x), rounded = (raw + 0x7fffu + ((raw >> 16) & 1u)) >> 16;
    *reinterpret_cast<HalfVec*>(all) = __builtin_convertvector(x == x ? rounded : UintVec{} + 0x7fc0u, HalfVec);
  } else {
    for (int64_t i = 0; i < kLanes; ++i) all[i] = static_cast<T>(x[i]);
  }
  if (count >= kLanes) std::memcpy(static_cast<void*>(to), all, sizeof(all));
  else std::memcpy(static_cast<void*>(to), all, count * sizeof(T));
}

// 2 to the power of x, for x <= 0 (with -inf) or NaN, which stays NaN; 0 below the normal numbers. Relative error 2e-7.
INLINE Vec exp2(Vec x) {
#if WIDTH == 512
  // x less its floor, in [0, 1); a polynomial of the least largest relative error there, 1 at 0; scaled by 2 to the floor.
  const auto f = reinterpret_cast<Vec>(_mm512_reduce_ps(reinterpret_cast<__m512>(x), 0x09));
  Vec p = broadcast(1.86713005e-3f);
  p = p * f + 9.01703071e-3f;
  p = p * f + 5.57999127e-2f;
  p = p * f + 2.40164444e-1f;
  p = p * f + 6.93151295e-1f;
  p = p * f + 1.f;
  return reinterpret_cast<Vec>(_mm512_maskz_scalef_ps(
      _mm512_cmp_ps_mask(reinterpret_cast<__m512>(x), _mm512_set1_ps(-126.f), _CMP_NLT_UQ),
      reinterpret_cast<__m512>(p), reinterpret_cast<__m512>(x)));
#else
  const Vec magic = broadcast(12582912.f);  // 1.5 * 2^23: adding it rounds to an integer, in the low bits
  const Vec clamped = max(broadcast(-126.f), x);
  const Vec shifted = clamped + magic;
  const Vec f = clamped - (shifted - magic);  // in [-0.5, 0.5]; below, its Taylor series
  Vec y = broadcast(1.54035304e-4f);
  y = y * f + 1.33335581e-3f;
  y = y * f + 9.61812911e-3f;
  y = y * f + 5.55041087e-2f;
  y = y * f + 2.40226507e-1f;
  y = y * f + 6.93147181e-1f;
  y = y * f + 1.f;
  return x < -126.f ? Vec{} : y * floats((bits(shifted) << 23) + 0x3f800000);  // a product, so that NaN stays NaN
#endif
}

INLINE float exp2(float x) { return exp2(broadcast(x))[0]; }

INLINE Vec tanh(Vec x) {
  const Vec square = x * x;
  const Vec series = x + x * square * (-1.f / 3 + square * (2.f / 15 - square * (17.f / 315)));
  const Vec magnitude = x < 0.f ? -x : x, shrunk = exp2(magnitude * (-2.f * kLog2E));
  const Vec y = (1.f - shrunk) / (1.f + shrunk);  // loses digits near 0
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
// of bf16, or four bytes. Bytes are signed, but for the weights of values. What is not quantised to 8 bits already, the
// queries and the weights, is taken as 16 bits: a row of high bytes and one of low bytes.

struct Floats {
  using Element = float;
  using Sum = Vec;
};
struct Pairs {
  using Element = uint16_t;
  using Sum = Vec;
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
template <class T, class C>
using Operand = std::conditional_t<DOT && std::is_same_v<C, int8_t>, Bytes,
                                   std::conditional_t<DOT && std::is_same_v<T, at::BFloat16>, Pairs, Floats>>;
// Whether the cache holds the operands as they are.
template <class O, class C>
constexpr bool kRaw = std::is_same_v<O, Bytes> || (std::is_same_v<O, Pairs> && std::is_same_v<C, at::BFloat16>) ||
                      (std::is_same_v<O, Floats> && std::is_same_v<C, float>);

// sum + x * keys, and sum + x * values, with x the same in all lanes.
template <class O>
INLINE typename O::Sum add_keys(Vec x, Vec keys, typename O::Sum sum) {
#if DOT
  if constexpr (std::is_same_v<O, Pairs>)
    return reinterpret_cast<Vec>(_mm512_dpbf16_ps(
        reinterpret_cast<__m512>(sum), reinterpret_cast<__m512bh>(keys), reinterpret_cast<__m512bh>(x)));
  // The instruction wants one side unsigned: keys plus 128, which softmax_row() takes away again.
  if constexpr (std::is_same_v<O, Bytes>)
    return _mm512_dpbusd_epi32(sum, reinterpret_cast<__m512i>(bits(keys) ^ static_cast<int32_t>(0x80808080)),
                               reinterpret_cast<__m512i>(x));
#endif
  if constexpr (!std::is_same_v<O, Bytes>) return x * keys + sum;
}

template <class O>
INLINE typename O::Sum add_values(Vec x, Vec values, typename O::Sum sum) {
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
    if constexpr (std::is_same_v<O, Pairs>) return at::BFloat16(y).x;
    else return y;
  }
}

// The 16 lanes at `from` in the cache as lanes of operands, one after the other along the summed dimension.
template <class O, class C>
INLINE void convert_lanes(const C* from, Vec* to) {
  if constexpr (std::is_same_v<C, at::Half>) {
    to[0] = load_floats(from);
  } else if constexpr (std::is_same_v<C, at::BFloat16>) {
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
