// Linear layer on quantised weights for CPUs, activations as they are. quantized_linear.py has the schema and the
// reference, quantized_weight.py the layout of the codes.
//
//   y[t, n] = bias[n] + sum over parts of  scale * (sum of value(code) * x - zero * sum of x)
//
// A part is a group of inputs, or 128 of them where a row is one group. Its sum starts at 0, is scaled once, and is
// added to the sums of the parts before it, in float32. Every value of a code is exact in bfloat16: where there are
// products of pairs of bfloat16, activations in bfloat16 are multiplied by them; all else is multiplied in float32,
// with the zero taken from the weights first.
//
// Products of pairs decode the codes in registers, again for every group of rows: the instructions for it fit beside
// the products, but for those of fp8. For many rows of these, and for products in float32, a tile is decoded once for a
// block of rows. Tile registers (AMX, quantized_linear_cpu_amx.h) take codes of 4 bits as they are, decoded once for a
// block of rows, if groups have whole tiles of 32 inputs; each part is a product of its own. Other weights become
// bfloat16 with their scales in them, and are multiplied as those of packed_linear are.
//
// Batch invariance: the order of a sum is that of the inputs in all of them, for every number of rows, place and thread; so a
// row has the same bits in any batch. Tiles add up even and odd inputs of each 32 apart, so their bits are others than those
// of AVX512-bf16, and a single row takes them too.

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "layer_checks.h"
#include "quantized_linear_cpu_types.h"
#include "quantized_units.h"
#include "../cpu/op.h"

namespace {

constexpr int64_t WHOLE_PART = 128;       // inputs of a part where a row is one group
constexpr int64_t BLOCK_BYTES = 1 << 19;  // of a block of rows: half of L2
constexpr int64_t TILED_BLOCK_BYTES = 5 << 18, TILED_ROWS = 32;  // of a block on tile registers, a multiple of these rows
constexpr int64_t STREAM_BYTES = 1 << 17;  // of output: more is written past the caches
constexpr int64_t WIDE_ROWS = 64;         // for more, tall products are as fast or faster again (Zen 5)
constexpr int64_t FEW_ROWS = 2 * MAX_ROWS;  // for more, a tile that can be decoded by itself is
constexpr int64_t GRAIN_FLOPS = 1 << 18;  // for less, waking a thread takes longer than the work

float value_of(Element element, int code) {
  if (element == Element::int8) return static_cast<float>(static_cast<int8_t>(code));
  if (element == Element::int4) return static_cast<float>(code % 16 - 8);
  if (element == Element::fp4) code %= 16;
  // exponent, and mantissa as a fraction; the least exponent has no leading 1
  const int mantissa_bits = element == Element::fp8 ? 3 : 1, bias = element == Element::fp8 ? 7 : 1;
  const int sign_bit = element == Element::fp8 ? 128 : 8, magnitude = code % sign_bit;
  const int mantissa = magnitude % (1 << mantissa_bits), exponent = magnitude >> mantissa_bits;
  float value = std::ldexp(static_cast<float>(mantissa + (exponent > 0 ? 1 << mantissa_bits : 0)),
                           std::max(exponent, 1) - bias - mantissa_bits);
  if (element == Element::fp8 && magnitude == 127) value = std::nanf("");
  return code & sign_bit ? -value : value;
}

const Values& values_of(Element element) {
  static const auto all = [] {
    std::array<Values, 4> each;
    for (int e = 0; e < 4; ++e) {
      for (int code = 0; code < 256; ++code) each[e].of[code] = value_of(static_cast<Element>(e), code);
      for (int code = 0; code < 128; ++code) each[e].pairs[code] = BFloat16(each[e].of[code]);
    }
    return each;
  }();
  return all[static_cast<int>(element)];
}

// Rows of activations; `index` names those that are taken, or is null.
struct Rows {
  const Tensor* x;
  const int32_t* index;
  int64_t first, count;

