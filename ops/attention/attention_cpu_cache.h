// How keys and values are written to the cache and found in it, and the rows of a unit: their queries, and their states
// where they are kept. For one instruction set; see attention_cpu_kernels.h.

#include "attention_cpu_products.h"

namespace {
namespace ISA {

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
// attention_cpu.cpp says in which order elements are kept.
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
  if (is_key && k_width == kCacheWidth<C>) {  // the same with a constant width
    for (int64_t i = 0, at = offset * k_width; i < p.head_dim; i += k_width, at += size * k_width)
      std::memcpy(static_cast<void*>(block + at), row + i, kCacheWidth<C> * sizeof(C));
  } else if (is_key) {
    for (int64_t i = 0, at = offset * k_width; i < p.head_dim; i += k_width, at += size * k_width)
      for (int64_t j = 0; j < k_width; ++j) block[at + j] = row[i + j];
  } else {
    C* to = block + offset / v_width * p.head_dim * v_width + offset % v_width;
    for (int64_t i = 0; i < p.head_dim; ++i) to[i * v_width] = row[i];
  }
  return scale;
}

#if WIDTH == 512
// 16 rows of 16 lanes become 16 lanes of 16 rows, `stride` floats apart.
INLINE void transpose(const float* from, int64_t row, float* to, int64_t stride) {
  __m512 x[16], y[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) x[i] = _mm512_loadu_ps(from + i * row);
  // Each step joins what is in neighbouring vectors, then two, four and eight vectors apart.
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    y[2 * i] = _mm512_unpacklo_ps(x[2 * i], x[2 * i + 1]);
    y[2 * i + 1] = _mm512_unpackhi_ps(x[2 * i], x[2 * i + 1]);
  }
  const auto pd = [](__m512 a) TARGET { return _mm512_castps_pd(a); };
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i)
#pragma GCC unroll 2
    for (int j = 0; j < 2; ++j) {
      x[4 * i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(pd(y[4 * i + j]), pd(y[4 * i + j + 2])));
      x[4 * i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(pd(y[4 * i + j]), pd(y[4 * i + j + 2])));
    }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    y[i] = _mm512_shuffle_f32x4(x[i], x[i + 4], 0x88);
    y[i + 4] = _mm512_shuffle_f32x4(x[i], x[i + 4], 0xdd);
    y[i + 8] = _mm512_shuffle_f32x4(x[i + 8], x[i + 12], 0x88);
    y[i + 12] = _mm512_shuffle_f32x4(x[i + 8], x[i + 12], 0xdd);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    _mm512_storeu_ps(to + i * stride, _mm512_shuffle_f32x4(y[i], y[i + 8], 0x88));
    _mm512_storeu_ps(to + (i + 8) * stride, _mm512_shuffle_f32x4(y[i], y[i + 8], 0xdd));
    _mm512_storeu_ps(to + (i + 4) * stride, _mm512_shuffle_f32x4(y[i + 4], y[i + 12], 0x88));
    _mm512_storeu_ps(to + (i + 12) * stride, _mm512_shuffle_f32x4(y[i + 4], y[i + 12], 0xdd));
  }
}

