// The row-wise kernels for one instruction set: compiled once for each by ../cpu/one_isa.cpp, which explains the macros.
// Each function is one row's work, in an order of operations that depends on the row's length alone.

#include "../cpu/row_vectors.h"
#include "rowwise_cpu_types.h"

namespace {
namespace ISA {

constexpr int64_t kChains = 4;  // sums that do not wait for each other

// Squares added up: vector after vector, to the sums in turn.
struct SquareSum {
  Vec chains[kChains] = {};
  INLINE void add(int64_t i, Vec x) { chains[i / kLanes % kChains] += x * x; }
  INLINE float scale(int64_t size, float eps) const {
    const float sum = sum_of_lanes((chains[0] + chains[1]) + (chains[2] + chains[3]));
    return 1.f / std::sqrt(sum / static_cast<float>(size) + eps);
  }
};

// The normed elements times the weight. A weight in T multiplies what was rounded to T, a float32 one what was not.
template <class T, class W>
INLINE Vec weighted(Vec x, float scale, const W* weight, int64_t count) {
  const Vec y = x * scale;
  return (std::is_same_v<W, T> ? rounded<T>(y) : y) * load_floats(weight, count);
}

template <class T, class W>
TARGET void norm(const NormRow& row) {
  const T *x = static_cast<const T*>(row.x), *delta = static_cast<const T*>(row.delta);
  const W* weight = static_cast<const W*>(row.weight);
  T *sum = static_cast<T*>(row.sum), *out = static_cast<T*>(row.out);
  SquareSum squares;
  for_vectors(row.size, [&](int64_t i, int64_t count) __attribute__((always_inline)) TARGET {
    Vec v = load_floats(x + i, count);
    if (delta != nullptr) {
      v = rounded<T>(v + load_floats(delta + i, count));
      store_as(sum + i, v, count);
    }
    squares.add(i, v);
  });
  const float scale = squares.scale(row.size, row.eps);
  const T* from = delta != nullptr ? sum : x;
  for_vectors(row.size, [&](int64_t i, int64_t count) __attribute__((always_inline)) TARGET {
    store_as(out + i, weighted<T>(load_floats(from + i, count), scale, weight + i, count), count);
  });
}

// Once more over the row for the mean, so that the squares are of what is left without it.
template <class T>
TARGET void layer_norm(const NormRow& row) {
  const T *x = static_cast<const T*>(row.x), *delta = static_cast<const T*>(row.delta);
  const T *weight = static_cast<const T*>(row.weight), *bias = static_cast<const T*>(row.bias);
  T *sum = static_cast<T*>(row.sum), *out = static_cast<T*>(row.out);
  Vec chains[kChains] = {};
  for_vectors(row.size, [&](int64_t i, int64_t count) __attribute__((always_inline)) TARGET {
    Vec v = load_floats(x + i, count);
    if (delta != nullptr) {
      v = rounded<T>(v + load_floats(delta + i, count));
      store_as(sum + i, v, count);
    }
    chains[i / kLanes % kChains] += v;
  });
  const float total = sum_of_lanes((chains[0] + chains[1]) + (chains[2] + chains[3]));
  const float mean = total / static_cast<float>(row.size);
  const T* from = delta != nullptr ? sum : x;
  const IntVec lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  SquareSum squares;
  for_vectors(row.size, [&](int64_t i, int64_t count) __attribute__((always_inline)) TARGET {
    squares.add(i, lane < static_cast<int32_t>(count) ? load_floats(from + i, count) - mean : Vec{});
  });
  const float scale = squares.scale(row.size, row.eps);
  for_vectors(row.size, [&](int64_t i, int64_t count) __attribute__((always_inline)) TARGET {
    const Vec y = (load_floats(from + i, count) - mean) * scale;
    store_as(out + i, y * load_floats(weight + i, count) + load_floats(bias + i, count), count);
  });
}

template <class T>
TARGET void gated_norm(const GatedNormRow& row) {
  for (int64_t group = 0; group < row.size; group += row.group) {
    const T *x = static_cast<const T*>(row.x) + group, *gate = static_cast<const T*>(row.gate) + group;
    const T* weight = static_cast<const T*>(row.weight) + group % row.weights;
    T* out = static_cast<T*>(row.out) + group;
    const auto silu = [&](int64_t i, int64_t count) __attribute__((always_inline)) TARGET {
      const Vec z = load_floats(gate + i, count);
      return z * sigmoid(z);
    };
    const auto element = [&](int64_t i, int64_t count) __attribute__((always_inline)) TARGET {
      const Vec v = load_floats(x + i, count);
      return row.norm_first ? v : v * silu(i, count);
    };
    SquareSum squares;
    for_vectors(row.group, [&](int64_t i, int64_t count) __attribute__((always_inline)) TARGET { squares.add(i, element(i, count)); });
    const float scale = squares.scale(row.group, row.eps);
    for_vectors(row.group, [&](int64_t i, int64_t count) __attribute__((always_inline)) TARGET {
      const Vec y = weighted<T>(element(i, count), scale, weight + i, count);
      store_as(out + i, row.norm_first ? rounded<T>(y) * silu(i, count) : y, count);
    });
  }
}

// Each head's first half is paired with its second. All heads are summed up first, so that none waits for its own root.
template <class T, class W>
TARGET void rope(const HeadsRow& row) {
  constexpr int64_t kHeads = 16;  // at once
  const W* weight = static_cast<const W*>(row.weight);
  const int64_t size = row.size, half = size / 2;
  for (int64_t from = 0; from < row.heads; from += kHeads) {
    const int64_t heads = std::min(kHeads, row.heads - from);
    const T* x = static_cast<const T*>(row.x) + from * size;
    T* out = static_cast<T*>(row.out) + from * size;
    float scales[kHeads];
    for (int64_t head = 0; weight != nullptr && head < heads; ++head) {
      SquareSum squares;
      for_vectors(size, [&](int64_t i, int64_t count) __attribute__((always_inline)) TARGET {
        squares.add(i, load_floats(x + head * size + i, count));
      });
      scales[head] = squares.scale(size, row.eps);
    }
    for (int64_t head = 0; head < heads; ++head, x += size, out += size)
      for_vectors(half, [&](int64_t i, int64_t count) __attribute__((always_inline)) TARGET {
        const auto element = [&](int64_t j) __attribute__((always_inline)) TARGET {
          const Vec v = load_floats(x + j, count);
          return weight == nullptr ? v : rounded<T>(weighted<T>(v, scales[head], weight + j, count));
        };
        const Vec first = element(i), second = element(half + i);
        const Vec cos = load_floats(row.cos_sin + i, count), sin = load_floats(row.cos_sin + half + i, count);
        store_as(out + i, first * cos - second * sin, count);
        store_as(out + half + i, second * cos + first * sin, count);
      });
  }
}

INLINE Vec tanh(Vec x) {
  const Vec size = x > 0 ? x : -x, square = x * x;
  // x + x^3 times a polynomial of the least largest relative error (7e-10) up to 0.7.
  Vec p = broadcast(0.00189567f);
  p = p * square - 0.00788331f;
  p = p * square + 0.02157106f;
  p = p * square - 0.05392096f;
  p = p * square + 0.13332983f;
  p = p * square - 0.33333325f;
  const Vec e = exp2(size * (-2 * kLog2E)), large = (1 - e) / (1 + e);
  return size < 0.7f ? x + x * square * p : x > 0 ? large : -large;
}

// The normal distribution's share below x. Of the share below -|x|, the logarithm less those of exp(-x^2 / 2) and of
// t = 1 / (1 + 0.4 |x|) is a polynomial in t, fitted at Chebyshev's points; its largest error is 1e-7.
INLINE Vec normal_cdf(Vec x) {
  const Vec size = x > 0 ? x : -x, t = 1 / (1 + 0.4f * size);
  Vec p = broadcast(0.2766989f);
  p = p * t - 1.4162087f;
  p = p * t + 2.8286076f;
  p = p * t - 2.5461032f;
  p = p * t + 0.7950981f;
  p = p * t - 0.26705325f;
  p = p * t + 0.5381326f;
  p = p * t + 1.4383364f;
  p = p * t - 2.6475081f;
  const Vec tail = t * exp2(p - 0.5f * kLog2E * (x * x));
  return x > 0 ? 1 - tail : tail;
}

INLINE Vec activated(Activation activation, Vec x) {
  if (activation == Activation::silu) return x * sigmoid(x);
  if (activation == Activation::gelu) return x * normal_cdf(x);
  if (activation == Activation::relu2) return x < 0 ? broadcast(0) : x * x;  // a NaN stays
  // 0.5 * (1 + tanh(u)) is sigmoid(2 * u).
  return x * sigmoid(1.59576912f * (x + 0.044715f * x * x * x));
}

template <class T, Activation activation>
INLINE void gated_by(const T* gate, const T* up, T* out, int64_t size) {
  for_vectors(size, [&](int64_t i, int64_t count) __attribute__((always_inline)) TARGET {
    const Vec x = rounded<T>(activated(activation, load_floats(gate + i, count)));
    store_as(out + i, x * load_floats(up + i, count), count);
  });
}

template <class T>
TARGET void gated(Activation activation, const void* gate, const void* up, void* out, int64_t size) {
  const T *g = static_cast<const T*>(gate), *u = static_cast<const T*>(up);
  if (activation == Activation::silu) gated_by<T, Activation::silu>(g, u, static_cast<T*>(out), size);
  else if (activation == Activation::gelu) gated_by<T, Activation::gelu>(g, u, static_cast<T*>(out), size);
  else if (activation == Activation::relu2) gated_by<T, Activation::relu2>(g, u, static_cast<T*>(out), size);
  else gated_by<T, Activation::gelu_tanh>(g, u, static_cast<T*>(out), size);
}

template <class T, Activation activation>
INLINE void activate_by(const T* x, T* out, int64_t size) {
  for_vectors(size, [&](int64_t i, int64_t count) __attribute__((always_inline)) TARGET {
    store_as(out + i, activated(activation, load_floats(x + i, count)), count);
  });
}

template <class T>
TARGET void activate(Activation activation, const void* x, void* out, int64_t size) {
  const T* from = static_cast<const T*>(x);
  if (activation == Activation::silu) activate_by<T, Activation::silu>(from, static_cast<T*>(out), size);
  else if (activation == Activation::gelu) activate_by<T, Activation::gelu>(from, static_cast<T*>(out), size);
  else if (activation == Activation::relu2) activate_by<T, Activation::relu2>(from, static_cast<T*>(out), size);
  else activate_by<T, Activation::gelu_tanh>(from, static_cast<T*>(out), size);
}

template <class T>
TARGET void clamped_swiglu(const void* gate, const void* up, float alpha, float limit, void* out, int64_t size) {
  for_vectors(size, [&](int64_t i, int64_t count) __attribute__((always_inline)) TARGET {
    Vec g = load_floats(static_cast<const T*>(gate) + i, count), u = load_floats(static_cast<const T*>(up) + i, count);
    g = g > limit ? broadcast(limit) : g;
    u = u > limit ? broadcast(limit) : u < -limit ? broadcast(-limit) : u;
    store_as(static_cast<T*>(out) + i, (u + 1) * (g * sigmoid(g * alpha)), count);
  });
}

template <class T>
TARGET void soft_cap(const void* x, float cap, void* out, int64_t size) {
  for_vectors(size, [&](int64_t i, int64_t count) __attribute__((always_inline)) TARGET {
    const Vec v = rounded<T>(load_floats(static_cast<const T*>(x) + i, count) / cap);
    store_as(static_cast<T*>(out) + i, rounded<T>(tanh(v)) * cap, count);
  });
}

template <class T>
TARGET void scaled_sum(const void* x, const void* delta, float scale, void* out, int64_t size) {
  for_vectors(size, [&](int64_t i, int64_t count) __attribute__((always_inline)) TARGET {
    const Vec sum = load_floats(static_cast<const T*>(x) + i, count) + load_floats(static_cast<const T*>(delta) + i, count);
    store_as(static_cast<T*>(out) + i, rounded<T>(sum) * scale, count);
  });
}

template <class T>
TARGET void sigmoid_gated(const void* x, const void* gate, int64_t gates, void* out, int64_t size) {
  const T *from = static_cast<const T*>(x), *by = static_cast<const T*>(gate);
  const Vec one = broadcast(load_floats(by, 1)[0]);
  for_vectors(size, [&](int64_t i, int64_t count) __attribute__((always_inline)) TARGET {
    const Vec g = gates == size ? load_floats(by + i, count) : one;
    store_as(static_cast<T*>(out) + i, load_floats(from + i, count) * rounded<T>(sigmoid(g)), count);
  });
}

// Up to 16 elements; behind them minus infinity.
template <class T>
INLINE Vec elements(const T* from, int64_t count) {
  const IntVec lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return lane < static_cast<int32_t>(count) ? load_floats(from, count) : broadcast(-kInfinity);
}

template <class T>
TARGET float peak(const void* all, int64_t size) {
  const T* x = static_cast<const T*>(all);
  Vec largest = broadcast(-kInfinity);
  for_vectors(size, [&](int64_t i, int64_t count) __attribute__((always_inline)) TARGET { largest = max(largest, elements(x + i, count)); });
  return largest_lane(largest);
}

// Added up by lane.
template <class T>
TARGET void sums_of_exp(const void* all, int64_t size, float peak, float* sums) {
  const T* x = static_cast<const T*>(all);
  for (int64_t from = 0; from < size; from += kSumChunk) {
    Vec chains[kChains] = {};
    for_vectors(std::min(kSumChunk, size - from), [&](int64_t i, int64_t count) __attribute__((always_inline)) TARGET {
      chains[i / kLanes % kChains] += exp2((elements(x + from + i, count) - peak) * kLog2E);
    });
    *sums++ = sum_of_lanes((chains[0] + chains[1]) + (chains[2] + chains[3]));
  }
}

template <class T>
TARGET void widen(const void* x, float* out, int64_t size) {
  for_vectors(size, [&](int64_t i, int64_t count) __attribute__((always_inline)) TARGET {
    store_as(out + i, load_floats(static_cast<const T*>(x) + i, count), count);
  });
}

template <class T>
TARGET void weighted_sum(const void* y, int64_t stride, const int32_t* places, const float* weights, int64_t terms, void* out,
                         int64_t size) {
  for_vectors(size, [&](int64_t i, int64_t count) __attribute__((always_inline)) TARGET {
    Vec sum = {};
    for (int64_t j = 0; j < terms; ++j) {
      if (places[j] < 0) continue;
      const T* row = reinterpret_cast<const T*>(static_cast<const char*>(y) + places[j] * stride);
      sum += weights[j] * load_floats(row + i, count);
    }
    store_as(static_cast<T*>(out) + i, sum, count);
  });
}

template <class T>
constexpr RowKernels row_kernels() {
  return {norm<T, T>,        norm<T, float>, layer_norm<T>, gated_norm<T>,  rope<T, T>, rope<T, float>,  gated<T>, activate<T>,
          clamped_swiglu<T>, soft_cap<T>,    scaled_sum<T>, sigmoid_gated<T>, peak<T>, sums_of_exp<T>, widen<T>,   weighted_sum<T>};
}

inline Kernels kernels() { return {row_kernels<float>(), row_kernels<BFloat16>(), row_kernels<Half>()}; }

}  // namespace ISA
}  // namespace
