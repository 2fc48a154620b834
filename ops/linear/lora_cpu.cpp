// Low-rank changes of a linear layer on the CPU: lora.py says what is computed, and has the layout and the schema.
//
// Rows of one slot, wherever they lie, are taken up to four at a time, which read the slot's weights once. Where each thread
// has several such blocks, it takes one after the other, A and B. Else all take A, a block and a part at a time, and then B, a
// block and some tiles of outputs at a time.

#include <algorithm>
#include <array>
#include <vector>

#include "lora_cpu_types.h"
#include "../cpu/tensor.h"
#include "../cpu/op.h"

namespace {

constexpr int64_t kGrain = 1 << 15;  // multiplications that are worth another thread
constexpr int64_t kBlocksPerThread = 4;  // from which on blocks are shared evenly enough

int64_t tiles_of(int64_t outputs) { return (outputs + kLanes - 1) / kLanes; }

struct Block {
  int64_t slot, count;
  std::array<int64_t, kMostRows> rows;
};

// The rows that have a slot. Throws where one names a slot that there is not.
std::vector<Block> blocks_of(const int32_t* slots, int64_t rows, int64_t num_slots) {
  std::vector<Block> blocks;
  if (std::all_of(slots, slots + rows, [](int32_t slot) { return slot == 0; })) return blocks;
  std::vector<int64_t> open(num_slots + 1, -1);  // by slot: its last block, unless that is full
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t slot = slots[row];
    CHECK_INDEX(slot >= 0 && slot <= num_slots, "add_lora: slots must be from 0 to ", num_slots, ", got ", slot);
    if (slot == 0) continue;
    if (open[slot] < 0) {
      open[slot] = blocks.size();
      blocks.push_back({slot - 1, 0, {}});
    }
    Block& block = blocks[open[slot]];
    block.rows[block.count++] = row;
    if (block.count == kMostRows) open[slot] = -1;
  }
  return blocks;
}

void check(const Tensor& tensor, const char* name, Dtype dtype, const Shape& sizes) {
  CHECK_VALUE(tensor.sizes() == sizes && tensor.dtype() == dtype && tensor.is_contiguous() && tensor.is_cpu(),
              "add_lora: ", name, " must be a contiguous ", sizes, " of ", dtype, " on the CPU, got ", tensor.sizes(), " of ",
              tensor.dtype(), " on ", tensor.place());
}

// Returns the outputs of each part.
std::vector<int64_t> check_all(const Tensor& y, const Tensor& x, const Tensor& slots, const Tensor& a, const Tensor& b,
                               const Tensor& ranks, const Tensor& scales, const Tensor& starts) {
  const Dtype dtype = y.dtype();
  CHECK_VALUE(dtype == kBFloat16 || dtype == kFloat || dtype == kHalf,
              "add_lora: y must be float32, bfloat16 or float16, got ", dtype);
  for (const Tensor* tensor : {&y, &x})
    CHECK_VALUE(tensor->dim() == 2 && tensor->dtype() == dtype && tensor->is_cpu() &&
                    (tensor->stride(1) == 1 || tensor->size(1) == 1) && tensor->size(0) == y.size(0),
                "add_lora: x and y must be matrices of as many rows, of one dtype on the CPU, with the last stride 1, got ",
                x.sizes(), " of ", x.dtype(), " and ", y.sizes(), " of ", dtype);
  CHECK_VALUE(a.dim() == 4 && b.dim() == 4, "add_lora: a and b must have 4 dimensions, got ", a.sizes(), " and ", b.sizes());
  const int64_t num_slots = a.size(0), parts = a.size(1), rank = a.size(2);
  check(a, "a", dtype, {num_slots, parts, rank, x.size(1)});
  check(b, "b", dtype, {num_slots, b.size(1), rank, kLanes});
  check(ranks, "ranks", kInt, {num_slots, parts});
  check(scales, "scales", kFloat, {num_slots, parts});
  check(starts, "starts", kInt, {parts + 1});
  check(slots, "slots", kInt, {y.size(0)});
  const auto* const from = starts.data<const int32_t>();
  std::vector<int64_t> outputs(parts);
  int64_t tiles = 0;
  for (int64_t part = 0; part < parts; ++part) {
    outputs[part] = from[part + 1] - from[part];
    tiles += tiles_of(outputs[part]);
  }
  CHECK_VALUE(from[0] == 0 && std::is_sorted(from, from + parts + 1) && from[parts] == y.size(1) && tiles == b.size(1),
              "add_lora: starts must rise from 0 to the ", y.size(1), " columns of y, with ", b.size(1), " tiles of 16");
  const auto* const of_slots = ranks.data<const int32_t>();
  CHECK_INDEX(std::all_of(of_slots, of_slots + num_slots * parts, [&](int32_t r) { return r >= 0 && r <= rank; }),
              "add_lora: ranks must be from 0 to ", rank);
  return outputs;
}

