// The two products of a tile on tile registers, for pairs of bf16; see attention_cpu_kernels.h. The cache holds keys and
// values as 16 rows of 16 pairs, as the instruction takes them.
//
// Few rows and many are multiplied by the same instruction, whose sums depend on their own row and column alone. Few rows
// wait for memory, so it must be read all the time. Many are bound by arithmetic: while the tiles multiply, the vector
// units compute the softmax of other rows.

#include <utility>

#include "../cpu/tiles.h"
#include "attention_cpu_operands.h"

#ifndef TILES  // this header by itself
#define TILES SoftwareTiles
#endif

namespace {
namespace ISA {

constexpr int64_t kTileLanes = 16;  // of the summed dimension, in one instruction

// ---------------------------------------------------------------------------------------------------- up to 16 rows

// Adds to (or, if not `add`, sets) the sums of 16 rows by kCols tiles of 16 columns:
//   x          [16][depth] lanes, `x_row` floats from row to row
//   operand    (column tile, lane) -> address of 16 lanes of 16 columns; `stride` floats from lane to lane
//   sums       `sums_row` floats from row to row
template <int kCols, class Operand>
INLINE void multiply_few(const float* x, int64_t x_row, int64_t depth, Operand&& operand, int64_t stride, bool add,
                         float* sums, int64_t sums_row) {
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
    if (add) tiles.template load<J>(sums + J * kLanes, sums_row * kBytes);
    else tiles.template zero<J>();
  });
  for (int64_t k = 0; k < depth; k += kTileLanes) {
    tiles.template load<4>(x + k, x_row * kBytes);
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
    multiply_few<kCols>(queries, depth, depth, keys_at, stride, false, scores + group * kLanes, kTile);
  };
  int64_t group = 0;
  for (; group + 4 <= groups; group += 4) multiply.template operator()<4>(group);
  if (group < groups) multiply.template operator()<2>(group);
}

// As all_values(), of an even number of column tiles; lanes may be anywhere. Two tiles of values at a time are copied into
// L1, one step ahead of their product, so that memory is read all the time.
TARGET void few_values(const float* weights, int64_t depth, const float* const* values, bool add, int64_t columns,
                       float* out) {
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
    multiply_few<kCols>(weights, kTile, depth, values_at, kCols * kLanes, add, out + column, columns);
  }
}

// ---------------------------------------------------------------------------------------------------- up to 32 rows

// One of the products of a block of rows, made step by step: a step multiplies 16 lanes of all rows by those of two tiles
// of columns. Between two steps the sums stay in tile registers 0 to 3, so one product ends before the next one starts.
struct Product {
  const float* x = nullptr;           // [rows][lanes], `x_row` floats from row to row
  int64_t x_row = 0;
  bool tall = false;                  // more than 16 rows
  const float* const* keys = nullptr;    // of 16 columns each, `stride` floats from lane to lane; or
  const float* const* values = nullptr;  // one lane of all columns, each 16 of them `stride` floats apart
  int64_t stride = 0;
  float* sums = nullptr;              // `sums_row` floats from row to row
  int64_t sums_row = 0;
  bool add = false;                   // to what is there
  int64_t steps = 1, pairs = 0;       // of lanes, for each pair of column tiles
  int64_t step = 0, pair = 0;         // the next

  int64_t left() const { return (pairs - pair) * steps - step; }
  TARGET void advance(TILES& tiles) { tall ? advance_rows<2>(tiles) : advance_rows<1>(tiles); }

  template <int kRows>
  TARGET void advance_rows(TILES& tiles) {
    constexpr int64_t kBytes = sizeof(float);
    float *at = sums + pair * 2 * kLanes, *below = at + kTileLanes * sums_row;
    if (step == 0 && add) {
      tiles.template load<0>(at, sums_row * kBytes);
      tiles.template load<1>(at + kLanes, sums_row * kBytes);
      if constexpr (kRows > 1) tiles.template load<2>(below, sums_row * kBytes);
      if constexpr (kRows > 1) tiles.template load<3>(below + kLanes, sums_row * kBytes);
    } else if (step == 0) {
      tiles.template zero<0>();
      tiles.template zero<1>();
      if constexpr (kRows > 1) tiles.template zero<2>();
      if constexpr (kRows > 1) tiles.template zero<3>();
    }
    const int64_t k = step * kTileLanes;
    const float* first = keys != nullptr ? keys[2 * pair] + k * stride : values[k] + 2 * pair * kLanes;
    const float* second = keys != nullptr ? keys[2 * pair + 1] + k * stride : first + kLanes;
    tiles.template load<4>(x + k, x_row * kBytes);
    tiles.template load<6>(first, stride * kBytes);
    tiles.template multiply<0, 4, 6>();
    tiles.template load<7>(second, stride * kBytes);
    tiles.template multiply<1, 4, 7>();
    if constexpr (kRows > 1) {
      tiles.template load<5>(x + kTileLanes * x_row + k, x_row * kBytes);
      tiles.template multiply<2, 5, 6>();
      tiles.template multiply<3, 5, 7>();
    }
    if (++step < steps) return;
    tiles.template store<0>(at, sums_row * kBytes);
    tiles.template store<1>(at + kLanes, sums_row * kBytes);
    if constexpr (kRows > 1) tiles.template store<2>(below, sums_row * kBytes);
    if constexpr (kRows > 1) tiles.template store<3>(below + kLanes, sums_row * kBytes);
    step = 0;
    ++pair;
  }
};

