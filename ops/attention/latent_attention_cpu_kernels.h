// The kernels of latent attention for one instruction set; see latent_attention_cpu.cpp, and attention_cpu_kernels.h for
// what both ops have in common.

#include <utility>

#include "attention_cpu_cache.h"
#include "latent_attention_cpu_types.h"

namespace {
namespace ISA {

template <class T, class C>
TARGET void write_latents(const Problem& p, int64_t begin, int64_t end) {
  const Problem turned = turned_part(p), latent = latent_part(p);
  for (int64_t token = begin; token < end; ++token) {
    const int64_t block = p.slots[token] / p.block_size, offset = p.slots[token] % p.block_size;
    for (const Problem* part : {&turned, &latent}) {
      const T* from = static_cast<const T*>(part->k) + token * part->k_token;
      C* to = static_cast<C*>(part->k_cache) + part->rows(block, 0);
      const float scale = write_row(*part, from, true, offset, to);
      if constexpr (!std::is_same_v<T, C>) part->k_scale[part->scales(block, 0) + offset] = scale;
    }
  }
}

// The keys of a tile as operands, of one of the two parts: where they are in the cache, or converted into `memory`.
template <class O, class C>
struct KeyOperands {
  const float* keys[Tile<C>::kGroups];
  int64_t stride;
  float *memory, *gathered;  // the latter of a tree's branches