Tensor add_lora(const Tensor& y, const Tensor& x, const Tensor& slots, const Tensor& a, const Tensor& b, const Tensor& ranks,
                const Tensor& scales, const Tensor& starts) {
  const std::vector<int64_t> outputs = check_all(y, x, slots, a, b, ranks, scales, starts);
  const int64_t rows = x.size(0), inputs = x.size(1), parts = a.size(1), most = a.size(2), tiles = b.size(1);
  Tensor shrunk = empty({rows, parts, most}, kFloat);
  const std::vector<Block> blocks = blocks_of(slots.data<const int32_t>(), rows, a.size(0));
  if (blocks.empty()) return shrunk;
  const LoraKernels& kernels = y.dtype() == kFloat      ? chosen().float32
                               : y.dtype() == kBFloat16 ? chosen().bfloat16
                                                        : chosen().float16;
  const int64_t item = bytes_of(y.dtype()), stride = (inputs + kLanes - 1) / kLanes * kLanes;
  const auto *const of_slots = ranks.data<const int32_t>();
  const auto *const factors = scales.data<const float>();
  auto* const s = shrunk.data<float>();
  const auto *const from = x.data<const char>(), *const of_a = a.data<const char>(), *const of_b = b.data<const char>();
  auto* const to = y.data<char>();
  const int64_t num_blocks = blocks.size();

  const auto shrink = [&](const Block& block, int64_t part, const float* wide) {
    const int64_t place = block.slot * parts + part;
    Shrink work = {wide, block.count, stride, inputs, of_slots[place], of_a + place * most * inputs * item, factors[place], {}};
    for (int64_t m = 0; m < block.count; ++m) work.s[m] = s + (block.rows[m] * parts + part) * most;
    if (work.rank > 0) kernels.shrink(work);
  };
  const auto widen = [&](const Block& block, float* wide) {
    for (int64_t m = 0; m < block.count; ++m) kernels.widen(from + block.rows[m] * x.stride(0) * item, wide + m * stride, inputs);
  };
  // The tiles of b from `begin` to `end`.
  const auto expand = [&](const Block& block, int64_t begin, int64_t end) {
    for (int64_t part = 0, tile = 0, start = 0; part < parts; start += outputs[part], tile += tiles_of(outputs[part]), ++part) {
      const int64_t first = std::max(begin, tile), own = std::min(end, tile + tiles_of(outputs[part])) - first;
      const int64_t skipped = (first - tile) * kLanes;
      Expand work = {{}, block.count, of_slots[block.slot * parts + part], std::min(own * kLanes, outputs[part] - skipped),
                     of_b + (block.slot * tiles + first) * most * kLanes * item, most * kLanes, {}};
      if (own <= 0 || work.rank == 0) continue;
      for (int64_t m = 0; m < block.count; ++m) {
        work.s[m] = s + (block.rows[m] * parts + part) * most;
        work.y[m] = to + (block.rows[m] * y.stride(0) + start + skipped) * item;
      }
      kernels.expand(work);
    }
  };

  if (num_blocks >= kBlocksPerThread * num_threads()) {
    parallel_for(0, num_blocks, 1 + kGrain / (most * (inputs + y.size(1))), [&](int64_t begin, int64_t end) {
      std::vector<float> wide(kMostRows * stride);
      for (int64_t i = begin; i < end; ++i) {
        widen(blocks[i], wide.data());
        for (int64_t part = 0; part < parts; ++part) shrink(blocks[i], part, wide.data());
        expand(blocks[i], 0, tiles);
      }
    });
    return shrunk;
  }
  parallel_for(0, num_blocks * parts, 1 + kGrain / (most * inputs), [&](int64_t begin, int64_t end) {
    std::vector<float> wide(kMostRows * stride);
    for (int64_t i = begin; i < end; ++i) {
      if (i == begin || i % parts == 0) widen(blocks[i / parts], wide.data());
      shrink(blocks[i / parts], i % parts, wide.data());
    }
  });
  parallel_for(0, num_blocks * tiles, 1 + kGrain / (most * kLanes), [&](int64_t begin, int64_t end) {
    for (int64_t next; begin < end; begin = next) {
      next = std::min(end, (begin / tiles + 1) * tiles);
      expand(blocks[begin / tiles], begin % tiles, begin % tiles + next - begin);
    }
  });
  return shrunk;
}

const std::vector<Op> ops = {{"add_lora", Boxed<add_lora>::call, Boxed<add_lora>::direct}};

}  // namespace
