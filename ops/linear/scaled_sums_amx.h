// Products on tile registers of weights in groups of few inputs, whose sums are scaled, each group's by itself: the loops
// of both kinds of activations, bfloat16 and int8.
//
// Scaling takes two to four instructions for 16 sums, where one product makes 256 of them, so it has to run beside the
// products. For that, sums wait in L1 and are scaled eight rows and one group at a time, after each product of a later
// group. Totals of these rows stay in registers for a batch of groups. The batch is short: its sums, the totals and the
// tiles of weights have to stay in L1, of which another program may have a half. On Emerald Rapids batches of two groups
// took 37 ns a product and those of four 50; 31 with sums stored and tiles loaded some products apart, and 18 of bare
// products, stores and scaling from L1 alone.

#include <algorithm>

#include "../cpu/features.h"

namespace {
namespace ISA {

// Where the first tiles of a group lie: of rows, and of the first column tile.
struct Tiles2 {
  const char *x, *w;
};

// Bytes from one to the next: of rows those of a row tile, row tiles, tiles of inputs, groups; of weights column tiles,
// tiles of inputs, groups. A group's last tile of inputs may reach into the next group, where weights are zeros.
struct Strides {
  int64_t x_row, x_below, x_step, x_group, w_second, w_step, w_group;
};

// Sums that are to be scaled, of groups [first, end) and `rows` rows from `row` on: [end - first, rows, C, 16].
struct Waiting {
  int64_t first = 0, end = 0, row = 0, rows = 0;
  const float* sums = nullptr;
};

// Lines of later weights, which are fetched a few at a time: the same ones of column tiles `stride` bytes apart.
struct Lines2 {
  const uint8_t* first = nullptr;
  int64_t stride = 0, count = 0, each = 0;
};

constexpr int EIGHT = 8;             // rows that are scaled together
constexpr int64_t GROUP_BATCH = 2;  // groups

// `Of` has what both kinds differ in:
//   rows, groups, totals   [rows rounded up to 32, C, 16]
//   steps(group)           tiles of inputs
//   add(group, row, sums, totals)  scales sums [EIGHT, C, 16] of rows from `row` on, adds them to totals [EIGHT][C]
//   finish(row, end)       of rows whose totals are complete
template <int C, class Of>
struct Scaling {
  const Of& of;
  const Waiting waiting;
  int64_t group = waiting.first, row = 0;
  Vec totals[EIGHT][C];

  INLINE void operator()() {
    if (row >= waiting.rows) return;
    float* const to = of.totals + (waiting.row + row) * C * TILE_WORDS;
    if (group == waiting.first) {
      const __mmask16 begun = waiting.first > 0 ? 0xffff : 0;
#pragma GCC unroll 8
      for (int m = 0; m < EIGHT; ++m)
#pragma GCC unroll 2
        for (int c = 0; c < C; ++c)
          totals[m][c] = reinterpret_cast<Vec>(_mm512_maskz_load_ps(begun, to + (m * C + c) * TILE_WORDS));
    }
    of.add(group, waiting.row + row,
           waiting.sums + ((group - waiting.first) * waiting.rows + row) * C * TILE_WORDS, totals);
    if (++group < waiting.end) return;
    group = waiting.first;
#pragma GCC unroll 8
    for (int m = 0; m < EIGHT; ++m)
#pragma GCC unroll 2
      for (int c = 0; c < C; ++c) store(to + (m * C + c) * TILE_WORDS, totals[m][c]);
    const int64_t first = waiting.row + row;
    if (waiting.end == of.groups) of.finish(first, std::min(first + EIGHT, of.rows));
    row += EIGHT;
  }
  INLINE void finish() {
    while (row < waiting.rows) (*this)();
  }
};

// BYTES: of int8, else of bfloat16. ONCE: tiles of rows are not needed again soon.
template <bool BYTES, bool ONCE, int C, class Of>
struct GroupProducts {
  static constexpr int64_t TILE_SUMS = TILE_ROWS * C * TILE_WORDS;
  const Of& of;
  Waiting waiting = {};
  float* before = nullptr;  // the last sums of two row tiles, of which but the first are still in registers
  int turn = 0;
  Lines2 later = {};
  alignas(64) float sums[2][GROUP_BATCH * 2 * TILE_SUMS];

  template <int SUMS, int X, int W>
  INLINE static void multiply() {
    TILES tiles;
    if constexpr (BYTES) tiles.template multiply_bytes<SUMS, X, W>();
    else tiles.template multiply<SUMS, X, W>();
  }
  // Stores the sums in register I: of row tile I / 2 and column tile I % 2.
  template <int R, int I>
  INLINE static void store_sum(float* to) {
    TILES tiles;
    if constexpr (I / 2 < R && I % 2 < C)
      tiles.template store<I>(to + I / 2 * TILE_SUMS + I % 2 * TILE_WORDS, C * 64);
  }
  INLINE static void load_rows(const Tiles2& at, const Strides& by) { TILES().template load<4, ONCE>(at.x, by.x_row); }
  INLINE static void load_below(const Tiles2& at, const Strides& by) {
    TILES().template load<5, ONCE>(at.x + by.x_below, by.x_row);
  }
  INLINE static void load_column(const Tiles2& at) { TILES().template load<6>(at.w, 64); }
  INLINE static void load_second(const Tiles2& at, const Strides& by) {
    if constexpr (C > 1) TILES().template load<7>(at.w + by.w_second, 64);
  }

