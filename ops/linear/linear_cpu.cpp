// Linear layer on packed weights for CPUs. packed_linear.py has the layout, the reference and the schema;
// linear_cpu_product.h has the loops, and linear_cpu_groups.h several layers at once.
//
//   y[t, n] = bias[n] + sum over k of  x[t, k] * W[n, k]
//
// The inputs are taken word by word: a pair of bfloat16, or one float32 or float16.
//
// Three loops around a micro kernel:
//
//   threads     each takes pieces of the column tiles (16 outputs each) of a block of rows
//   columns     `cols` tiles at a time ...
//   K chunks    ... of which `chunk` words are read from memory once for a block of rows, ...
//   row groups  ... and used from the caches by every group of `rows` rows
//
// The micro kernel holds rows x cols sums of 16 columns in registers and walks through a chunk word by word, or with AMX
// (linear_cpu_amx.h) 16 words at a time.
//
// AMX multiplies faster than L2 delivers: of each product's operands one has to be in L1 (the weights' chunk), the other
// in L2 (the block of rows), and weights have to be fetched from farther away all the time. So every row group fetches
// its part of the next weights; from 65 rows on activations are packed tile by tile, to be read from L2 one line after the
// other; outputs are written past the caches, while the next sums are added up.
//
// Batch invariance: every output has one float32 sum, which takes its words in order, whatever the number of rows, the
// place of its row, or the number of threads. Chunks do not change that: between two of them a sum is kept in memory as
// float32. So a request gets the same tokens alone or in any batch. Kernels of different instruction sets may
// differ in the last bit (AMX sums 16 even and 16 odd products before it adds them), so one of them serves all shapes: AMX
// also takes single rows, where it has more than enough arithmetic to keep up with memory.

#include <algorithm>
#include <atomic>
#include <cstring>
#include <optional>
#include <tuple>
#include <vector>

#include "layer_checks.h"
#include "linear_cpu_groups.h"
#include "../cpu/op.h"

