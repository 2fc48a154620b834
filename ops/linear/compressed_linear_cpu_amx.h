// Products of compressed weights on tile registers. Words of a group are decompressed into tiles of 16 pairs by 16 outputs, in
// L1, and loaded from there, while the words before them are multiplied. A sum takes its products as on packed weights
// (linear_cpu_amx.h), 16 pairs at a time: it has the same bits.

#include <algorithm>

#include "linear_cpu_amx.h"

namespace {
namespace ISA {

constexpr int64_t STEP = TILE_ROWS;  // words that a product takes: 4 KiB of a group, decompressed
constexpr int64_t AHEAD = 64;        // words, 12 KiB, from what is decompressed to what is fetched

// Decompresses the words of a group in their order, tiles FIRST to END_TILE of them.
template <int FIRST, int END_TILE>
struct Decompress {
  const TileWork& work;
  const Tables tables;
  const int32_t* exception;
  int64_t word = 0;  // the next one

  INLINE explicit Decompress(const TileWork& work) : work(work), tables(work.group), exception(work.group.exceptions) {}

  // The next `count`: a row of 16 pairs in each of the tiles, `stride` pairs apart. Zeros after the last word.
  INLINE void operator()(int64_t count, uint32_t* to, int64_t stride) {
    const int64_t left = std::clamp<int64_t>(work.words - word, 0, count);
    const uint8_t* from = work.group.words + word * WORD_BYTES;
    uint32_t* at = to;
    for (int64_t i = 0; i < left; ++i, from += WORD_BYTES, at += TILE) {
      __m512i w[GROUP_TILES];
      tables.decode(from, w);
#pragma GCC unroll 4
      for (int tile = FIRST; tile < END_TILE; ++tile) _mm512_store_si512(at + (tile - FIRST) * stride, w[tile]);
    }
    for (int64_t i = left; i < count; ++i, at += TILE)
      for (int tile = FIRST; tile < END_TILE; ++tile) _mm512_store_si512(at + (tile - FIRST) * stride, __m512i{});
    for (; word_of(*exception) < word + left; ++exception)
      if (const int tile = tile_of(*exception); tile >= FIRST && tile < END_TILE)
        correct(*exception, to + (word_of(*exception) - word) * TILE - FIRST * stride, stride * 4);
    word += count;
  }
};

// Fetches words of the group, and of the next one after them.
struct Fetch {
  const TileWork& work;
  int64_t word;

  INLINE void operator()(int64_t count) {
    const uint8_t* line = word < work.words ? work.group.words + word * WORD_BYTES
                                            : work.next + (word - work.words) * WORD_BYTES;
    for (int64_t i = 0; i < count; ++i, line += WORD_BYTES)
#pragma GCC unroll 3
      for (int part = 0; part < 3; ++part) __builtin_prefetch(line + part * LINE, 0, 2);
    word += count;
  }
};

// Half a group: two tiles of outputs, a line of each row.
constexpr int64_t HALF_TILES = GROUP_TILES / 2, HALF = HALF_TILES * TILE;

// Outputs of half a group that are complete, of up to two row tiles: rounded as packed_linear rounds them.
struct Lines {
  Finish of = {};
  Vec bias[HALF_TILES] = {};
  int64_t row = 0;  // the next one