  INLINE void fetch() {
    for (int64_t i = 0; i < std::min(later.count, later.each); ++i, later.first += 64)
      for (int c = 0; c < C; ++c) __builtin_prefetch(later.first + c * later.stride, 0, 2);
    later.count -= later.each;
  }

  // The products of further tiles of inputs of a group.
  template <int R>
  INLINE static void multiply_step(const Tiles2& at, const Strides& by) {
    load_rows(at, by), load_column(at);
    multiply<0, 4, 6>();
    load_second(at, by);
    if constexpr (C > 1) multiply<1, 4, 7>();
    if constexpr (R > 1) load_below(at, by), multiply<2, 5, 6>();
    if constexpr (R > 1 && C > 1) multiply<3, 5, 7>();
  }

  // Groups [first, end), at most GROUP_BATCH, of R row tiles to `to`. Two things keep tile registers busy meanwhile: a sum
  // is stored some products after its own, since a store that waits keeps all tile registers waiting; and tiles are loaded
  // some products ahead. Those at `now` are in registers 4, 6 and 7 already, those at `next` will be.
  template <int R>
  INLINE void multiply_batch(int64_t first, int64_t end, Tiles2 now, const Tiles2& next, const Strides& by, float* to,
                             Scaling<C, Of>& meanwhile) {
    TILES tiles;
    float* last = before;
    for (int64_t group = first; group < end; ++group, to += R * TILE_SUMS) {
      const int64_t steps = of.steps(group);
      const Tiles2 then =
          group + 1 < end ? Tiles2{now.x + by.x_group, now.w + by.w_group} : next;
      const bool single = steps == 1;
      tiles.template zero<0>();
      multiply<0, 4, 6>();
      if constexpr (R > 1) load_below(now, by);
      fetch();
      if (last != nullptr) store_sum<2, 1>(last);
      meanwhile();
      if constexpr (C > 1) {
        tiles.template zero<1>();
        multiply<1, 4, 7>();
      }
      if (single) load_rows(then, by);
      if (last != nullptr) store_sum<2, 2>(last);
      meanwhile();
      if constexpr (R > 1) {
        tiles.template zero<2>();
        multiply<2, 5, 6>();
      }
      if (single) load_column(then);
      if (last != nullptr) store_sum<2, 3>(last);
      if constexpr (R > 1) meanwhile();
      if constexpr (R > 1 && C > 1) {
        tiles.template zero<3>();
        multiply<3, 5, 7>();
      }
      if (single) {
        load_second(then, by);
      } else {
        for (int64_t s = 1; s < steps; ++s)
          multiply_step<R>({now.x + s * by.x_step, now.w + s * by.w_step}, by);
        load_rows(then, by), load_column(then), load_second(then, by);
      }
      now = then;
      store_sum<R, 0>(to);
      if constexpr (R > 1) {
        meanwhile();
        last = to;
      } else {
        store_sum<R, 1>(to);
        last = nullptr;
      }
    }
    before = last;
  }

  // Groups [first, end) of all rows. at(group, row): where their tiles lie; strides(row). `lines` are fetched meanwhile.
  template <class At, class StridesOf>
  TARGET void take(int64_t first, int64_t end, const At& at, const StridesOf& strides, Lines2 lines = {}) {
    const int64_t times = (of.rows + 2 * TILE_ROWS - 1) / (2 * TILE_ROWS) * (end - first);
    later = lines, later.each = (lines.count + times - 1) / times;
    const Tiles2 start = at(first, 0);
    load_rows(start, strides(0)), load_column(start), load_second(start, strides(0));
    for (int64_t row = 0; row < of.rows; row += 2 * TILE_ROWS) {
      const int64_t below = row + 2 * TILE_ROWS;
      const bool two = of.rows - row > TILE_ROWS;
      const Strides by = strides(row);
      for (int64_t group = first; group < end; group += GROUP_BATCH, turn = 1 - turn) {
        const int64_t until = std::min(group + GROUP_BATCH, end);
        const Tiles2 next = until < end ? at(until, row) : below < of.rows ? at(first, below) : start;
        Scaling<C, Of> meanwhile{of, waiting};
        if (two) multiply_batch<2>(group, until, at(group, row), next, by, sums[turn], meanwhile);
        else multiply_batch<1>(group, until, at(group, row), next, by, sums[turn], meanwhile);
        meanwhile.finish();
        waiting = {group, until, row, two ? 2 * TILE_ROWS : TILE_ROWS, sums[turn]};
      }
    }
  }
  // After the last groups.
  TARGET void finish() {
    if (before != nullptr) store_sum<2, 1>(before), store_sum<2, 2>(before), store_sum<2, 3>(before);
    Scaling<C, Of>{of, waiting}.finish();
  }
};

}  // namespace ISA
}  // namespace
