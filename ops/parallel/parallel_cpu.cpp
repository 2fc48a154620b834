// Sums and joins over ranks on the CPU, through memory that their processes share: rank_group.py and reductions.py say what is
// computed, and have the layout and the schemas.

#include <algorithm>
#include <array>
#include <cstring>

#include "parallel_cpu_types.h"
#include "shared_buffers.h"
#include "../cpu/op.h"

namespace {

constexpr int64_t kGrain = 1 << 15;  // elements that are worth another thread
constexpr int64_t kTreeLeaves = 8;
constexpr int64_t kShared = 1 << 13;  // elements from which on ranks share the work of a sum

using Sources = std::array<const void*, kMostSummed>;

void check(const Tensor& x, int64_t dim, const char* name, const char* op) {
  CHECK_VALUE(x.dim() == dim && x.is_contiguous() && x.is_cpu(), op, ": ", name, " must be contiguous, of ", dim,
              " dimensions, on the CPU, got ", x.sizes(), " on ", x.place());
}

const SumKernels& kernels_of(Dtype dtype, const char* op) {
  CHECK_VALUE(dtype == kFloat || dtype == kBFloat16 || dtype == kHalf, op,
              ": the dtype must be float32, bfloat16 or float16, got ", dtype);
  return dtype == kFloat ? chosen().float32 : dtype == kBFloat16 ? chosen().bfloat16 : chosen().float16;
}

void copy(char* to, const char* from, int64_t bytes) {
  parallel_for(0, bytes, kGrain * 4, [&](int64_t begin, int64_t end) { std::memcpy(to + begin, from + begin, end - begin); });
}

// kernel(sources, count, to, size) for parts of `size` elements of `source_bytes` and `to_bytes`.
template <class Kernel>
void by_parts(const Kernel& kernel, const Sources& sources, int64_t count, int64_t source_bytes, char* to, int64_t to_bytes,
              int64_t size) {
  parallel_for(0, size, kGrain, [&](int64_t begin, int64_t end) {
    Sources own;
    for (int64_t i = 0; i < count; ++i) own[i] = static_cast<const char*>(sources[i]) + begin * source_bytes;
    kernel(own.data(), count, to + begin * to_bytes, end - begin);
  });
}

Tensor all_reduce(const Tensor& x, const Tensor& place, const Tensor& memory) {
  check(x, 2, "x", "all_reduce");
  const SumKernels& kernels = kernels_of(x.dtype(), "all_reduce");
  Exchange ranks(place, memory, "all_reduce");
  Tensor out = empty(x.sizes(), x.dtype());
  const int64_t size = x.size(0) * x.size(1), bytes = bytes_of(x.dtype());
  const char* const from = x.data<const char>();
  char* const to = out.data<char>();
  if (ranks.size == 1) return copy(to, from, size * bytes), std::move(out);
  const int64_t most = ranks.capacity / bytes;
  for (int64_t begin = 0; begin < size; begin += most) {
    const int64_t count = std::min(most, size - begin);
    const char* const piece = from + begin * bytes;
    // Each rank sums a section, or all of it. The bits are the same.
    const int64_t sections = count < kShared ? 1 : ranks.size, own = sections == 1 ? 0 : ranks.rank;
    const auto section = [&](int64_t number) { return count * number / sections / kLanes * kLanes; };
    const auto end_of = [&](int64_t number) { return number + 1 == sections ? count : section(number + 1); };
    ranks.begin();
    for (int64_t n = 0; n < sections; ++n)
      if (sections == 1 || n != own)
        copy(ranks.own() + section(n) * bytes, piece + section(n) * bytes, (end_of(n) - section(n)) * bytes);
    ranks.meet();
    Sources sources;
    for (int64_t rank = 0; rank < ranks.size; ++rank)
      sources[rank] = (rank == ranks.rank ? piece : ranks.of(rank)) + section(own) * bytes;
    char* const summed = sections == 1 ? to + begin * bytes : ranks.own() + section(own) * bytes;
    by_parts(kernels.sum, sources, ranks.size, bytes, summed, bytes, end_of(own) - section(own));
    if (sections == 1) continue;
    ranks.meet();
    for (int64_t n = 0; n < sections; ++n)
      copy(to + (begin + section(n)) * bytes, ranks.of(n) + section(n) * bytes, (end_of(n) - section(n)) * bytes);
  }
  return out;
}

// Rows of `width` bytes of each rank, side by side.
Tensor all_gather(const Tensor& x, const Tensor& place, const Tensor& memory, int64_t size) {
  check(x, 2, "x", "all_gather");
  Exchange ranks(place, memory, "all_gather");
  CHECK_VALUE(ranks.size == size, "all_gather: size must be that of the group, ", ranks.size, ", got ", size);
  Tensor out = empty({x.size(0), x.size(1) * size}, x.dtype());
  const int64_t width = x.size(1) * bytes_of(x.dtype()), bytes = x.size(0) * width;
  const char* const from = x.data<const char>();
  char* const to = out.data<char>();
  if (size == 1) return copy(to, from, bytes), std::move(out);
  for (int64_t begin = 0; begin < bytes; begin += ranks.capacity) {
    const int64_t end = std::min(bytes, begin + ranks.capacity), rows = (end + width - 1) / width;
    ranks.begin();
    copy(ranks.own(), from + begin, end - begin);
    ranks.meet();
    parallel_for(begin / width, rows, 1 + kGrain / width, [&](int64_t first, int64_t last) {
      for (int64_t rank = 0; rank < size; ++rank)
        for (int64_t row = first; row < last; ++row) {
          const int64_t at = std::max(begin, row * width), until = std::min(end, (row + 1) * width);
          std::memcpy(to + (row * size + rank) * width + at - row * width, ranks.of(rank) + at - begin, until - at);
        }
    });
  }
  return out;
}

Tensor join_parts(const Tensor& parts, const Tensor& place, const Tensor& memory, int64_t size, const std::string& dtype) {
  check(parts, 3, "parts", "join_parts");
  Exchange ranks(place, memory, "join_parts");
  CHECK_VALUE(parts.dtype() == kFloat, "join_parts: parts must be float32, got ", parts.dtype());
  CHECK_VALUE(ranks.size == size && parts.size(0) * size == kTreeLeaves, "join_parts: the parts of all ranks must be ",
              kTreeLeaves, ", got ", parts.size(0), " for ", ranks.size, " ranks");
  const Dtype rounded = dtype == "float32" ? kFloat : dtype == "bfloat16" ? kBFloat16 : kHalf;
  CHECK_VALUE(rounded != kHalf || dtype == "float16", "join_parts: dtype must be float32, bfloat16 or float16, got ", dtype);
  const SumKernels& kernels = kernels_of(rounded, "join_parts");
  Tensor out = empty({parts.size(1), parts.size(2)}, rounded);
  const int64_t count = parts.size(0), all = parts.size(1) * parts.size(2), bytes = bytes_of(rounded);
  const int64_t most = size == 1 ? all : ranks.capacity / 4;
  const auto* const from = parts.data<const float>();
  char* const to = out.data<char>();
  for (int64_t begin = 0; begin < all; begin += most) {
    const int64_t elements = std::min(most, all - begin);
    Sources own, sources;
    for (int64_t part = 0; part < count; ++part) own[part] = from + part * all + begin;
    if (size == 1) {
      by_parts(kernels.join, own, count, 4, to, bytes, all);
      break;
    }
    ranks.begin();
    by_parts(chosen().float32.join, own, count, 4, ranks.own(), 4, elements);
    ranks.meet();
    for (int64_t rank = 0; rank < size; ++rank) sources[rank] = ranks.of(rank);
    by_parts(kernels.join, sources, size, 4, to + begin * bytes, bytes, elements);
  }
  return out;
}

const std::vector<Op> ops = {
    {"all_reduce", Boxed<all_reduce>::call, Boxed<all_reduce>::direct},
    {"all_gather", Boxed<all_gather>::call, Boxed<all_gather>::direct},
    {"join_parts", Boxed<join_parts>::call, Boxed<join_parts>::direct},
};

}  // namespace
