// The kernels of sampling for one instruction set: compiled once for each by ../cpu/one_isa.cpp, which explains the macros.

#include <algorithm>
#include <cmath>

#include "sampling_cpu_noise.h"

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

// A part of a chunk's logits, all of them in the vocabulary.
template <class T>
INLINE Part load_part_of(const T* from) {
#if WIDTH == 512
  return load_floats(from);
#else
  if constexpr (std::is_same_v<T, float>) {
    return load_part(from);
  } else if constexpr (std::is_same_v<T, BFloat16>) {
    return reinterpret_cast<Part>(__builtin_convertvector(*reinterpret_cast<const HalfPart*>(from), IntPart) << 16);
  } else {
#if WIDTH == 256
    return reinterpret_cast<Part>(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
#elif defined(__aarch64__)
    return load_part(from);
#else
    Part x;
    for (int64_t i = 0; i < kPartLanes; ++i) x[i] = from[i];
    return x;
#endif
  }
#endif
}

// Calls each(i, the logits from the chunk's i-th on) for all parts of chunk c; -inf past the end of the vocabulary.
template <class T, class Each>
INLINE void each_part(const T* logits, const Row& row, int64_t c, const Each& each) {
  const int64_t begin = c * kChunk, count = std::min(kChunk, row.vocabulary - begin);
  if (count == kChunk) {
    for (int64_t i = 0; i < kChunk; i += kPartLanes) each(i, load_part_of(logits + begin + i));
  } else {
    float copy[kChunk];
    for (int64_t i = 0; i < kChunk; ++i) copy[i] = i < count ? static_cast<float>(logits[begin + i]) : -kInfinity;
    for (int64_t i = 0; i < kChunk; i += kPartLanes) each(i, load_part(copy + i));
  }
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
INLINE double kept_in_chunk(const Row& row, int64_t c, float least, IntPart (&counts)[kPartsOfVec]) {
  constexpr int64_t kChains = 4;  // sums that do not wait for each other
  Part sums[kChains][kPartsOfVec] = {};
  for (int64_t i = 0; i < kChunk; i += kChains * kLanes)
#pragma GCC unroll 4
    for (int64_t j = 0; j < kChains; ++j)
#pragma GCC unroll 4
      for (int64_t p = 0; p < kPartsOfVec; ++p) {
        const Part w = load_part(row.weights + c * kChunk + i + j * kLanes + p * kPartLanes);
        const auto kept = w >= least;
        sums[j][p] += kept ? w : Part{};
        counts[p] -= reinterpret_cast<IntPart>(kept);
      }
  Vec sum;
  for (int64_t p = 0; p < kPartsOfVec; ++p)
    store_part(reinterpret_cast<float*>(&sum) + p * kPartLanes,
               (sums[0][p] + sums[1][p]) + (sums[2][p] + sums[3][p]));
  return sum_of_lanes(sum);
}

TARGET Kept kept(const Row& row, float least) {
  double sum = 0, count = 0;
  IntPart counts[kPartsOfVec] = {};
  for (int64_t c = 0; c < row.num_chunks; ++c)
    if (row.largest[c] >= least) sum += kept_in_chunk(row, c, least, counts);
  for (const IntPart& part : counts)
    for (int64_t i = 0; i < kPartLanes; ++i) count += part[i];
  return {count, sum};
}

TARGET double kept_of_chunks(const Row& row, float least, float* sums) {
  double count = 0;
  IntPart counts[kPartsOfVec] = {};
  for (int64_t c = 0; c < row.num_chunks; ++c)
    sums[c] = row.largest[c] >= least ? static_cast<float>(kept_in_chunk(row, c, least, counts)) : 0;
  for (const IntPart& part : counts)
    for (int64_t i = 0; i < kPartLanes; ++i) count += part[i];
  return count;
}

// The weights from `least` to below `end`.
TARGET void gather(const Row& row, float least, float end, std::vector<float>& found) {
  found.clear();
  for (int64_t c = 0; c < row.num_chunks; ++c) {
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
  const float bound = std::max(kth_of_chunks(row.largest, row.num_chunks, k, found), 0.f);
  return search(row, bound, static_cast<double>(k), &Kept::count, found);
}

// Of tokens, those with the largest sum of noise less depth, the lowest of equal ones.
class Race {
 public:
  Race(const Choice& choice, int32_t limit) : choice_(choice), limit_(limit) {}

  // The largest depth at which a token of such noise stays and may win.
  INLINE int32_t deepest(int32_t noise) const { return std::min(limit_, noise - best_); }

  INLINE void take(int32_t sum, int64_t token) {
    if (sum > best_ || (sum == best_ && token < winner_)) {
      best_ = sum;
      winner_ = token;
    }
  }

  // A token of a block whose least E is that, which another token has. Looked at when there are 16.
  INLINE void keep(int64_t token, int32_t depth, float least) {
    tokens_[count_] = static_cast<uint32_t>(token);
    depths_[count_] = depth;
    least_[count_] = least;
    if (++count_ == kLanes) finish();
  }

  // Looks at those that are kept.
  TARGET void finish() {
    if (count_ == 0) return;
    int32_t noise[kLanes];
    other_noise(choice_, tokens_, least_, noise);
    for (int64_t i = 0; i < count_; ++i) take(noise[i] - depths_[i], tokens_[i]);
    count_ = 0;
  }

  Drawn winner() const { return {winner_, best_}; }

 private:
  const Choice& choice_;
  const int32_t limit_;
  int32_t best_ = std::numeric_limits<int32_t>::min() / 2;
  int64_t winner_ = 0, count_ = 0;
  uint32_t tokens_[kLanes] = {};
  int32_t depths_[kLanes] = {};
  float least_[kLanes] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
};

INLINE IntVec depths(Vec x, float maximum, float unit) {
  const Vec depth = (maximum - x) * unit, deepest = broadcast(kDeepest);
  return __builtin_convertvector(depth < deepest ? depth : deepest, IntVec);
}

INLINE int32_t depth_of(float x, float maximum, float unit) {
  return static_cast<int32_t>(std::min((maximum - x) * unit, static_cast<float>(kDeepest)));
}

// Those tokens of a block that stay and may win.
template <class T>
INLINE void look_into(const T* logits, const Row& row, int64_t block, float maximum, float unit, float least_weight,
                      float least, int64_t place, int32_t noise, Race& race) {
  const int64_t begin = block * kBlock - row.first, first = begin + place;
  const auto stays = [&](int64_t token) { return least_weight == 0 || row.weights[token] >= least_weight; };
  if (first < row.vocabulary && stays(first)) {
    const int32_t depth = depth_of(static_cast<float>(logits[first]), maximum, unit);
    if (depth <= race.deepest(noise)) race.take(noise - depth, row.first + first);
  }
  for (int64_t i = begin; i < begin + kBlock && i < row.vocabulary; i += kLanes) {
    const IntVec depth = depths(load_logits(logits, i, row.vocabulary), maximum, unit);
    const IntVec near = depth <= race.deepest(noise);
    if (!any(near)) continue;
    for (int64_t lane = 0; lane < kLanes; ++lane)
      if (near[lane] && i + lane != first && i + lane < row.vocabulary && stays(i + lane))
        race.keep(row.first + i + lane, depth[lane], least);
  }
}

// Of the tokens with a weight of at least `least_weight` and a depth of at most `limit` the one that is drawn. Blocks whose
// noise cannot bring the largest logit of their chunk up to the best token so far are not looked into.
template <class T>
TARGET Drawn draw(const void* all_logits, const Choice& choice, const Row& row, float maximum, float unit,
                  float least_weight, int32_t limit) {
  const T* logits = static_cast<const T*>(all_logits);
  constexpr int64_t kBlocks = kChunk / kBlock, kTogether = kLanes / kBlocks;  // of a chunk; chunks of a vector
  int64_t count = 0, top = 0;
  for (int64_t c = 0; c < row.num_chunks; ++c) {
    row.chunks[count] = static_cast<int32_t>(c);
    if (row.peaks[c] == maximum && row.peaks[row.chunks[top]] != maximum) top = count;
    count += (least_weight == 0 || row.largest[c] >= least_weight) && depth_of(row.peaks[c], maximum, unit) <= limit;
  }
  Race race(choice, limit);
  if (count == 0) return race.winner();
  std::swap(row.chunks[0], row.chunks[top]);  // so that the first is a hard one to beat
  std::fill_n(row.chunks + count, kTogether, row.chunks[0]);
  for (int64_t i = 0; i < count; i += kTogether) {
    uint32_t blocks[kLanes];
    for (int64_t j = 0; j < kLanes; ++j) blocks[j] = row.first / kBlock + row.chunks[i + j / kBlocks] * kBlocks + j % kBlocks;
    BlockNoise noise;
    block_noise(choice, blocks, noise);
    for (int64_t j = 0; j < std::min(kLanes, (count - i) * kBlocks); ++j)
      if (depth_of(row.peaks[row.chunks[i + j / kBlocks]], maximum, unit) <= race.deepest(noise.noise[j]))
        look_into(logits, row, blocks[j], maximum, unit, least_weight, noise.least[j], noise.place[j], noise.noise[j], race);
    if (i == 0) race.finish();
  }
  race.finish();
  return race.winner();
}

// Of each chunk the sum of term(maximum - x) over its logits x above -inf.
template <class T, class Term>
INLINE void sums_of_chunks(const T* logits, const Row& row, float maximum, float* sums, const Term& term) {
  for (int64_t c = 0; c < row.num_chunks; ++c) {
    Vec terms = {};
    for (int64_t i = c * kChunk; i < (c + 1) * kChunk; i += kLanes) {
      const Vec x = load_logits(logits, i, row.vocabulary);
      terms += x > -kInfinity ? term(maximum - x) : Vec{};
    }
    sums[c] = sum_of_lanes(terms);
  }
}

template <class T>
TARGET void distances(const void* all_logits, const Row& row, float maximum, float* counts, float* sums) {
  const T* logits = static_cast<const T*>(all_logits);
  sums_of_chunks(logits, row, maximum, counts, [](Vec) TARGET { return broadcast(1); });
  sums_of_chunks(logits, row, maximum, sums, [](Vec distance) TARGET { return distance; });
}

template <class T>
TARGET void squares(const void* all_logits, const Row& row, float maximum, float mean, float* sums) {
  sums_of_chunks(static_cast<const T*>(all_logits), row, maximum, sums,
                 [&](Vec distance) TARGET { return (distance - mean) * (distance - mean); });
}

// The standard deviation of a row's logits above -inf.
template <class T>
TARGET double standard_deviation(const void* logits, const Row& row, float maximum, std::vector<float>& found) {
  found.resize(2 * row.num_chunks);
  float *const counts = found.data(), *const sums = counts + row.num_chunks;
  distances<T>(logits, row, maximum, counts, sums);
  const double count = total_of(counts, row.num_chunks);
  squares<T>(logits, row, maximum, static_cast<float>(total_of(sums, row.num_chunks) / count), sums);
  return deviation_of(total_of(sums, row.num_chunks), count);
}

// The weights of the chunks whose largest logit is at least `least`, and the largest weight of each; of others -1 for that.
template <class T>
TARGET void weigh(const void* all_logits, const Row& row, float maximum, float scale, float least) {
  const T* logits = static_cast<const T*>(all_logits);
  for (int64_t c = 0; c < row.num_chunks; ++c) {
    row.largest[c] = -1;
    if (row.peaks[c] < least) continue;
    Part largest = {};
    each_part(logits, row, c, [&](int64_t i, Part x) TARGET {
      const Part w = exp2((x - maximum) * scale);
      store_part(row.weights + c * kChunk + i, w);
      largest = max(w, largest);
    });
    row.largest[c] = largest_lane(largest);
  }
}

template <class T>
TARGET float survey(const void* all_logits, const Row& row) {
  const T* logits = static_cast<const T*>(all_logits);
  float maximum = -kInfinity;
  IntPart greatest = {};  // of all bits without the sign: those of NaN are above those of infinity
  for (int64_t c = 0; c < row.num_chunks; ++c) {
    Part largest = Part{} - kInfinity;
    each_part(logits, row, c, [&](int64_t, Part x) TARGET {
      const IntPart magnitude = reinterpret_cast<IntPart>(x) & 0x7fffffff;
      greatest = magnitude > greatest ? magnitude : greatest;
      largest = max(x, largest);
    });
    row.peaks[c] = largest_lane(largest);
    maximum = std::max(maximum, row.peaks[c]);
  }
  bool has_nan = false;
  for (int64_t i = 0; i < kPartLanes; ++i) has_nan |= greatest[i] > 0x7f800000;
  return has_nan ? std::numeric_limits<float>::quiet_NaN() : maximum;
}

template <class T>
TARGET int64_t first_of(const void* all_logits, const Row& row, float maximum) {
  const T* logits = static_cast<const T*>(all_logits);
  for (int64_t c = 0; c < row.num_chunks; ++c)
    for (int64_t i = c * kChunk; row.peaks[c] == maximum && i < std::min(row.vocabulary, (c + 1) * kChunk); ++i)
      if (static_cast<float>(logits[i]) == maximum) return i;
  return kNoToken;
}

// The token of one row.
template <class T>
TARGET int64_t sample(const void* logits, const Choice& choice, Row& row, std::vector<float>& found) {
  const float maximum = survey<T>(logits, row);
  if (!std::isfinite(maximum)) return kNoToken;
  if (choice.temperature <= 0) return first_of<T>(logits, row, maximum);
  const float temperature = std::max(choice.temperature, kMinTemperature);
  const float unit = kLog2E * kHalving / temperature;  // depths of a logit's unit
  float least = 0;
  if (choice.top_k < row.vocabulary || choice.top_p < 1) {
    // As many chunks as top-k keeps tokens are enough for it.
    const float peak = choice.top_k < row.vocabulary ? kth_of_chunks(row.peaks, row.num_chunks, choice.top_k, found) : -kInfinity;
    weigh<T>(logits, row, maximum, 1 / temperature * kLog2E, peak);
  }
  if (choice.top_k < row.vocabulary) least = kth_largest(row, choice.top_k, found);
  if (choice.top_p < 1) {
    const double total = kept(row, least).sum;
    // Of all weights, those below this sum to less than what may go.
    if (least == 0) least = least_of_top_p(choice, total, row.vocabulary);
    least = search(row, least, choice.top_p * total, &Kept::sum, found);
  }
  const double deviation = choice.top_n_sigma > 0 ? standard_deviation<T>(logits, row, maximum, found) : 0;
  return draw<T>(logits, choice, row, maximum, unit, least, deepest_kept(choice, deviation, unit)).token;
}

template <class T>
constexpr RowKernels row_kernels() {
  return {sample<T>, survey<T>, first_of<T>, weigh<T>, distances<T>, squares<T>, draw<T>};
}

inline Kernels kernels() {
  return {row_kernels<float>(), row_kernels<BFloat16>(), row_kernels<Half>(), kept_of_chunks, gather, kth_largest};
}

}  // namespace ISA
}  // namespace
