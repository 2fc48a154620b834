// The short convolution's kernel for one instruction set, for recurrent_cpu_kernels.h. A channel's numbers are computed in
// its own lane, from the oldest input on.

#include "../cpu/row_vectors.h"
#include "recurrent_cpu_types.h"

namespace {
namespace ISA {

// The weights of `count` channels, in floats, of each input one after the other.
template <class T, int64_t kWidth>
INLINE void turn_weights(const T* weight, int64_t count, float (*turned)[kChannels]) {
  for (int64_t i = 0; i < count; i += kLanes) {
    const int64_t channels = std::min(kLanes, count - i), size = channels * kWidth;
    float row[kLanes * kWidth];
    for (int64_t j = 0; j < kWidth; ++j)
      store(row + j * kLanes, load_floats(weight + i * kWidth + j * kLanes, std::max<int64_t>(0, size - j * kLanes)));
    for (int64_t j = 0; j < kWidth; ++j)
      for (int64_t c = 0; c < kLanes; ++c) turned[j][i + c] = row[c * kWidth + j];
  }
}

template <class T>
TARGET void turn_weights(const T* weight, int64_t width, int64_t count, float (*turned)[kChannels]) {
  if (width == 4) return turn_weights<T, 4>(weight, count, turned);
  if (width == 3) return turn_weights<T, 3>(weight, count, turned);
  for (int64_t c = 0; c < count; ++c)
    for (int64_t j = 0; j < width; ++j) turned[j][c] = static_cast<float>(weight[c * width + j]);
}

// Asks for `count` numbers to be brought into the cache.
template <class T>
INLINE void fetch(const T* from, int64_t count) {
  for (int64_t i = 0; i < count; i += 64 / sizeof(T)) __builtin_prefetch(from + i);
}

template <class T>
TARGET void convolution(const Convolution& p, int64_t channel, int64_t begin, int64_t end) {
  const int64_t count = std::min(kChannels, p.channels - channel), width = p.width;
  // A decode waits for memory: what the channels after these need comes meanwhile.
  const int64_t next = std::min(kChannels, p.channels - channel - count);
  fetch(static_cast<const T*>(p.weight) + (channel + count) * width, next * width);
  alignas(64) float weights[kMostWidth][kChannels], bias[kChannels] = {};
  turn_weights(static_cast<const T*>(p.weight) + channel * width, width, count, weights);
  if (p.bias != nullptr)
    for_vectors(count, [&](int64_t i, int64_t n) __attribute__((always_inline)) TARGET {
      store(bias + i, load_floats(static_cast<const T*>(p.bias) + channel + i, n));
    });
  // The last inputs in turns: that of a row's token t is at (t + width - 1) % width, those of the state before them.
  alignas(64) float inputs[kMostWidth][kChannels];
  for (int64_t r = begin; r < end; ++r) {
    const int64_t first = p.rows.first(r), length = p.rows.length(r);
    const auto slot = [&](int64_t s) {
      return static_cast<T*>(p.state) + s * p.slot_stride + channel;
    };
    const bool more = r + 1 < end;
    const T* later = slot(p.rows.read_slot[more ? r + 1 : begin]) + (more ? 0 : count);
    for (int64_t j = 0; length == 1 && j < width - 1; ++j) fetch(later + j * p.channels, more ? count : next);
    for (int64_t j = 0; length > 0 && j < width - 1; ++j)
      for_vectors(count, [&](int64_t i, int64_t n) __attribute__((always_inline)) TARGET {
        store(inputs[j] + i,
              p.rows.from_zeros(r) ? Vec{} : load_floats(slot(p.rows.read_slot[r]) + j * p.channels + i, n));
      });
    for (int64_t t = 0; t < length; ++t) {
      const int64_t token = first + t;
      const T* x = static_cast<const T*>(p.x) + token * p.x_row + channel;
      const T* before = static_cast<const T*>(p.gate_before) + token * p.before_row + channel;
      const T* after = static_cast<const T*>(p.gate_after) + token * p.after_row + channel;
      T* out = static_cast<T*>(p.out) + token * p.channels + channel;
      const float* in[kMostWidth];
      for (int64_t j = 0; j < width; ++j) in[j] = inputs[(t + j) % width];
      float* newest = inputs[(t + width - 1) % width];
      for_vectors(count, [&](int64_t i, int64_t n) __attribute__((always_inline)) TARGET {
        Vec input = load_floats(x + i, n);
        if (p.gate_before != nullptr) input = rounded<T>(input * load_floats(before + i, n));
        store(newest + i, input);
        Vec y = load(bias + i);
        for (int64_t j = 0; j < width - 1; ++j) y += load(weights[j] + i) * load(in[j] + i);
        y += load(weights[width - 1] + i) * input;
        if (p.silu) y = y * sigmoid(y);
        if (p.gate_after != nullptr) y = y * load_floats(after + i, n);
        store_as(out + i, y, n);
      });
      for (int64_t w = 0; w < p.rows.writes; ++w) {
        if (!p.rows.wants(r, w, t + 1)) continue;
        T* to = slot(p.rows.slot(r, w));
        for (int64_t j = 0; j < width - 1; ++j)
          for_vectors(count, [&](int64_t i, int64_t n) __attribute__((always_inline)) TARGET {
            store_as(to + j * p.channels + i, load(inputs[(t + 1 + j) % width] + i), n);
          });
      }
    }
  }
}

}  // namespace ISA
}  // namespace