// Writes keys and values of 16 tokens, whose slots follow one another from a multiple of 16 on, in bfloat16.
TARGET void write_16(const Problem& p, int64_t token) {
  const int64_t block = p.slots[token] / p.block_size, offset = p.slots[token] % p.block_size;
  alignas(64) uint16_t evens_and_odds[2][32];
  for (int i = 0; i < 32; ++i)
    for (int j = 0; j < 2; ++j) evens_and_odds[j][i] = static_cast<uint16_t>(16 * j + i / 2 + i % 2 * 32);
  const __m512i low = _mm512_load_si512(evens_and_odds[0]), high = _mm512_load_si512(evens_and_odds[1]);
  for (int64_t h = 0; h < p.kv_heads; ++h) {
    const int64_t at = p.rows(block, h);
    const BFloat16* k = static_cast<const BFloat16*>(p.k) + token * p.k_token + h * p.k_head;
    float* keys = reinterpret_cast<float*>(static_cast<BFloat16*>(p.k_cache) + at) + offset;
    for (int64_t lane = 0; lane < p.head_dim / 2; lane += kLanes)
      transpose(reinterpret_cast<const float*>(k) + lane, p.k_token / 2, keys + lane * p.block_size, p.block_size);
    const BFloat16* v = static_cast<const BFloat16*>(p.v) + token * p.v_token + h * p.v_head;
    BFloat16* values = static_cast<BFloat16*>(p.v_cache) + at + offset * p.head_dim;
    for (int64_t i = 0; i < kLanes; i += 2, v += 2 * p.v_token, values += 2 * p.head_dim)
      for (int64_t column = 0; column < p.head_dim; column += 2 * kLanes) {
        const __m512i first = _mm512_loadu_si512(v + column), second = _mm512_loadu_si512(v + p.v_token + column);
        _mm512_storeu_si512(values + 2 * column, _mm512_permutex2var_epi16(first, low, second));
        _mm512_storeu_si512(values + 2 * column + 2 * kLanes, _mm512_permutex2var_epi16(first, high, second));
      }
  }
}
#endif

template <class T, class C>
TARGET void write_token(const Problem& p, int64_t token) {
  const int64_t block = p.slots[token] / p.block_size, offset = p.slots[token] % p.block_size;
  for (int64_t h = 0; h < p.kv_heads; ++h) {
    const int64_t at = p.rows(block, h);
    const T* k = static_cast<const T*>(p.k) + token * p.k_token + h * p.k_head;
    const T* v = static_cast<const T*>(p.v) + token * p.v_token + h * p.v_head;
    const float k_scale = write_row(p, k, true, offset, static_cast<C*>(p.k_cache) + at);
    const float v_scale = write_row(p, v, false, offset, static_cast<C*>(p.v_cache) + at);
    if constexpr (!std::is_same_v<T, C>) {
      const int64_t scales = p.scales(block, h);
      p.k_scale[scales + offset] = k_scale;
      p.v_scale[scales + offset] = v_scale;
    }
  }
}

template <class T, class C>
TARGET void write(const Problem& p, int64_t begin, int64_t end) {
#if WIDTH == 512
  if constexpr (std::is_same_v<T, BFloat16> && std::is_same_v<C, BFloat16>)
    if (p.block_size % kLanes == 0 && p.head_dim % (2 * kLanes) == 0 && p.k_token % 2 == 0) {
      const auto in_order = [&](int64_t token) {
        if (p.slots[token] % kLanes != 0) return false;
        for (int64_t i = 1; i < kLanes; ++i)
          if (p.slots[token + i] != p.slots[token] + i) return false;
        return true;
      };
      while (begin < end) {
        if (end - begin >= kLanes && in_order(begin)) write_16(p, begin), begin += kLanes;
        else write_token<T, C>(p, begin++);
      }
      return;
    }
#endif
  for (; begin < end; ++begin) write_token<T, C>(p, begin);
}

// The keys and values of a tile: their places in the cache, in runs of 16 keys.
template <class C>
struct Tile {
  static constexpr int64_t kGroups = kTile / kLanes, kRows = kTile / kCacheWidth<C>;
  int64_t count = 0;          // of keys that exist
  const float* keys[kGroups];  // the first lane of 16 keys
  const float* values[kRows];  // one lane of keys, all columns
  const float *k_scales[kGroups], *v_scales[kGroups];  // of 16 keys
  float k_scale[kTile], v_scale[kTile];                // copies of them: see take_scales
};

// Rows of a unit's tree that follow one another, each the child of the one before: what they see are the keys of its
// context and some nodes.
struct Branch {
  int64_t end = 0;  // one past its last token, in the unit
  int64_t context = 0, keys = 0;
  uint64_t nodes = 0;

