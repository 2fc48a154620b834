// Linear layer on quantised weights for CPUs, activations as they are. quantized_linear.py has the schema and the
// reference, quantized_weight.py the layout of the codes.
//
//   y[t, n] = bias[n] + sum over parts of  scale * (sum of value(code) * x - zero * sum of x)
//
// A part is a group of inputs, or 128 of them where a row is one group. Its sum starts at 0, is scaled once, and is added
// to the sums of the parts before it, in float32. Every value of a code is exact in bfloat16: where there are products of
// pairs of bfloat16, activations in bfloat16 are multiplied by them; all else is multiplied in float32, with the zero
// taken from the weights first.
//
//   few rows    codes are decoded in registers, and used once
//   more rows   a chunk of a block of columns is decoded into a thread's cache, and used by every group of rows
//
// Batch invariance: the order of a sum is that of the inputs in both, for every number of rows, place and thread; so a
// row has the same bits in any batch. CPUs with AMX use the kernels for AVX512-bf16: tiles would sum in another order.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "../cpu/tensor.h"
#include "quantized_linear_cpu_types.h"
#include "../cpu/op.h"

namespace {

constexpr int64_t WHOLE_PART = 128;   // inputs of a part where a row is one group
constexpr int64_t CHUNK = 512;        // inputs of a chunk: 3 tiles of bfloat16 are 48 KiB
constexpr int64_t ROW_BLOCK = 256;    // rows that use a decoded chunk: their sums stay in L2
constexpr int64_t GRAIN_FLOPS = 1 << 18;  // for less, waking a thread takes longer than the work

float value_of(Element element, int code) {
  if (element == Element::int8) return static_cast<float>(static_cast<int8_t>(code));
  if (element == Element::int4) return static_cast<float>(code % 16 - 8);
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
    std::vector<Values> each(4);
    for (int e = 0; e < 4; ++e)
      for (int code = 0; code < 256; ++code) each[e].of[code] = value_of(static_cast<Element>(e), code);
    return each;
  }();
  return all[static_cast<int>(element)];
}

// Rows of activations; `index` names those that are taken, or is null.
struct Rows {
  const Tensor* x;
  const int32_t* index;
  int64_t first, count;
};

// Writes `count` rows for the micro kernels of pairs: [words, count] in the order in which codes are decoded, and the sums
// of each part where they are wanted. `of.inputs` is K rounded up; what is past K is 0.
void pack_pairs(const BFloat16* x, int64_t stride, const int32_t* index, int64_t first, int64_t count, int64_t K,
                const Block& of, uint32_t* to, float* sums) {
  typedef uint16_t Inputs __attribute__((vector_size(16)));
  typedef uint32_t Words __attribute__((vector_size(16)));
  typedef uint32_t Wide __attribute__((vector_size(32)));
  typedef float Sums __attribute__((vector_size(32)));
  const bool four_bits = of.word_inputs() == 8;
  for (int64_t m = 0; m < count; ++m) {
    const BFloat16* const row = x + (index == nullptr ? first + m : index[first + m]) * stride;
    Sums sum = {};
    for (int64_t k = 0; k < of.inputs; k += 8) {
      Inputs inputs = {};
      if (k + 8 <= K) std::memcpy(&inputs, row + k, sizeof(inputs));
      else std::memcpy(&inputs, row + k, (K - k) * sizeof(BFloat16));
      const Words words = reinterpret_cast<Words>(four_bits ? __builtin_shufflevector(inputs, inputs, 0, 2, 4, 6, 1, 3, 5, 7)
                                                            : __builtin_shufflevector(inputs, inputs, 0, 2, 1, 3, 4, 6, 5, 7));
      const int64_t made = std::min<int64_t>((of.inputs - k) / 2, 4);
      for (int64_t i = 0; i < made; ++i) to[(k / 2 + i) * count + m] = words[i];
      if (sums == nullptr) continue;
      sum += reinterpret_cast<Sums>(__builtin_convertvector(inputs, Wide) << 16);
      if ((k + 8) % of.part != 0 && k + 8 < of.inputs) continue;
      float& all = sums[k / of.part * count + m] = 0;
      for (int i = 0; i < 8; ++i) all += sum[i];
      sum = Sums{};
    }
  }
}

// And for those of float32: [inputs, count].
template <class T>
void pack_floats(const T* x, int64_t stride, const int32_t* index, int64_t first, int64_t count, int64_t K,
                 const Block& of, uint32_t* to) {
  for (int64_t m = 0; m < count; ++m) {
    const T* const row = x + (index == nullptr ? first + m : index[first + m]) * stride;
    for (int64_t k = 0; k < of.inputs; ++k)
      to[k * count + m] = __builtin_bit_cast(uint32_t, k < K ? static_cast<float>(row[k]) : 0.f);
  }
}

