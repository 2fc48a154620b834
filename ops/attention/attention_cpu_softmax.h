// The softmax beside tile registers, for one instruction set; see attention_cpu_tiled.h.

#include "attention_cpu_amx.h"

namespace {
namespace ISA {

constexpr float kUnset = 3e38f;         // a shift before the first key
constexpr float kMostWeight = 0x1p17f;  // of two keys together

// The softmax of some rows over the keys of a partition, 32 at a time. A row's weights are relative to a power of 2, the
// next above the largest of its first scores; so weights may be larger than 1. Only when one would be above kMostWeight
// is the power set anew, and what was written before is multiplied by a power of 2, which loses nothing.
struct Softmax {
  float scale;                     // of products, to scores as powers of 2
  const float *k_scale, *v_scale;  // of the keys of the partition, or null
  float soft_cap;                  // or 0
  int64_t window, first_key;
  int64_t first_block;       // of 32 keys, that some row sees
  const int64_t* positions;  // [rows] of the queries; -1 for rows that are not there
  float* shifts;             // [rows] minus the exponent of that power of 2
  float* sums;               // [rows][16]
  float* weights;            // of rows from `first_row` on: pairs, by tiles, [blocks of rows][blocks of keys][32][16]
  int64_t first_row;

  float* weights_at(int64_t row, int64_t key) const {
    const int64_t block = (row - first_row) / kBlockRows * (kTile / kBlockKeys) + key / kBlockKeys;
    return weights + (block * kBlockRows + row % kBlockRows) * kTileLanes;
  }

  // What a row sees of the partition's keys.
  int64_t end(int64_t row) const { return positions[row] + 1 - first_key; }
  int64_t first(int64_t row) const { return window > 0 ? end(row) - window : 0; }
  INLINE IntVec sees(int64_t row, int64_t key) const {
    const IntVec lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return (lane >= static_cast<int32_t>(std::clamp<int64_t>(first(row) - key, 0, kLanes))) &
           (lane < static_cast<int32_t>(std::clamp<int64_t>(end(row) - key, 0, kLanes)));
  }
};

// Products become scores, where it takes more than one factor.
__attribute__((noinline)) TARGET void scale_products(const Softmax& softmax, float scale, float* products, int64_t key) {
  for (int64_t i = 0; i < kBlockKeys; i += kLanes) {
    Vec x = load(products + i) * scale;
    if (softmax.k_scale != nullptr) x *= load(softmax.k_scale + key + i);
    if (softmax.soft_cap > 0) x = tanh(x / softmax.soft_cap) * (softmax.soft_cap * kLog2E);
    store(products + i, x);
  }
}

INLINE Vec fused(Vec x, Vec y, Vec z) {
  return reinterpret_cast<Vec>(
      _mm512_fmadd_ps(reinterpret_cast<__m512>(x), reinterpret_cast<__m512>(y), reinterpret_cast<__m512>(z)));
}

// 2 to the power of x, infinity where that is too large. Relative error 9e-5; weights are then rounded to 2e-3.
INLINE Vec weight_of(Vec x) {
  const auto f = reinterpret_cast<Vec>(_mm512_reduce_ps(reinterpret_cast<__m512>(x), 0x09));  // x less its floor
  Vec p = broadcast(7.70671651e-2f);
  p = fused(p, f, broadcast(2.27644859e-1f));
  p = fused(p, f, broadcast(6.95116817e-1f));
  p = fused(p, f, broadcast(1.f));
  return reinterpret_cast<Vec>(_mm512_scalef_ps(reinterpret_cast<__m512>(p), reinterpret_cast<__m512>(x)));
}

INLINE bool any_above(Vec x, Vec limit) {
  return _mm512_cmp_ps_mask(reinterpret_cast<__m512>(x), reinterpret_cast<__m512>(limit), _CMP_GT_OQ) != 0;
}

// Sets the power of 2 of a row anew.
__attribute__((noinline)) TARGET void shift_row(const Softmax& softmax, int64_t row, const float* products, int64_t key) {
  Vec largest = broadcast(-kInfinity);
  for (int64_t i = 0; i < kBlockKeys; i += kLanes)
    largest = max(softmax.sees(row, key + i) ? load(products + i) : broadcast(-kInfinity), largest);
  const float before = softmax.shifts[row];
  softmax.shifts[row] = -__builtin_ceilf(largest_lane(largest) * softmax.scale);
  if (before == kUnset) return;  // all weights so far are 0
  const float shrink = exp2(softmax.shifts[row] - before);
  float* sums = softmax.sums + row * kLanes;
  store(sums, load(sums) * shrink);
  constexpr int32_t kHigh = static_cast<int32_t>(0xffff0000);
  for (int64_t i = softmax.first_block * kBlockKeys; i < key; i += kBlockKeys) {
    float* weights = softmax.weights_at(row, i);
    const IntVec pairs = bits(load(weights));
    const IntVec low = bits(floats(pairs << 16) * shrink), high = bits(floats(pairs & kHigh) * shrink);
    store(weights, floats(((low >> 16) & 0xffff) | (high & kHigh)));
  }
}

// Turns the products of kRows rows and 32 keys into weights, each row by itself. kWhole: the rows see all these keys, and
// values have no scale.
template <int kRows, bool kWhole>
INLINE void weigh_rows(const Softmax& softmax, int64_t row, const float* products, int64_t products_row, int64_t key) {
  Vec x[2 * kRows], sums[kRows];
  const Vec scale = broadcast(softmax.scale), limit = broadcast(kMostWeight);
  const auto weigh_row = [&](int i) __attribute__((always_inline)) TARGET {
    for (int j = 0; j < 2; ++j) {
      const Vec score = load(products + i * products_row + j * kLanes);
      const Vec relative = fused(score, scale, broadcast(softmax.shifts[row + i]));
      x[2 * i + j] = weight_of(kWhole || softmax.sees(row + i, key + j * kLanes) ? relative : broadcast(-kInfinity));
    }
    sums[i] = x[2 * i] + x[2 * i + 1];
  };
  Vec most = limit;
#pragma GCC unroll 16
  for (int i = 0; i < kRows; ++i) {
    weigh_row(i);
    most = max(sums[i], most);  // NaN is passed over
  }
  if (any_above(most, limit)) [[unlikely]]
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i)
      if (any_above(sums[i], limit)) {
        shift_row(softmax, row + i, products + i * products_row, key);
        weigh_row(i);
      }
#pragma GCC unroll 16
  for (int i = 0; i < kRows; ++i) {
    float* sum = softmax.sums + (row + i) * kLanes;
    store(sum, load(sum) + sums[i]);
    if constexpr (!kWhole)
      if (softmax.v_scale != nullptr)
        for (int j = 0; j < 2; ++j) {
          const int64_t at = key + j * kLanes;
          x[2 * i + j] = softmax.sees(row + i, at) ? x[2 * i + j] * load(softmax.v_scale + at) : Vec{};
        }
    store(softmax.weights_at(row + i, key), to_bf16_pairs(x[2 * i], x[2 * i + 1]));
  }
}

template <int kRows>
INLINE void weigh(const Softmax& softmax, int64_t row, const float* products, int64_t products_row, int64_t key) {
  const int64_t last = row + kRows - 1;
  if (key + kBlockKeys <= softmax.end(row) && softmax.first(last) <= key && softmax.positions[last] >= 0 &&
      softmax.v_scale == nullptr)
    weigh_rows<kRows, true>(softmax, row, products, products_row, key);
  else
    weigh_rows<kRows, false>(softmax, row, products, products_row, key);
}

}  // namespace ISA
}  // namespace
