// The scan of Mamba-2 for one instruction set, for recurrent_cpu_kernels.h.
//
// The rows of a head's state, one for each element of its input, do not depend on each other. kRows of them stay in the L1
// cache over a request's tokens, and one pass over them brings a token in and multiplies with its C. A row is padded to
// whole vectors with zeros, which add nothing; all tokens run through the same compiled pass.

#include "gated_delta_cpu.h"

namespace {
namespace ISA {

INLINE float sum_of_register(Register x) {
#if WIDTH == 512
  return _mm512_reduce_add_ps(reinterpret_cast<__m512>(x));
#else
  float sum = 0;
  for (int64_t i = 0; i < kRegister; ++i) sum += x[i];
  return sum;
#endif
}

// state = decay * state + u B and y = state C, for `rows` rows of `size` elements, whole registers.
__attribute__((noinline)) TARGET void scan(int64_t rows, int64_t size, Block from, Block to, float decay, const float* u,
                                           const float* b, const float* c, float* y) {
  const Register decays = broadcast_register(decay);
  for (int64_t p = 0; p < rows; ++p) {
    const float* before = from.data + p * from.stride;
    float* after = to.data + p * to.stride;
    const Register added = broadcast_register(u[p]);
    Register sums[2] = {};
    for (int64_t n = 0; n < size; n += kRegister) {
      const Register s = fused(load_register(b + n), added, decays * load_register(before + n));
      store_register(after + n, s);
      Register& sum = sums[n / kRegister % 2];
      sum = fused(s, load_register(c + n), sum);
    }
    y[p] = sum_of_register(sums[0] + sums[1]);
  }
}

struct TimeSteps {
  alignas(64) float dt[kTile], decay[kTile];
};

template <class T>
__attribute__((noinline)) TARGET void time_steps_of(const Mamba2& p, int64_t head, int64_t token, int64_t count,
                                                    TimeSteps& steps) {
  const Vec rate = exponential(broadcast(p.a_log[head]));
  for (int64_t from = 0; from < count; from += kLanes) {
    Vec dt = {};
    for (int64_t i = 0; i < std::min(kLanes, count - from); ++i) dt[i] = *p.dt.at<T>(token + from + i, head);
    dt = softplus(dt + p.dt_bias[head]);
    dt = dt < p.dt_min ? broadcast(p.dt_min) : dt > p.dt_max ? broadcast(p.dt_max) : dt;
    store(steps.dt + from, dt);
    store(steps.decay + from, exp2(-rate * dt * kLog2E));
  }
}

// One block of a state's rows over `count` tokens of a request, the first of which is its token `done`.
template <class T>
TARGET void scan_block(const Mamba2& p, int64_t r, int64_t head, int64_t block, int64_t done, int64_t count,
                       const TimeSteps& steps, const float* bs, const float* cs, Block kept) {
  const int64_t row = block * kRows, rows = std::min(kRows, p.head_dim - row), length = p.rows.length(r);
  const bool whole = p.size % kLanes == 0;
  const auto slot = [&](int64_t s) { return Block{p.at(s, head) + row * p.size, p.size}; };
  alignas(64) float x[kRows], u[kRows], y[kRows];
  Block from = kept;
  if (done == 0 && p.rows.from_zeros(r)) from = {const_cast<float*>(p.zeros), 0};
  else if (done == 0 && whole) from = slot(p.rows.read_slot[r]);
  else if (done == 0) {
    std::memset(kept.data, 0, kRows * kept.stride * sizeof(float));
    copy_block(rows, p.size, slot(p.rows.read_slot[r]), kept);
  }
  for (int64_t i = 0; i < count; ++i) {
    const int64_t token = p.rows.first(r) + done + i, after = done + i + 1;
    const T* input = p.x.at<T>(token, head) + row;
    T* out = static_cast<T*>(p.out) + (token * p.heads + head) * p.head_dim + row;
    for_vectors(rows, [&](int64_t j, int64_t n) __attribute__((always_inline)) TARGET {
      const Vec v = load_floats(input + j, n);
      store(x + j, v);
      store(u + j, v * steps.dt[i]);
    });
    // The last state is stored where it is wanted, if that is one place.
    int64_t wanted = 0, only = 0;
    for (int64_t w = 0; w < p.rows.writes; ++w)
      if (p.rows.wants(r, w, after)) ++wanted, only = p.rows.slot(r, w);
    const bool direct = after == length && wanted == 1 && whole;
    const Block to = direct ? slot(only) : kept;
    scan(rows, p.padded(), from, to, steps.decay[i], u, bs + i * p.padded(), cs + i * p.padded(), y);
    from = kept;
    for (int64_t w = 0; !direct && w < p.rows.writes; ++w)
      if (p.rows.wants(r, w, after)) copy_block(rows, p.size, kept, slot(p.rows.slot(r, w)));
    for_vectors(rows, [&](int64_t j, int64_t n) __attribute__((always_inline)) TARGET {
      store_as(out + j, load(y + j) + p.d[head] * load(x + j), n);
    });
  }
}

template <class T>
TARGET void mamba2(const Mamba2& p, int64_t r, int64_t head, int64_t begin, int64_t end, float* scratch) {
  const int64_t length = p.rows.length(r), group = head / (p.heads / p.groups), padded = p.padded();
  float *bs = scratch, *cs = bs + kTile * padded, *kept = cs + kTile * padded;
  TimeSteps steps;
  for (int64_t done = 0; done < length; done += kTile) {
    const int64_t count = std::min(kTile, length - done), token = p.rows.first(r) + done;
    time_steps_of<T>(p, head, token, count, steps);
    for (int64_t i = 0; i < count; ++i)
      for_vectors(p.size, [&](int64_t n, int64_t lanes) __attribute__((always_inline)) TARGET {
        store(bs + i * padded + n, load_floats(p.b.at<T>(token + i, group) + n, lanes));
        store(cs + i * padded + n, load_floats(p.c.at<T>(token + i, group) + n, lanes));
      });
    for (int64_t block = begin; block < end; ++block)
      scan_block<T>(p, r, head, block, done, count, steps, bs, cs, {kept + (block - begin) * kRows * padded, padded});
  }
}

}  // namespace ISA
}  // namespace
