// Choosing tokens over ranks, each of which has the logits of a run of whole chunks: the same token as of all logits.
//
// Ranks tell each other the maxima of chunks, sums of chunks and the largest weights, and each then knows of a row what one
// process would. What that adds up chunk after chunk, all ranks add up in the same order. Each draws among its own tokens, and
// the best of these wins: noise is that of the token's id in the vocabulary.

#pragma once

#include <iterator>

#include "sampling_cpu_types.h"
#include "../parallel/shared_buffers.h"

namespace {

// What a row keeps from one step of its choice to the next.
struct RankRow {
  const char* logits;
  Choice choice;
  Row own;
  float maximum = 0;          // of all ranks
  float least = 0;            // the smallest weight that stays
  double deviation = 0;       // of all logits
  int32_t low = 0, high = 0;  // of the search for top-p: bits of weights
  double target = 0;          // the sum that is searched for
  struct {
    double count, sum;
  } from_low = {}, from_high = {};  // of the weights from there on
  std::vector<float> weights, largest, peaks, found;
  std::vector<int32_t> chunks;

  bool is_open() const { return from_low.count - from_high.count > kFew && high - low > 1; }
};

// A few rows at a time: their weights shall stay in the processor's caches.
class RankRows {
 public:
  // `width`: tokens of a rank, of which those past the vocabulary are not looked at; whole chunks. `rows` is memory.
  RankRows(Exchange& ranks, const Kernels& kernels, const RowKernels& steps, int64_t width, int64_t vocabulary, std::vector<RankRow>& rows)
      : ranks_(ranks), kernels_(kernels), steps_(steps), chunks_(width / kChunk), vocabulary_(vocabulary),
        own_(std::clamp(vocabulary - ranks.rank * width, int64_t{0}, width)), rows_(rows) {}

  int64_t count() const { return count_; }

  void add(const char* logits, const Choice& choice) {
    if (count_ == static_cast<int64_t>(rows_.size())) rows_.emplace_back();
    RankRow& row = rows_[count_++];
    row.logits = logits;
    row.choice = choice;
    row.weights.resize(is_weighed(choice) ? chunks_ * kChunk : row.weights.size());
    row.largest.resize(chunks_);
    row.peaks.resize(chunks_);
    row.chunks.resize(chunks_ + 4);
    const int64_t first = ranks_.rank * chunks_ * kChunk;
    row.own = {own_, (own_ + kChunk - 1) / kChunk, row.weights.data(), row.largest.data(), row.peaks.data(), row.chunks.data(), first};
    row.least = row.deviation = row.target = 0;
    row.low = row.high = 0;
    row.from_low = row.from_high = {};
  }

  // Writes the token of each row that was added, and forgets them.
  void choose(int64_t* tokens) {
    std::vector<RankRow*> sampled = join_largest(tokens), some;
    const auto those = [&](auto needs) -> std::vector<RankRow*>& {
      some.clear();
      std::copy_if(sampled.begin(), sampled.end(), std::back_inserter(some), needs);
      return some;
    };
    if (auto& rows = those([&](RankRow* row) { return is_weighed(row->choice); }); !rows.empty()) weigh(rows);
    if (auto& rows = those([&](RankRow* row) { return row->choice.top_k < vocabulary_; }); !rows.empty()) keep_largest(rows);
    if (auto& rows = those([](RankRow* row) { return row->choice.top_p < 1; }); !rows.empty()) keep_nucleus(rows);
    if (auto& rows = those([](RankRow* row) { return row->choice.top_n_sigma > 0; }); !rows.empty()) deviations(rows);
    if (!sampled.empty()) draw(sampled, tokens);
    count_ = 0;
  }

 private:
  using Rows = std::vector<RankRow*>;

  int64_t num_chunks() const { return (vocabulary_ + kChunk - 1) / kChunk; }  // of all ranks
  bool is_weighed(const Choice& choice) const {
    return choice.temperature > 0 && (choice.top_k < vocabulary_ || choice.top_p < 1);
  }
  static float temperature(const RankRow& row) { return std::max(row.choice.temperature, kMinTemperature); }
  static float unit(const RankRow& row) { return kLog2E * kHalving / temperature(row); }

