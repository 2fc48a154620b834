// What is written for ARM alone, against plain loops: exact where it must be, and each row's bits in any number of rows.
// test_kernel_build.py compiles it once for each KERNELS and level, and runs it under an emulator. Returns 0 if all is well.

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "../../../ops/cpu/features.h"
#if LEVEL == 2
#define TARGET TARGET_NEON_BF16
#else
#define TARGET TARGET_NEON_DOT
#endif
#define ISA neon
#define NEON LEVEL
#define WIDTH 128
#define DOT 0
#include KERNELS

namespace {

int wrong = 0;
void expect(bool holds, const char* what) {
  if (!holds && wrong++ == 0) std::printf("%s\n", what);
}

BFloat16 number() { return BFloat16(static_cast<float>(std::rand() % 2001 - 1000) / 317.f); }
std::vector<BFloat16> numbers(int64_t count) {
  std::vector<BFloat16> all(count);
  for (auto& one : all) one = number();
  return all;
}
double product(const BFloat16* a, const BFloat16* b) {
  return double(float(a[0])) * float(b[0]) + double(float(a[1])) * float(b[1]);
}

#if defined(LINEAR)
// Words are cut into two calls, as chunks do.
void check() {
  constexpr int WORDS = 37;
  const auto x = numbers(4 * WORDS * 2), w = numbers(WORDS * TILE * 2);
  const auto* weights = reinterpret_cast<const uint32_t*>(w.data());
  float alone[4][TILE], sums[4][TILE];
  for (int rows = 1; rows <= 4; ++rows)
    for (int first = 0; first + rows <= 4; ++first) {
      std::vector<BFloat16> packed(WORDS * rows * 2);
      for (int p = 0; p < WORDS; ++p)
        for (int m = 0; m < rows; ++m) std::memcpy(&packed[(p * rows + m) * 2], &x[((first + m) * WORDS + p) * 2], 4);
      for (int cut : {WORDS, 3, 10}) {
        for (int done = 0, words; done < WORDS; done += words) {
          words = done == 0 ? cut : WORDS - cut;
          neon::bf16_kernels().multiply[rows - 1](
              {.x = reinterpret_cast<const uint32_t*>(packed.data()) + done * rows, .x_stride = 0,
               .w = weights + done * TILE, .w_stride = WORDS * TILE, .words = words, .sums = sums[0], .first = done == 0,
               .prefetch = true, .left = WORDS, .later = weights, .later_lines = 0, .before = nullptr});
        }
        for (int m = 0; m < rows; ++m)
          for (int c = 0; c < TILE; ++c) {
            double exact = 0;
            for (int p = 0; p < WORDS; ++p) exact += product(&x[((first + m) * WORDS + p) * 2], &w[(p * TILE + c) * 2]);
            expect(std::fabs(exact - sums[m][c]) < 1e-4, "sums");
            if (rows == 1 && cut == WORDS) alone[first + m][c] = sums[m][c];
            expect(alone[first + m][c] == sums[m][c], "bits of rows");
          }
      }
    }
}

#elif defined(BYTES)
template <int BITS>
void check_bits(int words, int group) {
  const Kernels kernels = neon::kernels();
  const int per = BITS == 4 ? 8 : 4, inputs = words * per, groups = (words + group - 1) / group;
  std::vector<uint8_t> w(words * WORD_BYTES);
  std::vector<int8_t> x(4 * inputs);
  std::vector<int32_t> starts(4 * groups);
  std::vector<float> sums(4 * groups), scales(groups * TILE);
  for (auto& one : w) one = static_cast<uint8_t>(std::rand());
  for (auto& one : x) one = static_cast<int8_t>(std::rand() % 255 - 127);
  for (auto& one : starts) one = std::rand() % 1000;
  for (auto& one : scales) one = float(std::rand() % 17) / 16;
  const Rows8 rows = {x.data(), inputs, starts.data(), sums.data(), nullptr, nullptr, groups};
  for (int count = 1; count <= 4; ++count) {
    float totals[4][TILE], streamed[4][TILE];
    const auto* of = BITS == 4 ? kernels.int4 : kernels.int8;
    of[(count - 1) * kernels.cols]({rows, w.data(), words, group, scales.data(), nullptr, totals[0], w.data()});
    const auto& streams = kernels.f32.streams;
    (BITS == 4 ? streams.int4 : streams.int8)[count - 1](
        {rows, 1, w.data(), words, group, scales.data(), nullptr, streamed[0]});
    for (int m = 0; m < count; ++m)
      for (int c = 0; c < TILE; ++c) {
        float total = 0;
        for (int g = 0; g < groups; ++g) {
          int32_t sum = starts[m * groups + g];
          for (int k = g * group * per; k < std::min((g + 1) * group, words) * per; ++k) {
            const uint8_t byte = w[k / per * WORD_BYTES + c * 4 + k % 4];
            sum += (BITS == 8 ? int8_t(byte) : k % 8 < 4 ? byte & 15 : byte >> 4) * x[m * inputs + k];
          }
          total = std::fma(float(sum), scales[g * TILE + c], total);
        }
        expect(totals[m][c] == total && streamed[m][c] == total, "products of bytes");
      }
  }
}
void check() {
  for (auto [words, group] : {std::pair(8, 8), {9, 4}, {7, 1}, {16, 4}, {13, 13}, {24, 3}})
    check_bits<8>(words, group), check_bits<4>(words, group);
}

#elif defined(ATTENTION)
using namespace neon;
TARGET void check() {
  static_assert(std::is_same_v<Operand<BFloat16, BFloat16>, Pairs> && std::is_same_v<Operand<BFloat16, Fp8>, Floats>);
  constexpr int LANES = 20, KEYS = 48, ROWS = 7;
  const auto q = numbers(ROWS * kTile * 2), k = numbers(KEYS * LANES * 2), v = numbers(LANES * KEYS * 2);
  const auto floats_of = [](const std::vector<BFloat16>& all) { return reinterpret_cast<const float*>(all.data()); };
  std::vector<float> scores(ROWS * kTile), out(ROWS * KEYS), alone(kTile);
  const float *groups[KEYS / 16], *values[LANES];
  for (int g = 0; g < KEYS / 16; ++g) groups[g] = floats_of(k) + g * LANES * 16;
  for (int i = 0; i < LANES; ++i) values[i] = floats_of(v) + i * KEYS;
  all_scores<Pairs>(false, ROWS, floats_of(q), LANES, KEYS / 16, groups, 16, groups, scores.data());
  all_values<Pairs>(false, ROWS, floats_of(q), nullptr, LANES, values, values, false, KEYS, out.data());
  for (int row = 0; row < ROWS; ++row)
    for (bool is_key : {true, false}) {
      const BFloat16* x = &q[row * (is_key ? LANES : kTile) * 2];
      const auto* from = reinterpret_cast<const float*>(x);
      if (is_key) all_scores<Pairs>(false, 1, from, LANES, KEYS / 16, groups, 16, nullptr, alone.data());
      else all_values<Pairs>(false, 1, from, nullptr, LANES, values, nullptr, false, KEYS, alone.data());
      for (int c = 0; c < KEYS; ++c) {
        double exact = 0;
        for (int i = 0; i < LANES; ++i)
          exact += product(x + 2 * i, is_key ? &k[((c / 16 * LANES + i) * 16 + c % 16) * 2] : &v[(i * KEYS + c) * 2]);
        const float found = is_key ? scores[row * kTile + c] : out[row * KEYS + c];
        expect(std::fabs(exact - found) < 1e-4, "products of pairs");
        expect(alone[c] == found, "bits of rows");
      }
    }
  float weights[32], row[32];
  for (float& one : weights) one = float(std::rand()) / 1e9f;
  Part parts[8];
  std::memcpy(parts, weights, sizeof(parts));
  store_weights<Pairs>(parts, row, 0);
  for (int i = 0; i < 32; ++i)
    expect(reinterpret_cast<const BFloat16*>(row)[i].bits == BFloat16(weights[i]).bits, "weights as pairs");
}

#else  // KERNELS is vectors.h: numbers of 16 bits
TARGET void check() {
  for (uint32_t i = 0; i < 65536; i += kLanes) {
    Half halves[kLanes], again[kLanes];
    for (uint32_t j = 0; j < kLanes; ++j) halves[j].bits = static_cast<uint16_t>(i + j);
    const Vec x = neon::load_floats(halves);
    neon::store_as(again, x, kLanes);
    for (int j = 0; j < kLanes; ++j) {
      const float one = halves[j];
      if (one != one) expect(x[j] != x[j], "NaN");
      else expect(one == x[j] && again[j].bits == halves[j].bits, "halves");
    }
  }
  for (int i = 0; i < 100'000; ++i) {
    const float x = __builtin_bit_cast(float, static_cast<uint32_t>(std::rand()) << 1 ^ static_cast<uint32_t>(std::rand()));
    Half rounded[kLanes];
    neon::store_as(rounded, neon::broadcast(x), kLanes);
    expect(x != x || rounded[3].bits == Half(x).bits, "rounding to halves");
  }
}
#endif

}  // namespace

int main() {
  std::srand(1);
  check();
  return wrong != 0;
}
