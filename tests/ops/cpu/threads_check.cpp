// parallel_for of ops/cpu/threads.h, for test_threads.py. Parts may take long enough that helpers get some.

#include "../../../ops/cpu/threads.h"

#include <set>

#define EXPORT extern "C" [[gnu::visibility("default")]]

namespace {

void busy(int64_t microseconds) {
  const auto end = team::Clock::now() + std::chrono::microseconds(microseconds);
  while (team::Clock::now() < end) continue;
}

}  // namespace

// Counts in found[i - begin] how often each i of begin..end was computed, and in `shortest` the items of the shortest part
// but for the last. Returns the number of threads that took part.
EXPORT int64_t count(int64_t threads, int64_t begin, int64_t end, int64_t grain, int64_t microseconds, int32_t* found,
                     int64_t* shortest) {
  std::set<std::thread::id> seen;
  std::mutex mutex;
  *shortest = end - begin;
  team::parallel_for(threads, begin, end, grain, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) ++found[i - begin];
    busy(microseconds);
    const std::lock_guard lock(mutex);
    seen.insert(std::this_thread::get_id());
    if (last < end) *shortest = std::min(*shortest, last - first);
  });
  return static_cast<int64_t>(seen.size());
}

// Loops within a loop: the number of inner parts that were computed.
EXPORT int64_t nested(int64_t threads, int64_t outer, int64_t inner) {
  std::atomic<int64_t> parts = 0;
  team::parallel_for(threads, 0, outer, 1, [&](int64_t, int64_t) {
    team::parallel_for(threads, 0, inner, 1, [&](int64_t first, int64_t last) { parts += last - first; });
  });
  return parts;
}

// A loop that throws in the part of item `at`: the item that was caught, or -1.
EXPORT int64_t thrown(int64_t threads, int64_t at, int64_t items) {
  try {
    team::parallel_for(threads, 0, items, 1, [&](int64_t first, int64_t last) {
      busy(20);
      if (first <= at && at < last) throw at;
    });
  } catch (int64_t caught) {
    return caught;
  }
  return -1;
}

EXPORT const void* first_team() { return &team::first_team(); }

EXPORT void rest() { team::first_team().rest(); }