  static int64_t floats(const Problem& part) { return ceil_div(part.head_dim, kPerLane<O>) * kTile; }
  static int64_t gathered_floats(const Problem& part) {
    return ceil_div((kTile + part.block_size) * part.head_dim * static_cast<int64_t>(sizeof(C)), sizeof(float));
  }
};

template <class O, class C>
TARGET void convert_keys(const Problem& part, const Tile<C>& tile, KeyOperands<O, C>& to) {
  constexpr int64_t kWidth = kCacheWidth<C>, kParts = kWidth / kPerLane<O>;
  const int64_t lanes = part.head_dim / kWidth;
  Vec parts[4];
  for (int64_t g = 0; g * kLanes < tile.count; ++g) {
    const C* from = reinterpret_cast<const C*>(tile.keys[g]);
    for (int64_t lane = 0; lane < lanes; ++lane, from += part.block_size * kWidth) {
      convert_lanes<O>(from, parts);
      for (int64_t i = 0; i < kParts; ++i) store(to.memory + ((g * lanes + lane) * kParts + i) * kLanes, parts[i]);
    }
  }
}

// Element by element, for blocks and rows that are not made of whole vectors.
template <class O, class C>
TARGET void copy_keys(const Problem& part, const Unit& unit, int64_t first, const Branch& branch, Tile<C>& tile,
                      KeyOperands<O, C>& to) {
  constexpr int64_t kEach = kPerLane<O>;
  const int64_t lanes = ceil_div(part.head_dim, kEach), width = part.key_width<C>();
  const int32_t* table = part.table + unit.request * part.table_width;
  tile.count = std::clamp<int64_t>(branch.keys - first, 0, kTile);
  std::memset(to.memory, 0, to.floats(part) * sizeof(float));
  auto* keys = reinterpret_cast<typename O::Element*>(to.memory);
  for (int64_t i = 0; i < tile.count; ++i) {
    const int64_t slot = branch.slot(first + i), offset = slot % part.block_size;
    const int32_t block = table[slot / part.block_size];
    const C* k = static_cast<const C*>(part.k_cache) + part.rows(block, 0) + offset * width;
    for (int64_t d = 0; d < part.head_dim; ++d)
      keys[((i / kLanes * lanes + d / kEach) * kLanes + i % kLanes) * kEach + d % kEach] =
          to_operand<O>(k[d / width * part.block_size * width + d % width]);
    if (part.k_scale != nullptr) tile.k_scale[i] = part.k_scale[part.scales(block, 0) + offset];
  }
}

template <class O, class C>
TARGET void find_keys(const Problem& part, const Unit& unit, int64_t first, const Branch& branch, bool apart,
                      bool in_runs, Tile<C>& tile, KeyOperands<O, C>& to) {
  if (in_runs) {
    find_tile(part, unit, first, branch.keys, tile);
    take_scales(part, tile);
    if (apart) gather_branch(part, unit, first, branch, to.gathered, tile, false);
    if constexpr (kRaw<O, C>) {
      std::copy(std::begin(tile.keys), std::end(tile.keys), to.keys);
      to.stride = part.block_size;
      return;
    } else {
      convert_keys(part, tile, to);
    }
  } else {
    copy_keys(part, unit, first, branch, tile, to);
  }
  const int64_t lanes = ceil_div(part.head_dim, kPerLane<O>);
  for (int64_t g = 0; g < Tile<C>::kGroups; ++g) to.keys[g] = to.memory + g * lanes * kLanes;
  to.stride = kLanes;
}

#if WIDTH == 512
// 64 columns of four rows of bytes, as four bytes of each column.
INLINE void join_rows_of_bytes(const float (*rows)[kLanes], float* to) {
  const auto row = [&](int i) TARGET { return _mm512_loadu_si512(rows[i]); };
  const __m512i low01 = _mm512_unpacklo_epi8(row(0), row(1)), high01 = _mm512_unpackhi_epi8(row(0), row(1));
  const __m512i low23 = _mm512_unpacklo_epi8(row(2), row(3)), high23 = _mm512_unpackhi_epi8(row(2), row(3));
  // Each has four columns of every 16.
  const __m512i first = _mm512_unpacklo_epi16(low01, low23), second = _mm512_unpackhi_epi16(low01, low23);
  const __m512i third = _mm512_unpacklo_epi16(high01, high23), fourth = _mm512_unpackhi_epi16(high01, high23);
  const __m512i a = _mm512_shuffle_i32x4(first, second, 0x44), b = _mm512_shuffle_i32x4(third, fourth, 0x44);
  const __m512i c = _mm512_shuffle_i32x4(first, second, 0xee), d = _mm512_shuffle_i32x4(third, fourth, 0xee);
  _mm512_storeu_si512(to, _mm512_shuffle_i32x4(a, b, 0x88));
  _mm512_storeu_si512(to + kLanes, _mm512_shuffle_i32x4(a, b, 0xdd));
  _mm512_storeu_si512(to + 2 * kLanes, _mm512_shuffle_i32x4(c, d, 0x88));
  _mm512_storeu_si512(to + 3 * kLanes, _mm512_shuffle_i32x4(c, d, 0xdd));
}

// 32 columns of two rows of bf16, as pairs.
INLINE void join_rows_of_bf16(const float (*rows)[kLanes], __m512i low, __m512i high, float* to) {
  const __m512i first = _mm512_loadu_si512(rows[0]), second = _mm512_loadu_si512(rows[1]);
  _mm512_storeu_si512(to, _mm512_permutex2var_epi16(first, low, second));
  _mm512_storeu_si512(to + kLanes, _mm512_permutex2var_epi16(first, high, second));
}

template <class O>
TARGET void transpose_keys(int64_t head_dim, int64_t groups, const float* const* keys, int64_t stride, int64_t dim,
                           float* values) {
  constexpr int64_t kEach = kPerLane<O>;
  alignas(64) uint16_t order[2][32];
  for (int i = 0; i < 32; ++i)
    for (int j = 0; j < 2; ++j) order[j][i] = static_cast<uint16_t>(16 * j + i / 2 + i % 2 * 32);
  const __m512i low = _mm512_load_si512(order[0]), high = _mm512_load_si512(order[1]);
  alignas(64) float rows[kLanes][kLanes];
  for (int64_t g = 0; g < groups; ++g)
    for (int64_t lane = 0; lane < head_dim / kEach; lane += kLanes) {
      float* to = values + g * (kLanes / kEach) * dim + lane * kEach;
      const float* from = keys[g] + lane * stride;
      if constexpr (std::is_same_v<O, Floats>) {
        transpose(from, stride, to, dim);
      } else {
        transpose(from, stride, rows[0], kLanes);
        for (int64_t i = 0; i < kLanes / kEach; ++i) {
          if constexpr (std::is_same_v<O, Pairs>) join_rows_of_bf16(rows + 2 * i, low, high, to + i * dim);
          else join_rows_of_bytes(rows + 4 * i, to + i * dim);
        }
      }
    }
}
#endif

// The latents of `groups` times 16 keys once more, as values: `kPerLane` keys in a lane, all columns in a row of `dim`.
template <class O>
TARGET void values_of_keys(int64_t head_dim, int64_t groups, const float* const* keys, int64_t stride, int64_t dim,
                           float* values) {
  constexpr int64_t kEach = kPerLane<O>;
#if WIDTH == 512
  if (head_dim % (kEach * kLanes) == 0) return transpose_keys<O>(head_dim, groups, keys, stride, dim, values);
#endif
  using Element = typename O::Element;
  std::memset(values, 0, groups * kLanes / kEach * dim * sizeof(float));
  auto* to = reinterpret_cast<Element*>(values);
  for (int64_t g = 0; g < groups; ++g)
    for (int64_t d = 0; d < head_dim; ++d) {
      const Element* from = reinterpret_cast<const Element*>(keys[g] + d / kEach * stride) + d % kEach;
      for (int64_t i = 0; i < kLanes; ++i)
        to[((g * kLanes + i) / kEach * dim + d) * kEach + i % kEach] = from[i * kEach];
    }
}

// A row of products with the latents becomes the row's scores, to powers of 2: those with the turned parts are added.
template <class O>
TARGET void add_products_of_parts(float* scores, const float* turned, int64_t keys, const Scoring& of_latent,
                                  const Scoring& of_turned, const float* latent_scale, const float* turned_scale) {
  const auto number = [](Vec x, const Scoring& scoring) TARGET {
    if constexpr (std::is_same_v<O, Bytes>)
      x = convert(reinterpret_cast<IntVec>(reinterpret_cast<UintVec>(x) - scoring.excess));
    return x * scoring.scale;
  };
  for (int64_t key = 0; key < keys; key += kLanes) {
    Vec x = number(load(scores + key), of_latent), y = number(load(turned + key), of_turned);
    if (latent_scale != nullptr) x *= load(latent_scale + key), y *= load(turned_scale + key);
    store(scores + key, x + y);
  }
}

template <class T, class C>
TARGET void attend_latents(const Problem& p, const Item& item, float* states) {
  using O = Operand<T, C>;
  constexpr bool kBytes = std::is_same_v<O, Bytes>;
  const Problem turned = turned_part(p), latent = latent_part(p);
  const Unit& unit = *item.units[0];
  const bool shared = item.count > 1;  // then all rows of all units see all keys
  int64_t rows = 0;
  for (int64_t i = 0; i < item.count; ++i) rows += item.units[i]->rows(p);
  const int64_t room = ceil_div(rows, kLanes) * kLanes, dim = p.padded_dim(), state_size = State::size(room, dim);
  const int64_t lanes = ceil_div(latent.head_dim, kPerLane<O>), turned_lanes = ceil_div(turned.head_dim, kPerLane<O>);
  const int64_t first_position = shared ? item.last_partition * kPartition : unit.keys - unit.tokens;
  const bool in_runs = turned.in_runs() && latent.in_runs(), raw = in_runs && kRaw<O, C>;
  const bool tree = !shared && p.is_tree(unit.request);
  const Branch whole{rows / p.group, unit.keys, unit.keys, 0};

  const int64_t sizes[] = {KeyOperands<O, C>::floats(latent), KeyOperands<O, C>::floats(turned),
                           Operands<O, C>::value_floats(p), 3 * dim, room * kRowsOf<O> * lanes,
                           room * kRowsOf<O> * turned_lanes, room * 4, room * 4, room * kTile, room * kTile,
                           room * kRowsOf<O> * kWeightsRow<O>, room, state_size, state_size,
                           tree && in_runs ? KeyOperands<O, C>::gathered_floats(latent) : 0,
                           tree && in_runs ? KeyOperands<O, C>::gathered_floats(turned) : 0};
  int64_t total_size = 0;
  for (const int64_t size : sizes) total_size += ceil_div(size, kLanes) * kLanes;
  float* memory = scratch(total_size);
  int64_t taken = 0;
  const auto take = [&] { return std::exchange(memory, memory + ceil_div(sizes[taken++], kLanes) * kLanes); };
  KeyOperands<O, C> latent_keys, turned_keys;
  latent_keys.memory = take();
  turned_keys.memory = take();
  Operands<O, C> operands;
  operands.value_memory = take();
  operands.edges = take();
  float *queries = take(), *turned_queries = take();
  static_assert(sizeof(Scoring) <= 4 * sizeof(float));
  Scoring *of_latent = reinterpret_cast<Scoring*>(take()), *of_turned = reinterpret_cast<Scoring*>(take());
  float *scores = take(), *turned_scores = take(), *codes = take(), *weight_scale = take();
  const State total(take(), room, dim);
  float* partition_memory = take();
  latent_keys.gathered = take();
  turned_keys.gathered = take();

  for (int64_t i = 0, row = 0; i < item.count; row += item.units[i++]->rows(p)) {
    load_queries<O, T>(latent, *item.units[i], lanes, queries + row * kRowsOf<O> * lanes, of_latent + row);
    load_queries<O, T>(turned, *item.units[i], turned_lanes, turned_queries + row * kRowsOf<O> * turned_lanes,
                       of_turned + row);
  }
  clear(total, rows);
  std::memset(operands.edges + 2 * dim, 0, dim * sizeof(float));

  Tile<C> latent_tile, turned_tile, next;
  const Scoring plain{1, 0, 0};
  const int64_t first_tile = unit.first_key / kTile * kTile;
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
      if (raw) find_tile(latent, unit, first + kTile, unit.keys, next);
      const bool fetch = raw && !apart && next.count > 0, quantised = p.v_scale != nullptr;
      Branch branch = whole;
      for (int64_t first_token = 0; first_token < whole.end; first_token = branch.end) {
        if (apart) branch = branch_from(p, unit, first_token);
        if (branch.keys <= first) continue;
        find_keys<O, C>(turned, unit, first, branch, apart, in_runs, turned_tile, turned_keys);
        find_keys<O, C>(latent, unit, first, branch, apart, in_runs, latent_tile, latent_keys);
        const int64_t begin_row = first_token * p.group, end_row = branch.end * p.group, num_rows = end_row - begin_row;
        const int64_t count = latent_tile.count;
        const int64_t last = tree ? count : std::min(first_position + (rows - 1) / p.group - first + 1, count);
        const int64_t depth = ceil_div(last, kPerLane<O>), groups = ceil_div(last, kLanes), keys = groups * kLanes;
        all_scores<O>(false, num_rows, queries + begin_row * kRowsOf<O> * lanes, lanes, groups, latent_keys.keys,
                      latent_keys.stride, fetch ? next.keys : nullptr, scores + begin_row * kTile);
        all_scores<O>(false, num_rows, turned_queries + begin_row * kRowsOf<O> * turned_lanes, turned_lanes, groups,
                      turned_keys.keys, turned_keys.stride, nullptr, turned_scores + begin_row * kTile);
        values_of_keys<O>(latent.head_dim, groups, latent_keys.keys, latent_keys.stride, dim, operands.value_memory);
        for (int64_t i = 0; i < operands.kDepth; ++i) operands.values[i] = operands.value_memory + i * dim;
        hide_values(std::max<int64_t>(unit.first_key - first, 0), count, depth, dim, operands);

        for (int64_t row = begin_row; row < end_row; ++row) {
          const int64_t token = row / p.group;
          const int64_t position = (tree ? p.position(unit.request, unit.first_token + token, tree) : first_position + token) -
                                   first;  // of the query, in the tile
          const Mask mask{p.window > 0 ? std::max<int64_t>(position - p.window + 1, 0) : 0,
                          std::min(position + 1, count), nullptr, quantised ? latent_tile.k_scale : nullptr};
          float* of_row = scores + row * kTile;
          add_products_of_parts<O>(of_row, turned_scores + row * kTile, keys, of_latent[row], of_turned[row],
                                   quantised ? latent_tile.k_scale : nullptr, turned_tile.k_scale);
          weight_scale[row] = weigh_row<O>(of_row, keys, plain, mask, largest_score<Floats>(of_row, keys, plain, mask),
                                           state, row, dim,
                                           reinterpret_cast<uint8_t*>(codes + row * kRowsOf<O> * kWeightsRow<O>));
        }
        all_values<O>(false, num_rows, kBytes ? codes + begin_row * kRowsOf<O> * kWeightsRow<O> : scores + begin_row * kTile,
                      weight_scale + begin_row, depth, operands.values, nullptr, first > start, dim,
                      state.values + begin_row * dim);
      }
    }
    if (shared) keep_states(p, item, partition, state, states);
    else if (folded) fold(total, state, rows, dim);
  }
  if (unit.state < 0) write_out<T>(p, unit, total);
}

// One head reads all keys alone: many rows a unit, so that few units turn the same latents into values.
constexpr int64_t kLatentUnitRows = 128;

template <class T, class C>
constexpr PairKernels latent_kernels() {
  return {write_latents<T, C>, attend_latents<T, C>, merge<T>, kLatentUnitRows};
}

inline Kernels kernels() {
  return {{{latent_kernels<float, float>(), latent_kernels<float, int8_t>(), latent_kernels<float, Fp8>()},
           {latent_kernels<BFloat16, BFloat16>(), latent_kernels<BFloat16, int8_t>(), latent_kernels<BFloat16, Fp8>()},
           {latent_kernels<Half, Half>(), latent_kernels<Half, int8_t>(), latent_kernels<Half, Fp8>()}}};
}

}  // namespace ISA
}  // namespace
