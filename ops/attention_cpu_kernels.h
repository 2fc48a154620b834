// The kernels of attention_cpu.cpp for one instruction set. Included there once for each, with these macros set:
//
//   ISA       the namespace
//   TARGET    the attribute of every function
//   WIDTH     bits of the registers
//   BF16_DOT  whether it multiplies pairs of bf16 and adds them to a float
//
// Hence no include guard. The types and constants are those of the including file.

namespace {
namespace ISA {

#define INLINE inline __attribute__((always_inline)) TARGET

// ---------------------------------------------------------------------------------------------------- vectors

INLINE Vec broadcast(float x) { return x - Vec{}; }

// max(a, b) for a NaN in a is b, as maxps has it.
INLINE Vec max(Vec a, Vec b) { return a > b ? a : b; }

template <class T>
INLINE Vec load_floats(const T* from) {
  if constexpr (std::is_same_v<T, float>) {
    return *reinterpret_cast<const Vec*>(from);
  } else if constexpr (std::is_same_v<T, at::BFloat16>) {
    return reinterpret_cast<Vec>(__builtin_convertvector(*reinterpret_cast<const HalfVec*>(from), IntVec) << 16);
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

// 2 to the power of x, for x <= 0 (with -inf) or NaN; 0 below the normal numbers. Relative error 2e-7.
INLINE Vec exp2(Vec x) {
  const Vec magic = broadcast(12582912.f);  // 1.5 * 2^23: adding it rounds to an integer, in the low bits
  const Vec clamped = max(x, broadcast(-126.f));
  const Vec shifted = clamped + magic;
  const Vec f = clamped - (shifted - magic);  // in [-0.5, 0.5]; below, its Taylor series
  Vec y = broadcast(1.54035304e-4f);
  y = y * f + 1.33335581e-3f;
  y = y * f + 9.61812911e-3f;
  y = y * f + 5.55041087e-2f;
  y = y * f + 2.40226507e-1f;
  y = y * f + 6.93147181e-1f;
  y = y * f + 1.f;
  const IntVec scaled = reinterpret_cast<IntVec>(y) + (reinterpret_cast<IntVec>(shifted) << 23);
  return x < -126.f ? Vec{} : reinterpret_cast<Vec>(scaled);
}

INLINE float exp2(float x) { return exp2(broadcast(x))[0]; }

// ---------------------------------------------------------------------------------------------------- operands
//
// A product's operands are lanes of 32 bits: a float, or with BF16_DOT a pair of bf16, two neighbours along the summed
// dimension.

template <class T>
constexpr bool kPairs = BF16_DOT && std::is_same_v<T, at::BFloat16>;
template <class T>
constexpr int64_t kPerLane = kPairs<T> ? 2 : 1;
template <class T>  // the cache holds the lanes as they are
constexpr bool kRaw = kPairs<T> || std::is_same_v<T, float>;

template <class T>
INLINE Vec multiply_add(Vec a, Vec b, Vec sum) {
#if BF16_DOT
  if constexpr (kPairs<T>)
    return reinterpret_cast<Vec>(_mm512_dpbf16_ps(
        reinterpret_cast<__m512>(sum), reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b)));
#endif
  return a * b + sum;
}

// 16 lanes of a row from element `first` on; zeros past the row's `length` elements.
template <class T>
INLINE Vec load_lanes(const T* row, int64_t first, int64_t length) {
  constexpr int64_t want = kLanes * kPerLane<T>;
  T copy[want];
  const T* from = row + first;
  if (length - first < want) {
    for (int64_t i = 0; i < want; ++i) copy[i] = first + i < length ? from[i] : T(0.f);
    from = copy;
  }
  if constexpr (kPairs<T>) return *reinterpret_cast<const Vec*>(from);
  return load_floats(from);
}

// The transpose of 16 rows of 16 lanes.
INLINE void transpose(Vec (&r)[16]) {
  Vec t[16];
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    t[i] = SHUFFLE(r[i], r[i + 1], 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29);
    t[i + 1] = SHUFFLE(r[i], r[i + 1], 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4)
#pragma GCC unroll 2
    for (int j = 0; j < 2; ++j) {
      const Vec a = t[i + j], b = t[i + j + 2];
      r[i + 2 * j] = SHUFFLE(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29);
      r[i + 2 * j + 1] = SHUFFLE(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
    }
  // r[4g + c]: of rows 4g to 4g+3, columns c, c+4, c+8, c+12, four lanes each
#pragma GCC unroll 4
  for (int c = 0; c < 4; ++c)
#pragma GCC unroll 2
    for (int g = 0; g < 2; ++g) {
      const Vec a = r[8 * g + c], b = r[8 * g + 4 + c];
      t[4 * c + 2 * g] = SHUFFLE(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27);
      t[4 * c + 2 * g + 1] = SHUFFLE(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
    }
#pragma GCC unroll 4
  for (int c = 0; c < 4; ++c)
#pragma GCC unroll 2
    for (int odd = 0; odd < 2; ++odd) {
      const Vec a = t[4 * c + odd], b = t[4 * c + 2 + odd];
      r[c + 4 * odd] = SHUFFLE(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27);
      r[c + 4 * odd + 8] = SHUFFLE(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
    }
}

// 16 columns of a row of values, or of two of them interleaved.
template <class T>
INLINE Vec load_values(const T* const* rows, int64_t column) {
#if BF16_DOT
  if constexpr (kPairs<T>) {
    const ShortVec order = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                            8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    const auto even = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(rows[0] + column));
    const auto odd = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(rows[1] + column));
    const auto both = _mm512_inserti64x4(_mm512_castsi256_si512(even), odd, 1);
    return reinterpret_cast<Vec>(_mm512_permutexvar_epi16(reinterpret_cast<__m512i>(order), both));
  }
#endif
  return load_floats(rows[0] + column);
}

// The rows of a tile that are wanted next, fetched into the L2 cache a few lines at a time, in the order of their
// addresses. (Into L1 they would push out what is in use.)
template <class T>
struct Ahead {
  const T* const* rows;
  int64_t row_bytes, row = 0, byte = 0;

  INLINE void fetch(int64_t lines) {
    for (; lines > 0 && row < kTile; --lines) {
      __builtin_prefetch(reinterpret_cast<const char*>(rows[row]) + byte, 0, 2);
      byte += 64;
      if (byte >= row_bytes) byte = 0, ++row;
    }
  }
};

// Keys, as [head_dim lanes][kTile keys].
template <class T>
TARGET void pack_keys(const T* const* rows, Ahead<T> ahead, int64_t keys, int64_t head_dim, float* to) {
  for (int64_t first = 0, lane = 0; first < head_dim; first += kLanes * kPerLane<T>, lane += kLanes)
    for (int64_t key = 0; key < keys; key += kLanes) {
      Vec block[kLanes];
      ahead.fetch(kLanes * kPerLane<T> * sizeof(T) / 4);
      if (kRaw<T> && first + kLanes * kPerLane<T> <= head_dim) {
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i) block[i] = *reinterpret_cast<const Vec*>(rows[key + i] + first);
      } else {
        for (int i = 0; i < kLanes; ++i) block[i] = load_lanes(rows[key + i], first, head_dim);
      }
      transpose(block);
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) *reinterpret_cast<Vec*>(to + (lane + i) * kTile + key) = block[i];
    }
}

// Values, as [key lanes][padded head_dim].
template <class T>
TARGET void pack_values(const T* const* rows, Ahead<T> ahead, int64_t keys, int64_t head_dim, int64_t padded_dim,
                        float* to) {
  for (int64_t key = 0; key < keys; key += kPerLane<T>, to += padded_dim)
    for (int64_t first = 0; first < head_dim; first += kLanes) {
      T copy[2][kLanes];
      const T* tail[2] = {copy[0] - first, copy[1] - first};
      const bool full = first + kLanes <= head_dim;
      if (!full)
        for (int i = 0; i < kPerLane<T>; ++i)
          for (int64_t j = 0; j < kLanes; ++j) copy[i][j] = first + j < head_dim ? rows[key + i][first + j] : T(0.f);
      ahead.fetch(1);
      *reinterpret_cast<Vec*>(to + first) = load_values(full ? rows + key : tail, first);
    }
}

// ---------------------------------------------------------------------------------------------------- products

// A block of c[rows][columns] (+)= a[rows][depth] * b[depth][columns] that is held in registers.
template <class T, int kRows, int kVecs>
TARGET void micro_gemm(const float* a, int64_t lda, const float* b, int64_t ldb, float* c, int64_t ldc, int64_t depth,
                       bool accumulate) {
  Vec sum[kRows][kVecs];
  for (int i = 0; i < kRows; ++i)
    for (int j = 0; j < kVecs; ++j)
      sum[i][j] = accumulate ? *reinterpret_cast<const Vec*>(c + i * ldc + j * kLanes) : Vec{};
  for (int64_t k = 0; k < depth; ++k, b += ldb) {
    Vec row[kVecs];
    for (int j = 0; j < kVecs; ++j) row[j] = *reinterpret_cast<const Vec*>(b + j * kLanes);
    for (int i = 0; i < kRows; ++i) {
      const Vec x = broadcast(a[i * lda + k]);
      for (int j = 0; j < kVecs; ++j) sum[i][j] = multiply_add<T>(x, row[j], sum[i][j]);
    }
  }
  for (int i = 0; i < kRows; ++i)
    for (int j = 0; j < kVecs; ++j) *reinterpret_cast<Vec*>(c + i * ldc + j * kLanes) = sum[i][j];
}

#if WIDTH == 512
// The same products for a few rows, straight from the cache: with so few, packing would cost more than the product.
// The next operand is fetched from memory meanwhile.
template <class T, int kRows>
TARGET void direct_scores(const T* const* keys, Ahead<T> ahead, const float* queries, int64_t q_lanes, float* scores) {
  Vec sum[kTile / kLanes][kRows] = {};
  for (int64_t lane = 0; lane < q_lanes; lane += kLanes)
#pragma GCC unroll 1
    for (int g = 0; g < kTile / kLanes; ++g) {
      Vec block[kLanes];
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i)
        block[i] = *reinterpret_cast<const Vec*>(keys[g * kLanes + i] + lane * kPerLane<T>);
      ahead.fetch(kLanes);
      transpose(block);
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i)
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r)
          sum[g][r] = multiply_add<T>(broadcast(queries[r * q_lanes + lane + i]), block[i], sum[g][r]);
    }
  for (int g = 0; g < kTile / kLanes; ++g)
    for (int r = 0; r < kRows; ++r) *reinterpret_cast<Vec*>(scores + r * kTile + g * kLanes) = sum[g][r];
}

