// Attention of one item on tile registers, for pairs of bf16; see attention_cpu_kernels.h.

#include "attention_cpu_amx.h"

namespace {
namespace ISA {

constexpr float kUnset = 3e38f;           // a shift before the first key
constexpr float kMostWeight = 0x1p17f;    // of two keys together
constexpr int64_t kTileSize = 16 * 16;    // floats
constexpr int64_t kGroup = 4;             // blocks of scores that are multiplied one after the other

// ---------------------------------------------------------------------------------------------------- softmax

// The softmax of some rows over the keys of a partition, 32 at a time. A row's weights are relative to a power of 2, the
// next above the largest of its first scores; so weights may be larger than 1. Only when one would be above kMostWeight
// is the power set anew, and what was written before is multiplied by a power of 2, which loses nothing.
struct Softmax {
  float scale;                     // of products, to scores as powers of 2
  const float *k_scale, *v_scale;  // of the keys of the partition, or null
  float soft_cap;                  // or 0
  int64_t window, first_key, first_block;  // of 32 keys
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

// 2 to the power of x: infinity where that is too large, 0 below the normal numbers (the caller has seen to that).
// Relative error 1e-4, where weights are rounded to 2e-3.
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
  softmax.shifts[row] = -std::ceil(largest_lane(largest) * softmax.scale);
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

// ---------------------------------------------------------------------------------------------------- a partition

// What all rows of an item need of a partition.
struct Part {
  Softmax softmax;
  float factor;   // of products that become scores by scale_products(); 0 for none
  int64_t lanes, dim, end;         // of the keys that some row sees, in blocks of 32
  const float* queries;            // [rows][lanes]
  const float* const* keys;        // of 16 keys each
  const float* const* values;      // a lane of all columns each
  int64_t stride;
  float *packed, *scores;
};

// One row or a few, [rows][kTile] scores at a time.
__attribute__((noinline)) TARGET void attend_few(const Part& part, int64_t rows, float* out) {
  const int64_t depth = part.end * kTileLanes, first = part.softmax.first_block * kTileLanes;
  few_scores(part.queries, part.lanes, (part.end - part.softmax.first_block) * 2, part.keys + part.softmax.first_block * 2, part.stride,
             part.scores + part.softmax.first_block * kBlockKeys);
  for (int64_t row = 0; row < rows; row += 2)
    for (int64_t key = part.softmax.first_block * kBlockKeys; key < part.end * kBlockKeys; key += kBlockKeys) {
      float* products = part.scores + row * kTile + key;
      for (int64_t i = 0; part.factor > 0 && i < 2; ++i)
        scale_products(part.softmax, part.factor, products + i * kTile, key);
      weigh<2>(part.softmax, row, products, kTile, key);
    }
  few_values(part.softmax.weights_at(0, first * 2), depth - first, part.values + first, part.dim, out);
}

// Lines of memory that will be needed soon. They lie in many pages, so reading one after the other would wait for each.
struct Fetch {
  const char *queries = nullptr, *out = nullptr;
  int64_t queries_stride = 0, out_stride = 0;       // bytes from token to token
  int64_t queries_tokens = 0, out_tokens = 0, bytes = 0;  // of a token

  INLINE void token(int64_t i) const {
    for (int64_t at = 0; i < queries_tokens && at < bytes; at += 64) prefetch(queries + i * queries_stride + at);
    for (int64_t at = 0; at < bytes; at += 64) prefetch(out + i * out_stride + at);
  }
};

// Some rows of an item, at most kChunkRows, whose weights are kept until their products with the values are made.
struct Chunk {
  Softmax softmax;
  int64_t begin = 0, end = 0;    // rows
  int64_t first = 0, last = 0;   // blocks of 32 keys
  State state{nullptr, 0, 0};    // of its rows alone
  Fetch fetch = {};