struct Layer {
  Block block;  // of all tiles and parts
  int64_t tiles, parts, K, N;
  const Tensor* bias;  // or null
  int64_t bias_at;
};

void copy_bias(const Layer& layer, int64_t tile, float* to) {
  std::fill_n(to, TILE, 0.f);
  if (layer.bias == nullptr) return;
  const int64_t from = layer.bias_at + tile * TILE, count = std::min(TILE, layer.N - tile * TILE);
  const Dtype dtype = layer.bias->dtype();
  if (dtype == kFloat) std::copy_n(layer.bias->data<const float>() + from, count, to);
  else if (dtype == kBFloat16) std::copy_n(layer.bias->data<const BFloat16>() + from, count, to);
  else std::copy_n(layer.bias->data<const Half>() + from, count, to);
}

// Rows of `out` from `out_row` on.
void multiply(const Layer& layer, const Rows& rows, const Tensor& out, int64_t out_row) {
  const Tensor& x = *rows.x;
  const Dtype dtype = x.dtype();
  const int type = dtype == kFloat ? 0 : dtype == kBFloat16 ? 1 : 2;
  const KernelsOf& kernels = type == 1 ? chosen().bf16 : chosen().floats;
  const bool direct = rows.count <= kernels.direct_rows, sums_of_x = layer.block.zeros != nullptr && kernels.pairs;
  const int64_t group = direct ? rows.count : kernels.rows, x_words = layer.block.inputs / (kernels.pairs ? 2 : 1);
  const int64_t groups = (rows.count + group - 1) / group;
  const Tensor packed = empty({rows.count, x_words}, kInt), sums = empty({sums_of_x ? rows.count : 0, layer.parts}, kFloat);
  auto* const x_packed = packed.data<uint32_t>();
  auto* const x_sums = sums_of_x ? sums.data<float>() : nullptr;
  parallel_for(0, groups, 1 + (1 << 16) / (layer.K * group), [&](int64_t begin, int64_t end) {
    for (int64_t first = begin * group; first < std::min(end * group, rows.count); first += group) {
      const auto pack = [&]<class T>(const T* data) {
        pack_floats(data, x.stride(0), rows.index, rows.first + first, std::min(group, rows.count - first), layer.K,
                    layer.block, x_packed + first * x_words);
      };
      if (kernels.pairs)
        pack_pairs(x.data<const BFloat16>(), x.stride(0), rows.index, rows.first + first,
                   std::min(group, rows.count - first), layer.K, layer.block, x_packed + first * x_words,
                   x_sums == nullptr ? nullptr : x_sums + first * layer.parts);
      else if (type == 0) pack(x.data<const float>());
      else if (type == 1) pack(x.data<const BFloat16>());
      else pack(x.data<const Half>());
    }
  });

  const int64_t most = direct ? 1 : kernels.cols, block_rows = std::min(rows.count, ROW_BLOCK);
  const int64_t chunk = direct ? layer.parts : std::max<int64_t>(CHUNK / layer.block.part, 1);
  const int64_t flops = rows.count * layer.block.inputs * TILE * most;
  parallel_for(0, (layer.tiles + most - 1) / most, 1 + GRAIN_FLOPS / 4 / flops, [&](int64_t begin, int64_t end) {
    const Tensor totals = empty({block_rows, most * TILE}, kFloat);
    const Tensor room = empty({direct ? 0 : chunk * layer.block.part * most * TILE * kernels.word_bytes / 4}, kInt);
    const int64_t last = std::min(end * most, layer.tiles);
    int64_t cols;
    for (int64_t tile = begin * most; tile < last; tile += cols) {
      cols = last - tile >= most ? most : 1;
      Block block = layer.block;
      block.codes += tile * block.code_stride;
      const int64_t scale_bytes = tile * block.groups * TILE * (block.type == ScaleType::float32 ? 4 : 2);
      block.scales = static_cast<const char*>(block.scales) + scale_bytes;
      if (block.zeros != nullptr) block.zeros = static_cast<const char*>(block.zeros) + scale_bytes;
      for (int64_t row = 0; row < rows.count; row += block_rows) {
        const int64_t here = std::min(block_rows, rows.count - row);
        std::fill_n(totals.data<float>(), here * cols * TILE, 0.f);
        for (block.first = 0; block.first < layer.parts; block.first = block.end) {
          block.end = std::min(block.first + chunk, layer.parts);
          if (!direct) kernels.decode(block, cols, room.data());
          // The chunk that is decoded next, of which each group of rows fetches a part; past the weights it does no harm.
          const bool again = block.end == layer.parts && row + here < rows.count;
          const uint8_t* const later = block.end < layer.parts ? block.codes + block.end * block.part / block.word_inputs() * 64
                                       : again                 ? block.codes
                                                               : block.codes + cols * block.code_stride;
          const int64_t lines = chunk * block.part / block.word_inputs() / ((here + group - 1) / group) + 1;
          for (int64_t m = 0; m < here; m += group)
            kernels.multiply({.block = &block,
                              .decoded = direct ? nullptr : room.data(),
                              .x = x_packed + (row + m) * x_words,
                              .x_sums = x_sums == nullptr ? nullptr : x_sums + (row + m) * layer.parts,
                              .sums = totals.data<float>() + m * cols * TILE,
                              .later = later + m / group * lines * 64,
                              .later_lines = direct ? 0 : lines},
                             std::min(group, here - m), cols);
        }
        for (int64_t c = 0; c < cols; ++c) {
          const int64_t column = (tile + c) * TILE;
          float bias[TILE];
          copy_bias(layer, tile + c, bias);
          kernels.finish(type, totals.data<float>() + c * TILE, cols * TILE, here, std::min(TILE, layer.N - column), bias,
                         out.data<char>() + ((out_row + row) * layer.N + column) * bytes_of(dtype), layer.N);
        }
      }
    }
  });
}

