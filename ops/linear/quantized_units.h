// How the work of linear layers of quantised weights is cut for threads: into units, which a thread takes one after the
// other.

#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

namespace {

constexpr int64_t FIRST_BYTES = 4096;
constexpr int64_t PIECES = 8;  // of the columns, for each thread

struct Unit {  // rows [row, row + rows) of column tiles [tile, end) of a layer
  int64_t layer, row, rows, tile, end;
};

// Layer `e` has the rows from starts[e] to starts[e + 1]. A unit has at most `block` of them, and `cols` tiles or more.
std::vector<Unit> units_of(const std::vector<int64_t>& starts, int64_t tiles, int64_t cols, int64_t block,
                           int64_t threads) {
  std::vector<Unit> units;
  int64_t busy = 0;  // layers that have rows
  for (size_t e = 0; e + 1 < starts.size(); ++e) busy += starts[e + 1] > starts[e];
  const int64_t pieces = threads == 1 ? 1 : std::max<int64_t>(1, PIECES * threads / std::max<int64_t>(busy, 1));
  const int64_t piece = std::max(cols, ((tiles + pieces - 1) / pieces + cols - 1) / cols * cols);
  for (size_t e = 0; e + 1 < starts.size(); ++e)
    for (int64_t row = starts[e]; row < starts[e + 1]; row += block)
      for (int64_t tile = 0; tile < tiles; tile += piece)
        units.push_back({static_cast<int64_t>(e), row, std::min(block, starts[e + 1] - row), tile,
                         std::min(tile + piece, tiles)});
  return units;
}

// Each thread takes the units of its own share one after the other, as they lie in memory, and then what other shares have
// left. So weights come as one stream a thread, and a thread that lost its core keeps nobody waiting.
class Shares {
 public:
  Shares(int64_t units, int64_t threads) : threads_(threads), shares_(new Share[threads]) {
    for (int64_t t = 0; t < threads; ++t) shares_[t].next = units * t / threads, shares_[t].end = units * (t + 1) / threads;
  }
  // The number of a unit; -1: none is left.
  int64_t claim(int64_t thread) {
    for (int64_t t = thread; t < thread + threads_; ++t) {
      Share& share = shares_[t % threads_];
      if (const int64_t unit = share.next++; unit < share.end) return unit;
    }
    return -1;
  }

 private:
  struct alignas(64) Share {
    std::atomic<int64_t> next = 0;
    int64_t end = 0;
  };
  const int64_t threads_;
  const std::unique_ptr<Share[]> shares_;
};

// Fetches the first weights that a thread will take, while it prepares rows for them.
inline void fetch_first(const uint8_t* codes) {
  for (int64_t i = 0; i < FIRST_BYTES; i += 64) __builtin_prefetch(codes + i, 0, 2);
}

}  // namespace
