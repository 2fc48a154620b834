// The two products of a tile and the softmax between them, for one instruction set; see attention_cpu_kernels.h.

#include <algorithm>
#include <utility>

#ifdef TILES
#include "attention_cpu_amx.h"
#else
#include "attention_cpu_operands.h"
#endif

namespace {
namespace ISA {

// ---------------------------------------------------------------------------------------------------- products

// The high and the low bytes' sums as one, modulo 2^32.
INLINE IntVec join(LongVec high, LongVec low) {
  return reinterpret_cast<IntVec>((reinterpret_cast<UintVec>(high) << 8) + reinterpret_cast<UintVec>(low));
}

// The largest blocks of sums that leave registers for the operands: rows of operands, and vectors of each.
#ifdef __aarch64__
template <class O>
constexpr int kMaxRows = 4 / kRowsOf<O>;  // with 6 rows of four registers some are kept in memory
#else
template <class O>
constexpr int kMaxRows = (WIDTH == 128 ? 2 : 6) / kRowsOf<O>;
#endif
constexpr int kMaxVecs = WIDTH == 512 ? 4 : 1;

// Scores[rows][kVecs groups of 16 keys] = queries[rows][depth] * keys[depth], integers for Bytes. The lane of a group is
// `stride` floats after the one before. `next` are the keys of the next tile, which are fetched meanwhile.
template <class O, int kRows, int kVecs>
TARGET void multiply_keys(const float* queries, int64_t depth, const float* const* keys, int64_t stride,
                          const float* const* next, float* scores) {
  constexpr int kEach = kRowsOf<O>, kAll = kVecs * kPartsOfVec;
  typename O::Sum sum[kRows * kEach][kAll];
#pragma GCC unroll 8
  for (int i = 0; i < kRows * kEach; ++i)
#pragma GCC unroll 8
    for (int j = 0; j < kAll; ++j) sum[i][j] = typename O::Sum{};
  for (int64_t k = 0; k < depth; ++k) {
    Part group[kAll];
#pragma GCC unroll 8
    for (int j = 0; j < kAll; ++j) group[j] = load_part(keys[j / kPartsOfVec] + k * stride + j % kPartsOfVec * kPartLanes);
    if (next != nullptr)
#pragma GCC unroll 8
      for (int j = 0; j < kVecs; ++j) prefetch(next[j] + k * stride);
#pragma GCC unroll 8
    for (int i = 0; i < kRows * kEach; ++i) {
      const Part x = broadcast_lane_of_part(queries + i * depth + k);
#pragma GCC unroll 8
      for (int j = 0; j < kAll; ++j) sum[i][j] = add_keys<O>(x, group[j], sum[i][j]);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 8
    for (int j = 0; j < kAll; ++j) {
      float* to = scores + i * kTile + j * kPartLanes;
      if constexpr (kEach == 2) store(to, floats(join(sum[2 * i][j], sum[2 * i + 1][j])));
      else store_part(to, sum[i][j]);
    }
}

// Out[rows][kVecs * 16 columns] = weights[rows][depth] * values[depth][columns], for Bytes times weight_scale[rows]; or
// `add`s that.
template <class O, int kRows, int kVecs>
TARGET void multiply_values(const float* weights, const float* weight_scale, int64_t depth, const float* const* values,
                            const float* const* next, bool add, int64_t column, float* out, int64_t out_row) {
  constexpr int kEach = kRowsOf<O>, kAll = kVecs * kPartsOfVec;
  typename O::Sum sum[kRows * kEach][kAll];
#pragma GCC unroll 8
  for (int i = 0; i < kRows * kEach; ++i)
#pragma GCC unroll 8
    for (int j = 0; j < kAll; ++j)
      if constexpr (kEach == 1) sum[i][j] = add ? load_part(out + i * out_row + column + j * kPartLanes) : Part{};
      else sum[i][j] = typename O::Sum{};
  for (int64_t k = 0; k < depth; ++k) {
    Part row[kAll];
#pragma GCC unroll 8
    for (int j = 0; j < kAll; ++j) row[j] = load_part(values[k] + column + j * kPartLanes);
    if (next != nullptr)
#pragma GCC unroll 8
      for (int j = 0; j < kVecs; ++j) prefetch(next[k] + column + j * kLanes);
#pragma GCC unroll 8
    for (int i = 0; i < kRows * kEach; ++i) {
      const Part x = broadcast_lane_of_part(weights + i * kWeightsRow<O> + k);
#pragma GCC unroll 8
      for (int j = 0; j < kAll; ++j) sum[i][j] = add_values<O>(x, row[j], sum[i][j]);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 8
    for (int j = 0; j < kAll; ++j) {
      float* to = out + i * out_row + column + j * kPartLanes;
      if constexpr (kEach == 1) store_part(to, sum[i][j]);
      else store(to, (add ? load(to) : Vec{}) + convert(join(sum[2 * i][j], sum[2 * i + 1][j])) * weight_scale[i]);
    }
}

// f.template operator()<kRows>(first row), over blocks of kRows rows and a last smaller one.
template <int kRows, class F>
INLINE void for_row_blocks(int64_t rows, int64_t first, F&& f) {
  for (; first + kRows <= rows; first += kRows) f.template operator()<kRows>(first);
  if constexpr (kRows > 1)
    if (first < rows) for_row_blocks<kRows - 1>(rows, first, f);
}

template <class O, int kRows, int kVecs>
TARGET void score_blocks(int64_t rows, const float* queries, int64_t depth, int64_t groups, const float* const* keys,
                         int64_t stride, const float* const* next, float* scores) {
  for (; groups >= kVecs; groups -= kVecs, keys += kVecs, next += next == nullptr ? 0 : kVecs, scores += kVecs * kLanes)
    for_row_blocks<kRows>(rows, 0, [&]<int kBlock>(int64_t i) TARGET {
      multiply_keys<O, kBlock, kVecs>(queries + i * kRowsOf<O> * depth, depth, keys, stride, i == 0 ? next : nullptr,
                                      scores + i * kTile);
    });
  if constexpr (kVecs > 1)
    if (groups > 0) score_blocks<O, kRows, kVecs - 1>(rows, queries, depth, groups, keys, stride, next, scores);
}

template <class O, int kRows, int kVecs>
TARGET void value_blocks(int64_t rows, const float* weights, const float* weight_scale, int64_t depth,
                         const float* const* values, const float* const* next, bool add, int64_t column, int64_t columns,
                         float* out) {
  for (; column + kVecs * kLanes <= columns; column += kVecs * kLanes)
    for_row_blocks<kRows>(rows, 0, [&]<int kBlock>(int64_t i) TARGET {
      multiply_values<O, kBlock, kVecs>(weights + i * kRowsOf<O> * kWeightsRow<O>, weight_scale + i, depth, values,
                                        i == 0 ? next : nullptr, add, column, out + i * columns, columns);
    });
  if constexpr (kVecs > 1)
    if (column < columns)
      value_blocks<O, kRows, kVecs / 2>(rows, weights, weight_scale, depth, values, next, add, column, columns, out);
}

// With many rows a product is bound by arithmetic, and blocks are as large as the registers allow. With few it is bound
// by memory, and blocks read keys and values in the order of their addresses.
constexpr int64_t kFewRows = 8;

#ifdef TILES
template <class O>
constexpr bool kTiled = std::is_same_v<O, Pairs>;
#else
template <class O>
constexpr bool kTiled = false;
#endif

// Both products: of up to 16 rows by tiles, or by vectors, which also fetch the next keys and values.
template <class O>
TARGET void all_scores(bool tiled, int64_t rows, const float* queries, int64_t depth, int64_t groups,
                       const float* const* keys, int64_t stride, const float* const* next, float* scores) {
#ifdef TILES
  if constexpr (kTiled<O>)
    if (tiled) return few_scores(queries, depth, groups, keys, stride, scores);
#endif
  const auto blocks = rows <= kFewRows ? score_blocks<O, kMaxRows<O>, 1> : score_blocks<O, kMaxRows<O>, kMaxVecs>;
  blocks(rows, queries, depth, groups, keys, stride, next, scores);
}

template <class O>
TARGET void all_values(bool tiled, int64_t rows, const float* weights, const float* weight_scale, int64_t depth,
                       const float* const* values, const float* const* next, bool add, int64_t columns, float* out) {
#ifdef TILES
  if constexpr (kTiled<O>)
    if (tiled) return few_values(weights, depth, values, add, columns, out);
#endif
  constexpr int kRows = std::max(kMaxRows<O> / 3, 1);
  const auto blocks = rows <= kFewRows ? value_blocks<O, kRows, 2 * kMaxVecs> : value_blocks<O, kMaxRows<O>, kMaxVecs>;
  blocks(rows, weights, weight_scale, depth, values, next, add, 0, columns, out);
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
  uint32_t excess;          // Bytes: what the unsigned keys added, modulo 2^32; without it sums fit 32 bits
};

// Weights of 32 keys as operands of the values' product: pairs are written over scores that have been read.
template <class O>
INLINE void store_weights(const Part* weights, float* row, int64_t key) {
#if DOT
  if constexpr (std::is_same_v<O, Pairs>) {
    return store(row + key / 2, to_bf16_pairs(weights[0], weights[1]));
  }
#elif NEON >= 2
  if constexpr (std::is_same_v<O, Pairs>) {
#pragma GCC unroll 4
    for (int i = 0; i < kPartsOfVec; ++i) {
      const auto first = vcvtq_low_bf16_f32(reinterpret_cast<float32x4_t>(weights[2 * i]));
      const auto both = vcvtq_high_bf16_f32(first, reinterpret_cast<float32x4_t>(weights[2 * i + 1]));
      store_part(row + key / 2 + i * kPartLanes, reinterpret_cast<Part>(both));
    }
    return;
  }
#endif
#pragma GCC unroll 8
  for (int i = 0; i < 2 * kPartsOfVec; ++i) store_part(row + key + i * kPartLanes, weights[i]);
}

// Whether products stay as they are until their exponentials are taken, which is the usual case: they need one scale only.
template <class O>
INLINE bool is_plain(const Scoring& scoring, const Mask& mask) {
  return !std::is_same_v<O, Bytes> && mask.k_scale == nullptr && scoring.soft_cap <= 0 && scoring.scale > 0;
}

INLINE IntPart visible(const Mask& mask, int64_t key) {
  constexpr int32_t kNumbers[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const IntPart lane = *reinterpret_cast<const IntPart*>(kNumbers);
  return (lane >= static_cast<int32_t>(mask.first - key)) & (lane < static_cast<int32_t>(mask.end - key));
}

// The softmax of a row of a tile's products, in two parts. The first hides what the row does not see and returns the
// largest score, to powers of 2. It ends in a chain of instructions that wait for one another, so the second part of a row
// is best computed after the first part of the next row.
template <class O>
TARGET float largest_score(float* scores, int64_t keys, const Scoring& scoring, const Mask& mask) {
  const Part none = Part{} - kInfinity;
  Part largest = none;
  if (mask.first >= mask.end) return -kInfinity;
  const bool plain = is_plain<O>(scoring, mask);
  if (plain && mask.first == 0 && mask.end == keys) {
    Part most[4] = {none, none, none, none};  // four chains
    int64_t key = 0;
    for (; key + 4 * kPartLanes <= keys; key += 4 * kPartLanes)
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) most[i] = max(load_part(scores + key + i * kPartLanes), most[i]);
    for (; key < keys; key += kPartLanes) most[0] = max(load_part(scores + key), most[0]);
    largest = max(max(most[0], most[1]), max(most[2], most[3]));
  } else {
    for (int64_t key = 0; key < keys; key += kPartLanes) {
      Part x = load_part(scores + key);
      if (!plain) {
        if constexpr (std::is_same_v<O, Bytes>)
          x = convert(reinterpret_cast<IntVec>(reinterpret_cast<UintVec>(x) - scoring.excess));
        x *= scoring.scale;
        if (mask.k_scale != nullptr) x *= load_part(mask.k_scale + key);
        if (scoring.soft_cap > 0) x = tanh(x / scoring.soft_cap) * (scoring.soft_cap * kLog2E);
      }
      x = visible(mask, key) ? x : none;
      store_part(scores + key, x);
      largest = max(x, largest);
    }
  }
  return largest_lane(largest) * (plain ? scoring.scale : 1.f);
}

// The second: the row becomes weights, and its softmax state moves on. Weights are written as operands of the values'
// product: to `scores` itself, or for Bytes to `codes` (two rows), in which case their scale is returned.
template <class O>
TARGET float weigh_row(float* scores, int64_t keys, const Scoring& scoring, const Mask& mask, float largest_of_row,
                       const State& state, int64_t row, int64_t padded_dim, uint8_t* codes) {
  constexpr bool kBytes = std::is_same_v<O, Bytes>;
  if (mask.first >= mask.end) {
    if constexpr (kBytes) std::memset(codes, 0, 2 * kTile);
    else std::memset(scores, 0, keys * sizeof(float));
    return 0;
  }
  const float scale = is_plain<O>(scoring, mask) ? scoring.scale : 1.f;
  const float maximum = std::max(state.maximum[row], largest_of_row);
  const float shift = maximum == -kInfinity ? 0.f : maximum;  // keys that are seen, with scores of -inf: no weight

  // 32 keys at a time, which are one vector of pairs; the row has memory for a multiple of 32.
  constexpr int kAll = 2 * kPartsOfVec;
  Part sums[kAll] = {}, check = {}, largest = {};
  const auto weigh = [&]<bool kScaled>() __attribute__((always_inline)) TARGET {
    for (int64_t key = 0; key < keys; key += 2 * kLanes) {
      Part weights[kAll];
#pragma GCC unroll 8
      for (int i = 0; i < kAll; ++i) {
        const int64_t at = key + i * kPartLanes;
        const Part weight = at < keys ? exp2(load_part(scores + at) * scale - shift) : Part{};
        sums[i] += weight;
        weights[i] = weight;
        if constexpr (kScaled) {
          weights[i] = visible(mask, at) ? weight * load_part(mask.v_scale + at) : Part{};
          largest = max(weights[i], largest);
          check += weights[i];
        }
      }
      store_weights<O>(weights, scores, key);
    }
  };
  if (mask.v_scale != nullptr) weigh.template operator()<true>();
  else weigh.template operator()<false>();

  if (maximum > state.maximum[row]) {
    if (state.sum[row] != 0) {
      const float shrink = exp2(state.maximum[row] - maximum);
      float* values = state.values + row * padded_dim;
      for (int64_t i = 0; i < padded_dim; i += kLanes) store(values + i, load(values + i) * shrink);
      state.sum[row] *= shrink;
    }
    state.maximum[row] = maximum;
  }
  Part sum = sums[0] + sums[kPartsOfVec];
#pragma GCC unroll 4
  for (int i = 1; i < kPartsOfVec; ++i) sum += sums[i] + sums[kPartsOfVec + i];
  state.sum[row] += sum_of_lanes(sum);

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

// Not inlined, so that all callers run the same instructions and agree to the bit.
__attribute__((noinline)) TARGET void fold(const State& into, const State& from, int64_t rows, int64_t padded_dim) {
  for (int64_t row = 0; row < rows; ++row) {
    if (from.sum[row] == 0) continue;  // it saw no key
    if (into.sum[row] == 0) {          // it had seen none
      std::copy_n(from.values + row * padded_dim, padded_dim, into.values + row * padded_dim);
      into.sum[row] = from.sum[row];
      into.maximum[row] = from.maximum[row];
      continue;
    }
    const float maximum = std::max(into.maximum[row], from.maximum[row]);
    const float keep = exp2(into.maximum[row] - maximum), add = exp2(from.maximum[row] - maximum);
    for (int64_t i = row * padded_dim; i < (row + 1) * padded_dim; i += kLanes)
      store(into.values + i, load(into.values + i) * keep + load(from.values + i) * add);
    into.sum[row] = into.sum[row] * keep + from.sum[row] * add;
    into.maximum[row] = maximum;
  }
}

// The values of a row whose sum is zero are not read.
TARGET void clear(const State& state, int64_t rows) {
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
    for (int64_t i = 0; i < p.head_dim; i += kLanes)
      store_as(to + i, (state.sum[row] == 0 ? Vec{} : load(from + i)) * scale, p.head_dim - i);
  }
}

}  // namespace ISA
}  // namespace
