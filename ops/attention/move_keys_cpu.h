// The op of move_keys.py: what is in some slots of a cache goes to other slots. It is in the library of rowwise_cpu.cpp,
// which every model loads, whether it has keys or latents. Where a slot's elements lie says attention_cpu.cpp.

#pragma once

#include <cstring>
#include <optional>
#include <tuple>
#include <vector>

#include "../cpu/tensor.h"

namespace {

// Where the elements of a slot lie within a block: `count` pieces of `bytes` each, `stride` bytes from one to the next.
struct Pieces {
  int64_t first, count, bytes, stride;
};

// A cache, or the scales of one: [blocks, heads, slots, size], with `width` neighbours (W in attention_cpu.cpp).
class Slots {
 public:
  Slots(const Tensor& x, int64_t size, int64_t width, bool as_values)
      : data_(x.data<char>()), heads_(x.size(1)), slots_(x.size(2)), size_(size), element_(bytes_of(x.dtype())),
        block_(x.size(0) > 1 ? x.stride(0) * element_ : 0), as_values_(as_values),
        width_((as_values ? slots_ : size) % width == 0 ? width : 1) {}

  int64_t bytes() const { return heads_ * size_ * element_; }

  // Copies what is in a slot to `to`, or from there, one piece after the other. `slot`: block * slots + offset.
  void read(int64_t slot, char* to) const {
    each(slot, [&](char* piece, int64_t bytes) { copy(to, piece, bytes), to += bytes; });
  }
  void write(int64_t slot, const char* from) const {
    each(slot, [&](char* piece, int64_t bytes) { copy(piece, from, bytes), from += bytes; });
  }

 private:
  template <class Use>
  void each(int64_t slot, const Use& use) const {
    char* const block = data_ + slot / slots_ * block_;
    const Pieces pieces = pieces_of(slot % slots_);
    for (int64_t head = 0; head < heads_; ++head) {
      char* piece = block + head * slots_ * size_ * element_ + pieces.first;
      for (int64_t i = 0; i < pieces.count; ++i, piece += pieces.stride) use(piece, pieces.bytes);
    }
  }

  // Of a head. Keys are [size / width, slots, width], values [slots / width, size, width].
  Pieces pieces_of(int64_t offset) const {
    if (as_values_)
      return {(offset / width_ * size_ * width_ + offset % width_) * element_, size_, element_, width_ * element_};
    return {offset * width_ * element_, size_ / width_, width_ * element_, slots_ * width_ * element_};
  }

  // A piece of 1, 2 or 4 bytes: a call of memcpy for each would take longer.
  static void copy(char* to, const char* from, int64_t bytes) {
    if (bytes == 4) std::memcpy(to, from, 4);
    else if (bytes == 2) std::memcpy(to, from, 2);
    else if (bytes == 1) std::memcpy(to, from, 1);
    else std::memcpy(to, from, bytes);
  }

  char* data_;
  int64_t heads_, slots_, size_, element_, block_;
  bool as_values_;
  int64_t width_;
};

// kCacheWidth of attention_cpu_types.h.
int64_t cache_width(Dtype dtype) {
  return dtype == kChar ? 4 : dtype == kBFloat16 || dtype == kFloat8 ? 2 : 1;
}

// Of blocks that are contiguous each, and may lie apart.
void check_slots(const Tensor& x, const char* name, Dtype dtype, Shape shape) {
  CHECK_VALUE(x.sizes() == shape && x.dtype() == dtype && x.is_cpu() && x.has_contiguous_rows(), "move_keys: ", name,
              " must be ", shape, " of ", dtype, " on the CPU in contiguous blocks, got ", x.sizes(), " of ", x.dtype(),
              " on ", x.place(), " with strides ", x.strides());
}

std::tuple<> move_keys(const Tensor& k_cache, const Tensor& v_cache, const std::optional<Tensor>& k_scale,
                       const std::optional<Tensor>& v_scale, const Tensor& moves, bool latent) {
  constexpr auto* op = "move_keys";
  CHECK_VALUE(moves.dim() == 2, op, ": moves must be [n, 2], got ", moves.sizes());
  const int64_t count = moves.size(0);
  CHECK_VALUE(moves.size(1) == 2 && moves.dtype() == kLong && moves.is_cpu() && moves.is_contiguous(), op,
              ": moves must be a contiguous [n, 2] of int64 on the CPU, got ", moves.sizes(), " of ", moves.dtype(), " on ",
              moves.place());
  CHECK_VALUE(k_cache.dim() == 4 && v_cache.dim() == 4, op, ": caches must be [B, K, S, H], got ", k_cache.sizes(), " and ",
              v_cache.sizes());
  const int64_t blocks = k_cache.size(0), heads = k_cache.size(1), size = k_cache.size(2);
  const auto dtype = k_cache.dtype();
  std::vector<Slots> all;
  for (const auto* cache : {&k_cache, &v_cache}) {
    const int64_t dim = cache->size(3);
    check_slots(*cache, cache == &k_cache ? "k_cache" : "v_cache", dtype, {blocks, heads, size, dim});
    all.emplace_back(*cache, dim, cache_width(dtype), cache == &v_cache && !latent);  // latents are kept as keys
  }
  for (const auto* scale : {&k_scale, &v_scale}) {
    if (!scale->has_value()) continue;
    check_slots(**scale, scale == &k_scale ? "k_scale" : "v_scale", kFloat, {blocks, heads, size});
    all.emplace_back(**scale, 1, 1, false);
  }
  const auto* slot = moves.data<const int64_t>();
  for (int64_t i = 0; i < 2 * count; ++i)
    CHECK_INDEX(slot[i] >= 0 && slot[i] < blocks * size, op, ": moves[", i / 2, ", ", i % 2, "] is ", slot[i],
                ", outside the cache of ", blocks, " blocks of ", size);
  std::vector<char> kept;  // all are read before one is written
  for (const Slots& slots : all) {
    kept.resize(count * slots.bytes());
    for (int64_t i = 0; i < count; ++i) slots.read(slot[2 * i], kept.data() + i * slots.bytes());
    for (int64_t i = 0; i < count; ++i) slots.write(slot[2 * i + 1], kept.data() + i * slots.bytes());
  }
  return {};
}

}  // namespace
