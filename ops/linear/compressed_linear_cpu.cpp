// Linear layer on compressed bfloat16 weights for CPUs. compressed_linear.py has the layout, the reference and the schemas.
//
// With few rows a step reads weights from memory, and a quarter fewer bytes of them take a quarter less time: they are
// decompressed in registers, one stream of words, each of which is 64 outputs. So the products of a word do not wait for
// each other.
//
// A thread works on a chunk of a group's words at a time, which stays in L1, and each row group fetches its part of the next
// chunk. With more than 24 rows the first row group keeps the words that it decompresses, for the others: decompressing takes
// other units of the processor than products, and costs little beside them.
//
// With tile registers (compressed_linear_cpu_amx.h) all words are decompressed into L1, once for a block of rows.
//
// Every output has one float32 sum, which takes its words in order: the bits of `packed_linear`, for any number of rows.

#include <algorithm>
#include <atomic>
#include <vector>

#include "compressed_linear_cpu_types.h"
#include "layer_checks.h"
#include "rows.h"
#include "../cpu/op.h"

namespace {

constexpr int64_t CHUNK = 128;       // words of a chunk: 24 KiB, expanded 32 KiB
constexpr int64_t FEW_ROWS = 64;     // up to so many rows chunks are shorter,
constexpr int64_t FEW_CHUNK = 64;    // of so many words: 12 KiB, so that L1 has the next chunk as well
constexpr int64_t FEW_GROUPS = 4;    // up to so many row groups each decompress the words; with more, the first keeps them
constexpr int64_t ROW_BLOCK = 86 * ROWS;      // rows, of which a chunk, 258 KiB, and the sums, 129 KiB, stay in L2
constexpr int64_t AHEAD = 43;                 // words, 8 KiB: more than 100 ns of work
constexpr int64_t TILED_CHUNK = 256, FEW_TILED_CHUNK = 64;  // words, of half a group expanded 32 KiB and 8
constexpr int64_t TILED_ROW_BLOCK = 512, TILED_BLOCK_BYTES = 5 << 18;  // with tile registers: rows, and their bytes
static_assert(TILED_CHUNK * GROUP / 2 <= CHUNK * GROUP && TILED_ROW_BLOCK <= ROW_BLOCK);
constexpr int64_t STREAM_BYTES = 1 << 17;    // of output: more is written past the caches
constexpr int64_t GRAIN_FLOPS = 1 << 18;     // for less, waking a thread takes longer than the work
constexpr int64_t PIECES = 8;                // of the weights, for each thread, where they come from memory

// W, compressed.
struct Weights {
  const uint8_t* words;       // [groups, length, WORD_BYTES]
  const uint8_t* tables;      // [groups, TABLE_BYTES]
  const int32_t* exceptions;  // [groups, exceptions_of_group]
  int64_t groups, length, exceptions_of_group;

  Group operator[](int64_t i) const {
    return {words + i * length * WORD_BYTES, tables + i * TABLE_BYTES, exceptions + i * exceptions_of_group};
  }
  // Of several, one after the other.
  Weights matrix(int64_t i) const {
    const Group first = (*this)[i * groups];
    return {first.words, first.table, first.exceptions, groups, length, exceptions_of_group};
  }
};

// y = x @ W.T + bias
struct Layer {
  Rows<uint16_t> x;
  int64_t rows, K;
  Weights w;
  const uint16_t* bias;  // [N], or null
  uint16_t* out;         // [rows, N]
  int64_t N;

  Finish finish(const float* sums, int64_t row, int64_t count, int64_t group) const {
    const int64_t column = group * GROUP;
    return {sums, GROUP, bias == nullptr ? nullptr : bias + column, out + row * N + column, N, count, std::min(GROUP, N - column),
            rows > FEW_ROWS && rows * N * 2 > STREAM_BYTES && N % 32 == 0};
  }
};

int64_t aligned(int64_t count) { return (count + TILE - 1) / TILE * TILE; }

// How the rows are cut: into blocks, these into row groups, and words into chunks.
struct Cut {
  int64_t group, block, chunk, ahead;  // ahead: words from a product to the prefetch
  bool expands;  // the first row group keeps its words expanded, for the others
  bool tiled;
  int64_t packed;  // rows that are packed together