  int64_t at(int64_t i) const { return index == nullptr ? first + i : index[first + i]; }
};

// The sums of each part of `count` rows, [parts, count].
void sum_parts(const BFloat16* const* rows, int64_t count, int64_t K, const Matrix& of, float* sums) {
  typedef uint16_t Inputs __attribute__((vector_size(16)));
  typedef uint32_t Wide __attribute__((vector_size(32)));
  typedef float Sums __attribute__((vector_size(32)));
  for (int64_t m = 0; m < count; ++m)
    for (int64_t part = 0; part < of.parts(); ++part) {
      Sums sum = {};
      for (int64_t k = part * of.part; k < std::min((part + 1) * of.part, K); k += 8) {
        Inputs inputs = {};
        if (k + 8 <= K) std::memcpy(&inputs, rows[m] + k, sizeof(inputs));
        else std::memcpy(&inputs, rows[m] + k, (K - k) * sizeof(BFloat16));
        sum += reinterpret_cast<Sums>(__builtin_convertvector(inputs, Wide) << 16);
      }
      float& all = sums[part * count + m] = 0;
      for (int i = 0; i < 8; ++i) all += sum[i];
    }
}

// One or more layers of one shape.
struct Layers {
  Matrix matrix;
  int64_t tiles, K, N;
  // Codes, scales and zeros begin at the first tile of the first layer; all other tiles follow.
  const uint8_t* codes;
  const char *scales, *zeros;
  const Tensor* bias;  // [layers, N], or null

  // Of a tile, counted from the first of the first layer.
  const uint8_t* codes_of(int64_t tile) const { return codes + tile * matrix.tile_bytes(); }
  const char* scales_of(int64_t tile) const {
    return scales + tile * matrix.groups * TILE * bytes_of(matrix.scale_type);
  }
  const char* zeros_of(int64_t tile) const {
    return zeros == nullptr ? nullptr : zeros + tile * matrix.groups * TILE * bytes_of(matrix.zero_type);
  }

  void copy_bias(int64_t layer, int64_t tile, float* to) const {
    std::fill_n(to, TILE, 0.f);
    if (bias == nullptr) return;
    const int64_t from = layer * N + tile * TILE, count = std::min(TILE, N - tile * TILE);
    const Dtype dtype = bias->dtype();
    if (dtype == kFloat) std::copy_n(bias->data<const float>() + from, count, to);
    else if (dtype == kBFloat16) std::copy_n(bias->data<const BFloat16>() + from, count, to);
    else std::copy_n(bias->data<const Half>() + from, count, to);
  }
};

// Rows as the micro kernels take them, in groups of `group`, the last of a layer with fewer.
struct Packed {
  int64_t group, words, parts;
  Tensor words_of, sums_of;
  uint32_t* x;
  float* sums;  // or null

  Packed(const Layers& of, const KernelsOf& kernels, int64_t rows, int64_t group)
      : group(group), words(of.matrix.inputs / (kernels.pack != nullptr ? 2 : 1)), parts(of.matrix.parts()),
        words_of(empty({rows, words}, kInt)),
        sums_of(empty({of.zeros != nullptr && kernels.pack != nullptr ? rows : 0, parts}, kFloat)),
        x(words_of.data<uint32_t>()),
        sums(of.zeros != nullptr && kernels.pack != nullptr ? sums_of.data<float>() : nullptr) {}

