// Attention of one item on tile registers, for pairs of bf16; see attention_cpu_kernels.h. The keys of a tile are those of
// a partition, and the order of operations of a row is this, whatever is computed beside it:
//
//   scores   of 32 keys at a time, added up over 16 lanes after 16 lanes
//   weights  of 32 keys at a time, and their sums lane by lane
//   values   added up over 32 keys after 32 keys
//
// Up to 16 rows wait for memory. More are cut into chunks of 64, and while the vector units weigh four blocks of 32 rows
// and keys, the tile registers make the scores of the next four, and multiply the values of the chunk before.

#include "attention_cpu_softmax.h"

namespace {
namespace ISA {

constexpr int64_t kTileSize = 16 * 16;  // floats
constexpr int64_t kGroup = 4;           // blocks of scores that are multiplied one after the other

// ---------------------------------------------------------------------------------------------------- a partition

// What all rows of an item need of a partition.
struct Part {
  Softmax softmax;
  float factor;                // of products that become scores by scale_products(); 0 for none
  int64_t lanes, dim;          // of a row of queries, and of values
  int64_t end;                 // of the keys that some row sees, in blocks of 32
  const float* queries;        // [rows][lanes]
  const float* const* keys;    // 16 of them each, `stride` floats from lane to lane
  const float* const* values;  // a lane of all columns each
  int64_t stride;
  float *packed, *scores;      // memory for values as tiles, and for scores
};

// One row or a few, [rows][kTile] scores at a time.
__attribute__((noinline)) TARGET void attend_few(const Part& part, int64_t rows, float* out) {
  const int64_t depth = part.end * kTileLanes, first = part.softmax.first_block * kTileLanes;
  few_scores(part.queries, part.lanes, (part.end - part.softmax.first_block) * 2,
             part.keys + part.softmax.first_block * 2, part.stride, part.scores + part.softmax.first_block * kBlockKeys);
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
  int64_t queries_stride = 0, out_stride = 0;             // bytes from token to token
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
  int64_t end_block = 0;         // of 32 keys
  State state{nullptr, 0, 0};    // of its rows alone
  Fetch fetch = {};

  int64_t blocks() const { return ceil_div(end - begin, kBlockRows); }
};

INLINE Product score_product(const Part& part, const Chunk& chunk, int64_t i) {
  const int64_t block = chunk.softmax.first_block + i / chunk.blocks();
  const int64_t row = chunk.begin + i % chunk.blocks() * kBlockRows;
  return {.x = part.queries + row * part.lanes, .x_row = part.lanes, .below = kTileLanes * part.lanes,
          .x_step = kTileLanes, .left = part.keys[2 * block], .right = part.keys[2 * block + 1], .stride = part.stride,
          .operand_step = kTileLanes * part.stride, .out = part.scores + i % (2 * kGroup) * kBlockRows * kBlockKeys,
          .out_row = kBlockKeys, .steps = part.lanes / kTileLanes};
}

INLINE Product value_product(const Part& part, const Chunk& chunk, int64_t i) {
  const int64_t columns = i / chunk.blocks(), row = chunk.begin + i % chunk.blocks() * kBlockRows;
  const int64_t last_row = std::min(row + kBlockRows, chunk.end) - 1;
  const int64_t last = std::min(ceil_div(chunk.softmax.end(last_row), kBlockKeys), chunk.end_block);
  const int64_t first = chunk.softmax.first_block;
  const float* values = part.packed + (columns * (kTile / kBlockKeys) + first) * 2 * kTileSize;
  return {.x = chunk.softmax.weights_at(row, first * kBlockKeys), .x_row = kTileLanes, .below = kTileSize,
          .x_step = 2 * kTileSize, .left = values, .right = values + kTileSize, .stride = kLanes,
          .operand_step = 2 * kTileSize,
          .out = chunk.state.values + (row - chunk.begin) * part.dim + columns * 2 * kLanes, .out_row = part.dim,
          .steps = last - first};
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
  const int64_t count = (chunk.end_block - chunk.softmax.first_block) * chunk.blocks(), groups = ceil_div(count, kGroup);
  const int64_t values = previous.blocks() * part.dim / (2 * kLanes);
  for (int64_t i = 0; i < std::min(kGroup, count); ++i)
    for (Product product = score_product(part, chunk, i); product.step < product.steps;) product.advance(tiles);
  for (int64_t group = 0, fetched = 0; group < groups; ++group) {
    int64_t made = 0, steps = 0, number = 0;
    const auto add = [&](const Product& product) {
      if (product.steps > 0) jobs[number++] = product, steps += product.steps;  // else its rows see nothing
    };
    const int64_t begin = group * kGroup, end = std::min(begin + kGroup, count);
    for (int64_t i = end; i < std::min(end + kGroup, count); ++i) add(score_product(part, chunk, i));
    for (int64_t i = values * group / groups; i < values * (group + 1) / groups; ++i)
      add(value_product(part, previous, i));
    Product* job = jobs;
    int64_t strip = 0;
    const int64_t strips = (end - begin) * (kBlockRows / kRows);
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = chunk.begin + i % chunk.blocks() * kBlockRows;
      const int64_t key = (chunk.softmax.first_block + i / chunk.blocks()) * kBlockKeys;
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

// The softmax state of some rows.
TARGET void finish(const Softmax& softmax, int64_t row, int64_t rows, const State& to) {
  for (int64_t i = 0; i < rows; ++i) {
    to.maximum[i] = softmax.shifts[row + i] == kUnset ? -kInfinity : -softmax.shifts[row + i];
    to.sum[i] = sum_of_lanes(load(softmax.sums + (row + i) * kLanes));
  }
}

// All rows of an item, chunk by chunk. `unit`: whose queries are loaded now, if any. The states are left in `state`, or
// folded into `total`, in which case `state` has memory for those of two chunks.
TARGET void attend_chunks(const Problem& p, const Unit* unit, const Part& part, int64_t rows, float* queries,
                          const State& state, const State* total) {
  pack_values(part.values, part.softmax.first_block, part.end, part.dim, part.packed);
  Chunk previous;
  const auto complete = [&] {
    const int64_t count = previous.end - previous.begin;
    finish(previous.softmax, previous.begin, count, previous.state);
    if (total != nullptr) fold(total->from(previous.begin, part.dim), previous.state, count, part.dim);
  };
  for (int64_t row = 0, i = 0; row < rows; row += kChunkRows, ++i) {
    Chunk chunk{.softmax = part.softmax, .begin = row, .end = std::min(row + kChunkRows, rows)};
    Softmax& softmax = chunk.softmax;
    softmax.weights += i % 2 * kChunkRows * kTile / 2;
    softmax.first_row = row;
    softmax.first_block = std::max(softmax.first_block, softmax.first(row) / kBlockKeys);
    chunk.end_block = std::min(ceil_div(softmax.end(chunk.end - 1), kBlockKeys), part.end);
    chunk.state = total == nullptr ? state.from(row, part.dim)
                                   : State(state.values + i % 2 * State::size(kChunkRows, part.dim), kChunkRows, part.dim);
    if (unit != nullptr) {
      for (int64_t j = row; j < chunk.end; ++j) load_row(p, *unit, j, queries + j * part.lanes);
      chunk.fetch = fetch_of(p, *unit, row);
    }
    if (chunk.end_block <= softmax.first_block) {
      if (total == nullptr) clear(chunk.state, chunk.end - row);
      continue;
    }
    weigh_chunk(part, chunk, previous);
    if (previous.end > 0) complete();
    previous = chunk;
  }
  multiply_values(part, previous);
  if (previous.end > 0) complete();
}

// The keys and values of a partition as operands.
template <class C>
TARGET void find_operands(const Problem& p, const Unit& unit, int64_t first_key, Tile<C>& tile,
                          Operands<Pairs, C>& operands) {
  if (p.in_runs()) find_tile(p, unit, first_key, tile);
  else copy_tile(p, unit, first_key, tile, operands);
  if (p.in_runs() && kRaw<Pairs, C>) {
    std::copy(std::begin(tile.keys), std::end(tile.keys), operands.keys);
    std::copy(std::begin(tile.values), std::end(tile.values), operands.values);
    operands.stride = p.block_size;
    return;
  }
  if constexpr (!kRaw<Pairs, C>)
    if (p.in_runs()) convert_tile(p, tile, tile, operands);
  for (int64_t g = 0; g < Tile<C>::kGroups; ++g)
    operands.keys[g] = operands.key_memory + g * p.head_dim / 2 * kLanes;
  for (int64_t i = 0; i < operands.kDepth; ++i) operands.values[i] = operands.value_memory + i * p.head_dim;
  operands.stride = kLanes;
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
  const bool few = rows <= kTileLanes;
  const int64_t state_size = State::size(room, dim), chunks_size = 2 * State::size(kChunkRows, dim);

  const int64_t sizes[] = {Memory::key_floats(p), Memory::value_floats(p), few ? 0 : Memory::value_floats(p), 3 * dim,
                           room * lanes, 2 * room, room, room * kLanes, (few ? kBlockRows : 2 * kChunkRows) * kTile / 2,
                           few ? kTileLanes * kTile : 2 * kGroup * kBlockRows * kBlockKeys, state_size,
                           shared ? state_size : chunks_size};
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
    find_operands<C>(p, unit, first_key, tile, operands);
    const int64_t skipped = std::max<int64_t>(unit.first_key - first_key, 0), end = ceil_div(tile.count, kBlockKeys);
    hide_values(skipped, tile.count, end * kTileLanes, dim, operands);
    std::fill_n(shifts, room, kUnset);
    std::memset(sums, 0, room * kLanes * sizeof(float));
    const bool scaled = p.k_scale != nullptr;
    const Softmax softmax{plain ? factor : 1.f, scaled ? tile.k_scale : nullptr, scaled ? tile.v_scale : nullptr,
                          p.soft_cap, p.window, first_key, skipped / kBlockKeys, positions, shifts, sums, weights, 0};
    const Part part{softmax, plain ? 0.f : factor, lanes, dim, end, queries, operands.keys, operands.values,
                    operands.stride, packed, scores};
    if (few) {
      attend_few(part, rows, state.values);
      finish(part.softmax, 0, rows, state);
      if (folded) fold(total, state, rows, dim);
    } else {
      const bool fetched = shared || partition > item.first_partition;
      attend_chunks(p, fetched ? nullptr : &unit, part, rows, queries, state, folded ? &total : nullptr);
    }
    if (shared) keep_states(p, item, partition, state, states);
  }
  TILES::end();
  if (unit.state < 0) write_out<BFloat16>(p, unit, total);
}

}  // namespace ISA
}  // namespace
