// The two products of a tile on tile registers, for pairs of bf16; see attention_cpu_kernels.h. The cache holds keys and
// values as 16 rows of 16 pairs, as the instruction takes them.
//
// Few rows and many are multiplied by the same instruction, whose sums depend on their own row and column alone. Few rows
// wait for memory, so it must be read all the time. Many are bound by arithmetic: while the tiles multiply, the vector
// units compute the softmax of other rows.

#include <utility>

#include "../cpu/tiles.h"
#include "attention_cpu_cache.h"

#ifndef TILES  // this header by itself
#define TILES SoftwareTiles
#endif

namespace {
namespace ISA {

constexpr int64_t kTileLanes = 16;  // of the summed dimension, in one instruction
constexpr int64_t kBlockKeys = 32;  // of scores of kBlockRows rows that are computed at a time

// ---------------------------------------------------------------------------------------------------- up to 16 rows

// The sums of 16 rows by kCols tiles of 16 columns:
//   x          lane -> address of 16 lanes of 16 rows; `x_row` floats from row to row
//   operand    (column tile, lane) -> address of 16 lanes of 16 columns; `stride` floats from lane to lane
//   sums       `sums_row` floats from row to row
template <int kCols, class X, class Operand>
INLINE void multiply_few(X&& x, int64_t x_row, int64_t depth, Operand&& operand, int64_t stride, float* sums,
                         int64_t sums_row) {
  static_assert(kCols <= 4);
  constexpr int64_t kBytes = sizeof(float);
  TILES tiles;
  const auto for_columns = [&](auto&& f) __attribute__((always_inline)) TARGET {
    f.template operator()<0>();
    if constexpr (kCols > 1) f.template operator()<1>();
    if constexpr (kCols > 2) f.template operator()<2>();
    if constexpr (kCols > 3) f.template operator()<3>();
  };
  for_columns([&]<int J>() __attribute__((always_inline)) TARGET {
    tiles.template zero<J>();
  });
  for (int64_t k = 0; k < depth; k += kTileLanes) {
    tiles.template load<4>(x(k), x_row * kBytes);
    for_columns([&]<int J>() __attribute__((always_inline)) TARGET {
      constexpr int kOperand = 6 + J % 2;
      tiles.template load<kOperand>(operand(J, k), stride * kBytes);
      tiles.template multiply<J, 4, kOperand>();
    });
  }
  for_columns([&]<int J>() __attribute__((always_inline)) TARGET {
    tiles.template store<J>(sums + J * kLanes, sums_row * kBytes);
  });
}

// As all_scores(), of `depth` lanes, a multiple of 16, and an even number of groups.
TARGET void few_scores(const float* queries, int64_t depth, int64_t groups, const float* const* keys, int64_t stride,
                       float* scores) {
  const auto multiply = [&]<int kCols>(int64_t group) __attribute__((always_inline)) TARGET {
    const auto keys_at = [&](int j, int64_t k) TARGET { return keys[group + j] + k * stride; };
    const auto queries_at = [&](int64_t k) TARGET { return queries + k; };
    multiply_few<kCols>(queries_at, depth, depth, keys_at, stride, scores + group * kLanes, kTile);
  };
  int64_t group = 0;
  for (; group + 4 <= groups; group += 4) multiply.template operator()<4>(group);
  if (group < groups) multiply.template operator()<2>(group);
}

// As all_values(), of an even number of column tiles; lanes may be anywhere. Two tiles of values at a time are copied into
// L1, one step ahead of their product, so that memory is read all the time.
TARGET void few_values(const float* weights, int64_t depth, const float* const* values, int64_t columns, float* out) {
  constexpr int64_t kCols = 2;
  alignas(64) float copies[2][kTileLanes * kCols * kLanes];
  for (int64_t column = 0; column < columns; column += kCols * kLanes) {
    const auto copy = [&](int64_t k) __attribute__((always_inline)) TARGET {
      float* to = copies[k / kTileLanes % 2];
      for (int64_t i = 0; i < kTileLanes; ++i)
        for (int64_t j = 0; j < kCols; ++j)
          store(to + (i * kCols + j) * kLanes, load(values[k + i] + column + j * kLanes));
    };
    copy(0);
    const auto values_at = [&](int j, int64_t k) __attribute__((always_inline)) TARGET {
      if (j == 0 && k + kTileLanes < depth) copy(k + kTileLanes);
      return copies[k / kTileLanes % 2] + j * kLanes;
    };
    const auto weights_at = [&](int64_t k) TARGET { return weights + k * kBlockRows; };
    multiply_few<kCols>(weights_at, kTileLanes, depth, values_at, kCols * kLanes, out + column, columns);
  }
}

// ---------------------------------------------------------------------------------------------------- blocks of 32 rows

// A product of 32 rows by 32 columns, made step by step so that other work may run beside it. A step multiplies 16 lanes.
// The sums stay in tile registers 0 to 3 until the last step stores them, so one product ends before the next one starts.
struct Product {
  const float* x;                    // 16 lanes of row 0, `x_row` floats from row to row; row 16 is at x + below
  int64_t x_row, below, x_step;      // from these lanes to the next
  const float *left, *right;         // 16 lanes of 16 columns each, `stride` floats from lane to lane
  int64_t stride, operand_step;      // from these lanes to the next
  float* out;                        // `out_row` floats from row to row
  int64_t out_row, steps, step = 0;  // the next one

  INLINE void advance(TILES& tiles) {
    constexpr int64_t kBytes = sizeof(float);
    if (step == 0) {
      tiles.template zero<0>();
      tiles.template zero<1>();
      tiles.template zero<2>();
      tiles.template zero<3>();
    }
    tiles.template load<4>(x, x_row * kBytes);
    tiles.template load<6>(left, stride * kBytes);
    tiles.template multiply<0, 4, 6>();
    tiles.template load<7>(right, stride * kBytes);
    tiles.template multiply<1, 4, 7>();
    tiles.template load<5>(x + below, x_row * kBytes);
    tiles.template multiply<2, 5, 6>();
    tiles.template multiply<3, 5, 7>();
    x += x_step, left += operand_step, right += operand_step;
    if (++step < steps) return;
    float* lower = out + kTileLanes * out_row;
    tiles.template store<0>(out, out_row * kBytes);
    tiles.template store<1>(out + kLanes, out_row * kBytes);
    tiles.template store<2>(lower, out_row * kBytes);
    tiles.template store<3>(lower + kLanes, out_row * kBytes);
  }
};

// Values of whole blocks of 32 keys as tiles: [pairs of columns' tiles][blocks][2][16 lanes][16 columns]. A cache block of
// 16 keys has only 8 of the 16 lanes of a tile.
TARGET void pack_values(const float* const* values, int64_t first, int64_t end, int64_t dim, float* to) {
  constexpr int64_t kSize = kTileLanes * kLanes;
  for (int64_t i = first * kTileLanes; i < end * kTileLanes; ++i) {
    float* at = to + i / kTileLanes * 2 * kSize + i % kTileLanes * kLanes;
    for (int64_t column = 0; column < dim; column += 2 * kLanes, at += kTile / kBlockKeys * 2 * kSize) {
      store(at, load(values[i] + column));
      store(at + kSize, load(values[i] + column + kLanes));
    }
  }
}

}  // namespace ISA
}  // namespace