template <class T, int kRows, int kVecs>
TARGET void direct_values(const T* const* values, Ahead<T> ahead, int64_t head_dim, const float* weights, float* out,
                          int64_t column) {
  for (; column + kVecs * kLanes <= head_dim; column += kVecs * kLanes) {
    Vec sum[kRows][kVecs];
    for (int r = 0; r < kRows; ++r)
      for (int j = 0; j < kVecs; ++j)
        sum[r][j] = *reinterpret_cast<const Vec*>(out + r * head_dim + column + j * kLanes);
    for (int64_t key = 0; key < kTile; key += kPerLane<T>) {
#pragma GCC unroll 8
      for (int j = 0; j < kVecs; ++j) {
        const Vec row = load_values(values + key, column + j * kLanes);
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r)
          sum[r][j] = multiply_add<T>(broadcast(weights[r * kTile + key / kPerLane<T>]), row, sum[r][j]);
      }
      ahead.fetch(kVecs);
    }
    for (int r = 0; r < kRows; ++r)
      for (int j = 0; j < kVecs; ++j) *reinterpret_cast<Vec*>(out + r * head_dim + column + j * kLanes) = sum[r][j];
  }
  if constexpr (kVecs > 1)
    if (column < head_dim) direct_values<T, kRows, kVecs / 2>(values, ahead, head_dim, weights, out, column);
}
#endif

