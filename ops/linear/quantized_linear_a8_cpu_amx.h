// Products of blocks of rows on tile registers, which multiply signed bytes: 16 rows of 64 inputs by 64 inputs of 16
// outputs, at twice the rate of bfloat16. Codes of int8 are packed as such tiles already: a "quad" is 4 inputs of 16
// outputs, 64 bytes, and 16 quads are a tile of weights. Codes of int4 are widened, once for all rows of a block.
//
// Weights are taken a chunk at a time, which stays in L1 while the rows of the block stream from L2. Two by two sums
// take four loads for four products, as those of bfloat16 do; so half as many of both make up the same layer. Integer
// sums are exact: that inputs are cut into chunks and tiles changes no bits.
//
// A group of fewer than 64 inputs is a product of narrower tiles, not of tiles filled up with zeros: a product takes as
// long, but loads and the widened codes are as many bytes as there are.

#include "quantized_linear_a8_cpu_types.h"
#include "quantized_zeros.h"
#ifdef TILES
#include "scaled_sums_amx.h"
#endif

namespace {
namespace ISA {

typedef int32_t IntRegister __attribute__((vector_size(WIDTH / 8), may_alias));
typedef int16_t ShortRegister __attribute__((vector_size(WIDTH / 8), may_alias));
typedef uint8_t ByteRegister __attribute__((vector_size(WIDTH / 8), may_alias));

// a * b + c, rounded once.
#if WIDTH != 512
INLINE Part fma(Part a, Part b, Part c) {
#if WIDTH == 256
  return reinterpret_cast<Part>(
      _mm256_fmadd_ps(reinterpret_cast<__m256>(a), reinterpret_cast<__m256>(b), reinterpret_cast<__m256>(c)));
#elif defined(__aarch64__)
  return reinterpret_cast<Part>(vfmaq_f32(reinterpret_cast<float32x4_t>(c), reinterpret_cast<float32x4_t>(a),
                                          reinterpret_cast<float32x4_t>(b)));
#else
  for (int i = 0; i < kPartLanes; ++i) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return c;
#endif
}
#endif
INLINE Vec fma(Vec a, Vec b, Vec c) {
#if WIDTH == 512
  return reinterpret_cast<Vec>(
      _mm512_fmadd_ps(reinterpret_cast<__m512>(a), reinterpret_cast<__m512>(b), reinterpret_cast<__m512>(c)));
#else
  const auto *of_a = reinterpret_cast<const float*>(&a), *of_b = reinterpret_cast<const float*>(&b);
  auto* of_c = reinterpret_cast<float*>(&c);
  for (int64_t i = 0; i < kLanes; i += kPartLanes)
    store_part(of_c + i, fma(load_part(of_a + i), load_part(of_b + i), load_part(of_c + i)));
  return c;
#endif
}

INLINE ByteRegister load_bytes(const uint8_t* from) {
  ByteRegister bytes;
  std::memcpy(&bytes, from, sizeof(bytes));
  return bytes;
}

#ifdef TILES
constexpr int64_t SHORT = 32;  // quads of a group, up to which converting its sums takes longer than multiplying
constexpr int64_t SHORT_CHUNK = 64;  // quads of a chunk of weights in short groups: 8 KiB of two column tiles
constexpr int64_t CHUNK = 256;  // quads: 32 KiB of two column tiles; with a chunk's rows and sums more than L1 holds

// Quads of a tile of weights, where groups have `group` of them.
inline int64_t quads_of_tile(int64_t group) { return std::min(group, TILE_WORDS); }

// R row tiles (1 or 2) by C column tiles (1 or 2), over `steps` tiles of inputs. sums [R * 16, C, 16]; not read if
// `first`. Calls `meanwhile` before each step.
template <int R, int C, class Meanwhile>
INLINE void multiply_quads(const int8_t* x, int64_t x_stride, const uint8_t* w, int64_t w_stride, int64_t steps,
                           int64_t step, int32_t* sums, bool first, Meanwhile& meanwhile) {
  TILES tiles;
  constexpr int64_t ROW = 64, SUMS_ROW = C * ROW;
  int32_t* const below = sums + TILE_ROWS * C * TILE_WORDS;
  if (first) {
    tiles.template zero<0>();
    if constexpr (C > 1) tiles.template zero<1>();
    if constexpr (R > 1) tiles.template zero<2>();
    if constexpr (R > 1 && C > 1) tiles.template zero<3>();
  } else {
    tiles.template load<0>(sums, SUMS_ROW);
    if constexpr (C > 1) tiles.template load<1>(sums + TILE_WORDS, SUMS_ROW);
    if constexpr (R > 1) tiles.template load<2>(below, SUMS_ROW);
    if constexpr (R > 1 && C > 1) tiles.template load<3>(below + TILE_WORDS, SUMS_ROW);
  }
  for (int64_t s = 0; s < steps; ++s, x += step * 4, w += step * ROW) {
    meanwhile();
    tiles.template load<4, true>(x, x_stride);
    tiles.template load<6>(w, ROW);
    tiles.template multiply_bytes<0, 4, 6>();
    if constexpr (C > 1) {
      tiles.template load<7>(w + w_stride, ROW);
      tiles.template multiply_bytes<1, 4, 7>();
    }
    if constexpr (R > 1) {
      tiles.template load<5, true>(x + TILE_ROWS * x_stride, x_stride);
      tiles.template multiply_bytes<2, 5, 6>();
    }
    if constexpr (R > 1 && C > 1) tiles.template multiply_bytes<3, 5, 7>();
  }
  tiles.template store<0>(sums, SUMS_ROW);
  if constexpr (C > 1) tiles.template store<1>(sums + TILE_WORDS, SUMS_ROW);
  if constexpr (R > 1) tiles.template store<2>(below, SUMS_ROW);
  if constexpr (R > 1 && C > 1) tiles.template store<3>(below + TILE_WORDS, SUMS_ROW);
}

// Adds the sums of group `g` to the totals of `rows` rows from `row` on.
template <int C, bool ZEROS, bool BY_GROUPS>
INLINE void add_group_of(const Block8& work, int64_t row, int64_t rows, int64_t g, const int32_t* sums) {
  const int64_t groups = work.x.groups, first = g * work.x.across + row;
  const float *const inputs = work.x.inputs + first, *const of_groups = work.x.of_groups + first;
  for (int c = 0; c < C; ++c) {
    const Vec scale = load(work.scales + (c * groups + g) * TILE);
    const Vec zero = ZEROS ? load(work.zeros + (c * groups + g) * TILE) : Vec{};
    float* total = work.totals + (row * C + c) * TILE;
    for (int64_t i = 0; i < rows; ++i, total += C * TILE) {
      IntVec whole;
      std::memcpy(&whole, sums + (i * C + c) * TILE, sizeof(whole));
      Vec sum = convert(whole);
      if constexpr (ZEROS) sum = fma(-zero, broadcast(inputs[i]), sum);
      if constexpr (BY_GROUPS) sum *= broadcast(of_groups[i]);
      store(total, fma(sum, scale, g == 0 ? Vec{} : load(total)));
    }
  }
}

template <int C>
INLINE void add_group(const Block8& work, int64_t row, int64_t rows, int64_t g, const int32_t* sums) {
  const bool by_groups = work.x.by_groups;
  if (work.zeros != nullptr && by_groups) add_group_of<C, true, true>(work, row, rows, g, sums);
  else if (work.zeros != nullptr) add_group_of<C, true, false>(work, row, rows, g, sums);
  else if (by_groups) add_group_of<C, false, true>(work, row, rows, g, sums);
  else add_group_of<C, false, false>(work, row, rows, g, sums);
}

// `count` groups from g on, of which `quads` quads are taken, from quad `skip` of each on.
struct Chunk {
  int64_t g, count, skip, quads;
  bool last;  // of its groups
};

// What GroupProducts (scaled_sums_amx.h) asks for.
template <int C, bool ZEROS, bool BY_GROUPS>
struct ScaledGroups {
  const Block8& work;
  const int64_t group, all, step;  // quads
  const int64_t rows = work.rows, groups = work.x.groups;
  float* const totals = work.totals;

