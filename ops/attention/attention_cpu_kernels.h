// The attention kernels for one instruction set: compiled once for each by ../cpu/one_isa.cpp, which explains the macros.
// Each of the headers below is included by the next: operands, tile registers, products and softmax, cache and rows.

#include <utility>

#include "attention_cpu_cache.h"

namespace {
namespace ISA {

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
  const bool tree = !shared && p.is_tree(unit.request);
  const Branch whole{rows / p.group, unit.keys, unit.keys, 0};

  using Memory = Operands<O, C>;
  const int64_t sizes[] = {Memory::key_floats(p), Memory::value_floats(p), 3 * dim, room * kRowsOf<O> * lanes, room * 4,
                           score_rows * kTile, room * kRowsOf<O> * kWeightsRow<O>, room, state_size, state_size,
                           tree && in_runs ? (2 * kTile + p.block_size) * p.head_dim : 0};
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
  float *partition_memory = take(), *gathered = take();

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
  if (in_runs) find_tile(p, unit, std::max(first_tile, item.first_partition * kPartition), unit.keys, tiles[now]);
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
      const bool apart = tree && first + kTile > p.context(unit.request) + 1;  // each branch has a tile of its own
      Branch branch = whole;
      bool add = first > start;
      for (int64_t first_token = 0; first_token < whole.end; first_token = branch.end) {
        if (apart) branch = branch_from(p, unit, first_token);
        if (branch.keys <= first) continue;
        // Tile registers multiply all rows; those of other branches see nothing.
        const int64_t begin_row = tiled ? 0 : first_token * p.group, end_row = tiled ? rows : branch.end * p.group;
        Tile<C>& tile = tiles[now];
        const Tile<C>* next = nullptr;
        if (in_runs) {
          if (apart) {
            find_tile(p, unit, first, branch.keys, tile);
            take_scales(p, tile);
            gather_branch(p, unit, first, branch, gathered, tile);
          } else {
            take_scales(p, tile);
            now ^= 1;
            find_tile(p, unit, first + kTile, unit.keys, tiles[now]);
            if (tiles[now].count > 0) next = &tiles[now];
          }
          if constexpr (!kRaw<O, C>) {
            convert_tile(p, tile, next == nullptr ? tile : *next, operands);
          } else {
            std::copy(std::begin(tile.keys), std::end(tile.keys), operands.keys);
            std::copy(std::begin(tile.values), std::end(tile.values), operands.values);
          }
        } else {
          copy_tile(p, unit, first, branch, tile, operands);
        }
        if (!raw) {
          next = nullptr;
          for (int64_t g = 0; g < Tile<C>::kGroups; ++g) operands.keys[g] = operands.key_memory + g * lanes * kLanes;
          for (int64_t i = 0; i < operands.kDepth; ++i) operands.values[i] = operands.value_memory + i * dim;
        }
        // What the last row sees, in lanes of keys as the products take them.
        const auto seen = [&](int64_t row) TARGET {
          const int64_t count = tree ? tile.count : std::min(first_position + row / p.group - first + 1, tile.count);
          return tiled ? ceil_div(count, 2 * kLanes) * kLanes : ceil_div(count, kPerLane<O>);
        };
        hide_values(std::max<int64_t>(unit.first_key - first, 0), tile.count, seen(rows - 1), dim, operands);
#ifdef TILES
        if (blocks) gather_values(seen(rows - 1), dim, operands.values, operands.value_memory);
#endif

        const auto mask_of = [&](int64_t row) TARGET {
          const int64_t token = row / p.group;
          if (apart && (token < first_token || token >= branch.end)) return Mask{0, 0, nullptr, nullptr};
          const int64_t position = (tree ? p.position(unit.request, unit.first_token + token, tree) : first_position + token) -
                                   first;  // of the query, in the tile
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
#ifdef TILES
        if constexpr (kTiled<O>)
          if (blocks) {
            attend_blocks(rows, lanes, dim, queries, operands.keys, operands.values, operands.stride, scores, state.values,
                          std::exchange(add, true), seen, largest, weigh);
            continue;
          }
#endif
        const int64_t depth = seen(rows - 1), count = end_row - begin_row;
        all_scores<O>(tiled, count, queries + begin_row * kRowsOf<O> * lanes, lanes, keys_of(depth) / kLanes, operands.keys,
                      operands.stride, next == nullptr ? nullptr : next->keys, scores + begin_row * kTile);
        for (int64_t row = begin_row; row < end_row; ++row) {
          float* of_row = scores + row * kTile;
          weight_scale[row] =
              weigh(row, depth, largest(row, depth, of_row), of_row, codes + row * kRowsOf<O> * kWeightsRow<O>);
        }
        all_values<O>(tiled, count, kBytes ? codes + begin_row * kRowsOf<O> * kWeightsRow<O> : scores + begin_row * kTile,
                      weight_scale + begin_row, depth, operands.values, next == nullptr ? nullptr : next->values, add, dim,
                      state.values + begin_row * dim);
        add |= tiled;
      }
    }
    if (shared) keep_states(p, item, partition, state, states);
    else if (folded) fold(total, state, rows, dim);
  }
#ifdef TILES
  if (tiled) TILES::end();
#endif
  if (unit.state < 0) write_out<T>(p, unit, total);
}

template <class T, class C>
constexpr PairKernels pair_kernels(int64_t unit_rows = kUnitRows) {
  return {write<T, C>, attend<T, C>, merge<T>, unit_rows};
}

inline Kernels kernels() {
#ifdef TILES  // for pairs of bf16 alone; the vectors multiply the rest
  namespace rest = avx512_bf16;
  return {{{rest::pair_kernels<float, float>(), rest::pair_kernels<float, int8_t>(), rest::pair_kernels<float, Fp8>()},
           {pair_kernels<BFloat16, BFloat16>(kTiledUnitRows), rest::pair_kernels<BFloat16, int8_t>(),
            pair_kernels<BFloat16, Fp8>(kTiledUnitRows)},
           {rest::pair_kernels<Half, Half>(), rest::pair_kernels<Half, int8_t>(), rest::pair_kernels<Half, Fp8>()}}};
#else
  return {{{pair_kernels<float, float>(), pair_kernels<float, int8_t>(), pair_kernels<float, Fp8>()},
           {pair_kernels<BFloat16, BFloat16>(), pair_kernels<BFloat16, int8_t>(), pair_kernels<BFloat16, Fp8>()},
           {pair_kernels<Half, Half>(), pair_kernels<Half, int8_t>(), pair_kernels<Half, Fp8>()}}};
#endif
}

}  // namespace ISA
}  // namespace
