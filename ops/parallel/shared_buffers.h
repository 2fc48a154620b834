// The memory that ranks share, and how they wait for each other: rank_group.py has the layout.

#pragma once

#include <time.h>

#include <cstring>

#include "../cpu/tensor.h"

namespace {

constexpr int64_t kLine = 128, kMostRanks = 64, kHeader = 16384;
constexpr std::chrono::microseconds kSpin(100), kYield(2000);
constexpr timespec kSleep = {0, 50'000};

// A call of one rank. For each piece that ranks exchange: begin(), write to own(), meet(), read of(rank); what is written to
// own() then may be read after another meet(). Buffers are taken in turns: who writes to one again has met the others since
// they read it.
class Exchange {
 public:
  Exchange(const Tensor& place, const Tensor& memory, const char* op) : op_(op) {
    CHECK_VALUE(place.dim() == 1 && place.size(0) == 2 && place.dtype() == kLong && place.is_contiguous() && place.is_cpu(),
                op, ": place must be a contiguous [2] of int64 on the CPU, got ", place.sizes(), " of ", place.dtype());
    const auto* const of = place.data<const int64_t>();
    rank = of[0];
    size = of[1];
    CHECK_VALUE(size >= 1 && size <= kMostRanks && rank >= 0 && rank < size, op, ": place must be a rank and a size of 1 to ",
                kMostRanks, ", got ", rank, " and ", size);
    if (size == 1) return;
    CHECK_VALUE(memory.dim() == 1 && memory.dtype() == Dtype{aoti_torch_dtype_uint8()} && memory.is_contiguous() &&
                    memory.is_cpu(), op, ": memory must be a contiguous vector of uint8 on the CPU");
    capacity = (memory.size(0) - kHeader) / (2 * size) / kLine * kLine;
    CHECK_VALUE(capacity > 0, op, ": memory for ", size, " ranks must have more than ", kHeader + 2 * size * kLine,
                " bytes, got ", memory.size(0));
    base_ = memory.data<char>();
    epoch_ = flag(rank).load(std::memory_order_relaxed);
  }

  // The next piece. Turns are counted beside the flag: a rank's own, and the same in all.
  void begin() { turn_ = ++*reinterpret_cast<uint64_t*>(base_ + kLine * (1 + rank) + kLine / 2) & 1; }
  // This rank's buffer for it.
  char* own() const { return buffer(rank); }
  // Afterwards what any rank wrote before may be read.
  void meet() {
    flag(rank).store(++epoch_, std::memory_order_release);
    for (int64_t other = 0; other < size; ++other)
      if (other != rank) wait_for(flag(other));
  }
  const char* of(int64_t other) const { return buffer(other); }

  int64_t rank, size, capacity = 0;  // bytes of a piece

 private:
  using Flag = std::atomic<uint64_t>;
  static_assert(Flag::is_always_lock_free);

  Flag& flag(int64_t of_rank) const { return *reinterpret_cast<Flag*>(base_ + kLine * (1 + of_rank)); }
  char* buffer(int64_t of_rank) const { return base_ + kHeader + (turn_ * size + of_rank) * capacity; }
  void check_aborted() const {
    const uint64_t failed = reinterpret_cast<Flag*>(base_)->load(std::memory_order_relaxed);
    if (failed != 0) throw std::runtime_error(text_of(op_, ": rank ", failed - 1, " has failed"));
  }
  void wait_for(const Flag& other) const {
    const auto is_there = [&] { return other.load(std::memory_order_acquire) >= epoch_; };
    if (is_there()) return;
    const auto began = team::Clock::now();
    for (auto waited = team::Clock::duration(0); !is_there(); waited = team::Clock::now() - began) {
      check_aborted();
      if (waited < kSpin)
        for (int i = 0; i < 16 && !is_there(); ++i) team::pause();
      else if (waited < kYield) sched_yield();
      else nanosleep(&kSleep, nullptr);
    }
  }

  const char* op_;
  char* base_ = nullptr;
  uint64_t epoch_ = 0;
  int64_t turn_ = 0;
};

// What every rank gives, `bytes` each, rank after rank.
inline void share(Exchange& ranks, const char* own, int64_t bytes, char* all) {
  if (ranks.size == 1) std::memcpy(all, own, bytes);
  else
    for (int64_t begin = 0; begin < bytes; begin += ranks.capacity) {
      const int64_t count = std::min(ranks.capacity, bytes - begin);
      ranks.begin();
      std::memcpy(ranks.own(), own + begin, count);
      ranks.meet();
      for (int64_t rank = 0; rank < ranks.size; ++rank) std::memcpy(all + rank * bytes + begin, ranks.of(rank), count);
    }
}

}  // namespace