  int64_t blocks() const { return ceil_div(end - begin, kBlockRows); }
};

INLINE Product score_product(const Part& part, const Chunk& chunk, int64_t i) {
  const int64_t block = chunk.first + i / chunk.blocks(), row = chunk.begin + i % chunk.blocks() * kBlockRows;
  return {.x = part.queries + row * part.lanes, .x_row = part.lanes, .below = kTileLanes * part.lanes, .x_step = kTileLanes,
          .left = part.keys[2 * block], .right = part.keys[2 * block + 1], .stride = part.stride,
          .operand_step = kTileLanes * part.stride, .out = part.scores + i % (2 * kGroup) * kBlockRows * kBlockKeys,
          .out_row = kBlockKeys, .steps = part.lanes / kTileLanes};
}

INLINE Product value_product(const Part& part, const Chunk& chunk, int64_t i) {
  const int64_t columns = i / chunk.blocks(), row = chunk.begin + i % chunk.blocks() * kBlockRows;
  const int64_t last_row = std::min(row + kBlockRows, chunk.end) - 1;
  const int64_t last = std::min(ceil_div(chunk.softmax.end(last_row), kBlockKeys), chunk.last);
  const float* values = part.packed + (columns * (kTile / kBlockKeys) + chunk.first) * 2 * kTileSize;
  return {.x = chunk.softmax.weights_at(row, chunk.first * kBlockKeys), .x_row = kTileLanes, .below = kTileSize,
          .x_step = 2 * kTileSize, .left = values, .right = values + kTileSize, .stride = kLanes,
          .operand_step = 2 * kTileSize, .out = chunk.state.values + (row - chunk.begin) * part.dim + columns * 2 * kLanes,
          .out_row = part.dim, .steps = last - chunk.first};
}

__attribute__((noinline)) TARGET void multiply_values(const Part& part, const Chunk& chunk) {
  TILES tiles;
  for (int64_t i = 0; i < chunk.blocks() * part.dim / (2 * kLanes); ++i)
    for (Product product = value_product(part, chunk, i); product.step < product.steps;) product.advance(tiles);
}

// The weights of a chunk, and meanwhile the products of its predecessor's with the values. While four blocks are weighed,
// the tile registers make the products of the next four.
__attribute__((noinline)) TARGET void weigh_chunk(const Part& part, const Chunk& chunk, const Chunk& previous) {
  constexpr int kRows = 4;
  TILES tiles;
  Product jobs[kGroup + 2 * 512 / (2 * kLanes)];
  const int64_t count = (chunk.last - chunk.first) * chunk.blocks(), groups = ceil_div(count, kGroup);
  const int64_t values = previous.blocks() * part.dim / (2 * kLanes);
  for (int64_t i = 0; i < std::min(kGroup, count); ++i)
    for (Product product = score_product(part, chunk, i); product.step < product.steps;) product.advance(tiles);
  for (int64_t group = 0, fetched = 0; group < groups; ++group) {
    int64_t made = 0, steps = 0, number = 0;
    const auto add = [&](const Product& product) { jobs[number++] = product, steps += product.steps; };
    const int64_t begin = group * kGroup, end = std::min(begin + kGroup, count);
    for (int64_t i = end; i < std::min(end + kGroup, count); ++i) add(score_product(part, chunk, i));
    for (int64_t i = values * group / groups; i < values * (group + 1) / groups; ++i)
      add(value_product(part, previous, i));
    Product* job = jobs;
    int64_t strip = 0;
    const int64_t strips = (end - begin) * (kBlockRows / kRows);
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = chunk.begin + i % chunk.blocks() * kBlockRows;
      const int64_t key = (chunk.first + i / chunk.blocks()) * kBlockKeys;
      float* scores = part.scores + i % (2 * kGroup) * kBlockRows * kBlockKeys;
      for (int64_t j = 0; j < kBlockRows; j += kRows, scores += kRows * kBlockKeys) {
        for (int64_t k = 0; part.factor > 0 && k < kRows; ++k)
          scale_products(chunk.softmax, part.factor, scores + k * kBlockKeys, key);
        weigh<kRows>(chunk.softmax, row + j, scores, kBlockKeys, key);
        if (fetched < chunk.fetch.out_tokens) chunk.fetch.token(fetched++);
        for (++strip; made * strips < strip * steps; ++made) {
          job->advance(tiles);
          if (job->step == job->steps) ++job;
        }
      }
    }
  }
}

// ---------------------------------------------------------------------------------------------------- an item

// What is fetched while a chunk is weighed: its outputs' lines, and the queries of the next one.
Fetch fetch_of(const Problem& p, const Unit& unit, int64_t row) {
  const int64_t first = p.starts[unit.request] + unit.first_token + row / p.group, head = unit.kv_head * p.group;
  const auto* q = static_cast<const BFloat16*>(p.q) + (first + kChunkRows / p.group) * p.q_token + head * p.q_head;
  const auto* out = static_cast<const BFloat16*>(p.out) + (first * p.heads + head) * p.head_dim;
  const int64_t end = p.starts[unit.request] + unit.first_token + unit.tokens;
  return {reinterpret_cast<const char*>(q), reinterpret_cast<const char*>(out), p.q_token * 2, p.heads * p.head_dim * 2,
          end - first - kChunkRows / p.group, std::min(kChunkRows / p.group, end - first), p.group * p.head_dim * 2};
}

// The query of one row of a unit.
TARGET void load_row(const Problem& p, const Unit& unit, int64_t row, float* to) {
  const int64_t token = p.starts[unit.request] + unit.first_token + row / p.group;
  const int64_t head = unit.kv_head * p.group + row % p.group;
  std::memcpy(to, static_cast<const BFloat16*>(p.q) + token * p.q_token + head * p.q_head, p.head_dim * sizeof(BFloat16));
}

template <class C>
TARGET void attend_tiled(const Problem& p, const Item& item, float* states) {
  if (p.head_dim % (2 * kTileLanes) != 0) return avx512_bf16::attend<BFloat16, C>(p, item, states);
  using Memory = Operands<Pairs, C>;
  const Unit& unit = *item.units[0];
  const bool shared = item.count > 1;  // then all rows of all units see all keys
  int64_t rows = 0;
  for (int64_t i = 0; i < item.count; ++i) rows += item.units[i]->rows(p);
  const int64_t room = ceil_div(rows, kBlockRows) * kBlockRows, dim = p.head_dim, lanes = dim / 2;
  const bool few = rows <= kTileLanes, in_runs = p.in_runs(), raw = in_runs && kRaw<Pairs, C>;
  const int64_t state_size = State::size(room, dim), chunk_size = State::size(kChunkRows, dim);

  const int64_t sizes[] = {Memory::key_floats(p), Memory::value_floats(p), few ? 0 : Memory::value_floats(p), 3 * dim,
                           room * lanes, 2 * room, room, room * kLanes, (few ? kBlockRows : 2 * kChunkRows) * kTile / 2,
                           few ? kTileLanes * kTile : 2 * kGroup * kBlockRows * kBlockKeys, state_size, shared ? state_size : 2 * chunk_size};
  int64_t total_size = 0;
  for (const int64_t size : sizes) total_size += ceil_div(size, kLanes) * kLanes;
  float* memory = scratch(total_size);
  int64_t taken = 0;
  const auto take = [&] { return std::exchange(memory, memory + ceil_div(sizes[taken++], kLanes) * kLanes); };
  Memory operands;
  operands.key_memory = take();
  operands.value_memory = take();
  float* packed = take();
  operands.edges = take();
  operands.stride = raw ? p.block_size : kLanes;
  std::memset(operands.edges + 2 * dim, 0, dim * sizeof(float));
  float* queries = take();
  int64_t* positions = reinterpret_cast<int64_t*>(take());
  float *shifts = take(), *sums = take(), *weights = take(), *scores = take();
  const State total(take(), room, dim);
  float* partition_memory = take();

  const int64_t first_position = shared ? item.last_partition * kPartition : unit.keys - unit.tokens;
  const bool lazy = !few && !shared;  // queries are loaded chunk by chunk
  for (int64_t i = 0, row = 0; i < item.count; ++i)
    for (int64_t j = 0; j < item.units[i]->rows(p); ++j, ++row) {
      if (!lazy) load_row(p, *item.units[i], j, queries + row * lanes);
      positions[row] = first_position + row / p.group;
    }
  for (int64_t row = rows; row < room; ++row) positions[row] = -1;
  clear(total, rows);
  TILES::begin(std::min(rows, kTileLanes));

  Tile<C> tile;
  const bool plain = p.k_scale == nullptr && p.soft_cap <= 0;
  const float factor = p.sm_scale * (p.soft_cap > 0 ? 1.f : kLog2E);
  for (int64_t partition = item.first_partition; partition < item.last_partition; ++partition) {
    const bool kept = unit.state >= 0 && !shared;
    const bool folded = !kept && !shared && partition > item.first_partition;  // the first is the total so far
    float* place = shared || folded ? partition_memory : total.values;
    if (kept) place = states + unit.state + (partition - unit.first_partition()) * state_size;
    const State state(place, room, dim);
    const int64_t first_key = partition * kPartition;
    if (in_runs) {
      find_tile(p, unit, first_key, tile);
      if constexpr (kRaw<Pairs, C>) {
        std::copy(std::begin(tile.keys), std::end(tile.keys), operands.keys);
        std::copy(std::begin(tile.values), std::end(tile.values), operands.values);
      } else {
        convert_tile(p, tile, tile, operands);
      }
    } else {
      copy_tile(p, unit, first_key, tile, operands);
    }
    if (!raw) {
      for (int64_t g = 0; g < Tile<C>::kGroups; ++g) operands.keys[g] = operands.key_memory + g * lanes * kLanes;
      for (int64_t i = 0; i < operands.kDepth; ++i) operands.values[i] = operands.value_memory + i * dim;
    }
    const int64_t skipped = std::max<int64_t>(unit.first_key - first_key, 0), end = ceil_div(tile.count, kBlockKeys);
    hide_values(skipped, tile.count, end * kTileLanes, dim, operands);
    std::fill_n(shifts, room, kUnset);
    std::memset(sums, 0, room * kLanes * sizeof(float));
    const Part part{{plain ? factor : 1.f, p.k_scale == nullptr ? nullptr : tile.k_scale,
                     p.k_scale == nullptr ? nullptr : tile.v_scale, p.soft_cap, p.window, first_key, skipped / kBlockKeys, positions, shifts, sums, weights, 0},
                    plain ? 0.f : factor, lanes, dim, end, queries, operands.keys, operands.values,
                    operands.stride, packed, scores};
    const auto finish = [&](int64_t row, int64_t count, const State& to) TARGET {
      for (int64_t i = 0; i < count; ++i) {
        to.maximum[i] = shifts[row + i] == kUnset ? -kInfinity : -shifts[row + i];
        to.sum[i] = sum_of_lanes(load(sums + (row + i) * kLanes));
      }
    };
    if (few) {
      attend_few(part, rows, state.values);
      finish(0, rows, state);
      if (folded) fold(total, state, rows, dim);
    } else {
      pack_values(part.values, part.softmax.first_block, end, dim, packed);
      Chunk previous;
      const auto complete = [&](const Chunk& chunk) TARGET {
        const int64_t count = chunk.end - chunk.begin;
        finish(chunk.begin, count, chunk.state);
        if (folded) fold(total.from(chunk.begin, dim), chunk.state, count, dim);
      };
      for (int64_t row = 0, i = 0; row < rows; row += kChunkRows, ++i) {
        Chunk chunk{.softmax = part.softmax, .begin = row, .end = std::min(row + kChunkRows, rows)};
        chunk.softmax.weights = weights + i % 2 * kChunkRows * kTile / 2;
        chunk.softmax.first_row = row;
        chunk.first = std::max(part.softmax.first_block, chunk.softmax.first(row) / kBlockKeys);
        chunk.last = std::min(ceil_div(chunk.softmax.end(chunk.end - 1), kBlockKeys), end);
        chunk.state = folded ? State(partition_memory + i % 2 * chunk_size, kChunkRows, dim) : state.from(row, dim);
        if (lazy && partition == item.first_partition) {
          for (int64_t j = row; j < chunk.end; ++j) load_row(p, unit, j, queries + j * lanes);
          chunk.fetch = fetch_of(p, unit, row);
        }
        if (chunk.last <= chunk.first) {
          if (!folded) clear(state.from(row, dim), chunk.end - row);
          continue;
        }
        weigh_chunk(part, chunk, previous);
        if (previous.end > 0) complete(previous);
        previous = chunk;
      }
      multiply_values(part, previous);
      complete(previous);
    }
    if (shared) keep_states(p, item, partition, state, states);
  }
  TILES::end();
  if (unit.state < 0) write_out<BFloat16>(p, unit, total);
}

}  // namespace ISA
}  // namespace