  INLINE int64_t steps(int64_t g) const { return (std::min(group, all - g * group) + step - 1) / step; }
  INLINE void add(int64_t g, int64_t row, const float* sums, Vec (&totals)[EIGHT][C]) const {
    const int64_t first = g * work.x.across + row;
    const float *const inputs = work.x.inputs + first, *const of_groups = work.x.of_groups + first;
    Vec scales[C], zeros[C];
#pragma GCC unroll 2
    for (int c = 0; c < C; ++c) {
      scales[c] = load(work.scales + (c * groups + g) * TILE);
      if constexpr (ZEROS) zeros[c] = load(work.zeros + (c * groups + g) * TILE);
    }
#pragma GCC unroll 8
    for (int m = 0; m < EIGHT; ++m) {
      const Vec input = ZEROS ? broadcast(inputs[m]) : Vec{}, own = BY_GROUPS ? broadcast(of_groups[m]) : Vec{};
#pragma GCC unroll 2
      for (int c = 0; c < C; ++c) {
        Vec sum = convert(reinterpret_cast<IntVec>(load(sums + (m * C + c) * TILE)));
        if constexpr (ZEROS) sum = fma(-zeros[c], input, sum);
        if constexpr (BY_GROUPS) sum *= own;
        totals[m][c] = fma(sum, scales[c], totals[m][c]);
        asm volatile("" ::"v"(totals[m][c]));  // or GCC loads all sums first, and has no registers for them
      }
    }
  }
  INLINE void finish(int64_t, int64_t) const {}
};

template <int BITS, int C>
struct BlockProduct {
  static constexpr int64_t QUADS = BITS == 4 ? 2 : 1;  // of a word
  const Block8& work;
  const int64_t group = work.group * QUADS, all = work.words * QUADS, step = quads_of_tile(group);
  const int64_t w_stride = work.words * WORD_BYTES;