  // `count` rows of `rows`, which are `first` and those after it.
  void pack(const Layers& of, const KernelsOf& kernels, const Rows& rows, int64_t first, int64_t count) const {
    const auto floats = [&]<class T>(const T* data) {
      for (int64_t m = 0; m < count; ++m)
        for (int64_t k = 0; k < of.matrix.inputs; ++k) {
          const T* const row = data + rows.at(first + m) * rows.x->stride(0);
          x[first * words + k * count + m] = __builtin_bit_cast(uint32_t, k < of.K ? static_cast<float>(row[k]) : 0.f);
        }
    };
    const Dtype dtype = rows.x->dtype();
    if (kernels.pack != nullptr) {
      const BFloat16* each[MAX_ROWS];
      for (int64_t m = 0; m < count; ++m)
        each[m] = rows.x->data<const BFloat16>() + rows.at(first + m) * rows.x->stride(0);
      kernels.pack(of.matrix, of.K, each, count, x + first * words);
      if (sums != nullptr) sum_parts(each, count, of.K, of.matrix, sums + first * parts);
    } else if (dtype == kFloat) floats(rows.x->data<const float>());
    else if (dtype == kBFloat16) floats(rows.x->data<const BFloat16>());
    else floats(rows.x->data<const Half>());
  }
};

// Outputs of a unit. `next` is the thread's next tile after it.
void multiply_unit(const Layers& of, const KernelsOf& kernels, const Products& products, const Unit& unit,
                   const Packed& packed, int type, char* decoded, int64_t next, char* out) {
  const Matrix& matrix = of.matrix;
  const int64_t bytes = bytes_of(type == 0 ? kFloat : kHalf);
  const int element = static_cast<int>(matrix.element);
  const bool decodes =
      kernels.decode[element] != nullptr && (products.multiply[element] == nullptr || unit.rows > FEW_ROWS);
  for (int64_t tile = unit.tile, cols; tile < unit.end; tile += cols) {
    const Products& own = unit.end - tile < products.cols ? kernels.tall : products;  // the last tile by itself
    const auto* const multiply = decodes ? own.multiply_decoded[element] : own.multiply[element];
    cols = own.cols;
    const int64_t at = unit.layer * of.tiles + tile, later = tile + cols < unit.end ? at + cols : next;
    alignas(64) float sums[MAX_COLS * MAX_ROWS * TILE];
    float bias[MAX_COLS * TILE];
    for (int64_t c = 0; c < cols; ++c) of.copy_bias(unit.layer, tile + c, bias + c * TILE);
    Work work = {.of = &matrix,
                 .codes = of.codes_of(at),
                 .scales = of.scales_of(at),
                 .zeros = of.zeros_of(at),
                 .decoded = decoded,
                 .x = nullptr,
                 .x_sums = nullptr,
                 .sums = sums,
                 .later = of.codes_of(later),
                 .later_scales = of.scales_of(later)};
    for (int64_t c = 0; decodes && c < cols; ++c) {
      Work one = work;
      one.codes = of.codes_of(at + c), one.zeros = of.zeros_of(at + c);
      kernels.decode[element](one, decoded + c * matrix.decoded_bytes());
    }
    for (int64_t row = unit.row, count; row < unit.row + unit.rows; row += count) {
      count = std::min(packed.group, unit.row + unit.rows - row);
      work.x = packed.x + row * packed.words;
      work.x_sums = packed.sums == nullptr ? nullptr : packed.sums + row * packed.parts;
      multiply[count - 1](work);
      for (int64_t c = 0; c < cols; ++c) {
        const int64_t column = (tile + c) * TILE;
        kernels.finish(type, sums + c * count * TILE, count, std::min(TILE, of.N - column), bias + c * TILE,
                       out + (row * of.N + column) * bytes, of.N);
      }
    }
  }
}

// All of it on tile registers: rows are packed block by block, then threads take pieces of the columns of a block.
void multiply_tiles(const Layers& of, const TileKernels& kernels, const Rows& rows, const std::vector<int64_t>& starts,
                    char* out) {
  const Matrix& matrix = of.matrix;
  const int64_t words = (matrix.inputs + 31) / 32 * 16;
  const int64_t threads = std::min(num_threads(), rows.count * matrix.inputs * of.N / GRAIN_FLOPS + 1);
  const int64_t limit = std::max<int64_t>(TILED_BLOCK_BYTES / 4 / words / TILED_ROWS, 1) * TILED_ROWS;
  std::vector<Unit> blocks;  // of rows of a layer, all of its tiles
  std::vector<int64_t> packed = {0};  // the first row of each, where it is packed
  int64_t most = 0;
  for (size_t e = 0; e + 1 < starts.size(); ++e) {
    const int64_t all = starts[e + 1] - starts[e], count = (all + limit - 1) / limit;
    const int64_t block = count == 0 ? 0 : ((all + count - 1) / count + TILED_ROWS - 1) / TILED_ROWS * TILED_ROWS;
    for (int64_t row = starts[e]; row < starts[e + 1]; row += block) {
      blocks.push_back({static_cast<int64_t>(e), row, std::min(block, starts[e + 1] - row), 0, of.tiles});
      packed.push_back(packed.back() + (blocks.back().rows + TILED_ROWS - 1) / TILED_ROWS * TILED_ROWS);
      most = std::max(most, blocks.back().rows);
    }
  }
  const int64_t pieces = threads == 1 ? 1 : std::max<int64_t>(1, PIECES * threads / blocks.size());
  const int64_t piece = ((of.tiles + pieces - 1) / pieces + 1) / 2 * 2, each = (of.tiles + piece - 1) / piece;
  fetch_first(of.codes_of(blocks[0].layer * of.tiles));
  const bool with_sums = of.zeros != nullptr && matrix.scales_sums();
  const Tensor x = empty({packed.back(), words}, kInt);
  // Sums of 16 rows are read, also where a block has fewer.
  const Tensor x_sums = empty({with_sums ? packed.back() + TILE : 0, matrix.parts()}, kFloat);
  parallel_for(0, blocks.size(), 1 + (1 << 16) / (of.K * most), [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      std::vector<const BFloat16*> inputs;
      for (int64_t m = 0; m < blocks[b].rows; ++m)
        inputs.push_back(rows.x->data<const BFloat16>() + rows.at(blocks[b].row + m) * rows.x->stride(0));
      kernels.pack(matrix, of.K, inputs.data(), blocks[b].rows, x.data<uint32_t>() + packed[b] * words);
      if (with_sums)
        sum_parts(inputs.data(), blocks[b].rows, of.K, matrix, x_sums.data<float>() + packed[b] * matrix.parts());
    }
  });
  const bool stream = rows.count * of.N * 2 > STREAM_BYTES && of.N % (2 * TILE) == 0;
  std::atomic<int64_t> free = 0;
  parallel_for(0, threads, 1, [&](int64_t, int64_t) {
    const Tensor sums = empty({(most + 31) / 32 * 32, 2, TILE}, kFloat);
    const Tensor decoded = empty({std::max(kernels.decoded_words, 2 * matrix.part * TILE) + 16}, kInt);
    auto* const aligned = reinterpret_cast<uint32_t*>((reinterpret_cast<uintptr_t>(decoded.data<uint32_t>()) + 63) & ~63);
    const Tensor numbers = empty({matrix.scales_sums() && most > TILE ? matrix.groups * 4 : 0, TILE}, kFloat);
    const int64_t count = blocks.size() * each;
    for (int64_t next, i = free++; i < count; i = next) {
      next = free++;
      const Unit& block = blocks[i / each];
      const int64_t first = i % each * piece, end = std::min(first + piece, of.tiles);
      const int64_t then = next < count ? blocks[next / each].layer * of.tiles + next % each * piece : 0;
      kernels.begin(block.rows);
      for (int64_t tile = first; tile < end; tile += 2) {
        const int64_t columns = std::min<int64_t>(2, end - tile), at = block.layer * of.tiles + tile;
        float bias[2 * TILE], factors[2 * TILE];
        for (int64_t c = 0; c < columns; ++c) of.copy_bias(block.layer, tile + c, bias + c * TILE);
        const int64_t later = tile + 2 < end ? at + 2 : then;
        kernels.multiply[static_cast<int>(matrix.element)](
            {.of = &matrix,
             .codes = of.codes_of(at),
             .scales = of.scales_of(at),
             .zeros = of.zeros_of(at),
             .columns = columns,
             .count = of.N - tile * TILE,
             .x = x.data<uint32_t>() + packed[i / each] * words,
             .x_sums = x_sums.data<float>() + (with_sums ? packed[i / each] * matrix.parts() : 0),
             .rows = block.rows,
             .sums = sums.data<float>(),
             .factors = factors,
             .decoded = aligned,
             .group_numbers = numbers.data<float>(),
             .bias = bias,
             .out = reinterpret_cast<BFloat16*>(out) + block.row * of.N + tile * TILE,
             .out_stride = of.N,
             .stream = stream,
             .later = of.codes_of(later),
             .later_scales = of.scales_of(later),
             .later_zeros = of.zeros_of(later)});
      }
      kernels.end();
    }
  });
}