// The largest blocks whose sums leave registers for the operands.
constexpr int kMaxRows = WIDTH == 512 ? 6 : WIDTH == 256 ? 3 : 1;
constexpr int kMaxVecs = WIDTH == 512 ? 4 : 2;

template <class T, int kRows, int kVecs>
TARGET void gemm(int64_t rows, int64_t columns, const float* a, int64_t lda, const float* b, int64_t ldb, float* c,
                 int64_t ldc, int64_t depth, bool accumulate) {
  for (; columns >= kVecs * kLanes; b += kVecs * kLanes, c += kVecs * kLanes, columns -= kVecs * kLanes) {
    int64_t i = 0;
    for (; i + kRows <= rows; i += kRows)
      micro_gemm<T, kRows, kVecs>(a + i * lda, lda, b, ldb, c + i * ldc, ldc, depth, accumulate);
    if constexpr (kRows > 1)
      if (i < rows)
        gemm<T, kRows - 1, kVecs>(rows - i, kVecs * kLanes, a + i * lda, lda, b, ldb, c + i * ldc, ldc, depth,
                                  accumulate);
  }
  if constexpr (kVecs > 1)
    if (columns > 0) gemm<T, kRows, kVecs - 1>(rows, columns, a, lda, b, ldb, c, ldc, depth, accumulate);
}

