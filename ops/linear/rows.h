// Rows of activations, and their packing for products that take a word of several rows at a time.

#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

namespace {

// Rows of activations, `stride` elements apart, or those of them that `index` names.
template <class Input>
struct Rows {
  const Input* data;
  int64_t stride;
  const int32_t* index = nullptr;

  const Input* operator[](int64_t i) const { return data + (index == nullptr ? i : index[i]) * stride; }
  Rows columns(int64_t first) const { return {data + first, stride, index}; }
  Rows from(int64_t first) const {
    return index == nullptr ? Rows{data + first * stride, stride} : Rows{data, stride, index + first};
  }
};

// `rows` rows of K elements -> [words, rows]: what a micro kernel reads in a row. Four rows, or two, of four words at a time.
template <class Input>
void interleave_rows(const Rows<Input>& from, int64_t rows, int64_t K, uint32_t* to) {
  typedef uint32_t u32 __attribute__((vector_size(16)));
  constexpr int64_t INPUTS = sizeof(uint32_t) / sizeof(Input);  // of a word
  const int64_t words = K / INPUTS;
  int64_t m = 0;
  for (; m + 4 <= rows; m += 4) {
    const Input* const four[] = {from[m], from[m + 1], from[m + 2], from[m + 3]};
    for (int64_t p = 0; p < words / 4 * 4; p += 4) {
      u32 a, b, c, d;
      for (auto [row, lanes] : {std::pair(0, &a), {1, &b}, {2, &c}, {3, &d}})
        std::memcpy(lanes, four[row] + INPUTS * p, sizeof(u32));
      const u32 ab = __builtin_shufflevector(a, b, 0, 4, 1, 5), ab_high = __builtin_shufflevector(a, b, 2, 6, 3, 7);
      const u32 cd = __builtin_shufflevector(c, d, 0, 4, 1, 5), cd_high = __builtin_shufflevector(c, d, 2, 6, 3, 7);
      const u32 columns[4] = {
          __builtin_shufflevector(ab, cd, 0, 1, 4, 5), __builtin_shufflevector(ab, cd, 2, 3, 6, 7),
          __builtin_shufflevector(ab_high, cd_high, 0, 1, 4, 5), __builtin_shufflevector(ab_high, cd_high, 2, 3, 6, 7)};
      for (int64_t i = 0; i < 4; ++i) std::memcpy(to + (p + i) * rows + m, &columns[i], sizeof(u32));
    }
  }
  for (; m + 2 <= rows; m += 2) {
    const Input *const first = from[m], *const second = from[m + 1];
    for (int64_t p = 0; p < words / 4 * 4; p += 4) {
      u32 a, b;
      std::memcpy(&a, first + INPUTS * p, sizeof a);
      std::memcpy(&b, second + INPUTS * p, sizeof b);
      const u32 ab = __builtin_shufflevector(a, b, 0, 4, 1, 5), ab_high = __builtin_shufflevector(a, b, 2, 6, 3, 7);
      for (int64_t i = 0; i < 2; ++i) {
        std::memcpy(to + (p + i) * rows + m, reinterpret_cast<const uint32_t*>(&ab) + 2 * i, 8);
        std::memcpy(to + (p + i + 2) * rows + m, reinterpret_cast<const uint32_t*>(&ab_high) + 2 * i, 8);
      }
    }
  }
  const auto copy = [&](int64_t row, int64_t first_word) {
    const Input* const inputs = from[row];
    for (int64_t p = first_word; p < words; ++p) std::memcpy(to + p * rows + row, inputs + INPUTS * p, sizeof(uint32_t));
    if (K % INPUTS != 0) to[words * rows + row] = inputs[K - 1];
  };
  for (int64_t row = 0; row < rows; ++row) copy(row, row < m ? words / 4 * 4 : 0);
}

}  // namespace
