// parallel_for of ops/cpu/threads.h, for test_threads.py. Every part is counted, slowly enough that helpers get some.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <set>
#include <stdexcept>
#include <vector>

#include "../../../ops/cpu/threads.h"

namespace {

void busy(int64_t microseconds) {
  const auto end = team::Clock::now() + std::chrono::microseconds(microseconds);
  while (team::Clock::now() < end) continue;
}

// (how often each of begin..end was computed, the number of threads that took part, the shortest part but for the last)
std::tuple<std::vector<int>, int64_t, int64_t> counts(int64_t begin, int64_t end, int64_t grain, int64_t microseconds) {
  std::vector<int> found(std::max<int64_t>(end - begin, 0));
  std::set<std::thread::id> threads;
  std::mutex mutex;
  int64_t shortest = end - begin;
  team::parallel_for(begin, end, grain, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) ++found[i - begin];
    busy(microseconds);
    const std::lock_guard lock(mutex);
    threads.insert(std::this_thread::get_id());
    if (last < end) shortest = std::min(shortest, last - first);
  });
  return {found, static_cast<int64_t>(threads.size()), shortest};
}

// Loops within a loop: the number of inner parts that were computed.
int64_t nested(int64_t outer, int64_t inner) {
  std::atomic<int64_t> parts = 0;
  team::parallel_for(0, outer, 1, [&](int64_t, int64_t) {
    team::parallel_for(0, inner, 1, [&](int64_t first, int64_t last) { parts += last - first; });
  });
  return parts;
}

void throws_at(int64_t at, int64_t count) {
  team::parallel_for(0, count, 1, [&](int64_t first, int64_t last) {
    busy(20);
    if (first <= at && at < last) throw std::invalid_argument("part " + std::to_string(at));
  });
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  const pybind11::call_guard<pybind11::gil_scoped_release> without_gil;
  m.def("counts", &counts, without_gil);
  m.def("nested", &nested, without_gil);
  m.def("throws_at", &throws_at, without_gil);
}