  Lines() = default;
  TARGET Lines(const TileWork& work, int64_t half, const float* sums, int64_t first) : of(work.finish) {
    const int64_t column = half * HALF;
    of.sums = sums, of.out += first * of.stride + column;
    of.rows = std::min(2 * TILE, of.rows - first), of.columns = std::min(of.columns - column, HALF);
    for (int64_t i = 0; of.bias != nullptr && i * TILE < of.columns; ++i)
      bias[i] = load_floats(reinterpret_cast<const BFloat16*>(of.bias + column + i * TILE), std::min(TILE, of.columns - i * TILE));
  }
  // The next `count` of them.
  INLINE void operator()(int64_t count) {
    for (const int64_t end = std::min(row + count, of.rows); row < end; ++row) {
      const float* const sums = of.sums + row * HALF;
      auto* const out = reinterpret_cast<BFloat16*>(of.out + row * of.stride);
      const Vec left = load(sums) + bias[0], right = load(sums + TILE) + bias[1];
      if (of.columns < HALF) {
        store_as(out, left, std::min(TILE, of.columns));
        if (of.columns > TILE) store_as(out + TILE, right, of.columns - TILE);
      } else if (const Vec line = to_bf16_pairs(left, right); of.stream) {
        _mm512_stream_si512(reinterpret_cast<__m512i*>(out), reinterpret_cast<__m512i>(line));
      } else {
        store(out, line);
      }
    }
  }
};

// Up to 16 rows: sums stay in tiles 0 to 3. Each step is decompressed while the one before is multiplied.
TARGET void multiply_few(const TileWork& work) {
  constexpr int64_t STRIDE = STEP * TILE, QUARTER = STEP / 4, ROW = HALF * sizeof(float);
  TILES tiles;
  Decompress<0, GROUP_TILES> decompress(work);
  Fetch fetch = {work, AHEAD};
  const auto part = [&](int64_t quarter, uint32_t* to) TARGET __attribute__((always_inline)) {
    fetch(QUARTER);
    decompress(QUARTER, to + quarter * QUARTER * TILE, STRIDE);
  };
  decompress(STEP, work.expanded, STRIDE);
  tiles.template zero<0>();
  tiles.template zero<1>();
  tiles.template zero<2>();
  tiles.template zero<3>();
  const uint32_t* x = work.x;
  for (int64_t word = 0, at = 0; word < work.words; word += STEP, at ^= 1, x += work.finish.rows * TILE) {
    const uint32_t* const w = work.expanded + at * STEP * GROUP;
    uint32_t* const next = work.expanded + (at ^ 1) * STEP * GROUP;
    tiles.template load<4>(x, LINE);
    tiles.template load<6>(w, LINE);
    tiles.template multiply<0, 4, 6>();
    part(0, next);
    tiles.template load<7>(w + STRIDE, LINE);
    tiles.template multiply<1, 4, 7>();
    part(1, next);
    tiles.template load<6>(w + 2 * STRIDE, LINE);
    tiles.template multiply<2, 4, 6>();
    part(2, next);
    tiles.template load<7>(w + 3 * STRIDE, LINE);
    tiles.template multiply<3, 4, 7>();
    part(3, next);
  }
  float* const second = work.sums + TILE * HALF;
  tiles.template store<0>(work.sums, ROW);
  tiles.template store<1>(work.sums + TILE, ROW);
  tiles.template store<2>(second, ROW);
  tiles.template store<3>(second + TILE, ROW);
  Lines(work, 0, work.sums, 0)(TILE);
  if (work.finish.columns > HALF) Lines(work, 1, second, 0)(TILE);
}

// What is done beside products, a part before each 16 pairs: the words that are multiplied next are decompressed, those of
// the next chunk fetched, and outputs rounded.
template <class Decompress>
struct Meanwhile {
  static constexpr int64_t ROWS = 4;
  Decompress& decompress;
  Fetch& fetch;
  const int64_t words, fetched;  // of a chunk; that are fetched each time,
  int64_t& to_fetch;             // while some are left
  Lines& lines;
  uint32_t* to;
  int64_t left = 0;  // words to decompress

  INLINE void operator()() {
    if (left > 0) part();
    if (to_fetch > 0) fetch(fetched);
    to_fetch -= fetched;
    lines(ROWS);
  }
  INLINE void part() {
    decompress(STEP, to, words * TILE);
    to += STEP * TILE, left -= STEP;
  }
};

// More rows, two row tiles at a time, by a chunk of half the group's words, then by that of the other half. The first two row
// tiles decompress it, a step ahead of their products.
TARGET void multiply_many(const TileWork& work) {
  const int64_t rows = work.finish.rows, words = (work.words + STEP - 1) / STEP * STEP;
  const int64_t row_groups = (rows + 2 * TILE - 1) / (2 * TILE), halves = work.finish.columns > HALF ? 2 : 1;
  const int64_t half_sums = row_groups * 2 * TILE * HALF;
  Decompress<0, HALF_TILES> first(work);
  Decompress<HALF_TILES, GROUP_TILES> second(work);
  Fetch fetch = {work, work.chunk};
  Lines lines;
  for (int64_t word = 0, own; word < words; word += own) {
    own = std::min(work.chunk, words - word);
    const bool last = word + own == words;
    const int64_t times = halves * row_groups * own / STEP, fetched = (own + times - 1) / times;
    int64_t to_fetch = own;
    const auto multiply_half = [&](int64_t half, auto& decompress) TARGET __attribute__((always_inline)) {
      Meanwhile<std::remove_reference_t<decltype(decompress)>> meanwhile = {
          decompress, fetch, own, fetched, to_fetch, lines, work.expanded, own};
      meanwhile.part();
      for (int64_t row = 0; row < rows; row += 2 * TILE) {
        float* const sums = work.sums + half * half_sums + row * HALF;
        const uint32_t* const x = work.x + row * words;
        if (rows - row <= TILE)
          multiply_tiles<TILES, true, 1, 2>(x + word * TILE, 0, work.expanded, own * TILE, own, sums, word == 0, meanwhile);
        else
          multiply_tiles<TILES, true, 2, 2>(x + word * 2 * TILE, 0, work.expanded, own * TILE, own, sums, word == 0,
                                            meanwhile);
        if (!last) continue;
        lines(2 * TILE);
        lines = Lines(work, half, sums, row);
      }
    };
    multiply_half(0, first);
    if (halves > 1) multiply_half(1, second);
  }
  lines(2 * TILE);
}

TARGET void multiply_block(const TileWork& work) {
  if (work.finish.rows <= TILE) multiply_few(work);
  else multiply_many(work);
}

}  // namespace ISA
}  // namespace
