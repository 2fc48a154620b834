// The kernels of attention_cpu.cpp for one instruction set. Included there once for each, with these macros set:
//
//   ISA     the namespace
//   TARGET  the attribute of every function
//   WIDTH   bits of the registers
//   DOT     whether it multiplies pairs of bf16, and groups of four bytes, and adds them to one number
//   TILES   the tile registers that multiply pairs of bf16, or not defined
//
// Hence no include guard, here and in the two parts it is made of. The types and constants are those of the including
// file.

#include "attention_cpu_vectors.h"
#ifdef TILES
#include "attention_cpu_amx.h"
#endif
#include "attention_cpu_products.h"

namespace {
namespace ISA {

// ---------------------------------------------------------------------------------------------------- the cache

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
// The order of elements is stated in attention_cpu.cpp.
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

template <class T, class C>
TARGET void write(const Problem& p, int64_t token) {
  const int64_t block = p.slots[token] / p.block_size, offset = p.slots[token] % p.block_size;
  for (int64_t h = 0; h < p.kv_heads; ++h) {
    const int64_t run = block * p.kv_heads + h, at = run * p.block_size * p.head_dim;
    const T* k = static_cast<const T*>(p.k) + token * p.k_token + h * p.k_head;
    const T* v = static_cast<const T*>(p.v) + token * p.v_token + h * p.v_head;
    const float k_scale = write_row(p, k, true, offset, static_cast<C*>(p.k_cache) + at);
    const float v_scale = write_row(p, v, false, offset, static_cast<C*>(p.v_cache) + at);
    if constexpr (!std::is_same_v<T, C>) {
      p.k_scale[run * p.block_size + offset] = k_scale;
      p.v_scale[run * p.block_size + offset] = v_scale;
    }
  }
}

// The keys and values of a tile: where they lie in the cache, in runs of 16 keys.
template <class C>
struct Tile {
  static constexpr int64_t kGroups = kTile / kLanes, kRows = kTile / kCacheWidth<C>;
  int64_t count = 0;          // of keys; the rest is not there
  const float* keys[kGroups];  // the first lane of 16 keys
  const float* values[kRows];  // one lane of keys, all columns
  float k_scale[kTile], v_scale[kTile];
};

template <class C>
TARGET void find_tile(const Problem& p, const Unit& unit, int64_t first, Tile<C>& tile) {
  constexpr int64_t kWidth = kCacheWidth<C>, kLanesOfKeys = kLanes / kWidth;
  tile.count = std::clamp<int64_t>(unit.keys - first, 0, kTile);
  if (tile.count == 0) return;
  const int32_t* table = p.table + unit.request * p.table_width + first / p.block_size;
  int64_t offset = first % p.block_size, run = p.run(*table, unit.kv_head);
  for (int64_t g = 0; g < tile.kGroups; ++g, offset += kLanes) {
    if (g * kLanes < tile.count && offset == p.block_size) offset = 0, run = p.run(*++table, unit.kv_head);
    if (g * kLanes >= tile.count) offset -= kLanes;  // past the end any place will do
    const C* keys = static_cast<const C*>(p.k_cache) + run * p.head_dim + offset * kWidth;
    const C* values = static_cast<const C*>(p.v_cache) + (run + offset) * p.head_dim;
    tile.keys[g] = reinterpret_cast<const float*>(keys);
    for (int64_t i = 0; i < kLanesOfKeys; ++i)
      tile.values[g * kLanesOfKeys + i] = reinterpret_cast<const float*>(values + i * p.head_dim * kWidth);
    if (p.k_scale != nullptr) {
      store(tile.k_scale + g * kLanes, load(p.k_scale + run + offset));
      store(tile.v_scale + g * kLanes, load(p.v_scale + run + offset));
    }
  }
}

// The same keys and values as operands: left where they are, or converted into memory of `Operands`.
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
TARGET void copy_tile(const Problem& p, const Unit& unit, int64_t first, Tile<C>& tile, Operands<O, C>& to) {
  constexpr int64_t kEach = kPerLane<O>;
  const int32_t* table = p.table + unit.request * p.table_width;
  const int64_t lanes = ceil_div(p.head_dim, kEach), dim = p.padded_dim();
  const int64_t k_width = p.key_width<C>(), v_width = p.value_width<C>();
  tile.count = std::min(unit.keys - first, kTile);
  std::memset(to.key_memory, 0, to.key_floats(p) * sizeof(float));
  std::memset(to.value_memory, 0, to.value_floats(p) * sizeof(float));
  auto* keys = reinterpret_cast<typename O::Element*>(to.key_memory);
  auto* values = reinterpret_cast<typename O::Element*>(to.value_memory);
  for (int64_t i = 0; i < tile.count; ++i) {
    const int64_t run = p.run(table[(first + i) / p.block_size], unit.kv_head), offset = (first + i) % p.block_size;
    const C* k = static_cast<const C*>(p.k_cache) + run * p.head_dim + offset * k_width;
    const C* v = static_cast<const C*>(p.v_cache) + run * p.head_dim + offset / v_width * p.head_dim * v_width +
                 offset % v_width;
    for (int64_t d = 0; d < p.head_dim; ++d) {
      keys[((i / kLanes * lanes + d / kEach) * kLanes + i % kLanes) * kEach + d % kEach] =
          to_operand<O>(k[d / k_width * p.block_size * k_width + d % k_width]);
      values[(i / kEach * dim + d) * kEach + i % kEach] = to_operand<O>(v[d * v_width]);
    }
    if (p.k_scale != nullptr) {
      tile.k_scale[i] = p.k_scale[run + offset];
      tile.v_scale[i] = p.v_scale[run + offset];
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

#ifdef TILES
// Copies lanes of values where 16 of them do not lie at one distance, as a tile is loaded.
template <class O, class C>
TARGET void gather_values(int64_t depth, int64_t dim, Operands<O, C>& operands) {
  for (int64_t i = 0; i < depth; i += kTileLanes) {
    const float** values = operands.values + i;
    bool apart = false;
    for (int64_t j = 1; j < kTileLanes; ++j) apart |= values[j] != values[0] + j * dim;
    for (int64_t j = 0; apart && j < kTileLanes; ++j) {
      float* to = operands.value_memory + (i + j) * dim;
      for (int64_t column = 0; column < dim; column += kLanes) store(to + column, load(values[j] + column));
      values[j] = to;
    }
  }
}
#endif

#ifdef TILES
// The products of a tile and the softmax between them for more than 16 rows, by blocks of 32. While the rows of one are
// weighed, the tile registers multiply the values of the block before and the keys of the block behind it.
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
  Product before, behind;
  if (begin < rows)
    for (before = score(begin); before.left() > 0;) before.advance(tiles);
  for (; begin < rows; begin += kTiledRows) {
    behind = begin + kTiledRows < rows ? score(begin + kTiledRows) : Product{};
    const int64_t end = end_of(begin), count = end - begin, depth = depth_of(begin);
    const int64_t steps = before.left() + behind.left();
    float* of_row = scores_of(begin);
    float most = largest(begin, depth, of_row);
    for (int64_t row = begin, made = 0; row < end; ++row, of_row += kTile) {
      const float most_of_next = row + 1 < end ? largest(row + 1, depth, of_row + kTile) : 0;
      weigh(row, depth, std::exchange(most, most_of_next), of_row, nullptr);
      for (; made * count < (row - begin + 1) * steps; ++made) (before.left() > 0 ? before : behind).advance(tiles);
    }
    before = weighted(begin);
  }
  while (before.left() > 0) before.advance(tiles);
}
#endif

// ---------------------------------------------------------------------------------------------------- items

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
    } else if constexpr (std::is_same_v<O, Pairs> && std::is_same_v<T, at::BFloat16>) {
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

template <class T, class C>
TARGET void attend(const Problem& p, const Item& item, float* states) {
  using O = Operand<T, C>;
  constexpr bool kBytes = std::is_same_v<O, Bytes>;
  const Unit& unit = *item.units[0];
  const bool shared = item.count > 1;  // then all rows of all units see all keys
  int64_t rows = 0;
  for (int64_t i = 0; i < item.count; ++i) rows += item.units[i]->rows(p);
  const int64_t room = ceil_div(rows, kLanes) * kLanes, dim = p.padded_dim(), state_size = State::size(room, dim);
  const int64_t lanes = ceil_div(p.head_dim, kPerLane<O>);
  const bool tiled = kTiled<O> && lanes % kLanes == 0;
  const bool blocks = tiled && rows > kLanes;  // of kTiledRows, of which two have scores at a time
  const int64_t score_rows = blocks ? 2 * kTiledRows : room;
  const int64_t first_position = shared ? item.last_partition * kPartition : unit.keys - unit.tokens;
  const bool in_runs = p.in_runs(), raw = in_runs && kRaw<O, C>;

  using Memory = Operands<O, C>;
  const int64_t sizes[] = {Memory::key_floats(p), Memory::value_floats(p), 3 * dim, room * kRowsOf<O> * lanes, room * 4,
                           score_rows * kTile, room * kRowsOf<O> * kWeightsRow<O>, room, state_size, state_size};
  int64_t total_size = 0;
  for (const int64_t size : sizes) total_size += ceil_div(size, kLanes) * kLanes;
  float* memory = scratch(total_size);
  int64_t taken = 0;
  const auto take = [&] { return std::exchange(memory, memory + ceil_div(sizes[taken++], kLanes) * kLanes); };
  Memory operands;
  operands.key_memory = take();
  operands.value_memory = take();
  operands.edges = take();
  float* queries = take();
  static_assert(sizeof(Scoring) <= 4 * sizeof(float));
  Scoring* scoring = reinterpret_cast<Scoring*>(take());
  float *scores = take(), *codes = take(), *weight_scale = take();
  const State total(take(), room, dim);
  float* partition_memory = take();

  for (int64_t i = 0, row = 0; i < item.count; row += item.units[i++]->rows(p))
    load_queries<O, T>(p, *item.units[i], lanes, queries + row * kRowsOf<O> * lanes, scoring + row);
  clear(total, rows);
  operands.stride = raw ? p.block_size : kLanes;
  std::memset(operands.edges + 2 * dim, 0, dim * sizeof(float));
#ifdef TILES
  if (tiled) TILES::begin(std::min(rows, kTileLanes));
#endif

  Tile<C> tiles[2];
  int64_t now = 0;
  const int64_t first_tile = unit.first_key / kTile * kTile;
  if (in_runs) find_tile(p, unit, std::max(first_tile, item.first_partition * kPartition), tiles[now]);
  for (int64_t partition = item.first_partition; partition < item.last_partition; ++partition) {
    const bool kept = unit.state >= 0 && !shared;
    const bool folded = !kept && !shared && partition > item.first_partition;  // the first is the total so far
    float* place = folded || shared ? partition_memory : total.values;
    if (kept) place = states + unit.state + (partition - unit.first_partition()) * state_size;
    const State state(place, room, dim);
    clear(state, rows);
    const int64_t start = std::max(first_tile, partition * kPartition);
    const int64_t end = std::min(unit.keys, (partition + 1) * kPartition);
    for (int64_t first = start; first < end; first += kTile) {
      Tile<C>& tile = tiles[now];
      const Tile<C>* next = nullptr;
      if (in_runs) {
        now ^= 1;
        find_tile(p, unit, first + kTile, tiles[now]);
        next = &tiles[now];
        if constexpr (!kRaw<O, C>) {
          convert_tile(p, tile, next->count == 0 ? tile : *next, operands);
        } else {
          std::copy(std::begin(tile.keys), std::end(tile.keys), operands.keys);
          std::copy(std::begin(tile.values), std::end(tile.values), operands.values);
        }
      } else {
        copy_tile(p, unit, first, tile, operands);
      }
      if (!raw || next->count == 0) next = nullptr;
      if (!raw) {
        for (int64_t g = 0; g < Tile<C>::kGroups; ++g) operands.keys[g] = operands.key_memory + g * lanes * kLanes;
        for (int64_t i = 0; i < operands.kDepth; ++i) operands.values[i] = operands.value_memory + i * dim;
      }
      // What the last row sees, in lanes of keys as the products take them.
      const auto seen = [&](int64_t row) TARGET {
        const int64_t count = std::min(first_position + row / p.group - first + 1, tile.count);
        return tiled ? ceil_div(count, 2 * kLanes) * kLanes : ceil_div(count, kPerLane<O>);
      };
      hide_values(std::max<int64_t>(unit.first_key - first, 0), tile.count, seen(rows - 1), dim, operands);
#ifdef TILES
      if (blocks) gather_values(seen(rows - 1), dim, operands);
#endif

      const auto mask_of = [&](int64_t row) TARGET {
        const int64_t position = first_position + row / p.group - first;  // of the query, in the tile
        return Mask{p.window > 0 ? std::max<int64_t>(position - p.window + 1, 0) : 0, std::min(position + 1, tile.count),
                    p.k_scale == nullptr ? nullptr : tile.k_scale, p.k_scale == nullptr ? nullptr : tile.v_scale};
      };
      const auto keys_of = [](int64_t depth) { return ceil_div(depth * kPerLane<O>, kLanes) * kLanes; };
      const auto largest = [&](int64_t row, int64_t depth, float* scores) TARGET {
        return largest_score<O>(scores, keys_of(depth), scoring[row], mask_of(row));
      };
      const auto weigh = [&](int64_t row, int64_t depth, float largest, float* scores, float* codes) TARGET {
        return weigh_row<O>(scores, keys_of(depth), scoring[row], mask_of(row), largest, state, row, dim,
                            reinterpret_cast<uint8_t*>(codes));
      };
      const bool add = first > start;
#ifdef TILES
      if constexpr (kTiled<O>)
        if (blocks) {
          attend_blocks(rows, lanes, dim, queries, operands.keys, operands.values, operands.stride, scores, state.values,
                        add, seen, largest, weigh);
          continue;
        }
#endif
      const int64_t depth = seen(rows - 1);
      all_scores<O>(tiled, rows, queries, lanes, keys_of(depth) / kLanes, operands.keys, operands.stride,
                    next == nullptr ? nullptr : next->keys, scores);
      for (int64_t row = 0; row < rows; ++row) {
        float* of_row = scores + row * kTile;
        weight_scale[row] =
            weigh(row, depth, largest(row, depth, of_row), of_row, codes + row * kRowsOf<O> * kWeightsRow<O>);
      }
      all_values<O>(tiled, rows, kBytes ? codes : scores, weight_scale, depth, operands.values,
                    next == nullptr ? nullptr : next->values, add, dim, state.values);
    }
    if (shared) keep_states(p, item, partition, state, states);
    else if (folded) fold(total, state, rows, dim);
  }
#ifdef TILES
  if (tiled) TILES::end();
#endif
  if (unit.state < 0) write_out<T>(p, unit, total);
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

#undef INLINE
#undef ISA
#undef TARGET
#undef WIDTH
#undef DOT
#undef TILES