  template <class Each>
  static void each(int64_t count, const Each& each) {
    parallel_for(0, count, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) each(i);
    });
  }

  // `width` numbers of each row of this rank: fill(row, to) writes them where there are others than `padding`. Afterwards
  // of(rank, row) are those of any rank.
  template <class T, class Fill>
  void tell(int64_t rows, int64_t width, T padding, const Fill& fill) {
    const int64_t bytes = rows * width * static_cast<int64_t>(sizeof(T));
    mine_.resize(bytes);
    all_.resize(bytes * ranks_.size);
    T* const mine = reinterpret_cast<T*>(mine_.data());
    std::fill_n(mine, rows * width, padding);
    each(rows, [&](int64_t i) { fill(i, mine + i * width); });
    share(ranks_, mine_.data(), bytes, all_.data());
  }
  template <class T>
  const T* of(int64_t rank, int64_t row, int64_t rows, int64_t width) const {
    return reinterpret_cast<const T*>(all_.data()) + (rank * rows + row) * width;
  }
  // `width` numbers of each chunk of a row: those of all ranks, in the order of the vocabulary.
  void of_chunks(int64_t row, int64_t rows, int64_t width, int64_t place, std::vector<float>& found) const {
    found.clear();
    for (int64_t rank = 0; rank < ranks_.size; ++rank) {
      const float* const from = of<float>(rank, row, rows, width) + place * chunks_;
      found.insert(found.end(), from, from + chunks_);
    }
    found.resize(num_chunks());
  }

  struct Largest {
    float value;
    int64_t token;
  };

  // The rows that are sampled; the tokens of the others are written.
  Rows join_largest(int64_t* tokens) {
    tell<Largest>(count_, 1, {-kInfinity, kNoToken}, [&](int64_t i, Largest* to) {
      const RankRow& row = rows_[i];
      to->value = steps_.survey(row.logits, row.own);
      if (row.choice.temperature <= 0 && std::isfinite(to->value))
        to->token = row.own.first + steps_.first_of(row.logits, row.own, to->value);
    });
    Rows sampled;
    for (int64_t i = 0; i < count_; ++i) {
      Largest best = {-kInfinity, kNoToken};
      for (int64_t rank = 0; rank < ranks_.size; ++rank) {
        const Largest& other = *of<Largest>(rank, i, count_, 1);
        if (!(other.value <= best.value)) best = other;  // the first of equal ones; NaN stays
        if (std::isnan(best.value)) break;
      }
      tokens[i] = std::isfinite(best.value) ? best.token : kNoToken;
      rows_[i].maximum = best.value;
      if (std::isfinite(best.value) && rows_[i].choice.temperature > 0) sampled.push_back(&rows_[i]);
    }
    return sampled;
  }

  // Weights of the chunks that top-k may keep tokens of, or of all.
  void weigh(const Rows& rows) {
    const int64_t count = rows.size();
    tell<float>(count, chunks_, -kInfinity, [&](int64_t i, float* to) { std::copy_n(rows[i]->own.peaks, rows[i]->own.num_chunks, to); });
    each(count, [&](int64_t i) {
      RankRow& row = *rows[i];
      std::vector<float> peaks;
      of_chunks(i, count, chunks_, 0, peaks);
      const bool few = row.choice.top_k < vocabulary_;
      const float peak = few ? kth_of_chunks(peaks.data(), num_chunks(), row.choice.top_k, row.found) : -kInfinity;
      steps_.weigh(row.logits, row.own, row.maximum, 1 / temperature(row) * kLog2E, peak);
    });
  }

  // Top-k: the k-th largest of the k largest weights of each rank.
  void keep_largest(const Rows& rows) {
    const int64_t count = rows.size();
    int64_t most = 0;
    for (const RankRow* row : rows) most = std::max(most, std::min(row->choice.top_k, chunks_ * kChunk));
    tell<float>(count, most, -1.f, [&](int64_t i, float* to) {
      RankRow& row = *rows[i];
      const int64_t k = row.choice.top_k;
      const float least = kernels_.kth_largest(row.own, k, row.found);
      kernels_.gather(row.own, least, 2.f, row.found);
      const auto found = static_cast<int64_t>(row.found.size()), taken = std::min(found, std::min(k, most));
      if (taken < found) std::nth_element(row.found.begin(), row.found.begin() + taken, row.found.end(), std::greater<>());
      std::copy_n(row.found.begin(), taken, to);
    });
    each(count, [&](int64_t i) {
      std::vector<float>& found = rows[i]->found;
      found.clear();
      for (int64_t rank = 0; rank < ranks_.size; ++rank) {
        const float* const from = of<float>(rank, i, count, most);
        found.insert(found.end(), from, from + most);
      }
      std::nth_element(found.begin(), found.begin() + (rows[i]->choice.top_k - 1), found.end(), std::greater<>());
      rows[i]->least = found[rows[i]->choice.top_k - 1];
    });
  }

  // The number and the sum of the weights that are at least from(row), for each row: keep(row, count, sum).
  template <class From, class Keep>
  void kept(const Rows& rows, const From& from, const Keep& keep) {
    const int64_t count = rows.size(), width = chunks_ + 1;
    tell<float>(count, width, 0.f, [&](int64_t i, float* to) {
      to[chunks_] = static_cast<float>(kernels_.kept_of_chunks(rows[i]->own, from(*rows[i]), to));
    });
    for (int64_t i = 0; i < count; ++i) {
      double number = 0;
      for (int64_t rank = 0; rank < ranks_.size; ++rank) number += of<float>(rank, i, count, width)[chunks_];
      of_chunks(i, count, width, 0, rows[i]->found);
      keep(*rows[i], number, total_of(rows[i]->found.data(), num_chunks()));
    }
  }

  // Top-p: as `search` of the kernels does it, step by step for all rows.
  void keep_nucleus(const Rows& rows) {
    kept(rows, [](const RankRow& row) { return row.least; }, [&](RankRow& row, double, double sum) {
      if (row.least == 0) row.least = least_of_top_p(row.choice, sum, vocabulary_);
      row.target = row.choice.top_p * sum;
      row.low = __builtin_bit_cast(int32_t, row.least);
      row.high = __builtin_bit_cast(int32_t, 1.f) + 1;
    });
    Rows open, few;
    const auto keep_open = [&](const Rows& from) {
      Rows still;
      std::copy_if(from.begin(), from.end(), std::back_inserter(still), [](RankRow* row) { return row->is_open(); });
      open = std::move(still);
    };
    kept(rows, [](const RankRow& row) { return row.least; }, [&](RankRow& row, double count, double sum) {
      row.from_low = {count, sum};
      if (sum <= row.target) row.high = row.low;  // found
      else few.push_back(&row);
    });
    for (keep_open(few); !open.empty(); keep_open(open)) {
      const auto middle = [](const RankRow& row) { return row.low + (row.high - row.low) / 2; };
      kept(open, [&](const RankRow& row) { return __builtin_bit_cast(float, middle(row)); },
           [&](RankRow& row, double count, double sum) {
             (sum >= row.target ? row.low : row.high) = middle(row);
             (sum >= row.target ? row.from_low : row.from_high) = {count, sum};
           });
    }
    std::erase_if(few, [](RankRow* row) { return row->high - row->low <= 1; });
    if (!few.empty()) sort_few(few);
    for (RankRow* row : rows)
      if (std::find(few.begin(), few.end(), row) == few.end()) row->least = __builtin_bit_cast(float, row->low);
  }

  // The end of a search: the weights that are left, largest first, until their sum reaches the target.
  void sort_few(const Rows& rows) {
    const int64_t count = rows.size();
    tell<float>(count, kFew, -1.f, [&](int64_t i, float* to) {
      RankRow& row = *rows[i];
      kernels_.gather(row.own, __builtin_bit_cast(float, row.low), __builtin_bit_cast(float, row.high), row.found);
      std::copy(row.found.begin(), row.found.end(), to);
    });
    each(count, [&](int64_t i) {
      RankRow& row = *rows[i];
      row.found.clear();
      for (int64_t rank = 0; rank < ranks_.size; ++rank) {
        const float* const from = of<float>(rank, i, count, kFew);
        std::copy_if(from, from + kFew, std::back_inserter(row.found), [](float w) { return w >= 0; });
      }
      std::sort(row.found.begin(), row.found.end(), std::greater<>());
      row.least = __builtin_bit_cast(float, row.low);
      double sum = row.from_high.sum;
      for (const float w : row.found)
        if ((sum += w) >= row.target) {
          row.least = w;
          break;
        }
    });
  }

  // Top-n-sigma: the standard deviation of all logits.
  void deviations(const Rows& rows) {
    const int64_t count = rows.size();
    std::vector<double> counts(count);
    std::vector<float> means(count), found;
    tell<float>(count, 2 * chunks_, 0.f, [&](int64_t i, float* to) {
      steps_.distances(rows[i]->logits, rows[i]->own, rows[i]->maximum, to, to + chunks_);
    });
    for (int64_t i = 0; i < count; ++i) {
      of_chunks(i, count, 2 * chunks_, 0, found);
      counts[i] = total_of(found.data(), num_chunks());
      of_chunks(i, count, 2 * chunks_, 1, found);
      means[i] = static_cast<float>(total_of(found.data(), num_chunks()) / counts[i]);
    }
    tell<float>(count, chunks_, 0.f, [&](int64_t i, float* to) {
      steps_.squares(rows[i]->logits, rows[i]->own, rows[i]->maximum, means[i], to);
    });
    for (int64_t i = 0; i < count; ++i) {
      of_chunks(i, count, chunks_, 0, found);
      rows[i]->deviation = deviation_of(total_of(found.data(), num_chunks()), counts[i]);
    }
  }

  void draw(const Rows& rows, int64_t* tokens) {
    const int64_t count = rows.size();
    tell<Drawn>(count, 1, {kNoToken, 0}, [&](int64_t i, Drawn* to) {
      const RankRow& row = *rows[i];
      const float depth = unit(row);
      *to = steps_.draw(row.logits, row.choice, row.own, row.maximum, depth, row.least, deepest_kept(row.choice, row.deviation, depth));
    });
    for (int64_t i = 0; i < count; ++i) {
      Drawn best = *of<Drawn>(0, i, count, 1);
      for (int64_t rank = 1; rank < ranks_.size; ++rank) {
        const Drawn& other = *of<Drawn>(rank, i, count, 1);
        if (other.sum > best.sum) best = other;  // of equal sums the lowest token, which an earlier rank has
      }
      tokens[rows[i] - rows_.data()] = best.token;
    }
  }

  Exchange& ranks_;
  const Kernels& kernels_;
  const RowKernels& steps_;
  const int64_t chunks_, vocabulary_, own_;
  int64_t count_ = 0;
  std::vector<RankRow>& rows_;
  std::vector<char> mine_, all_;
};

}  // namespace
