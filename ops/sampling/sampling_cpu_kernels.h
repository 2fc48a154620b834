// The kernels of sampling for one instruction set: compiled once for each by ../cpu/one_isa.cpp, which explains the macros.

#include <algorithm>
#include <cmath>
#include <functional>

#include "../cpu/vectors.h"
#include "sampling_cpu_types.h"

namespace {
namespace ISA {

// A chunk's logits from `from` on, 16 of them; -inf past the end of the vocabulary.
template <class T>
INLINE Vec load_logits(const T* logits, int64_t from, int64_t vocabulary) {
  if (from + kLanes <= vocabulary) return load_floats(logits + from);
  const IntVec lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const auto left = static_cast<int32_t>(std::max<int64_t>(vocabulary - from, 0));
  const Vec x = left > 0 ? load_floats(logits + from, left) : Vec{};
  return lane < left ? x : broadcast(-kInfinity);
}

INLINE bool any(IntVec mask) {
#if WIDTH == 512
  return _mm512_test_epi32_mask(reinterpret_cast<__m512i>(mask), reinterpret_cast<__m512i>(mask)) != 0;
#else
  int32_t lanes = 0;
  for (int i = 0; i < kLanes; ++i) lanes |= mask[i];
  return lanes != 0;
#endif
}

// How many weights there are from some bound on, and their sum.
struct Kept {
  double count, sum;
};

// The sum of the weights of chunk c that are at least `least`; their number is added to `counts`, lane by lane.
INLINE double kept_in_chunk(const Row& row, int64_t c, float least, IntVec& counts) {
  constexpr int64_t kChains = 4;  // sums that do not wait for each other
  Vec sums[kChains] = {};
  for (int64_t i = 0; i < kChunk; i += kChains * kLanes)
    for (int64_t j = 0; j < kChains; ++j) {
      const Vec w = load(row.weights + c * kChunk + i + j * kLanes);
      const auto kept = w >= least;
      sums[j] += kept ? w : Vec{};
      counts -= reinterpret_cast<IntVec>(kept);
    }
  return sum_of_lanes((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

TARGET Kept kept(const Row& row, float least) {
  double sum = 0, count = 0;
  IntVec counts = {};
  for (int64_t c = 0; c < row.chunks; ++c)
    if (row.largest[c] >= least) sum += kept_in_chunk(row, c, least, counts);
  for (int i = 0; i < kLanes; ++i) count += counts[i];
  return {count, sum};
}

// The weights from `least` to below `end`.
TARGET void gather(const Row& row, float least, float end, std::vector<float>& found) {
  found.clear();
  for (int64_t c = 0; c < row.chunks; ++c) {
    if (row.largest[c] < least) continue;
    for (int64_t i = c * kChunk; i < (c + 1) * kChunk; i += kLanes) {
      const Vec w = load(row.weights + i);
      if (!any(reinterpret_cast<IntVec>(w >= least) & reinterpret_cast<IntVec>(w < end))) continue;
      for (int64_t j = i; j < i + kLanes; ++j)
        if (row.weights[j] >= least && row.weights[j] < end) found.push_back(row.weights[j]);
    }
  }
}

// The largest t such that the `amount` of the weights of at least t, their number or their sum, reaches `target`; at least
// `least`. Positive floats are in the order of their bits, so the search halves a range of those, until few weights are
// left in it.
TARGET float search(const Row& row, float least, double target, double Kept::* amount, std::vector<float>& found) {
  int32_t low = __builtin_bit_cast(int32_t, least), high = __builtin_bit_cast(int32_t, 1.f) + 1;
  Kept from_low = kept(row, least), from_high = {0, 0};
  if (from_low.*amount <= target) return least;
  while (from_low.count - from_high.count > kFew && high - low > 1) {
    const int32_t middle = low + (high - low) / 2;
    const Kept from_middle = kept(row, __builtin_bit_cast(float, middle));
    if (from_middle.*amount >= target) {
      low = middle;
      from_low = from_middle;
    } else {
      high = middle;
      from_high = from_middle;
    }
  }
  gather(row, __builtin_bit_cast(float, low), __builtin_bit_cast(float, high), found);
  std::sort(found.begin(), found.end(), std::greater<>());
  double sum = from_high.*amount;
  for (const float w : found)
    if ((sum += amount == &Kept::sum ? w : 1) >= target) return w;
  return __builtin_bit_cast(float, low);
}

// The k-th largest weight. Where there are k chunks or more, each of the k with the largest maxima has a weight of at
// least the k-th of these maxima; so there are k weights of at least that much.
TARGET float kth_largest(const Row& row, int64_t k, std::vector<float>& found) {
  float bound = 0;
  if (k <= row.chunks) {
    found.assign(row.largest, row.largest + row.chunks);
    std::nth_element(found.begin(), found.begin() + (k - 1), found.end(), std::greater<>());
    bound = found[k - 1];
  }
  return search(row, bound, static_cast<double>(k), &Kept::count, found);
}

// The first token where the running sum of the weights of at least `least` exceeds `uniform` times their sum.
TARGET int64_t draw(const Row& row, float least, double uniform) {
  double total = 0;
  int64_t last_chunk = 0;
  IntVec counts = {};
  for (int64_t c = 0; c < row.chunks; ++c) {
    if (least > 0) row.sums[c] = row.largest[c] >= least ? kept_in_chunk(row, c, least, counts) : 0;
    if (row.sums[c] > 0) last_chunk = c;
    total += row.sums[c];
  }
  const double threshold = uniform * total;
  double sum = 0;
  int64_t c = 0, last = 0;
  for (; c < last_chunk && sum + row.sums[c] <= threshold; ++c) sum += row.sums[c];
  for (; c <= last_chunk; ++c)
    for (int64_t i = c * kChunk; i < (c + 1) * kChunk; ++i) {
      if (row.weights[i] < least || row.weights[i] == 0) continue;
      last = i;  // where rounding leaves nothing above the threshold, it is the last one
      sum += row.weights[i];
      if (sum > threshold) return i;
    }
  return last;
}

// The standard deviation of a row's logits above -inf; infinite, so that every token stays, where a square overflows.
template <class T>
TARGET double standard_deviation(const T* logits, const Row& row, float maximum) {
  const auto total = [&](auto term) TARGET {
    double sum = 0;
    for (int64_t c = 0; c < row.chunks; ++c) {
      Vec terms = {};
      for (int64_t i = c * kChunk; i < (c + 1) * kChunk; i += kLanes) {
        const Vec x = load_logits(logits, i, row.vocabulary);
        terms += x > -kInfinity ? term(maximum - x) : Vec{};
      }
      sum += sum_of_lanes(terms);
    }
    return sum;
  };
  const double count = total([](Vec) TARGET { return broadcast(1); });
  const float mean = static_cast<float>(total([](Vec distance) TARGET { return distance; }) / count);
  const double squares = total([&](Vec distance) TARGET { return (distance - mean) * (distance - mean); });
  return std::isnan(squares) ? kInfinity : std::sqrt(squares / count);
}

// The token of one row.
template <class T>
TARGET int64_t sample(const void* all_logits, const Choice& choice, Row& row, std::vector<float>& found) {
  const T* logits = static_cast<const T*>(all_logits);
  float maximum = -kInfinity;
  IntVec greatest = {};  // of all bits without the sign: those of NaN are above those of infinity
  for (int64_t c = 0; c < row.chunks; ++c) {
    Vec largest = broadcast(-kInfinity);
    for (int64_t i = 0; i < kChunk; i += kLanes) {
      const Vec x = load_logits(logits, c * kChunk + i, row.vocabulary);
      const IntVec magnitude = bits(x) & 0x7fffffff;
      greatest = magnitude > greatest ? magnitude : greatest;
      largest = max(x, largest);
    }
    row.largest[c] = largest_lane(largest);
    maximum = std::max(maximum, row.largest[c]);
  }
  if (any(greatest > 0x7f800000) || maximum == kInfinity || maximum == -kInfinity) return kNoToken;
  if (choice.temperature <= 0) {
    for (int64_t c = 0; c < row.chunks; ++c)
      for (int64_t i = c * kChunk; row.largest[c] == maximum && i < std::min(row.vocabulary, (c + 1) * kChunk); ++i)
        if (static_cast<float>(logits[i]) == maximum) return i;
  }
  const float scale = 1 / std::max(choice.temperature, kMinTemperature) * kLog2E;
  for (int64_t c = 0; c < row.chunks; ++c) {
    Vec sum = {}, largest = {};
    for (int64_t i = c * kChunk; i < (c + 1) * kChunk; i += kLanes) {
      const Vec x = load_logits(logits, i, row.vocabulary);
      const Vec w = exp2((x - maximum) * scale);
      store(row.weights + i, w);
      largest = max(w, largest);
      sum += w;
    }
    row.largest[c] = largest_lane(largest);
    row.sums[c] = sum_of_lanes(sum);
  }
  float least = 0;
  if (choice.top_k < row.vocabulary) least = kth_largest(row, choice.top_k, found);
  if (choice.top_p < 1) {
    const double total = kept(row, least).sum;
    // Of all weights, those below this sum to less than what may go.
    if (least == 0) least = static_cast<float>((1 - choice.top_p) * total / row.vocabulary * 0.999);
    least = search(row, least, choice.top_p * total, &Kept::sum, found);
  }
  least = std::max(least, choice.min_p);
  if (choice.top_n_sigma > 0) {
    const double depth = choice.top_n_sigma * standard_deviation(logits, row, maximum);
    least = std::max(least, exp2(static_cast<float>(-depth * scale)));
  }
  return draw(row, least, choice.uniform);
}

inline Kernels kernels() { return {sample<float>, sample<BFloat16>, sample<Half>}; }

}  // namespace ISA
}  // namespace