// ---------------------------------------------------------------------------------------------------- softmax

// Turns a row of a tile's scores into weights, of which the first `visible` are not masked, and moves its softmax state
// on. A soft cap of the scores would stand here.
template <class T>
TARGET void softmax_row(float* scores, int64_t keys, int64_t visible, float scale, const State& state, int64_t row,
                        int64_t padded_dim) {
  const IntVec lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  Vec largest = broadcast(-kInfinity);
  for (int64_t key = 0; key < keys; key += kLanes) {
    Vec& x = *reinterpret_cast<Vec*>(scores + key);
    x = lane < static_cast<int32_t>(visible - key) ? x * scale : broadcast(-kInfinity);
    largest = max(x, largest);
  }
  float maximum = state.maximum[row];
  for (int i = 0; i < kLanes; ++i) maximum = largest[i] > maximum ? largest[i] : maximum;
  if (visible <= 0) {
    std::memset(scores, 0, keys * sizeof(float));
    return;
  }

  Vec sums = {};
  for (int64_t key = 0; key < keys; key += kLanes) {
    const Vec weight = exp2(*reinterpret_cast<Vec*>(scores + key) - maximum);
    sums += weight;
#if BF16_DOT
    if constexpr (kPairs<T>) {  // written over the scores, behind the reading
      const auto pairs = _mm512_cvtneps_pbh(reinterpret_cast<__m512>(weight));
      *reinterpret_cast<HalfVec*>(scores + key / 2) = reinterpret_cast<HalfVec>(pairs);
      continue;
    }
#endif
    *reinterpret_cast<Vec*>(scores + key) = weight;
  }
  float sum = 0;
  for (int i = 0; i < kLanes; ++i) sum += sums[i];

  if (maximum > state.maximum[row]) {
    const float shrink = exp2(state.maximum[row] - maximum);
    float* values = state.values + row * padded_dim;
    for (int64_t i = 0; i < padded_dim; i += kLanes) *reinterpret_cast<Vec*>(values + i) *= shrink;
    state.sum[row] *= shrink;
    state.maximum[row] = maximum;
  }
  state.sum[row] += sum;
}

TARGET void fold(const State& into, const State& from, int64_t rows, int64_t padded_dim) {
  for (int64_t row = 0; row < rows; ++row) {
    const float maximum = std::max(into.maximum[row], from.maximum[row]);
    const Vec keep = broadcast(exp2(into.maximum[row] - maximum)), add = broadcast(exp2(from.maximum[row] - maximum));
    for (int64_t i = row * padded_dim; i < (row + 1) * padded_dim; i += kLanes) {
      Vec& x = *reinterpret_cast<Vec*>(into.values + i);
      x = x * keep + *reinterpret_cast<const Vec*>(from.values + i) * add;
    }
    into.sum[row] = into.sum[row] * keep[0] + from.sum[row] * add[0];
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
    const float scale = 1.f / state.sum[row];
    for (int64_t i = 0; i < p.head_dim; ++i) to[i] = static_cast<T>(from[i] * scale);
  }
}

// ---------------------------------------------------------------------------------------------------- items

// f(std::integral_constant<int, rows>()).
template <int kRows, class F>
void with_rows(int64_t rows, F&& f) {
  if (rows == kRows) return f(std::integral_constant<int, kRows>());
  if constexpr (kRows > 1) with_rows<kRows - 1>(rows, f);
}