  int64_t own_keys() const { return context + std::countr_one(nodes); }  // those whose slot is their position
  int64_t slot(int64_t position) const {
    uint64_t left = nodes;
    for (int64_t i = context; i < position; ++i) left &= left - 1;
    return position < context ? position : context + std::countr_zero(left);
  }
};

Branch branch_from(const Problem& p, const Unit& unit, int64_t token) {
  const auto nodes = [&](int64_t i) { return p.nodes_seen(unit.request, unit.first_token + i); };
  int64_t last = token;
  while (last + 1 < unit.tokens && nodes(last + 1) == (nodes(last) | uint64_t{1} << (unit.first_token + last + 1))) ++last;
  const int64_t context = p.context(unit.request);
  return {last + 1, context, context + std::popcount(nodes(last)), nodes(last)};
}

template <class C>
TARGET void find_tile(const Problem& p, const Unit& unit, int64_t first, int64_t keys_end, Tile<C>& tile) {
  constexpr int64_t kWidth = kCacheWidth<C>, kLanesOfKeys = kLanes / kWidth;
  tile.count = std::clamp<int64_t>(keys_end - first, 0, kTile);
  if (tile.count == 0) return;
  const int32_t* table = p.table + unit.request * p.table_width + first / p.block_size;
  int64_t offset = first % p.block_size;
  for (int64_t g = 0; g < tile.kGroups; ++g, offset += kLanes) {
    if (g * kLanes < tile.count && offset == p.block_size) offset = 0, ++table;
    if (g * kLanes >= tile.count) offset -= kLanes;  // past the end any place will do
    const int64_t rows = p.rows(*table, unit.kv_head);
    const C* keys = static_cast<const C*>(p.k_cache) + rows + offset * kWidth;
    const C* values = static_cast<const C*>(p.v_cache) + rows + offset * p.head_dim;
    tile.keys[g] = reinterpret_cast<const float*>(keys);
    for (int64_t i = 0; i < kLanesOfKeys; ++i)
      tile.values[g * kLanesOfKeys + i] = reinterpret_cast<const float*>(values + i * p.head_dim * kWidth);
    if (p.k_scale != nullptr) {
      const int64_t scales = p.scales(*table, unit.kv_head) + offset;
      prefetch(tile.k_scales[g] = p.k_scale + scales);
      prefetch(tile.v_scales[g] = p.v_scale + scales);
    }
  }
}

// Copies the scales of a tile that find_tile() found: a tile later, when they have come.
template <class C>
TARGET void take_scales(const Problem& p, Tile<C>& tile) {
  if (p.k_scale == nullptr) return;
  for (int64_t g = 0; g < tile.kGroups; ++g) {
    store(tile.k_scale + g * kLanes, load(tile.k_scales[g]));
    store(tile.v_scale + g * kLanes, load(tile.v_scales[g]));
  }
}