  INLINE int64_t quads_at(const Chunk& chunk, int64_t j) const {
    return std::min(chunk.quads, all - (chunk.g + j) * group - chunk.skip);
  }

  // Signed codes [C, count, padded, 64], with zeros after the last quad of a group.
  INLINE void widen_codes(const Chunk& chunk, int64_t padded) const {
    uint8_t* to = work.codes;
    for (int c = 0; c < C; ++c)
      for (int64_t j = 0; j < chunk.count; ++j, to += padded * WORD_BYTES) {
        const int64_t quads = quads_at(chunk, j);
        const uint8_t* from = work.w + c * w_stride + ((chunk.g + j) * group + chunk.skip) / QUADS * WORD_BYTES;
        if constexpr (BITS == 4) {
          for (int64_t q = 0; q < quads; q += 2, from += WORD_BYTES) {
            const ByteRegister word = load_bytes(from), low = (word & 15) - 8, high = ((word >> 4) & 15) - 8;
            std::memcpy(to + q * WORD_BYTES, &low, sizeof(low));
            std::memcpy(to + (q + 1) * WORD_BYTES, &high, sizeof(high));
          }
        } else {
          std::memcpy(to, from, quads * WORD_BYTES);
        }
        std::memset(to + quads * WORD_BYTES, 0, (padded - quads) * WORD_BYTES);
      }
  }

  // `next`: the weights that are taken after this chunk, which its products fetch.
  TARGET void take(const Chunk& chunk, const uint8_t* next) const {
    const int64_t steps = (chunk.quads + step - 1) / step, padded = steps * step;
    const bool whole = quads_at(chunk, chunk.count - 1) % step == 0 && chunk.quads % step == 0;
    const int64_t at = (chunk.g * group + chunk.skip) / QUADS * WORD_BYTES;
    const bool direct = BITS == 8 && whole;
    if (!direct) widen_codes(chunk, padded);
    const uint8_t* const w = direct ? work.w + at : work.codes;
    const int64_t stride = direct ? w_stride : chunk.count * padded * WORD_BYTES;
    const int64_t pairs_of_tiles = (work.rows + 2 * TILE_ROWS - 1) / (2 * TILE_ROWS);
    int64_t lines = chunk.count * chunk.quads / QUADS;
    const int64_t each = (lines + pairs_of_tiles * chunk.count * steps - 1) / (pairs_of_tiles * chunk.count * steps);
    const uint8_t* line = next;
    auto fetch = [&]() TARGET __attribute__((always_inline)) {
      for (int64_t i = 0; i < std::min(lines, each); ++i, line += WORD_BYTES)
        for (int c = 0; c < C; ++c) __builtin_prefetch(line + c * w_stride, 0, 2);
      lines -= each;
    };
    const bool parts = chunk.skip > 0 || !chunk.last;  // their sums wait for the next chunk
    for (int64_t row = 0; row < work.rows; row += 2 * TILE_ROWS) {
      const int64_t rows = std::min(2 * TILE_ROWS, work.rows - row);
      int32_t* const sums = work.sums + (parts ? row * C * TILE : 0);
      for (int64_t j = 0; j < chunk.count; ++j) {
        const int8_t* x = work.x.codes + row * work.x.stride + ((chunk.g + j) * group + chunk.skip) * 4;
        const int64_t own = (quads_at(chunk, j) + step - 1) / step;
        const uint8_t* const of_group = w + j * padded * WORD_BYTES;
        if (rows > TILE_ROWS)
          multiply_quads<2, C>(x, work.x.stride, of_group, stride, own, step, sums, chunk.skip == 0, fetch);
        else
          multiply_quads<1, C>(x, work.x.stride, of_group, stride, own, step, sums, chunk.skip == 0, fetch);
        if (chunk.last) add_group<C>(work, row, rows, chunk.g + j, sums);
      }
    }
  }