namespace {

// A thread's part of the blocks, from block `own` on: `taken` counts the pieces of each. If it `packs`, it calls `pack` with
// the rows of a block before its first piece, and leaves the last pieces of other threads' blocks to them.
template <class T, class Pack>
void multiply_pieces(const KernelsOf<T>& kernels, const Problem<T>& problem, Workplace<T>& place, int64_t own, bool packs,
                     std::vector<std::atomic<int64_t>>& taken, const Pack& pack) {
  const int64_t blocks = taken.size(), pieces = (problem.tiles + problem.piece - 1) / problem.piece;
  for (int64_t i = 0; i < blocks; ++i) {
    std::atomic<int64_t>& free = taken[(own + i) % blocks];
    if (packs && i > 0 && free > pieces * 3 / 4) continue;
    const int64_t row = (own + i) % blocks * problem.block, rows = std::min(problem.block, problem.rows - row);
    int64_t next, piece = free++;
    if (packs && piece < pieces) pack(row, row + rows);
    for (; piece < pieces; piece = next) {
      next = free++;
      const int64_t end = std::min((piece + 1) * problem.piece, problem.tiles);
      for (int64_t tile = piece * problem.piece; tile < end; tile += problem.cols)
        multiply_block(kernels, problem, place, row, rows, tile, std::min(problem.cols, end - tile),
                       problem.w + (tile + problem.cols < end ? tile + problem.cols : next % pieces * problem.piece) *
                                       problem.words * TILE);
    }
  }
}

// All of it.
template <class T>
void multiply(const KernelsOf<T>& kernels, const Operands<T>& of) {
  const int64_t rows = of.rows, flops = rows * of.tiles * of.words * TILE;
  const int64_t threads = std::min(num_threads(), flops / GRAIN_FLOPS + 1);
  const Problem<T> problem = problem_of(kernels, of, threads, weight_bytes(of));
  std::vector<std::atomic<int64_t>> taken((rows + problem.block - 1) / problem.block);
  const int64_t blocks = taken.size(), x_words = problem.x_words, group = problem.group, first = problem.first_packed;
  const auto pack = [&](int64_t begin, int64_t end, uint32_t* to) {
    pack_rows(kernels, of, begin, end, group, x_words, to);
  };
  // Where each thread has blocks of its own it packs them, into its own L2; else all rows are packed for all threads.
  const bool each_packs = kernels.align > 1 && blocks >= threads;
  const int64_t all = kernels.aligned(rows - first), room = each_packs ? std::min(problem.block, all) : all;
  const Tensor packs = empty({each_packs ? threads : 1, room, x_words}, kInt);
  auto* const x_packed = packs.data<uint32_t>();
  if (!each_packs)
    parallel_for(0, (rows - first + group - 1) / group, 1 + (1 << 17) / (x_words * group), [&](int64_t begin, int64_t end) {
      pack(first + begin * group, std::min(rows, first + end * group), x_packed + begin * group * x_words);
    });
  // A thread that is free takes the next piece of the columns: cores need not be equally fast.
  parallel_for(0, threads, 1, [&](int64_t thread, int64_t) {
    kernels.begin(rows);
    Workplace<T> place;
    place.x_packed = x_packed + (each_packs ? thread * room * x_words : 0);
    place.packed_from = first;
    const int64_t own = each_packs ? thread * blocks / threads : 0;
    multiply_pieces(kernels, problem, place, own, each_packs, taken, [&](int64_t begin, int64_t end) {
      place.packed_from = std::max(begin, first);
      if (place.packed_from < end) pack(place.packed_from, end, place.x_packed);
    });
    kernels.finish(place.before);
    kernels.end();
  });
}

void check(const char* op, const Tensor& x, const Tensor& packed, const OptionalTensor& bias, int64_t N, Experts experts) {
  check_input(op, x);
  check_on_cpu(op, {&packed, bias ? &*bias : &x, &x});
  const int64_t inputs = x.dtype() == kBFloat16 ? 2 : 1;  // of a word
  const Shape wanted = with_experts(experts, {(N + TILE - 1) / TILE, (x.size(1) + inputs - 1) / inputs, TILE, inputs});
  CHECK_VALUE(N > 0 && packed.sizes() == wanted && packed.is_contiguous() && packed.dtype() == x.dtype(), op, ": x ",
              x.sizes(), " of ", x.dtype(), " and out_features ", N, " take a contiguous packed ", wanted, ", got ",
              packed.sizes(), " of ", packed.dtype());
  check_bias(op, x, bias, experts, N);
}

// In float32, contiguous.
Tensor as_floats(const Tensor& x) {
  Tensor floats = empty(x.sizes(), kFloat);
  succeeded(aoti_torch_copy_(floats.get(), x.get(), 0));
  return floats;
}

// Calls work(kernels, x), with the kernels of the dtype of x, and x as they take it.
template <class Work>
void with_kernels(const Tensor& x, const Work& work) {
  const Kernels& kernels = chosen();
  if (x.dtype() == kBFloat16) work(std::get<KernelsOf<BFloat16>>(kernels), x);
  else if (x.dtype() == kFloat) work(std::get<KernelsOf<float>>(kernels), x);
  else work(std::get<KernelsOf<Half>>(kernels), as_floats(x));
}

template <class T>
Rows<typename Packing<T>::Input> rows_of(const Tensor& x) {
  return {x.data<const typename Packing<T>::Input>(), x.stride(0)};
}

Tensor packed_linear(const Tensor& x, const Tensor& packed, const OptionalTensor& bias, int64_t out_features) {
  check("packed_linear", x, packed, bias, out_features, std::nullopt);
  Tensor out = empty({x.size(0), out_features}, x.dtype());
  if (x.size(0) == 0) return out;
  with_kernels(x, [&]<class T>(const KernelsOf<T>& kernels, const Tensor& x) {
    multiply<T>(kernels, {rows_of<T>(x), x.size(0), x.size(1), packed.data<const typename Packing<T>::Word>(), packed.size(0),
                       packed.size(1), bias ? bias->data<const T>() : nullptr, out.data<T>(), out_features});
  });
  return out;
}

// out[r] = W[e] x[r] for the rows r from starts[e] to starts[e + 1], of each e of `packed`; row r is the index[r]-th of x.
void multiply_each(const Tensor& x, const int32_t* index, const int32_t* starts, const Tensor& packed,
                   const OptionalTensor& bias, const Tensor& out) {
  const int64_t layers = packed.size(0), tiles = packed.size(1), words = packed.size(2), N = out.size(1);
  with_kernels(x, [&]<class T>(const KernelsOf<T>& kernels, const Tensor& x) {
    auto all = rows_of<T>(x);
    all.index = index;
    const auto* w = packed.data<const typename Packing<T>::Word>();
    const T* b = bias ? bias->data<const T>() : nullptr;
    std::vector<Operands<T>> groups;
    for (int64_t e = 0; e < layers; ++e)
      if (const int64_t first = starts[e], own = starts[e + 1] - first; own > 0)
        groups.push_back({all.from(first), own, x.size(1), w + e * tiles * words * TILE, tiles, words,
                          b == nullptr ? nullptr : b + e * N, out.data<T>() + first * N, N});
    if (!groups.empty()) multiply_groups(kernels, groups);
  });
}

Tensor grouped_packed_linear(const Tensor& x, const Tensor& packed, const OptionalTensor& bias, const OptionalTensor& rows,
                             const Tensor& starts, int64_t out_features) {
  constexpr auto* op = "grouped_packed_linear";
  check(op, x, packed, bias, out_features, packed.dim() == 5 ? packed.size(0) : 0);
  Tensor out = empty({check_experts(op, x, rows, starts, packed.size(0)).count, out_features}, x.dtype());
  multiply_each(x, rows ? rows->data<const int32_t>() : nullptr, starts.data<const int32_t>(), packed, bias, out);
  return out;
}

// A head is read once for all its rows, wherever these lie in y.
std::tuple<> own_head(const Tensor& y, const Tensor& x, const Tensor& slots, const Tensor& weights, const Tensor& present) {
  constexpr auto* op = "own_head";
  CHECK_VALUE(y.dim() == 2 && (y.stride(1) == 1 || y.size(1) == 1) && y.is_cpu(), op,
              ": y must be a matrix on the CPU with the last stride 1, got ", y.sizes());
  check(op, x, weights, std::nullopt, y.size(1), weights.dim() == 5 ? weights.size(0) : 0);
  const int64_t count = x.size(0), heads = weights.size(0), bytes = y.size(1) * bytes_of(y.dtype());
  CHECK_VALUE(y.size(0) == count && y.dtype() == x.dtype(), op, ": y must have ", count, " rows of ", x.dtype(), ", got ",
              y.sizes(), " of ", y.dtype());
  for (const auto& [tensor, name, size] : {std::tuple(&slots, "slots", count), {&present, "present", heads}})
    CHECK_VALUE(tensor->sizes() == Shape{size} && tensor->is_contiguous() && tensor->dtype() == kInt && tensor->is_cpu(), op,
                ": ", name, " must be a contiguous [", size, "] of int32 on the CPU, got ", tensor->sizes(), " of ",
                tensor->dtype());
  const auto *const of_rows = slots.data<const int32_t>(), *const is_there = present.data<const int32_t>();
  std::vector<int32_t> rows, starts{0};
  for (int64_t head = 0; head < heads; ++head) {
    for (int64_t row = 0; row < count && is_there[head] != 0; ++row)
      if (of_rows[row] == head + 1) rows.push_back(row);
    starts.push_back(rows.size());
  }
  if (rows.empty()) return {};
  const Tensor own = empty({starts.back(), y.size(1)}, y.dtype());
  multiply_each(x, rows.data(), starts.data(), weights, std::nullopt, own);
  parallel_for(0, starts.back(), 1, [&](int64_t begin, int64_t end) {
    for (; begin < end; ++begin)
      std::memcpy(y.data<char>() + rows[begin] * y.stride(0) * bytes_of(y.dtype()), own.data<char>() + begin * bytes, bytes);
  });
  return {};
}

const std::vector<Op> ops = {
    {"packed_linear", Boxed<packed_linear>::call, Boxed<packed_linear>::direct},
    {"grouped_packed_linear", Boxed<grouped_packed_linear>::call, Boxed<grouped_packed_linear>::direct},
    {"own_head", Boxed<own_head>::call, Boxed<own_head>::direct},
};

}  // namespace
