// The kernels of attention_cpu.cpp for one instruction set. Included there once for each, with these macros set:
//
//   ISA     the namespace
//   TARGET  the attribute of every function
//   WIDTH   bits of the registers
//   DOT     whether it multiplies pairs of bf16, and groups of four bytes, and adds them to one number
//
// Hence no include guard. The types and constants are those of the including file.

namespace {
namespace ISA {

#define INLINE inline __attribute__((always_inline)) TARGET

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

// 2 to the power of x, for x <= 0 (with -inf) or NaN, which stays NaN; 0 below the normal numbers. Relative error 2e-7.
INLINE Vec exp2(Vec x) {
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
  return x < -126.f ? Vec{} : floats(bits(y) + (bits(shifted) << 23));
}

INLINE float exp2(float x) { return exp2(broadcast(x))[0]; }

INLINE Vec tanh(Vec x) {
  const Vec shrunk = exp2((x < 0.f ? x : -x) * (2.f * kLog2E));
  const Vec y = (1.f - shrunk) / (1.f + shrunk);
  return x < 0.f ? -y : y;
}

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

// ---------------------------------------------------------------------------------------------------- products

INLINE void prefetch(const void* at) { __builtin_prefetch(at, 0, 2); }  // into L2: in L1 it would push out what is in use

// The high and the low bytes' sums as one.
INLINE IntVec join(LongVec high, LongVec low) {
  return (reinterpret_cast<IntVec>(high) << 8) + reinterpret_cast<IntVec>(low);
}

// The largest blocks of sums that leave registers for the operands: rows of operands, and vectors of each.
template <class O>
constexpr int kMaxRows = (WIDTH == 512 ? 6 : WIDTH == 256 ? 3 : 1) / kRowsOf<O>;
constexpr int kMaxVecs = WIDTH == 512 ? 4 : 2;

// Scores[rows][kVecs groups of 16 keys] = queries[rows][depth] * keys[depth], integers for Bytes. The lane of a group is
// `stride` floats after the one before. `next` are the keys that will be wanted next, at the same places.
template <class O, int kRows, int kVecs>
TARGET void multiply_keys(const float* queries, int64_t depth, const float* const* keys, int64_t stride,
                          const float* const* next, float* scores) {
  constexpr int kParts = kRowsOf<O>;
  typename O::Sum sum[kRows * kParts][kVecs];
#pragma GCC unroll 8
  for (int i = 0; i < kRows * kParts; ++i)
#pragma GCC unroll 8
    for (int j = 0; j < kVecs; ++j) sum[i][j] = typename O::Sum{};
  for (int64_t k = 0; k < depth; ++k) {
    Vec group[kVecs];
#pragma GCC unroll 8
    for (int j = 0; j < kVecs; ++j) group[j] = load(keys[j] + k * stride);
    if (next != nullptr)
#pragma GCC unroll 8
      for (int j = 0; j < kVecs; ++j) prefetch(next[j] + k * stride);
#pragma GCC unroll 8
    for (int i = 0; i < kRows * kParts; ++i) {
      const Vec x = broadcast_lane(queries + i * depth + k);
#pragma GCC unroll 8
      for (int j = 0; j < kVecs; ++j) sum[i][j] = add_keys<O>(x, group[j], sum[i][j]);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 8
    for (int j = 0; j < kVecs; ++j) {
      Vec& to = *reinterpret_cast<Vec*>(scores + i * kTile + j * kLanes);
      if constexpr (kParts == 2) to = floats(join(sum[2 * i][j], sum[2 * i + 1][j]));
      else to = sum[i][j];
    }
}

// Out[rows][kVecs * 16 columns] += weights[rows][depth] * values[depth][columns], for Bytes times weight_scale[rows].
template <class O, int kRows, int kVecs>
TARGET void multiply_values(const float* weights, const float* weight_scale, int64_t depth, const float* const* values,
                            const float* const* next, int64_t column, float* out, int64_t out_row) {
  constexpr int kParts = kRowsOf<O>;
  typename O::Sum sum[kRows * kParts][kVecs];
#pragma GCC unroll 8
  for (int i = 0; i < kRows * kParts; ++i)
#pragma GCC unroll 8
    for (int j = 0; j < kVecs; ++j)
      if constexpr (kParts == 1) sum[i][j] = load(out + i * out_row + column + j * kLanes);
      else sum[i][j] = typename O::Sum{};
  for (int64_t k = 0; k < depth; ++k) {
    Vec row[kVecs];
#pragma GCC unroll 8
    for (int j = 0; j < kVecs; ++j) row[j] = load(values[k] + column + j * kLanes);
    if (next != nullptr)
#pragma GCC unroll 8
      for (int j = 0; j < kVecs; ++j) prefetch(next[k] + column + j * kLanes);
#pragma GCC unroll 8
    for (int i = 0; i < kRows * kParts; ++i) {
      const Vec x = broadcast_lane(weights + i * kWeightsRow<O> + k);
#pragma GCC unroll 8
      for (int j = 0; j < kVecs; ++j) sum[i][j] = add_values<O>(x, row[j], sum[i][j]);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 8
    for (int j = 0; j < kVecs; ++j) {
      Vec& to = *reinterpret_cast<Vec*>(out + i * out_row + column + j * kLanes);
      if constexpr (kParts == 2) to += convert(join(sum[2 * i][j], sum[2 * i + 1][j])) * weight_scale[i];
      else to = sum[i][j];
    }
}

// f.template operator()<kRows>(first row), over blocks of kRows rows and a last smaller one.
template <int kRows, class F>
INLINE void for_row_blocks(int64_t rows, int64_t first, F&& f) {
  for (; first + kRows <= rows; first += kRows) f.template operator()<kRows>(first);
  if constexpr (kRows > 1)
    if (first < rows) for_row_blocks<kRows - 1>(rows, first, f);
}

template <class O, int kVecs = kMaxVecs>
TARGET void all_scores(int64_t rows, const float* queries, int64_t depth, int64_t groups, const float* const* keys,
                       int64_t stride, const float* const* next, float* scores) {
  for (; groups >= kVecs; groups -= kVecs, keys += kVecs, next += next == nullptr ? 0 : kVecs, scores += kVecs * kLanes)
    for_row_blocks<kMaxRows<O>>(rows, 0, [&]<int kRows>(int64_t i) TARGET {
      multiply_keys<O, kRows, kVecs>(queries + i * kRowsOf<O> * depth, depth, keys, stride, i == 0 ? next : nullptr,
                                     scores + i * kTile);
    });
  if constexpr (kVecs > 1)
    if (groups > 0) all_scores<O, kVecs - 1>(rows, queries, depth, groups, keys, stride, next, scores);
}

template <class O, int kVecs = kMaxVecs>
TARGET void all_values(int64_t rows, const float* weights, const float* weight_scale, int64_t depth,
                       const float* const* values, const float* const* next, int64_t column, int64_t columns,
                       float* out) {
  for (; column + kVecs * kLanes <= columns; column += kVecs * kLanes)
    for_row_blocks<kMaxRows<O>>(rows, 0, [&]<int kRows>(int64_t i) TARGET {
      multiply_values<O, kRows, kVecs>(weights + i * kRowsOf<O> * kWeightsRow<O>, weight_scale + i, depth, values,
                                       i == 0 ? next : nullptr, column, out + i * columns, columns);
    });
  if constexpr (kVecs > 1)
    if (column < columns)
      all_values<O, kVecs - 1>(rows, weights, weight_scale, depth, values, next, column, columns, out);
}

// ---------------------------------------------------------------------------------------------------- softmax

// What of a tile's keys a row sees, and with which scales.
struct Mask {
  int64_t first, end;                    // keys of the tile
  const float *k_scale, *v_scale;        // one for each key, or null
};

// How a row of products becomes scores.
struct Scoring {
  float scale;              // of the products; to powers of 2, without a soft cap
  float soft_cap;           // or 0
  int32_t excess;           // Bytes: what the unsigned keys added
};

// A row of a tile's products becomes weights, and its softmax state moves on. Weights are
// written as operands for the values' product: to `scores` itself, or for Bytes to `codes` (two rows), in which case
// their scale is returned.
template <class O>
TARGET float softmax_row(float* scores, int64_t keys, const Scoring& scoring, const Mask& mask, const State& state,
                         int64_t row, int64_t padded_dim, uint8_t* codes) {
  constexpr bool kBytes = std::is_same_v<O, Bytes>;
  if (mask.first >= mask.end) {
    if constexpr (kBytes) std::memset(codes, 0, 2 * kTile);
    else std::memset(scores, 0, keys * sizeof(float));
    return 0;
  }
  const IntVec lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const auto visible = [&](int64_t key) TARGET {
    return (lane >= static_cast<int32_t>(mask.first - key)) & (lane < static_cast<int32_t>(mask.end - key));
  };
  Vec largest = broadcast(-kInfinity);
  for (int64_t key = 0; key < keys; key += kLanes) {
    Vec x = load(scores + key);
    if constexpr (kBytes) x = convert(bits(x) - scoring.excess);
    x *= scoring.scale;
    if (mask.k_scale != nullptr) x *= load(mask.k_scale + key);
    if (scoring.soft_cap > 0) x = tanh(x / scoring.soft_cap) * (scoring.soft_cap * kLog2E);
    x = visible(key) ? x : broadcast(-kInfinity);
    store(scores + key, x);
    largest = max(x, largest);
  }
  const float maximum = std::max(state.maximum[row], largest_lane(largest));

  Vec sums = {}, check = {};
  largest = Vec{};
  for (int64_t key = 0; key < keys; key += kLanes) {
    const Vec weight = exp2(load(scores + key) - maximum);
    sums += weight;
    Vec scaled = weight;
    if (mask.v_scale != nullptr) {
      scaled = visible(key) ? weight * load(mask.v_scale + key) : Vec{};
      largest = max(scaled, largest);
      check += scaled;
    }
#if DOT
    if constexpr (std::is_same_v<O, Pairs>) {  // written over the scores, behind the reading
      const auto pairs = _mm512_cvtneps_pbh(reinterpret_cast<__m512>(scaled));
      *reinterpret_cast<HalfVec*>(scores + key / 2) = reinterpret_cast<HalfVec>(pairs);
      continue;
    }
#endif
    store(scores + key, scaled);
  }

  if (maximum > state.maximum[row]) {
    const float shrink = exp2(state.maximum[row] - maximum);
    float* values = state.values + row * padded_dim;
    for (int64_t i = 0; i < padded_dim; i += kLanes) store(values + i, load(values + i) * shrink);
    state.sum[row] *= shrink;
    state.maximum[row] = maximum;
  }
  state.sum[row] += sum_of_lanes(sums);

  if constexpr (kBytes) {
    const float most = largest_lane(largest), total = sum_of_lanes(check);
    if (total != total) return total;  // NaN, and so will be all values
    const float inverse = most < 0x1p-110f ? 0.f : 65535.f / most;
    for (int64_t key = 0; key < keys; key += kLanes) {
      const IntVec x = __builtin_convertvector(load(scores + key) * inverse + 0.5f, IntVec);
      *reinterpret_cast<ByteVec*>(codes + key) = __builtin_convertvector(x >> 8, ByteVec);
      *reinterpret_cast<ByteVec*>(codes + kTile + key) = __builtin_convertvector(x & 255, ByteVec);
    }
    return most * (1.f / 65535.f);
  }
  return 1;
}

TARGET void fold(const State& into, const State& from, int64_t rows, int64_t padded_dim) {
  for (int64_t row = 0; row < rows; ++row) {
    if (from.sum[row] == 0) continue;  // it saw no key
    const float maximum = std::max(into.maximum[row], from.maximum[row]);
    const float keep = exp2(into.maximum[row] - maximum), add = exp2(from.maximum[row] - maximum);
    for (int64_t i = row * padded_dim; i < (row + 1) * padded_dim; i += kLanes)
      store(into.values + i, load(into.values + i) * keep + load(from.values + i) * add);
    into.sum[row] = into.sum[row] * keep + from.sum[row] * add;
    into.maximum[row] = maximum;
  }
}

TARGET void clear(const State& state, int64_t rows, int64_t padded_dim) {
  std::memset(state.values, 0, rows * padded_dim * sizeof(float));
  std::memset(state.sum, 0, rows * sizeof(float));
  std::fill_n(state.maximum, rows, -kInfinity);
}

template <class T>
TARGET void write_out(const Problem& p, const Unit& unit, const State& state) {
  const int64_t first = p.starts[unit.request] + unit.first_token;
  for (int64_t row = 0; row < unit.tokens * p.group; ++row) {
    const int64_t head = unit.kv_head * p.group + row % p.group;
    T* to = static_cast<T*>(p.out) + ((first + row / p.group) * p.heads + head) * p.head_dim;
    const float* from = state.values + row * p.padded_dim();
    float scale = 1.f / state.sum[row];
    if (p.sinks != nullptr) {  // one more key, whose value is zero
      const float sink = p.sinks[head] * kLog2E, maximum = std::max(sink, state.maximum[row]);
      const float shrink = exp2(state.maximum[row] - maximum);
      scale = shrink / (state.sum[row] * shrink + exp2(sink - maximum));
    }
    for (int64_t i = 0; i < p.head_dim; ++i) to[i] = static_cast<T>(from[i] * scale);
  }
}

// ---------------------------------------------------------------------------------------------------- the cache

// The largest absolute value of a row, no less than kSmallestMaximum, and whether all of it are numbers.
struct Range {
  float maximum;
  bool finite;
};

template <class T>
TARGET Range range_of(const T* row, int64_t length) {
  Vec largest = broadcast(kSmallestMaximum), check = {};
  for (int64_t i = 0; i < length; i += kLanes) {
    const Vec x = load_floats(row + i, length - i);
    largest = max(x < 0.f ? -x : x, largest);
    check += x * 0.f;  // 0, or NaN
  }
  const float maximum = largest_lane(largest), sum = sum_of_lanes(check);
  return {maximum < kInfinity ? maximum : kSmallestMaximum, sum == 0};
}

// Writes one row, the key or value of a token and head, to its places in a block. Quantised rows return their scale.
// The order of elements is stated in attention_cpu.cpp.
template <class T, class C>
TARGET float write_row(const Problem& p, const T* from, bool is_key, int64_t offset, C* block) {
  float scale = 1;
  C* codes = reinterpret_cast<C*>(scratch(ceil_div(p.head_dim, kLanes) * kLanes));
  const C* row = reinterpret_cast<const C*>(from);
  if constexpr (!std::is_same_v<T, C>) {
    constexpr float kCodeMax = std::is_same_v<C, int8_t> ? 127.f : 448.f;
    const Range range = range_of(from, p.head_dim);
    const float maximum = range.maximum;
    scale = range.finite ? maximum / kCodeMax : std::numeric_limits<float>::quiet_NaN();
    const float inverse = 1.f / maximum * kCodeMax;
    for (int64_t i = 0; i < p.head_dim; i += kLanes) {
      Vec x = load_floats(from + i, p.head_dim - i) * inverse;
      x = x > kCodeMax ? broadcast(kCodeMax) : x < -kCodeMax ? broadcast(-kCodeMax) : x;
      IntVec code;
      if constexpr (std::is_same_v<C, int8_t>)
        code = nearest(x);
      else
        code = to_fp8(x);
      if (!range.finite) code = IntVec{};
      reinterpret_cast<ByteVec*>(codes)[i / kLanes] = __builtin_convertvector(code, ByteVec);
    }
    row = codes;
  }
  const int64_t size = p.block_size, k_width = p.key_width<C>(), v_width = p.value_width<C>();
  if (is_key) {
    for (int64_t i = 0, at = offset * k_width; i < p.head_dim; i += k_width, at += size * k_width)
      for (int64_t j = 0; j < k_width; ++j) block[at + j] = row[i + j];
  } else {
    C* to = block + offset / v_width * p.head_dim * v_width + offset % v_width;
    for (int64_t i = 0; i < p.head_dim; ++i) to[i * v_width] = row[i];
  }
  return scale;
}

template <class T, class C>
TARGET void write(const Problem& p, int64_t token) {
  const int64_t block = p.slots[token] / p.block_size, offset = p.slots[token] % p.block_size;
  for (int64_t h = 0; h < p.kv_heads; ++h) {
    const int64_t run = block * p.kv_heads + h, at = run * p.block_size * p.head_dim;
    const T* k = static_cast<const T*>(p.k) + token * p.k_token + h * p.k_head;
    const T* v = static_cast<const T*>(p.v) + token * p.v_token + h * p.v_head;
    const float k_scale = write_row(p, k, true, offset, static_cast<C*>(p.k_cache) + at);
    const float v_scale = write_row(p, v, false, offset, static_cast<C*>(p.v_cache) + at);
    if constexpr (!std::is_same_v<T, C>) {
      p.k_scale[run * p.block_size + offset] = k_scale;
      p.v_scale[run * p.block_size + offset] = v_scale;
    }
  }
}

// The keys and values of a tile: where they lie in the cache, in runs of 16 keys.
template <class C>
struct Tile {
  static constexpr int64_t kGroups = kTile / kLanes, kRows = kTile / kCacheWidth<C>;
  int64_t count = 0;          // of keys; the rest is not there
  const float* keys[kGroups];  // the first lane of 16 keys
  const float* values[kRows];  // one lane of keys, all columns
  float k_scale[kTile], v_scale[kTile];
};

template <class C>
TARGET void find_tile(const Problem& p, const Unit& unit, int64_t first, Tile<C>& tile) {
  constexpr int64_t kWidth = kCacheWidth<C>, kLanesOfKeys = kLanes / kWidth;
  tile.count = std::clamp<int64_t>(unit.keys - first, 0, kTile);
  if (tile.count == 0) return;
  const int32_t* table = p.table + unit.request * p.table_width + first / p.block_size;
  int64_t offset = first % p.block_size, run = p.run(*table, unit.kv_head);
  for (int64_t g = 0; g < tile.kGroups; ++g, offset += kLanes) {
    if (g * kLanes < tile.count && offset == p.block_size) offset = 0, run = p.run(*++table, unit.kv_head);
    if (g * kLanes >= tile.count) offset -= kLanes;  // past the end any place will do
    const C* keys = static_cast<const C*>(p.k_cache) + run * p.head_dim + offset * kWidth;
    const C* values = static_cast<const C*>(p.v_cache) + (run + offset) * p.head_dim;
    tile.keys[g] = reinterpret_cast<const float*>(keys);
    for (int64_t i = 0; i < kLanesOfKeys; ++i)
      tile.values[g * kLanesOfKeys + i] = reinterpret_cast<const float*>(values + i * p.head_dim * kWidth);
    if (p.k_scale != nullptr) {
      store(tile.k_scale + g * kLanes, load(p.k_scale + run + offset));
      store(tile.v_scale + g * kLanes, load(p.v_scale + run + offset));
    }
  }
}

// The same keys and values as operands: left where they are, or converted into memory of `Operands`.
template <class O, class C>
struct Operands {
  static constexpr int64_t kDepth = kTile / kPerLane<O>;
  const float* keys[Tile<C>::kGroups];
  const float* values[kDepth];
  int64_t stride;             // from a lane of keys to the next, in floats
  float *key_memory, *value_memory, *tail;

  static int64_t key_floats(const Problem& p) { return ceil_div(p.head_dim, kPerLane<O>) * kTile; }
  static int64_t value_floats(const Problem& p) { return kDepth * p.padded_dim(); }
};

template <class O, class C>
TARGET void convert_tile(const Problem& p, const Tile<C>& tile, const Tile<C>& next, Operands<O, C>& to) {
  constexpr int64_t kWidth = kCacheWidth<C>, kParts = kWidth / kPerLane<O>;
  const int64_t lanes = p.head_dim / kWidth, dim = p.padded_dim();
  Vec parts[4];
  for (int64_t g = 0; g * kLanes < tile.count; ++g) {
    const C *from = reinterpret_cast<const C*>(tile.keys[g]), *later = reinterpret_cast<const C*>(next.keys[g]);
    for (int64_t lane = 0; lane < lanes; ++lane, from += p.block_size * kWidth, later += p.block_size * kWidth) {
      prefetch(later);
      convert_lanes<O>(from, parts);
      for (int64_t i = 0; i < kParts; ++i) store(to.key_memory + ((g * lanes + lane) * kParts + i) * kLanes, parts[i]);
    }
  }
  for (int64_t row = 0; row * kWidth < tile.count; ++row) {
    const C *from = reinterpret_cast<const C*>(tile.values[row]), *later = reinterpret_cast<const C*>(next.values[row]);
    for (int64_t column = 0; column < p.head_dim; column += kLanes) {
      prefetch(later + column * kWidth);
      convert_lanes<O>(from + column * kWidth, parts);
      for (int64_t i = 0; i < kParts; ++i) store(to.value_memory + (row * kParts + i) * dim + column, parts[i]);
    }
  }
}

// Element by element, for blocks and heads that are not made of whole vectors.
template <class O, class C>
TARGET void copy_tile(const Problem& p, const Unit& unit, int64_t first, Tile<C>& tile, Operands<O, C>& to) {
  constexpr int64_t kEach = kPerLane<O>;
  const int32_t* table = p.table + unit.request * p.table_width;
  const int64_t lanes = ceil_div(p.head_dim, kEach), dim = p.padded_dim();
  const int64_t k_width = p.key_width<C>(), v_width = p.value_width<C>();
  tile.count = std::min(unit.keys - first, kTile);
  std::memset(to.key_memory, 0, to.key_floats(p) * sizeof(float));
  std::memset(to.value_memory, 0, to.value_floats(p) * sizeof(float));
  auto* keys = reinterpret_cast<typename O::Element*>(to.key_memory);
  auto* values = reinterpret_cast<typename O::Element*>(to.value_memory);
  for (int64_t i = 0; i < tile.count; ++i) {
    const int64_t run = p.run(table[(first + i) / p.block_size], unit.kv_head), offset = (first + i) % p.block_size;
    const C* k = static_cast<const C*>(p.k_cache) + run * p.head_dim + offset * k_width;
    const C* v = static_cast<const C*>(p.v_cache) + run * p.head_dim + offset / v_width * p.head_dim * v_width +
                 offset % v_width;
    for (int64_t d = 0; d < p.head_dim; ++d) {
      keys[((i / kLanes * lanes + d / kEach) * kLanes + i % kLanes) * kEach + d % kEach] =
          to_operand<O>(k[d / k_width * p.block_size * k_width + d % k_width]);
      values[(i / kEach * dim + d) * kEach + i % kEach] = to_operand<O>(v[d * v_width]);
    }
    if (p.k_scale != nullptr) {
      tile.k_scale[i] = p.k_scale[run + offset];
      tile.v_scale[i] = p.v_scale[run + offset];
    }
  }
}

// ---------------------------------------------------------------------------------------------------- items

// The rows of a unit's queries as operands. For Bytes a row is two, of the high and low bytes of 16 bits.
template <class O, class T>
TARGET void load_queries(const Problem& p, const Unit& unit, int64_t lanes, float* to, Scoring* scoring) {
  using Element = typename O::Element;
  const int64_t first = p.starts[unit.request] + unit.first_token;
  for (int64_t row = 0; row < unit.tokens * p.group; ++row) {
    const int64_t head = unit.kv_head * p.group + row % p.group;
    const T* from = static_cast<const T*>(p.q) + (first + row / p.group) * p.q_token + head * p.q_head;
    Element* x = reinterpret_cast<Element*>(to + row * kRowsOf<O> * lanes);
    std::memset(static_cast<void*>(x), 0, kRowsOf<O> * lanes * sizeof(float));
    scoring[row] = {p.sm_scale * (p.soft_cap > 0 ? 1.f : kLog2E), p.soft_cap, 0};
    if constexpr (std::is_same_v<O, Bytes>) {
      constexpr float kMost = 127 * 256;
      const Range range = range_of(from, p.head_dim);
      scoring[row].scale *= range.finite ? range.maximum / kMost : std::numeric_limits<float>::quiet_NaN();
      IntVec sum = {};
      for (int64_t i = 0; i < p.head_dim && range.finite; i += kLanes) {
        const IntVec code = nearest(load_floats(from + i, p.head_dim - i) * (kMost / range.maximum));
        const IntVec low = (code << 24) >> 24;
        const ByteVec bytes[2] = {__builtin_convertvector((code - low) >> 8, ByteVec),
                                  __builtin_convertvector(low, ByteVec)};
        for (int j = 0; j < 2; ++j) std::memcpy(x + j * 4 * lanes + i, &bytes[j], std::min(kLanes, p.head_dim - i));
        sum += code;
      }
      for (int i = 0; i < kLanes; ++i) scoring[row].excess += 128 * sum[i];
    } else {
      for (int64_t i = 0; i < p.head_dim; ++i) x[i] = to_operand<O>(from[i]);
    }
  }
}

template <class T, class C>
TARGET void attend(const Problem& p, const Unit& unit, const Item& item, float* states) {
  using O = Operand<T, C>;
  constexpr bool kBytes = std::is_same_v<O, Bytes>;
  const int64_t rows = unit.tokens * p.group, dim = p.padded_dim(), state_size = State::size(rows, dim);
  const int64_t lanes = ceil_div(p.head_dim, kPerLane<O>);
  const int64_t first_position = unit.keys - unit.tokens;
  const bool in_runs = p.in_runs(), raw = in_runs && kRaw<O, C>;

  using Memory = Operands<O, C>;
  const int64_t sizes[] = {Memory::key_floats(p), Memory::value_floats(p), dim, rows * kTile, rows * kRowsOf<O> * lanes,
                           rows * kRowsOf<O> * kWeightsRow<O>, rows, rows * 4, state_size, state_size};
  int64_t total_size = 0;
  for (const int64_t size : sizes) total_size += ceil_div(size, kLanes) * kLanes;
  float* memory = scratch(total_size);
  int64_t taken = 0;
  const auto take = [&] { return std::exchange(memory, memory + ceil_div(sizes[taken++], kLanes) * kLanes); };
  Memory operands;
  operands.key_memory = take();
  operands.value_memory = take();
  operands.tail = take();
  float *scores = take(), *queries = take(), *codes = take(), *weight_scale = take();
  static_assert(sizeof(Scoring) <= 4 * sizeof(float));
  Scoring* scoring = reinterpret_cast<Scoring*>(take());
  const State total(take(), rows, dim);
  float* partition_memory = take();

  load_queries<O, T>(p, unit, lanes, queries, scoring);
  clear(total, rows, dim);
  operands.stride = raw ? p.block_size : kLanes;
  if (!raw) {
    for (int64_t g = 0; g < Tile<C>::kGroups; ++g) operands.keys[g] = operands.key_memory + g * lanes * kLanes;
    for (int64_t i = 0; i < operands.kDepth; ++i) operands.values[i] = operands.value_memory + i * dim;
  }

  Tile<C> tiles[2];
  int64_t now = 0;
  const int64_t first_tile = unit.first_key / kTile * kTile;
  if (in_runs) find_tile(p, unit, std::max(first_tile, item.first_partition * kPartition), tiles[now]);
  for (int64_t partition = item.first_partition; partition < item.last_partition; ++partition) {
    const bool kept = unit.state >= 0;
    const State state(kept ? states + unit.state + (partition - unit.first_partition()) * state_size : partition_memory,
                      rows, dim);
    clear(state, rows, dim);
    const int64_t end = std::min(unit.keys, (partition + 1) * kPartition);
    for (int64_t first = std::max(first_tile, partition * kPartition); first < end; first += kTile) {
      Tile<C>& tile = tiles[now];
      const Tile<C>* next = nullptr;
      if (in_runs) {
        now ^= 1;
        find_tile(p, unit, first + kTile, tiles[now]);
        next = &tiles[now];
        if constexpr (!kRaw<O, C>) {
          convert_tile(p, tile, next->count == 0 ? tile : *next, operands);
        } else {
          std::copy(std::begin(tile.keys), std::end(tile.keys), operands.keys);
          std::copy(std::begin(tile.values), std::end(tile.values), operands.values);
        }
      } else {
        copy_tile(p, unit, first, tile, operands);
      }
      if (!raw || next->count == 0) next = nullptr;
      const int64_t groups = ceil_div(tile.count, kLanes), depth = ceil_div(tile.count, kPerLane<O>);
      if constexpr (std::is_same_v<O, Pairs>)
        if (in_runs && tile.count % 2 != 0) {  // the other half of the last pair is anything: it becomes zero
          const float*& last = operands.values[depth - 1];
          for (int64_t i = 0; i < dim; i += kLanes) store(operands.tail + i, floats(bits(load(last + i)) & 0xffff));
          last = operands.tail;
        }

      all_scores<O>(rows, queries, lanes, groups, operands.keys, operands.stride,
                    next == nullptr ? nullptr : next->keys, scores);
      for (int64_t row = 0; row < rows; ++row) {
        const int64_t position = first_position + row / p.group - first;  // of the query, in the tile
        const Mask mask{p.window > 0 ? std::max<int64_t>(position - p.window + 1, 0) : 0, std::min(position + 1, tile.count),
                        p.k_scale == nullptr ? nullptr : tile.k_scale, p.k_scale == nullptr ? nullptr : tile.v_scale};
        weight_scale[row] = softmax_row<O>(scores + row * kTile, groups * kLanes, scoring[row], mask, state, row, dim,
                                           reinterpret_cast<uint8_t*>(codes) + row * 2 * kTile);
      }
      all_values<O>(rows, kBytes ? codes : scores, weight_scale, depth, operands.values,
                    next == nullptr ? nullptr : next->values, 0, dim, state.values);
    }
    if (!kept) fold(total, state, rows, dim);
  }
  if (unit.state < 0) write_out<T>(p, unit, total);
}

template <class T>
TARGET void merge(const Problem& p, const Unit& unit, const float* states) {
  const int64_t rows = unit.tokens * p.group, dim = p.padded_dim(), state_size = State::size(rows, dim);
  const State total(scratch(state_size), rows, dim);
  clear(total, rows, dim);
  for (int64_t i = 0; i < unit.partitions(); ++i)
    fold(total, State(const_cast<float*>(states) + unit.state + i * state_size, rows, dim), rows, dim);
  write_out<T>(p, unit, total);
}

}  // namespace ISA
}  // namespace

#undef INLINE
#undef ISA
#undef TARGET
#undef WIDTH
#undef DOT
