// Several linear layers of one shape, each for rows of its own: a mixture of experts.
//
// The weights of a layer that has rows are read once, those of the others not at all. A thread takes units, pieces of the
// columns of a layer, one after the other, and packs their rows by itself. The sums are those of linear_cpu.cpp, so an
// output has the same bits whatever rows its layer has besides.

#pragma once

#include <atomic>
#include <vector>

#include "../cpu/tensor.h"
#include "linear_cpu_product.h"

namespace {

template <class T>
struct Unit {  // rows [row, row + rows) of column tiles [tile, end) of a problem
  const Operands<T>* of;
  const Problem<T>* problem;
  int64_t row, rows, tile, end;
};

template <class T>
std::vector<Unit<T>> units_of(const std::vector<Operands<T>>& groups, const std::vector<Problem<T>>& problems,
                              int64_t threads) {
  // Below about 32 rows the time is that of reading the weights.
  const auto cost = [](int64_t rows) { return std::max<int64_t>(rows, 32); };
  int64_t total = 0;
  for (const Problem<T>& problem : problems) total += cost(problem.rows) * problem.tiles;
  std::vector<Unit<T>> units;
  for (size_t i = 0; i < problems.size(); ++i) {
    const Problem<T>& problem = problems[i];
    for (int64_t row = 0; row < problem.rows; row += problem.block) {
      const int64_t rows = std::min(problem.block, problem.rows - row);
      const int64_t most = std::max(total / (PIECES * threads) / cost(rows), problem.cols);
      const int64_t pieces = threads == 1 ? 1 : (problem.tiles + most - 1) / most;
      const int64_t even = (problem.tiles + pieces - 1) / pieces;
      const int64_t piece = (even + problem.cols - 1) / problem.cols * problem.cols;
      for (int64_t tile = 0; tile < problem.tiles; tile += piece)
        units.push_back({&groups[i], &problem, row, rows, tile, std::min(tile + piece, problem.tiles)});
    }
  }
  return units;
}

// The rows of a unit are packed by the thread that takes it.
template <class T>
void multiply_groups(const KernelsOf<T>& kernels, const std::vector<Operands<T>>& groups) {
  int64_t flops = 0, room = 0, bytes = 0;
  for (const Operands<T>& of : groups) {
    flops += of.rows * of.tiles * of.words * TILE;
    bytes += weight_bytes(of);
  }
  const int64_t threads = std::min(num_threads(), flops / GRAIN_FLOPS + 1);
  std::vector<Problem<T>> problems;
  for (const Operands<T>& of : groups) {
    problems.push_back(problem_of(kernels, of, threads, bytes));
    const Problem<T>& problem = problems.back();
    if (problem.first_packed < problem.rows)
      room = std::max(room, kernels.aligned(std::min(problem.block, problem.rows)) * problem.x_words);
  }
  const std::vector<Unit<T>> units = units_of(groups, problems, threads);
  const int64_t count = units.size();
  const Tensor packs = empty({threads, room}, kInt);
  std::atomic<int64_t> free = 0;
  parallel_for(0, threads, 1, [&](int64_t thread, int64_t) {
    Workplace<T> place;
    place.x_packed = packs.data<uint32_t>() + thread * room;
    const Unit<T>* before = nullptr;
    for (int64_t next, i = free++; i < count; i = next) {
      next = free++;
      const Unit<T>& unit = units[i];
      const Problem<T>& problem = *unit.problem;
      const int64_t tile_words = problem.words * TILE, end = unit.row + unit.rows;
      kernels.begin(problem.rows);
      place.packed_from = std::max(unit.row, problem.first_packed);
      const bool is_packed = before != nullptr && before->problem == unit.problem && before->row == unit.row;
      if (!is_packed && place.packed_from < end)
        pack_rows(kernels, *unit.of, place.packed_from, end, problem.group, problem.x_words, place.x_packed);
      const auto* then = next < count ? units[next].problem->w + units[next].tile * tile_words : problem.w;
      for (int64_t tile = unit.tile; tile < unit.end; tile += problem.cols)
        multiply_block(kernels, problem, place, unit.row, unit.rows, tile, std::min(problem.cols, unit.end - tile),
                       tile + problem.cols < unit.end ? problem.w + (tile + problem.cols) * tile_words : then);
      kernels.finish(place.before);
      place.before.rows = 0;
      kernels.end();
      before = &unit;
    }
  });
}

}  // namespace
