// Linear layers of quantised weights and activations, for CPUs. quantized_linear_a8.py has the formula, the reference
// and the schemas, quantized_weight.py the layout.
//
// Rows are quantised first, once. Then threads take units, pieces of the column tiles of a block of rows of a layer,
// one after the other. In a unit, `cols` column tiles are read from memory once for a block of rows, and used from the
// caches by every group of `rows` rows. A product takes all inputs, with its integer sums in registers. On tile
// registers a product is of all rows of the block.

#include <algorithm>
#include <atomic>
#include <optional>
#include <string>
#include <vector>

#include "layer_checks.h"
#include "quantized_linear_a8_cpu_types.h"
#include "quantized_units.h"
#include "../cpu/op.h"

namespace {

constexpr int64_t TILED_ROWS = 8;            // from here on tile registers are faster, where there are any
// Inputs. Sums of groups up to this leave tile registers often: these are faster from so many rows on. Where there are no tile
// registers, products of such groups keep their totals in registers.
constexpr int64_t SHORT_GROUP = 64;
constexpr int64_t TILED_ROWS_OF_SHORT = 33;
constexpr int64_t BLOCK_ROWS = 32;           // of products on tile registers
constexpr int64_t BLOCK_BYTES = 1 << 19;     // of a block of rows: half of L2
constexpr int64_t TILES_BYTES = 1 << 18;     // of the column tiles that are used together, about
constexpr int64_t GRAIN_PRODUCTS = 1 << 18;  // for less, waking a thread takes longer than the work
constexpr int64_t LONGEST_GROUP = 1 << 17;   // inputs whose sum of products fits in 32 bits

struct Arguments {
  const Tensor &x, &codes, &scales;
  const OptionalTensor &zeros, &bias, &x_scale;
  bool by_groups;
  const std::string& element;
  int64_t group_size, N;

  int64_t K() const { return x.size(1); }
  int64_t group() const { return group_size == 0 ? K() : group_size; }
  int64_t groups() const { return (K() + group() - 1) / group(); }
  int64_t inputs() const { return element == "int4" ? 8 : 4; }  // of a word
  int64_t words() const { return (K() + inputs() - 1) / inputs(); }
  int64_t tiles() const { return (N + TILE - 1) / TILE; }
  const uint8_t* codes_of(int64_t tile) const { return codes.data<const uint8_t>() + tile * words() * WORD_BYTES; }
};

void check(const char* op, const Arguments& of, Experts experts) {
  CHECK_VALUE(of.element == "int8" || of.element == "int4", op, ": element must be int8 or int4, got ", of.element);
  check_quantised(op, of.x, of.codes, of.scales, of.zeros, of.bias, of.inputs(), of.group_size, of.N, experts);
  CHECK_VALUE(of.group() <= LONGEST_GROUP, op, ": a group may have ", LONGEST_GROUP, " inputs, got ", of.group());
  CHECK_VALUE(!of.x_scale || (of.x_scale->sizes() == Shape{1} && of.x_scale->dtype() == kFloat && of.x_scale->is_cpu()),
              op, ": x_scale must be [1] of float32 on the CPU, got ", of.x_scale->sizes(), " of ", of.x_scale->dtype());
  CHECK_VALUE(!of.by_groups || (!of.x_scale && of.group_size > 0), op,
              ": by_groups must be False with x_scale or without groups, got group_size=", of.group_size, " and ",
              of.x_scale ? "an" : "no", " x_scale");
}

// Calls work(kernels) with those for a dtype.
template <class Work>
void with_dtype(Dtype dtype, const Work& work) {
  if (dtype == kBFloat16) work(chosen().bf16);
  else if (dtype == kFloat) work(chosen().f32);
  else work(chosen().f16);
}

// Rows of x, as they are or as `index` names them, quantised. `memory` keeps them: one piece, since to allocate five takes
// as long as to quantise a row.
struct Quantized {
  Tensor memory;
  Rows8 rows;