  // Groups of up to SHORT quads.
  template <bool ZEROS, bool BY_GROUPS>
  TARGET void run_short() const {
    const ScaledGroups<C, ZEROS, BY_GROUPS> scaled{work, group, all, step};
    GroupProducts<true, true, C, ScaledGroups<C, ZEROS, BY_GROUPS>> products{scaled};
    const int64_t padded = (group + step - 1) / step * step, together = std::max<int64_t>(1, SHORT_CHUNK / padded);
    const bool direct = BITS == 8 && group % step == 0 && all % step == 0;
    for (int64_t g = 0; g < work.x.groups; g += together) {
      const Chunk chunk = {g, std::min(together, work.x.groups - g), 0, group, true};
      const uint8_t* const own = work.w + g * group / QUADS * WORD_BYTES;
      if (!direct) widen_codes(chunk, padded);
      const int64_t w_second = direct ? w_stride : chunk.count * padded * WORD_BYTES;
      products.take(
          g, g + chunk.count,
          [&](int64_t at, int64_t row) -> Tiles2 {
            const uint8_t* const w = direct ? own : work.codes;
            return {reinterpret_cast<const char*>(work.x.codes + row * work.x.stride + at * group * 4),
                    reinterpret_cast<const char*>(w + (at - g) * padded * WORD_BYTES)};
          },
          [&](int64_t) -> Strides {
            return {work.x.stride, TILE_ROWS * work.x.stride, step * 4,           group * 4,
                    w_second,      step * WORD_BYTES,         padded * WORD_BYTES};
          },
          {own + C * w_stride, w_stride, chunk.count * group / QUADS});  // of the next column tiles
    }
    products.finish();
  }

  TARGET void run() const {
    if (group <= SHORT) {
      const bool by_groups = work.x.by_groups;
      if (work.zeros != nullptr) return by_groups ? run_short<true, true>() : run_short<true, false>();
      return by_groups ? run_short<false, true>() : run_short<false, false>();
    }
    const int64_t padded = (group + step - 1) / step * step, together = std::max<int64_t>(1, CHUNK / padded);
    for (int64_t g = 0; g < work.x.groups; g += together)
      for (int64_t skip = 0; skip < std::min(group, all - g * group); skip += CHUNK) {
        const int64_t rest = std::min(group, all - g * group) - skip;
        const Chunk chunk = {g, std::min(together, work.x.groups - g), skip,
                             together > 1 ? group : std::min(rest, CHUNK), together > 1 || rest <= CHUNK};
        const int64_t after = (g * group + skip + chunk.count * chunk.quads) / QUADS;
        take(chunk, after < work.words ? work.w + after * WORD_BYTES : work.w + C * w_stride);
      }
  }
};

template <int BITS>
TARGET void multiply_block(const Block8& work) {
  if (work.columns == 2) BlockProduct<BITS, 2>{work}.run();
  else BlockProduct<BITS, 1>{work}.run();
}

inline TileKernels tile_kernels() {
  if (!TILES::multiplies_bytes()) return {};
  return {[](int64_t rows, int64_t group) { TILES::begin(std::min(rows, TILE_ROWS), quads_of_tile(group)); },
          [] { TILES::end(); }, multiply_block<8>, multiply_block<4>, 2 * CHUNK * WORD_BYTES};
}
#else
inline TileKernels tile_kernels() { return {}; }
#endif

}  // namespace ISA
}  // namespace
