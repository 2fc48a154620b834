// The two products of a tile on AMX's registers, for pairs of bf16; part of attention_cpu_products.h, where TILES names
// the registers (cpu_tiles.h). The cache holds keys and values as 16 rows of 16 pairs, as the instruction takes them.
//
// Few rows and many are multiplied by the same instruction, whose sums depend on their own row and column alone.

namespace {
namespace ISA {

constexpr int64_t kTileLanes = 16;  // of the summed dimension, in one instruction

// Adds to (or, if not `add`, sets) the sums of kRows tiles of 16 rows by kCols tiles of 16 columns:
//   x          [kRows * 16][depth] lanes, `x_row` floats from row to row
//   operand    (column tile, lane) -> where 16 lanes of 16 columns begin; `stride` floats from lane to lane
//   sums       `sums_row` floats from row to row
template <int kRows, int kCols, class Operand>
INLINE void multiply_tiles(const float* x, int64_t x_row, int64_t depth, Operand&& operand, int64_t stride, bool add,
                           float* sums, int64_t sums_row) {
  static_assert(kRows * kCols <= 4);
  constexpr int64_t kBytes = sizeof(float);
  TILES tiles;
  const auto for_sums = [&](auto&& f) __attribute__((always_inline)) TARGET {
    const auto each = [&]<int I>() __attribute__((always_inline)) TARGET {
      if constexpr (I < kRows * kCols)
        f.template operator()<I>(sums + I / kCols * kTileLanes * sums_row + I % kCols * kLanes);
    };
    each.template operator()<0>();
    each.template operator()<1>();
    each.template operator()<2>();
    each.template operator()<3>();
  };
  for_sums([&]<int I>(float* at) __attribute__((always_inline)) TARGET {
    if (add) tiles.template load<I>(at, sums_row * kBytes);
    else tiles.template zero<I>();
  });
  for (int64_t k = 0; k < depth; k += kTileLanes) {
    tiles.template load<4>(x + k, x_row * kBytes);
    if constexpr (kRows > 1) tiles.template load<5>(x + kTileLanes * x_row + k, x_row * kBytes);
    const auto column = [&]<int J>() __attribute__((always_inline)) TARGET {
      if constexpr (J < kCols) {
        constexpr int kWeights = 6 + J % 2;
        tiles.template load<kWeights>(operand(J, k), stride * kBytes);
        tiles.template multiply<J, 4, kWeights>();
        if constexpr (kRows > 1) tiles.template multiply<kCols + J, 5, kWeights>();
      }
    };
    column.template operator()<0>();
    column.template operator()<1>();
    column.template operator()<2>();
    column.template operator()<3>();
  }
  for_sums([&]<int I>(float* at) __attribute__((always_inline)) TARGET {
    tiles.template store<I>(at, sums_row * kBytes);
  });
}

// f.template operator()<kRows, kCols>(first row, first column tile) for blocks of tiles that cover `rows` rows, of which
// memory has whole tiles, and `columns` column tiles.
template <class F>
INLINE void for_tile_blocks(int64_t rows, int64_t columns, F&& f) {
  int64_t column = 0;
  if (rows <= kTileLanes)
    for (; column + 4 <= columns; column += 4) f.template operator()<1, 4>(0, column);
  for (; column < columns; column += 2)
    for (int64_t row = 0; row < rows; row += 2 * kTileLanes) {
      const bool tall = rows - row > kTileLanes, wide = columns - column > 1;
      if (tall && wide) f.template operator()<2, 2>(row, column);
      else if (tall) f.template operator()<2, 1>(row, column);
      else if (wide) f.template operator()<1, 2>(row, column);
      else f.template operator()<1, 1>(row, column);
    }
}

// As all_scores(), of `depth` lanes, a multiple of 16.
TARGET void tile_scores(int64_t rows, const float* queries, int64_t depth, int64_t groups, const float* const* keys,
                        int64_t stride, float* scores) {
  for_tile_blocks(rows, groups, [&]<int kRows, int kCols>(int64_t row, int64_t group) TARGET {
    const auto keys_at = [&](int j, int64_t k) TARGET { return keys[group + j] + k * stride; };
    multiply_tiles<kRows, kCols>(queries + row * depth, depth, depth, keys_at, stride, false,
                                 scores + row * kTile + group * kLanes, kTile);
  });
}

// As all_values(), of `depth` lanes, a multiple of 16, of which each 16 lie `columns` floats apart.
TARGET void tile_values(int64_t rows, const float* weights, int64_t depth, const float* const* values, bool add,
                        int64_t columns, float* out) {
  for_tile_blocks(rows, columns / kLanes, [&]<int kRows, int kCols>(int64_t row, int64_t tile) TARGET {
    const auto values_at = [&](int j, int64_t k) TARGET { return values[k] + (tile + j) * kLanes; };
    multiply_tiles<kRows, kCols>(weights + row * kTile, kTile, depth, values_at, columns, add,
                                 out + row * columns + tile * kLanes, columns);
  });
}

// The same for up to 16 rows and an even number of column tiles, with lanes anywhere: two tiles of values at a time are
// copied into L1, one step ahead of their product, so that memory is read all the time.
TARGET void few_tile_values(const float* weights, int64_t depth, const float* const* values, bool add, int64_t columns,
                            float* out) {
  constexpr int64_t kCols = 2;
  alignas(64) float copies[2][kTileLanes * kCols * kLanes];
  for (int64_t column = 0; column < columns; column += kCols * kLanes) {
    const auto copy = [&](int64_t k) __attribute__((always_inline)) TARGET {
      float* to = copies[k / kTileLanes % 2];
      for (int64_t i = 0; i < kTileLanes; ++i)
        for (int64_t j = 0; j < kCols; ++j) store(to + (i * kCols + j) * kLanes, load(values[k + i] + column + j * kLanes));
    };
    copy(0);
    const auto values_at = [&](int j, int64_t k) __attribute__((always_inline)) TARGET {
      if (j == 0 && k + kTileLanes < depth) copy(k + kTileLanes);
      return copies[k / kTileLanes % 2] + j * kLanes;
    };
    multiply_tiles<1, kCols>(weights, kTile, depth, values_at, kCols * kLanes, add, out + column, columns);
  }
}

}  // namespace ISA
}  // namespace