  // That a row takes, packed.
  int64_t words(const Layer& layer) const { return tiled ? aligned(layer.w.length) : layer.w.length; }

  Cut(const Layer& layer, int64_t threads, bool tiled) : tiled(tiled) {
    const auto even = [](int64_t rows, int64_t most) {
      const int64_t parts = (rows + most - 1) / most;
      return (rows + parts - 1) / parts;
    };
    if (tiled) {
      const int64_t most = std::max(TILED_BLOCK_BYTES / 4 / aligned(layer.w.length) / TILE * TILE, TILE);
      group = TILE;
      block = aligned(even(layer.rows, std::min(TILED_ROW_BLOCK, most)));
      chunk = layer.rows <= FEW_ROWS ? FEW_TILED_CHUNK : TILED_CHUNK;
      packed = 2 * TILE;
      return;
    }
    group = even(layer.rows, ROWS);
    // In at least as many blocks as give each thread some pieces, where rows are many.
    const int64_t blocks = layer.rows <= FEW_ROWS ? 1 : std::max<int64_t>(1, PIECES * threads / layer.w.groups);
    block = (even(layer.rows, std::min(ROW_BLOCK, (layer.rows + blocks - 1) / blocks)) + group - 1) / group * group;
    packed = block;
    // A single row group has two chunks: the last AHEAD words, which fetch the first ones of the next group, and all before,
    // which fetch words AHEAD further on.
    const bool one = layer.rows <= group && layer.w.length >= 2 * AHEAD;
    chunk = one ? layer.w.length - AHEAD : layer.rows <= FEW_ROWS ? FEW_CHUNK : CHUNK;
    ahead = one ? AHEAD : chunk;
    expands = layer.rows > FEW_GROUPS * group;
  }
};

// Rows [row, row + rows), a block, as products read them one after the other: of each chunk, of each row group, the words.
void pack_block(const Layer& layer, const Cut& cut, int64_t row, int64_t rows, uint32_t* to) {
  for (int64_t word = 0; word < layer.w.length; word += cut.chunk) {
    const int64_t words = std::min(cut.chunk, layer.w.length - word), inputs = std::min(2 * words, layer.K - 2 * word);
    for (int64_t first = 0; first < rows; first += cut.group) {
      const int64_t m = std::min(cut.group, rows - first);
      interleave_rows(layer.x.from(row + first).columns(2 * word), m, inputs, to);
      to += m * words;
    }
  }
}

// Such rows by a group of outputs, with room for their sums [rows, GROUP] and a chunk, `expanded`. The thread's next words
// start at `next`.
void multiply_block(const Kernels& kernels, const Layer& layer, const Cut& cut, const uint32_t* x, int64_t row, int64_t rows,
                    int64_t group, const uint8_t* next, float* sums, uint32_t* expanded) {
  Group left = layer.w[group];
  const int64_t length = layer.w.length, row_groups = (rows + cut.group - 1) / cut.group;
  for (int64_t word = 0, words; word < length; word += words) {
    words = std::min(cut.chunk, length - word);
    const uint8_t* later = word + cut.ahead < length ? left.words + (word + cut.ahead) * WORD_BYTES : next;
    const int64_t each = (words * WORD_BYTES / LINE + row_groups - 1) / row_groups, at_once = (each + words - 1) / words;
    for (int64_t first = 0; first < rows; first += cut.group, later += each * LINE) {
      const int64_t m = std::min(cut.group, rows - first);
      const Work work = {x, words, sums + first * GROUP, word == 0, later, each, at_once};
      if (cut.expands && first > 0) kernels.multiply[m - 1](work, expanded);
      else kernels.multiply_compressed[m - 1](work, left, word, cut.expands ? expanded : nullptr);
      x += m * words;
    }
    while (*left.exceptions >> 15 < word + words) ++left.exceptions;
  }
  kernels.finish(layer.finish(sums, row, rows, group));
}

// A row group for tile registers, as `TileWork` takes it: `rows` from `row` on, filled up to `filled`.
void pack_tiles(const Layer& layer, int64_t row, int64_t rows, int64_t filled, uint32_t* to) {
  for (int64_t k = 0; k < layer.K; k += 2 * TILE)
    for (int64_t m = 0; m < filled; ++m, to += TILE) {
      const int64_t count = m < rows ? std::min(2 * TILE, layer.K - k) : 0;
      if (count == 2 * TILE) {
        std::memcpy(to, layer.x[row + m] + k, LINE);
        continue;
      }
      std::memset(to, 0, LINE);
      if (count > 0) std::copy_n(layer.x[row + m] + k, count, reinterpret_cast<uint16_t*>(to));
    }
}

// Some groups of a layer by a block of its rows.
struct Piece {
  int64_t layer, block, group, end;
};

// The layers one after the other, in pieces, of which a thread that is free takes the next: cores need not be equally fast.
void multiply(const Kernels& kernels, const std::vector<Layer>& layers) {
  const bool tiled = kernels.tiles != nullptr;
  int64_t groups = 0, flops = 0, room = 0;
  for (const Layer& layer : layers) {
    groups += layer.w.groups;
    flops += layer.rows * layer.w.groups * GROUP * layer.K;
  }
  const int64_t threads = std::min(num_threads(), flops / GRAIN_FLOPS + 1);
  std::vector<Cut> cuts;
  std::vector<int64_t> starts;  // of each block's packed rows, from those of a layer's first block on
  std::vector<Piece> pieces, packs;  // packs: `group` is the first of their rows in the block
  for (size_t i = 0; i < layers.size(); ++i) {
    const Layer& layer = layers[i];
    const Cut& cut = cuts.emplace_back(layer, threads, tiled);
    const int64_t step = layer.rows > FEW_ROWS ? 1 : std::max<int64_t>(1, groups / (PIECES * threads));
    starts.push_back(room);
    room += (layer.rows <= TILE || !tiled ? layer.rows : aligned(layer.rows)) * cut.words(layer);
    for (int64_t block = 0; block * cut.block < layer.rows; ++block) {
      for (int64_t row = 0; row < std::min(cut.block, layer.rows - block * cut.block); row += cut.packed)
        packs.push_back({static_cast<int64_t>(i), block, row, 0});
      for (int64_t group = 0; group < layer.w.groups; group += step)
        pieces.push_back({static_cast<int64_t>(i), block, group, std::min(group + step, layer.w.groups)});
    }
  }
  const Tensor packed = empty({room}, kInt);
  const auto rows_of = [&](const Piece& piece) {  // the first one, how many there are, and where they are packed
    const Layer& layer = layers[piece.layer];
    const Cut& cut = cuts[piece.layer];
    const int64_t row = piece.block * cut.block;
    return std::tuple(row, std::min(cut.block, layer.rows - row),
                      packed.data<uint32_t>() + starts[piece.layer] + row * cut.words(layer));
  };
  parallel_for(0, packs.size(), 1 + (1 << 17) / (layers[0].w.length * cuts[0].packed), [&](int64_t begin, int64_t end) {
    for (; begin < end; ++begin) {
      const Layer& layer = layers[packs[begin].layer];
      const Cut& cut = cuts[packs[begin].layer];
      const auto [row, rows, to] = rows_of(packs[begin]);
      const int64_t first = packs[begin].group, count = std::min(cut.packed, rows - first);
      if (tiled) pack_tiles(layer, row + first, count, rows <= TILE ? rows : aligned(count), to + first * cut.words(layer));
      else pack_block(layer, cut, row, rows, to);
    }
  });
  std::atomic<size_t> free = 0;
  parallel_for(0, threads, 1, [&](int64_t, int64_t) {
    alignas(64) float sums[ROW_BLOCK * GROUP];
    alignas(64) uint32_t expanded[CHUNK * GROUP];
    for (size_t after, next = free++; next < pieces.size(); next = after) {
      const Piece& piece = pieces[next];
      const auto [row, rows, x] = rows_of(piece);
      after = free++;
      const Piece& then = pieces[std::min(after, pieces.size() - 1)];
      const Layer& layer = layers[piece.layer];
      const Cut& cut = cuts[piece.layer];
      if (tiled) kernels.tiles->begin(rows);
      for (int64_t group = piece.group; group < piece.end; ++group) {
        const Group later = group + 1 < piece.end ? layer.w[group + 1] : layers[then.layer].w[then.group];
        if (tiled)
          kernels.tiles->multiply({x, layer.w.length, layer.w[group], later.words, sums, expanded, cut.chunk,
                                   layer.finish(sums, row, rows, group)});
        else multiply_block(kernels, layer, cut, x, row, rows, group, later.words, sums, expanded);
      }
    }
    if (tiled) kernels.tiles->end();
  });
}

const Dtype kByte{aoti_torch_dtype_uint8()};

// `experts`: of several matrices.
Weights check_weights(const char* op, const Tensor& words, const Tensor& tables, const Tensor& exceptions, int64_t N,
                      int64_t K, Experts experts) {
  const int64_t groups = (N + GROUP - 1) / GROUP, length = (K + 1) / 2, last = exceptions.dim() - 1;
  check_on_cpu(op, {&words, &tables, &exceptions});
  const Shape of_words = with_experts(experts, {groups, length, 3, 64}), of_tables = with_experts(experts, {groups, 2, 4, 16});
  CHECK_VALUE(N > 0 && K > 0 && words.sizes() == of_words && words.is_contiguous() && words.dtype() == kByte, op, ": ", K,
              " inputs and ", N, " outputs take contiguous words ", of_words, " of uint8, got ", words.sizes());
  CHECK_VALUE(tables.sizes() == of_tables && tables.is_contiguous() && tables.dtype() == kByte, op,
              ": tables must be a contiguous ", of_tables, " of uint8, got ", tables.sizes());
  CHECK_VALUE(last > 0 && exceptions.sizes() == with_experts(experts, {groups, exceptions.size(last)}) &&
                  exceptions.size(last) > 0 && exceptions.is_contiguous() && exceptions.dtype() == kInt,
              op, ": exceptions must be contiguous int32 with ", groups, " groups of one or more, got ", exceptions.sizes());
  return {words.data<const uint8_t>(), tables.data<const uint8_t>(), exceptions.data<const int32_t>(), groups, length,
          exceptions.size(last)};
}

void check_x(const char* op, const Tensor& x, const OptionalTensor& bias, Experts experts, int64_t N) {
  check_input(op, x);
  CHECK_VALUE(x.dtype() == kBFloat16, op, ": x must be bfloat16, got ", x.dtype());
  check_on_cpu(op, {&x, bias ? &*bias : &x});
  check_bias(op, x, bias, experts, N);
}

Tensor compressed_linear(const Tensor& x, const Tensor& words, const Tensor& tables, const Tensor& exceptions,
                         const OptionalTensor& bias, int64_t out_features) {
  constexpr auto* op = "compressed_linear";
  check_x(op, x, bias, std::nullopt, out_features);
  const Weights weights = check_weights(op, words, tables, exceptions, out_features, x.size(1), std::nullopt);
  Tensor out = empty({x.size(0), out_features}, x.dtype());
  if (x.size(0) == 0) return out;
  multiply(chosen(), {{{x.data<const uint16_t>(), x.stride(0)}, x.size(0), x.size(1), weights,
                       bias ? bias->data<const uint16_t>() : nullptr, out.data<uint16_t>(), out_features}});
  return out;
}

Tensor grouped_compressed_linear(const Tensor& x, const Tensor& words, const Tensor& tables, const Tensor& exceptions,
                                 const OptionalTensor& bias, const OptionalTensor& rows, const Tensor& starts,
                                 int64_t out_features) {
  constexpr auto* op = "grouped_compressed_linear";
  const int64_t experts = words.dim() == 5 ? words.size(0) : 0, N = out_features;
  check_x(op, x, bias, experts, N);
  const Weights all = check_weights(op, words, tables, exceptions, N, x.size(1), experts);
  Tensor out = empty({check_experts(op, x, rows, starts, experts).count, N}, x.dtype());
  const auto* const first = starts.data<const int32_t>();
  const Rows<uint16_t> x_rows = {x.data<const uint16_t>(), x.stride(0), rows ? rows->data<const int32_t>() : nullptr};
  std::vector<Layer> layers;
  for (int64_t e = 0; e < experts; ++e)
    if (const int64_t own = first[e + 1] - first[e]; own > 0)
      layers.push_back({x_rows.from(first[e]), own, x.size(1), all.matrix(e),
                        bias ? bias->data<const uint16_t>() + e * N : nullptr, out.data<uint16_t>() + first[e] * N, N});
  if (!layers.empty()) multiply(chosen(), layers);
  return out;
}

// The op `packed_linear`, which is in another library.
Direct packed_linear = nullptr;

Tensor either_linear(const Tensor& x, const Tensor& packed, const Tensor& words, const Tensor& tables,
                     const Tensor& exceptions, const OptionalTensor& bias, int64_t out_features) {
  // A thread takes 64 outputs of compressed weights at a time: where there are more threads some would have none.
  if (x.dim() == 2 && x.size(0) <= TILE && (out_features + GROUP - 1) / GROUP >= num_threads())
    return compressed_linear(x, words, tables, exceptions, bias, out_features);
  CHECK_VALUE(packed_linear != nullptr, "either_linear: the library of packed_linear is not loaded");
  Slot result;
  const void* const arguments[] = {&x, &packed, &bias, &out_features};
  Slot* const results[] = {&result};
  packed_linear(arguments, results, spare);
  return std::move(*result);
}

// A row of W, K inputs.
void copy_row(const Weights& weights, int64_t row, int64_t K, uint16_t* to) {
  const Group group = weights[row / GROUP];
  const int64_t tile = row % GROUP / TILE, lane = row % TILE / 4, half = tile / 2;
  const int64_t place = lane * 16 + tile % 2 * 8 + row % 4 * 2;  // in the half of a word
  const uint8_t* const table = group.table + half * 64 + lane * 16;
  for (int64_t k = 0; k < K; ++k) {
    const uint8_t* const word = group.words + k / 2 * WORD_BYTES + place + k % 2;
    to[k] = static_cast<uint16_t>(table[word[128] >> 4 * half & 15] << 8 | word[half * 64]);
  }
  for (const int32_t* exception = group.exceptions; *exception != END; ++exception) {
    const int64_t at = *exception >> 8, k = (at >> 7) * 2 + at % 2;
    if ((at & 0x7e) == half * 64 + place && k < K)
      to[k] = static_cast<uint16_t>((*exception & 0xff) << 8 | (to[k] & 0xff));
  }
}

Tensor compressed_rows(const Tensor& words, const Tensor& tables, const Tensor& exceptions, const Tensor& ids,
                       int64_t out_features, int64_t in_features) {
  constexpr auto* op = "compressed_rows";
  const Weights weights = check_weights(op, words, tables, exceptions, out_features, in_features, std::nullopt);
  check_on_cpu(op, {&ids});
  CHECK_VALUE(ids.dim() == 1 && ids.is_contiguous() && (ids.dtype() == kInt || ids.dtype() == kLong), op,
              ": ids must be contiguous [T] of int32 or int64, got ", ids.sizes(), " of ", ids.dtype());
  const int64_t count = ids.size(0);
  std::vector<int64_t> rows(count);
  for (int64_t i = 0; i < count; ++i)
    rows[i] = ids.dtype() == kInt ? ids.data<const int32_t>()[i] : ids.data<const int64_t>()[i];
  CHECK_INDEX(std::all_of(rows.begin(), rows.end(), [&](int64_t row) { return row >= 0 && row < out_features; }), op,
              ": ids must be from 0 to ", out_features - 1);
  Tensor out = empty({count, in_features}, kBFloat16);
  auto* const to = out.data<uint16_t>();
  parallel_for(0, count, 1 + (1 << 15) / in_features, [&](int64_t begin, int64_t end) {
    for (; begin < end; ++begin) copy_row(weights, rows[begin], in_features, to + begin * in_features);
  });
  return out;
}

const std::vector<Op> ops = {
    {"compressed_linear", Boxed<compressed_linear>::call, Boxed<compressed_linear>::direct},
    {"grouped_compressed_linear", Boxed<grouped_compressed_linear>::call, Boxed<grouped_compressed_linear>::direct},
    {"either_linear", Boxed<either_linear>::call, Boxed<either_linear>::direct},
    {"compressed_rows", Boxed<compressed_rows>::call, Boxed<compressed_rows>::direct},
};

}  // namespace

// For ../native.py.
extern "C" __attribute__((visibility("default"))) void use_packed_linear(Direct direct) { packed_linear = direct; }