Element element_of(const char* op, const std::string& name) {
  constexpr const char* names[] = {"int8", "int4", "fp8", "fp4"};
  for (int i = 0; i < 4; ++i)
    if (name == names[i]) return static_cast<Element>(i);
  CHECK_VALUE(false, op, "element must be int8, int4, fp8 or fp4, got ", name);
  return {};
}

// What both ops take. With `experts` every tensor but x has one more dimension in front.
Layer checked(const char* op, const Tensor& x, const Tensor& codes, const Tensor& scales,
              const std::optional<Tensor>& zeros, const std::optional<Tensor>& bias, const std::string& element,
              int64_t group_size, int64_t N, std::optional<int64_t> experts) {
  const auto dtype = x.dtype();
  CHECK_VALUE(dtype == kBFloat16 || dtype == kFloat || dtype == kHalf, op, "x must be bfloat16, float32 or float16, got ",
              dtype);
  for (const Tensor* tensor : {&x, &codes, &scales, zeros ? &*zeros : &x, bias ? &*bias : &x})
    CHECK_VALUE(tensor->is_cpu(), op, "all tensors must be on the CPU, got one on ", tensor->place());
  CHECK_VALUE(x.dim() == 2 && x.size(1) > 0, op, "x must be [T, K] with K > 0, got ", x.sizes());
  CHECK_VALUE(x.stride(1) == 1 || x.size(1) == 1, op, "the last stride of x must be 1, got strides ", x.strides());
  CHECK_VALUE(group_size >= 0 && group_size % 8 == 0, op, "group_size must be 0 or a multiple of 8, got ", group_size);
  const Element of = element_of(op, element);
  const int64_t K = x.size(1), inputs = of == Element::int4 || of == Element::fp4 ? 8 : 4, words = (K + inputs - 1) / inputs;
  const int64_t tiles = (N + TILE - 1) / TILE, groups = group_size == 0 ? 1 : (K + group_size - 1) / group_size;
  const auto wanted = [&](std::initializer_list<int64_t> sizes) {
    Shape all(sizes);
    if (!experts) return all;
    std::copy_backward(all.values, all.values + all.dim, all.values + all.dim + 1);
    all.values[0] = *experts;
    ++all.dim;
    return all;
  };
  const Shape of_codes = wanted({tiles, words, TILE, 4}), of_scales = wanted({tiles, groups, TILE}), of_bias = wanted({N});
  static const Dtype bytes{aoti_torch_dtype_uint8()};
  CHECK_VALUE(N > 0 && codes.sizes() == of_codes && codes.is_contiguous() && codes.dtype() == bytes, op, "x ", x.sizes(),
              " and out_features ", N, " take contiguous codes ", of_codes, " of uint8, got ", codes.sizes(), " of ",
              codes.dtype());
  const Dtype type = scales.dtype();
  CHECK_VALUE(type == kFloat || type == kBFloat16 || type == kHalf, op,
              "scales must be float32, bfloat16 or float16, got ", type);
  for (const Tensor* tensor : {&scales, zeros ? &*zeros : &scales})
    CHECK_VALUE(tensor->sizes() == of_scales && tensor->is_contiguous() && tensor->dtype() == type, op,
                "scales and zeros must be contiguous ", of_scales, " of one dtype, got ", tensor->sizes(), " of ",
                tensor->dtype());
  CHECK_VALUE(!bias || (bias->sizes() == of_bias && bias->is_contiguous() && bias->dtype() == dtype), op,
              "bias must be a contiguous ", of_bias, " of ", dtype, ", got ", bias->sizes(), " of ", bias->dtype());
  const int64_t part = group_size == 0 ? WHOLE_PART : group_size, rounded = words * inputs;
  return {.block = {.codes = codes.data<const uint8_t>(),
                    .code_stride = words * TILE * 4,
                    .scales = scales.data(),
                    .zeros = zeros ? zeros->data() : nullptr,
                    .groups = groups,
                    .type = type == kFloat ? ScaleType::float32 : type == kBFloat16 ? ScaleType::bfloat16 : ScaleType::float16,
                    .element = of,
                    .values = &values_of(of),
                    .whole = group_size == 0,
                    .part = part,
                    .inputs = rounded,
                    .first = 0,
                    .end = 0},
          .tiles = tiles,
          .parts = (rounded + part - 1) / part,
          .K = K,
          .N = N,
          .bias = bias ? &*bias : nullptr,
          .bias_at = 0};
}