// Layer `e` takes the rows from starts[e] to starts[e + 1]; the first of all is `rows.first`, and goes to `out`.
void multiply(const Layers& of, const Rows& rows, const std::vector<int64_t>& starts, char* out) {
  if (rows.count == 0) return;
  const Dtype dtype = rows.x->dtype();
  const int type = dtype == kFloat ? 0 : dtype == kBFloat16 ? 1 : 2;
  const KernelsOf& kernels = type == 1 ? chosen().bf16 : chosen().floats;
  if (kernels.tiles != nullptr) return multiply_tiles(of, *kernels.tiles, rows, starts, out);
  int64_t most = 0;
  for (size_t e = 0; e + 1 < starts.size(); ++e) most = std::max(most, starts[e + 1] - starts[e]);
  // Groups of about the same size, where all rows are of one layer.
  // Where codes of few rows are decoded beside the products by a table, as those of fp8, two tiles are too much for registers.
  const int64_t least = kernels.decode[static_cast<int>(of.matrix.element)] != nullptr ? FEW_ROWS : kernels.tall.rows;
  const Products& products = most > least && most <= WIDE_ROWS ? kernels.wide : kernels.tall;
  const int64_t groups = (most + products.rows - 1) / products.rows, group = (most + groups - 1) / groups;
  const Packed packed(of, kernels, rows.count, group);
  const int64_t block = std::max<int64_t>(1, BLOCK_BYTES / 4 / packed.words / group) * group;
  const int64_t threads = std::min(num_threads(), rows.count * of.matrix.inputs * of.N / GRAIN_FLOPS + 1);
  const std::vector<Unit> units = units_of(starts, of.tiles, products.cols, block, threads);
  fetch_first(of.codes_of(units[0].layer * of.tiles));
  std::vector<Unit> packs;  // groups of rows
  for (size_t e = 0; e + 1 < starts.size(); ++e)
    for (int64_t row = starts[e]; row < starts[e + 1]; row += group)
      packs.push_back({static_cast<int64_t>(e), row, std::min(group, starts[e + 1] - row), 0, 0});
  parallel_for(0, packs.size(), 1 + (1 << 16) / (of.K * group), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) packed.pack(of, kernels, rows, packs[i].row, packs[i].rows);
  });
  std::atomic<size_t> free = 0;
  parallel_for(0, threads, 1, [&](int64_t, int64_t) {
    const Tensor decoded = empty({products.cols * of.matrix.inputs, TILE}, kFloat);
    for (size_t next, i = free++; i < units.size(); i = next) {
      next = free++;
      const Unit& then = units[next < units.size() ? next : i];
      multiply_unit(of, kernels, products, units[i], packed, type, decoded.data<char>(),
                    then.layer * of.tiles + then.tile, out);
    }
  });
}