// Gives a tile of a branch the keys that are not where their positions say: copies of runs of 16 keys, in `memory`.
// Without `has_values` of keys alone, which are all that latents have.
template <class C>
TARGET void gather_branch(const Problem& p, const Unit& unit, int64_t first, const Branch& branch, float* memory,
                          Tile<C>& tile, bool has_values = true) {
  constexpr int64_t kWidth = kCacheWidth<C>, kLanesOfKeys = kLanes / kWidth;
  const int64_t lanes = p.head_dim / kWidth, stride = p.block_size * kWidth, runs = p.block_size / kLanes;
  const int32_t* table = p.table + unit.request * p.table_width;
  C* values = reinterpret_cast<C*>(memory);
  C* keys = values + (has_values ? kTile * p.head_dim : 0);
  for (int64_t g = std::max<int64_t>(branch.own_keys() - first, 0) / kLanes; g * kLanes < tile.count; ++g) {
    C* const keys_of_run = keys + g / runs * lanes * stride + g % runs * kLanes * kWidth;
    C* const values_of_run = values + g * kLanes * p.head_dim;
    const C* from = reinterpret_cast<const C*>(tile.keys[g]);
    for (int64_t lane = 0; lane < lanes; ++lane)
      std::memcpy(static_cast<void*>(keys_of_run + lane * stride), from + lane * stride, kLanes * kWidth * sizeof(C));
    if (has_values)
      std::memcpy(static_cast<void*>(values_of_run), tile.values[g * kLanesOfKeys], kLanes * p.head_dim * sizeof(C));
    for (int64_t i = std::max<int64_t>(branch.own_keys() - first - g * kLanes, 0);
         i < std::min(kLanes, tile.count - g * kLanes); ++i) {
      const int64_t slot = branch.slot(first + g * kLanes + i), offset = slot % p.block_size;
      const int32_t block = table[slot / p.block_size];
      const int64_t rows = p.rows(block, unit.kv_head);
      const C* k = static_cast<const C*>(p.k_cache) + rows + offset * kWidth;
      const C* v = static_cast<const C*>(p.v_cache) + rows + offset / kWidth * kWidth * p.head_dim + offset % kWidth;
      for (int64_t lane = 0; lane < lanes; ++lane)
        std::memcpy(static_cast<void*>(keys_of_run + lane * stride + i * kWidth), k + lane * stride, kWidth * sizeof(C));
      C* to = values_of_run + i / kWidth * kWidth * p.head_dim + i % kWidth;
      for (int64_t d = 0; has_values && d < p.head_dim; ++d) to[d * kWidth] = v[d * kWidth];
      if (p.k_scale != nullptr) {
        const int64_t scales = p.scales(block, unit.kv_head) + offset;
        tile.k_scale[g * kLanes + i] = p.k_scale[scales];
        tile.v_scale[g * kLanes + i] = p.v_scale[scales];
      }
    }
    tile.keys[g] = reinterpret_cast<const float*>(keys_of_run);
    for (int64_t i = 0; has_values && i < kLanesOfKeys; ++i)
      tile.values[g * kLanesOfKeys + i] = reinterpret_cast<const float*>(values_of_run + i * p.head_dim * kWidth);
  }
}