Tensor quantized_linear(const Tensor& x, const Tensor& codes, const Tensor& scales, const std::optional<Tensor>& zeros,
                        const std::optional<Tensor>& bias, const std::string& element, int64_t group_size, int64_t N) {
  const Layer layer = checked("quantized_linear: ", x, codes, scales, zeros, bias, element, group_size, N, std::nullopt);
  Tensor out = empty({x.size(0), N}, x.dtype());
  if (x.size(0) > 0) multiply(layer, {&x, nullptr, 0, x.size(0)}, out, 0);
  return out;
}

Tensor grouped_quantized_linear(const Tensor& x, const Tensor& codes, const Tensor& scales,
                                const std::optional<Tensor>& zeros, const std::optional<Tensor>& bias,
                                const std::optional<Tensor>& rows, const Tensor& starts, const std::string& element,
                                int64_t group_size, int64_t N) {
  constexpr auto* op = "grouped_quantized_linear: ";
  const int64_t experts = codes.dim() == 5 ? codes.size(0) : 0;
  const Layer all = checked(op, x, codes, scales, zeros, bias, element, group_size, N, experts);
  CHECK_VALUE(!rows || (rows->dim() == 1 && rows->is_contiguous() && rows->dtype() == kInt && rows->is_cpu()), op,
              "rows must be contiguous and int32 on the CPU, got ", rows->sizes(), " of ", rows->dtype());
  CHECK_VALUE(starts.sizes() == Shape{experts + 1} && starts.is_contiguous() && starts.dtype() == kInt && starts.is_cpu(),
              op, "starts must be a contiguous [", experts + 1, "] of int32 on the CPU, got ", starts.sizes(), " of ",
              starts.dtype());
  const int64_t count = rows ? rows->size(0) : x.size(0);
  const auto* const from = starts.data<const int32_t>();
  CHECK_INDEX(from[0] >= 0 && std::is_sorted(from, from + experts + 1) && from[experts] <= count, op,
              "starts must rise from at least 0 to at most ", count);
  const int32_t* const index = rows ? rows->data<const int32_t>() : nullptr;
  CHECK_INDEX(!rows || std::all_of(index + from[0], index + from[experts], [&](int32_t i) { return i >= 0 && i < x.size(0); }),
              op, "rows must be from 0 to ", x.size(0) - 1);
  Tensor out = empty({count, N}, x.dtype());
  for (int64_t e = 0; e < experts; ++e) {
    if (from[e] == from[e + 1]) continue;
    Layer own = all;
    const int64_t scale_bytes = e * all.tiles * all.block.groups * TILE * bytes_of(scales.dtype());
    own.block.codes += e * all.tiles * all.block.code_stride;
    own.block.scales = static_cast<const char*>(all.block.scales) + scale_bytes;
    if (zeros) own.block.zeros = static_cast<const char*>(all.block.zeros) + scale_bytes;
    own.bias_at = e * N;
    multiply(own, {&x, index, from[e], from[e + 1] - from[e]}, out, from[e]);
  }
  return out;
}

const std::vector<Op> ops = {
    {"quantized_linear", Boxed<quantized_linear>::call},
    {"grouped_quantized_linear", Boxed<grouped_quantized_linear>::call},
};

}  // namespace