Element element_of(const char* op, const std::string& name) {
  constexpr const char* names[] = {"int8", "int4", "fp8", "fp4"};
  for (int i = 0; i < 4; ++i)
    if (name == names[i]) return static_cast<Element>(i);
  CHECK_VALUE(false, op, ": element must be int8, int4, fp8 or fp4, got ", name);
  return {};
}

GroupType group_type(Dtype dtype) {
  if (dtype == kChar) return GroupType::int8;
  return dtype == kFloat ? GroupType::float32 : dtype == kBFloat16 ? GroupType::bfloat16 : GroupType::float16;
}

// What both ops take.
Layers checked(const char* op, const Tensor& x, const Tensor& codes, const Tensor& scales, const OptionalTensor& zeros,
               const OptionalTensor& bias, const std::string& element, int64_t group_size, int64_t N, Experts experts) {
  const Element of = element_of(op, element);
  const int64_t inputs = of == Element::int4 || of == Element::fp4 ? 8 : 4;
  const QuantisedSizes sizes = check_quantised(op, x, codes, scales, zeros, bias, inputs, group_size, N, experts);
  return {.matrix = {.groups = sizes.groups,
                     .scale_type = group_type(scales.dtype()),
                     .zero_type = group_type(zeros ? zeros->dtype() : scales.dtype()),
                     .element = of,
                     .values = &values_of(of),
                     .whole = group_size == 0,
                     .part = group_size == 0 ? WHOLE_PART : group_size,
                     .inputs = sizes.words * inputs},
          .tiles = sizes.tiles,
          .K = x.size(1),
          .N = N,
          .codes = codes.data<const uint8_t>(),
          .scales = scales.data<const char>(),
          .zeros = zeros ? zeros->data<const char>() : nullptr,
          .bias = bias ? &*bias : nullptr};
}

Tensor quantized_linear(const Tensor& x, const Tensor& codes, const Tensor& scales, const OptionalTensor& zeros,
                        const OptionalTensor& bias, const std::string& element, int64_t group_size, int64_t N) {
  const Layers layer =
      checked("quantized_linear", x, codes, scales, zeros, bias, element, group_size, N, std::nullopt);
  Tensor out = empty({x.size(0), N}, x.dtype());
  multiply(layer, {&x, nullptr, 0, x.size(0)}, {0, x.size(0)}, out.data<char>());
  return out;
}

Tensor grouped_quantized_linear(const Tensor& x, const Tensor& codes, const Tensor& scales, const OptionalTensor& zeros,
                                const OptionalTensor& bias, const OptionalTensor& rows, const Tensor& starts,
                                const std::string& element, int64_t group_size, int64_t N) {
  constexpr auto* op = "grouped_quantized_linear";
  const int64_t experts = codes.dim() == 5 ? codes.size(0) : 0;
  const Layers all = checked(op, x, codes, scales, zeros, bias, element, group_size, N, experts);
  const ExpertRows own = check_experts(op, x, rows, starts, experts);
  Tensor out = empty({own.count, N}, x.dtype());
  multiply(all, {&x, own.index, own.first, own.starts.back()}, own.starts,
           out.data<char>() + own.first * N * bytes_of(x.dtype()));
  return out;
}

const std::vector<Op> ops = {
    {"quantized_linear", Boxed<quantized_linear>::call, Boxed<quantized_linear>::direct},
    {"grouped_quantized_linear", Boxed<grouped_quantized_linear>::call, Boxed<grouped_quantized_linear>::direct},
};

}  // namespace