template <class T>
TARGET void attend(const Problem& p, const Unit& unit, const Item& item, float* states) {
  const int64_t rows = unit.tokens * p.group, dim = p.padded_dim(), state_size = State::size(rows, dim);
  const int64_t q_lanes = ceil_div(p.head_dim, kLanes * kPerLane<T>) * kLanes, p_lanes = kTile / kPerLane<T>;
  const int64_t first_row = p.starts[unit.request] + unit.first_token;
  const int64_t first_position = unit.keys - unit.tokens;

  float* memory = scratch(rows * q_lanes + q_lanes * kTile + p_lanes * dim + rows * kTile + 2 * state_size + dim);
  const auto take = [&memory](int64_t floats) { return std::exchange(memory, memory + floats); };
  float* packed_keys = take(q_lanes * kTile);
  float* packed_values = take(p_lanes * dim);
  float* scores = take(rows * kTile);
  float* queries = take(rows * q_lanes);
  T* zeros = reinterpret_cast<T*>(take(dim));
  const State total(take(state_size), rows, dim);
  float* partition_memory = take(state_size);

  std::memset(static_cast<void*>(zeros), 0, dim * sizeof(float));
  if (dim != p.head_dim) std::memset(packed_values, 0, p_lanes * dim * sizeof(float));
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t head = unit.kv_head * p.group + row % p.group;
    const T* from = static_cast<const T*>(p.q) + (first_row + row / p.group) * p.q_token + head * p.q_head;
    for (int64_t lane = 0; lane < q_lanes; lane += kLanes)
      *reinterpret_cast<Vec*>(queries + row * q_lanes + lane) = load_lanes(from, lane * kPerLane<T>, p.head_dim);
  }
  clear(total, rows, dim);

  const int32_t* table = p.table + unit.request * p.table_width;
  // The rows of this tile and of the next one. Past the end stand zeros.
  struct Rows {
    const T *keys[kTile], *values[kTile];
  } tiles[2];
  const auto find_rows = [&](int64_t first, Rows& tile) {
    int64_t block = first / p.block_size, offset = first % p.block_size, at = 0;
    for (int64_t i = 0; i < kTile; ++i, ++offset, at += p.head_dim) {
      if (first + i >= unit.keys) {
        tile.keys[i] = tile.values[i] = zeros;
        continue;
      }
      if (offset == p.block_size) ++block, offset = 0;
      if (i == 0 || offset == 0)
        at = ((table[block] * p.kv_heads + unit.kv_head) * p.block_size + offset) * p.head_dim;
      tile.keys[i] = static_cast<const T*>(p.k_cache) + at;
      tile.values[i] = static_cast<const T*>(p.v_cache) + at;
    }
  };
  const int64_t row_bytes = p.head_dim * sizeof(T);
  int64_t now = 0;
  find_rows(item.first_partition * kPartition, tiles[now]);
  for (int64_t partition = item.first_partition; partition < item.last_partition; ++partition) {
    const State state(unit.state < 0 ? partition_memory : states + unit.state + partition * state_size, rows, dim);
    clear(state, rows, dim);
    const int64_t end = std::min(unit.keys, (partition + 1) * kPartition);
    for (int64_t first = partition * kPartition; first < end; first += kTile, now ^= 1) {
      const int64_t count = std::min(kTile, end - first);
      find_rows(first + kTile, tiles[now ^ 1]);
      const T *const *k_rows = tiles[now].keys, *const *v_rows = tiles[now].values;
      const Ahead<T> next_keys{tiles[now ^ 1].keys, row_bytes}, next_values{tiles[now ^ 1].values, row_bytes};
      int64_t keys = ceil_div(count, kLanes) * kLanes;
      const auto softmax = [&] {
        for (int64_t row = 0; row < rows; ++row) {
          const int64_t visible = std::min(first_position + row / p.group + 1 - first, count);
          softmax_row<T>(scores + row * kTile, keys, visible, p.sm_scale * 1.44269504f, state, row, dim);
        }
      };
#if WIDTH == 512
      if constexpr (kRaw<T>)
        if (rows <= kDirectRows && p.head_dim % (kLanes * kPerLane<T>) == 0) {
          keys = kTile;
          with_rows<kDirectRows>(rows, [&]<int kRows>(std::integral_constant<int, kRows>) {
            direct_scores<T, kRows>(k_rows, next_keys, queries, q_lanes, scores);
            softmax();
            constexpr int kVecs = kRows <= 2 ? 8 : kRows <= 4 ? 4 : 2;
            direct_values<T, kRows, kVecs>(v_rows, next_values, p.head_dim, scores, state.values, 0);
          });
          continue;
        }
#endif
      pack_keys(k_rows, next_keys, keys, p.head_dim, packed_keys);
      gemm<T, kMaxRows, kMaxVecs>(rows, keys, queries, q_lanes, packed_keys, kTile, scores, kTile, q_lanes, false);
      softmax();
      pack_values(v_rows, next_values, keys, p.head_dim, dim, packed_values);
      gemm<T, kMaxRows, kMaxVecs>(rows, dim, scores, kTile, packed_values, dim, state.values, dim, keys / kPerLane<T>,
                                  true);
    }
    if (unit.state < 0) fold(total, state, rows, dim);
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
#undef BF16_DOT