  Quantized(const Arguments& of, const int32_t* index, int64_t first, int64_t end) {
    const int64_t count = end - first, groups = of.groups(), K = of.K();
    // Numbers of few rows, which no tile registers take, should lie in few cache lines. Those of many are no power of two
    // apart either: threads quantise several rows.
    const int64_t across = count <= FEW_ROWS ? FEW_ROWS : (count + TILE) / 32 * 32 + 48;
    const int64_t stride = (K + 63) / 64 * 64 + 64;  // rows a power of two apart would share a few sets of L1
    const int64_t codes = (count + TILE) * stride;   // tile registers take 16 rows
    memory = empty({codes + across * (3 * groups + 1) * 4}, kChar);
    float* const after = reinterpret_cast<float*>(memory.data<int8_t>() + codes);
    rows = {.codes = memory.data<int8_t>(),
            .stride = stride,
            .starts = reinterpret_cast<int32_t*>(after),
            .inputs = after + across * groups,
            .of_groups = after + 2 * across * groups,
            .scales = after + 3 * across * groups,
            .groups = groups,
            .across = across,
            .by_groups = of.by_groups};
    const Quantize how = {K, of.group(), of.x_scale ? of.x_scale->data<float>() : nullptr,
                          of.element == "int4" ? 8 : chosen().offset};
    with_dtype(of.x.dtype(), [&]<class T>(const KernelsOf8<T>& kernels) {
      const T* const x = of.x.data<const T>();
      const int64_t x_stride = of.x.stride(0);
      parallel_for(0, count, 1 + (1 << 15) / K, [&](int64_t begin, int64_t until) {
        for (int64_t i = begin; i < until; ++i)
          kernels.quantize(x + (index == nullptr ? first + i : index[first + i]) * x_stride, how, rows.from(i));
      });
    });
  }
};

// Numbers that begin with a cache line: a vector or a row of a tile that lies in two lines takes twice as long.
template <class T>
class Lines {
 public:
  void resize(int64_t count) { memory_.resize(count + 64 / sizeof(T)); }
  T* data() {
    const auto at = reinterpret_cast<uintptr_t>(memory_.data());
    return reinterpret_cast<T*>((at + 63) / 64 * 64);
  }