// A tile's keys and values as operands: left where they are, or converted into memory of `Operands`.
template <class O, class C>
struct Operands {
  static constexpr int64_t kDepth = kTile / kPerLane<O>;
  const float* keys[Tile<C>::kGroups];
  const float* values[kDepth];
  int64_t stride;             // from a lane of keys to the next, in floats
  float *key_memory, *value_memory;
  float* edges;               // three rows of values; the last is zero

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
TARGET void copy_tile(const Problem& p, const Unit& unit, int64_t first, const Branch& branch, Tile<C>& tile,
                      Operands<O, C>& to) {
  constexpr int64_t kEach = kPerLane<O>;
  const int32_t* table = p.table + unit.request * p.table_width;
  const int64_t lanes = ceil_div(p.head_dim, kEach), dim = p.padded_dim();
  const int64_t k_width = p.key_width<C>(), v_width = p.value_width<C>();
  tile.count = std::min(branch.keys - first, kTile);
  std::memset(to.key_memory, 0, to.key_floats(p) * sizeof(float));
  std::memset(to.value_memory, 0, to.value_floats(p) * sizeof(float));
  auto* keys = reinterpret_cast<typename O::Element*>(to.key_memory);
  auto* values = reinterpret_cast<typename O::Element*>(to.value_memory);
  for (int64_t i = 0; i < tile.count; ++i) {
    const int64_t slot = branch.slot(first + i), offset = slot % p.block_size;
    const int32_t block = table[slot / p.block_size];
    const int64_t rows = p.rows(block, unit.kv_head);
    const C* k = static_cast<const C*>(p.k_cache) + rows + offset * k_width;
    const C* v = static_cast<const C*>(p.v_cache) + rows + offset / v_width * p.head_dim * v_width + offset % v_width;
    for (int64_t d = 0; d < p.head_dim; ++d) {
      keys[((i / kLanes * lanes + d / kEach) * kLanes + i % kLanes) * kEach + d % kEach] =
          to_operand<O>(k[d / k_width * p.block_size * k_width + d % k_width]);
      values[(i / kEach * dim + d) * kEach + i % kEach] = to_operand<O>(v[d * v_width]);
    }
    if (p.k_scale != nullptr) {
      const int64_t scales = p.scales(block, unit.kv_head) + offset;
      tile.k_scale[i] = p.k_scale[scales];
      tile.v_scale[i] = p.v_scale[scales];
    }
  }
}

// Replaces the values of keys that no row sees, before the first `skipped` and from `count` to the last lane of `depth`,
// by zeros: they may be infinite or NaN, and weights of zero would not help. Quantised values are numbers whatever the
// codes.
template <class O, class C>
TARGET void hide_values(int64_t skipped, int64_t count, int64_t depth, int64_t dim, Operands<O, C>& operands) {
  for (int64_t i = ceil_div(count, kPerLane<O>); i < depth; ++i) operands.values[i] = operands.edges + 2 * dim;
  if constexpr (std::is_same_v<C, int8_t> || std::is_same_v<C, Fp8>) return;
  for (int64_t i = 0; i < skipped / kPerLane<O>; ++i) operands.values[i] = operands.edges + 2 * dim;
  if constexpr (std::is_same_v<O, Pairs>) {
    const auto hide_half = [&](int64_t lane, int32_t seen, float* copy) TARGET {
      for (int64_t i = 0; i < dim; i += kLanes) store(copy + i, floats(bits(load(operands.values[lane] + i)) & seen));
      operands.values[lane] = copy;
    };
    if (skipped % 2 != 0) hide_half(skipped / 2, static_cast<int32_t>(0xffff0000), operands.edges);
    if (count % 2 != 0) hide_half(count / 2, 0xffff, operands.edges + dim);
  }
}

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
      for (int i = 0; i < kLanes; ++i) scoring[row].excess += 128 * static_cast<uint32_t>(sum[i]);
    } else if constexpr (std::is_same_v<O, Pairs> && std::is_same_v<T, BFloat16>) {
      std::memcpy(x, from, p.head_dim * sizeof(T));
    } else {
      for (int64_t i = 0; i < p.head_dim; ++i) x[i] = to_operand<O>(from[i]);
    }
  }
}

// Copies what several units have of a partition to where each of them keeps it.
TARGET void keep_states(const Problem& p, const Item& item, int64_t partition, const State& from, float* states) {
  const int64_t dim = p.padded_dim();
  for (int64_t i = 0, row = 0; i < item.count; row += item.units[i++]->rows(p)) {
    const Unit& unit = *item.units[i];
    const int64_t rows = unit.rows(p), room = unit.room(p), at = partition - unit.first_partition();
    const State to(states + unit.state + at * State::size(room, dim), room, dim);
    std::copy_n(from.values + row * dim, rows * dim, to.values);
    std::copy_n(from.maximum + row, rows, to.maximum);
    std::copy_n(from.sum + row, rows, to.sum);
  }
}

template <class T>
TARGET void merge(const Problem& p, const Unit& unit, const float* states) {
  const int64_t rows = unit.rows(p), room = unit.room(p), dim = p.padded_dim(), state_size = State::size(room, dim);
  const State total(scratch(state_size), room, dim);
  clear(total, rows);
  for (int64_t i = 0; i < unit.partitions(); ++i)
    fold(total, State(const_cast<float*>(states) + unit.state + i * state_size, room, dim), rows, dim);
  write_out<T>(p, unit, total);
}

}  // namespace ISA
}  // namespace