// Copies lanes of values to `memory` where 16 of them are not at equal distances, as a tile is loaded.
TARGET void gather_values(int64_t depth, int64_t dim, const float** values, float* memory) {
  for (int64_t i = 0; i < depth; i += kTileLanes, values += kTileLanes) {
    bool apart = false;
    for (int64_t j = 1; j < kTileLanes; ++j) apart |= values[j] != values[0] + j * dim;
    for (int64_t j = 0; apart && j < kTileLanes; ++j) {
      float* to = memory + (i + j) * dim;
      for (int64_t column = 0; column < dim; column += kLanes) store(to + column, load(values[j] + column));
      values[j] = to;
    }
  }
}

// The products of a tile and the softmax between them for more than 16 rows, by blocks of 32. While the rows of one are
// weighed, the tile registers multiply the values of the block before and the keys of the block after it.
//   seen(row)                                 lanes of keys that matter to this row and those before it
//   largest(row, depth, scores)               the first part of its softmax
//   weigh(row, depth, largest, scores, null)  the second
template <class Seen, class Largest, class Weigh>
TARGET void attend_blocks(int64_t rows, int64_t lanes, int64_t dim, const float* queries, const float* const* keys,
                          const float* const* values, int64_t keys_stride, float* scores, float* out, bool add,
                          Seen&& seen, Largest&& largest, Weigh&& weigh) {
  const auto end_of = [&](int64_t begin) { return std::min(begin + kTiledRows, rows); };
  const auto depth_of = [&](int64_t begin) TARGET { return seen(end_of(begin) - 1); };
  const auto scores_of = [&](int64_t begin) { return scores + begin / kTiledRows % 2 * kTiledRows * kTile; };
  const auto score = [&](int64_t begin) TARGET {
    return Product{.x = queries + begin * lanes, .x_row = lanes, .tall = end_of(begin) - begin > kTileLanes, .keys = keys,
                   .stride = keys_stride, .sums = scores_of(begin), .sums_row = kTile, .steps = lanes / kTileLanes,
                   .pairs = depth_of(begin) / kTileLanes};
  };
  const auto weighted = [&](int64_t begin) TARGET {
    return Product{.x = scores_of(begin), .x_row = kTile, .tall = end_of(begin) - begin > kTileLanes,
                   .values = values, .stride = dim, .sums = out + begin * dim, .sums_row = dim, .add = add,
                   .steps = depth_of(begin) / kTileLanes, .pairs = dim / (2 * kLanes)};
  };
  TILES tiles;
  int64_t begin = 0;
  while (begin < rows && depth_of(begin) <= 0) begin += kTiledRows;
  Product previous, next;
  if (begin < rows)
    for (previous = score(begin); previous.left() > 0;) previous.advance(tiles);
  for (; begin < rows; begin += kTiledRows) {
    next = begin + kTiledRows < rows ? score(begin + kTiledRows) : Product{};
    const int64_t end = end_of(begin), count = end - begin, depth = depth_of(begin);
    const int64_t steps = previous.left() + next.left();
    float* of_row = scores_of(begin);
    float most = largest(begin, depth, of_row);
    for (int64_t row = begin, made = 0; row < end; ++row, of_row += kTile) {
      const float most_of_next = row + 1 < end ? largest(row + 1, depth, of_row + kTile) : 0;
      weigh(row, depth, std::exchange(most, most_of_next), of_row, nullptr);
      for (; made * count < (row - begin + 1) * steps; ++made) (previous.left() > 0 ? previous : next).advance(tiles);
    }
    previous = weighted(begin);
  }
  while (previous.left() > 0) previous.advance(tiles);
}

}  // namespace ISA
}  // namespace