 private:
  std::vector<T> memory_;
};

// A thread's memory.
struct Workplace8 {
  Lines<float> scales, zeros, of_stream;
  alignas(64) float totals[MAX_ROWS * MAX_COLS * TILE];
  // For products on tile registers.
  Lines<float> block_totals;
  Lines<int32_t> sums;
  Lines<uint8_t> codes;
};

// `count` zeros from `at` on, as float32.
void widen_zeros(const Kernels& all, const Tensor& zeros, int64_t at, int64_t count, float* to) {
  if (zeros.dtype() == kChar) return all.widen(zeros.data<const int8_t>() + at, count, to);
  with_dtype(zeros.dtype(),
             [&]<class Z>(const KernelsOf8<Z>& kernels) { kernels.widen(zeros.data<const Z>() + at, count, to); });
}

bool on_tiles(const Kernels& all, const Arguments& of, int64_t rows) {
  return all.tiles.int8 != nullptr && rows >= (of.group() <= SHORT_GROUP ? TILED_ROWS_OF_SHORT : TILED_ROWS);
}

const Products& products_of(const Kernels& all, const Arguments& of) {
  return of.group() <= SHORT_GROUP ? all.of_short : all.of_long;
}

// Few rows take their weights as a stream. `x` and `out` begin with the first row of all layers.
template <class T, class S>
void stream_unit(const KernelsOf8<T>& kernels, const KernelsOf8<S>& of_scales, const Arguments& of, const Unit& unit,
                 const Rows8& x, T* out, Lines<float>& totals) {
  const int64_t at = unit.layer * of.tiles() + unit.tile, count = unit.end - unit.tile, column = unit.tile * TILE;
  const int64_t groups = of.groups() * TILE;
  const auto* const stream = of.element == "int4" ? of_scales.streams.int4 : of_scales.streams.int8;
  const Rows8 own = x.from(unit.row);
  totals.resize(unit.rows * count * TILE);
  stream[unit.rows - 1]({
      .x = own,
      .tiles = count,
      .w = of.codes_of(at),
      .words = of.words(),
      .group = (of.group() + of.inputs() - 1) / of.inputs(),
      .scales = of.scales.data<const S>() + at * groups,
      .zeros = of.zeros ? of.zeros->data<const S>() + at * groups : nullptr,
      .totals = totals.data(),
  });
  kernels.finish({unit.rows, std::min(count * TILE, of.N - column), totals.data(), count * TILE, own.scales,
                  of.bias ? of.bias->data<const T>() + unit.layer * of.N + column : nullptr,
                  out + unit.row * of.N + column, of.N});
}

// `x` and `out` begin with the first row of all layers. `next` is the thread's next tile after the unit.
template <class T, class S>
void multiply_unit(const Kernels& all, const KernelsOf8<T>& kernels, const KernelsOf8<S>& of_scales,
                   const Arguments& of, const Unit& unit, const Rows8& x, int64_t cols, int64_t next, T* out,
                   Workplace8& place) {
  const int64_t tiles = of.tiles(), words = of.words(), groups = of.groups();
  const Products& products = products_of(all, of);
  const auto* const multiply = of.element == "int4" ? products.int4 : products.int8;
  const int64_t group = (of.group() + of.inputs() - 1) / of.inputs();
  const bool tiled = on_tiles(all, of, unit.rows);
  if (tiled) all.tiles.begin(unit.rows, group * of.inputs() / 4);
  for (int64_t tile = unit.tile; tile < unit.end; tile += cols) {
    const int64_t c = std::min(cols, unit.end - tile), at = unit.layer * tiles + tile;
    const int64_t later = tile + cols < unit.end ? at + cols : next;
    of_scales.widen(of.scales.data<const S>() + at * groups * TILE, c * groups * TILE, place.scales.data());
    for (int64_t i = 0; i < c * groups * TILE; i += 64 / sizeof(S))
      __builtin_prefetch(of.scales.data<const S>() + later * groups * TILE + i, 0, 2);
    if (of.zeros) widen_zeros(all, *of.zeros, at * groups * TILE, c * groups * TILE, place.zeros.data());
    const int64_t column = tile * TILE, columns = std::min(c * TILE, of.N - column);
    const uint8_t* const w = of.codes_of(at);
    const float* const zeros = of.zeros ? place.zeros.data() : nullptr;
    const T* const bias = of.bias ? of.bias->data<const T>() + unit.layer * of.N + column : nullptr;
    if (tiled) {
      const Rows8 own = x.from(unit.row);
      const auto multiply_block = of.element == "int4" ? all.tiles.int4 : all.tiles.int8;
      multiply_block({own, unit.rows, c, w, words, group, place.scales.data(), zeros, place.block_totals.data(),
                      place.sums.data(), place.codes.data()});
      kernels.finish({unit.rows, columns, place.block_totals.data(), c * TILE, own.scales, bias,
                      out + unit.row * of.N + column, of.N});
      continue;
    }
    const Work8 work = {
        .x = x,
        .w = w,
        .words = words,
        .group = group,
        .scales = place.scales.data(),
        .zeros = zeros,
        .totals = place.totals,
        .later = of.codes_of(later),
    };
    for (int64_t i = 0; i < unit.rows; i += products.rows) {
      const int64_t m = std::min(products.rows, unit.rows - i), row = unit.row + i;
      multiply[(m - 1) * products.cols + c - 1](work, row);
      kernels.finish({m, columns, place.totals, c * TILE, x.scales + row, bias, out + row * of.N + column, of.N});
    }
  }
  if (tiled) all.tiles.end();
}

// Rows from `first` on, of which `starts` says how many each layer has. The first is row `first` of the result.
void multiply(const Arguments& of, const std::vector<int64_t>& starts, const int32_t* index, int64_t first,
              Tensor& result) {
  const int64_t rows = starts.back(), K = of.K(), tiles = of.tiles();
  if (rows == 0) return;
  const Kernels& all = chosen();
  const int64_t threads = std::min(num_threads(), rows * of.N * K / GRAIN_PRODUCTS + 1);
  int64_t most = 0;
  for (size_t e = 0; e + 1 < starts.size(); ++e) most = std::max(most, starts[e + 1] - starts[e]);
  const int64_t fit = std::max<int64_t>(1, TILES_BYTES / (K * TILE * 4 / of.inputs()));
  const bool tiled = on_tiles(all, of, most);
  const Products& products = products_of(all, of);
  const int64_t cols = tiled ? 2 : most <= FEW_ROWS ? 1 : std::min(products.cols, fit);
  const int64_t together = tiled ? BLOCK_ROWS : products.rows;
  const int64_t block = std::max<int64_t>(1, BLOCK_BYTES / K / together) * together;
  const std::vector<Unit> units = units_of(starts, tiles, cols, block, threads);
  fetch_first(of.codes_of(units[0].layer * tiles));
  const Quantized quantized(of, index, first, first + rows);
  Shares shares(units.size(), threads);
  const bool alike = !of.zeros || of.zeros->dtype() == of.scales.dtype();
  with_dtype(of.x.dtype(), [&]<class T>(const KernelsOf8<T>& kernels) {
    with_dtype(of.scales.dtype(), [&]<class S>(const KernelsOf8<S>& of_scales) {
      T* const out = result.data<T>() + first * of.N;
      parallel_for(0, threads, 1, [&](int64_t thread, int64_t) {
        Workplace8 place;
        if (most > FEW_ROWS || !alike) {
          place.scales.resize(cols * of.groups() * TILE);
          if (of.zeros) place.zeros.resize(cols * of.groups() * TILE);
        }
        if (tiled) {
          const int64_t block_rows = (std::min(block, most) + BLOCK_ROWS - 1) / BLOCK_ROWS * BLOCK_ROWS;
          place.block_totals.resize(block_rows * cols * TILE);
          place.sums.resize(block_rows * cols * TILE);
          place.codes.resize(all.tiles.code_bytes);
        }
        for (int64_t next, i = shares.claim(thread); i >= 0; i = next) {
          next = shares.claim(thread);
          const Unit &unit = units[i], &then = units[next >= 0 ? next : i];
          if (unit.rows <= FEW_ROWS && alike)
            stream_unit(kernels, of_scales, of, unit, quantized.rows, out, place.of_stream);
          else
            multiply_unit(all, kernels, of_scales, of, unit, quantized.rows, cols, then.layer * tiles + then.tile, out,
                          place);
        }
      });
    });
  });
}

Tensor quantized_linear_a8(const Tensor& x, const Tensor& codes, const Tensor& scales, const OptionalTensor& zeros,
                           const OptionalTensor& bias, const OptionalTensor& x_scale, bool by_groups,
                           const std::string& element, int64_t group_size, int64_t out_features) {
  const Arguments of = {x, codes, scales, zeros, bias, x_scale, by_groups, element, group_size, out_features};
  check("quantized_linear_a8", of, std::nullopt);
  Tensor out = empty({x.size(0), out_features}, x.dtype());
  multiply(of, {0, x.size(0)}, nullptr, 0, out);
  return out;
}

Tensor grouped_quantized_linear_a8(const Tensor& x, const Tensor& codes, const Tensor& scales, const OptionalTensor& zeros,
                                   const OptionalTensor& bias, const OptionalTensor& x_scale, const OptionalTensor& rows,
                                   const Tensor& starts, bool by_groups, const std::string& element, int64_t group_size,
                                   int64_t out_features) {
  constexpr auto* op = "grouped_quantized_linear_a8";
  const Arguments of = {x, codes, scales, zeros, bias, x_scale, by_groups, element, group_size, out_features};
  const int64_t experts = codes.dim() == 5 ? codes.size(0) : 0;
  check(op, of, experts);
  const ExpertRows own = check_experts(op, x, rows, starts, experts);
  Tensor out = empty({own.count, out_features}, x.dtype());
  multiply(of, own.starts, own.index, own.first, out);
  return out;
}

const std::vector<Op> ops = {
    {"quantized_linear_a8", Boxed<quantized_linear_a8>::call, Boxed<quantized_linear_a8>::direct},
    {"grouped_quantized_linear_a8", Boxed<grouped_quantized_linear_a8>::call, Boxed<grouped_quantized_linear_a8>::direct},
};

}  // namespace
