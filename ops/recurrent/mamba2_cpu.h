// The scan of Mamba-2 for one instruction set, for recurrent_cpu_kernels.h.
//
// The rows of a head's state, one for each element of its input, do not depend on each other. Some rows are held in registers
// over several tokens, each of which is brought in and multiplied with its C. The order of operations on an element, and that
// of a sum, is the same however many tokens there are. A row is padded to whole vectors with zeros, which add nothing.

#include <utility>

#include "gated_delta_cpu.h"

namespace {
namespace ISA {

constexpr int64_t kRowsAtOnce = WIDTH == 512 ? 2 : 1;  // with kMostRegisters of each, what the registers hold
constexpr int64_t kMostRegisters = 8;

// The sums of `kEach` registers' lanes lie in `a`, and those of as many others in `b`, in kRegister / kEach lanes each that
// are still to be added up. The result has all of them, in half as many lanes.
template <int64_t kEach, size_t... i>
INLINE Register joined(Register a, Register b, std::index_sequence<i...>) {
  constexpr int64_t half = kRegister / kEach / 2;
  return __builtin_shufflevector(a, b, (i / half * 2 * half + i % half)...) +
         __builtin_shufflevector(a, b, (i / half * 2 * half + i % half + half)...);
}

// The sums of the lanes of `kCount` registers.
template <int64_t kCount>
INLINE Register sums_of(const float* registers) {
  if constexpr (kCount == 1) {
    return load_register(registers);
  } else {
    const Register a = sums_of<kCount / 2>(registers), b = sums_of<kCount / 2>(registers + kCount / 2 * kRegister);
    return joined<kCount / 2>(a, b, std::make_index_sequence<kRegister>());
  }
}

// What the tokens of a tile bring to a block of a state's rows.
struct Tokens {
  int64_t count;
  const float *decay, *u;  // [count] and [count, kRows]
  const float *b, *c;      // [count, padded]
  int64_t padded;
};

// kRowsAtOnce rows from row `p` on, and `kRegisters` registers of their columns from column `n` on: state = decay * state +
// u B, token by token. Of the products with C, `sums` gets a register for each row and token; with `more` they are added.
template <int64_t kRegisters>
INLINE void scan_columns(const Tokens& tokens, int64_t p, int64_t n, Block from, Block to, bool more, float* sums) {
  Register state[kRowsAtOnce][kRegisters];
  for (int64_t r = 0; r < kRowsAtOnce; ++r)
    for (int64_t j = 0; j < kRegisters; ++j)
      state[r][j] = load_register(from.data + (p + r) * from.stride + n + j * kRegister);
  for (int64_t t = 0; t < tokens.count; ++t) {
    const Register decay = broadcast_register(tokens.decay[t]);
    Register added[kRowsAtOnce], sum[kRowsAtOnce][2] = {};
    for (int64_t r = 0; r < kRowsAtOnce; ++r) added[r] = broadcast_register(tokens.u[t * kRows + p + r]);
    for (int64_t j = 0; j < kRegisters; ++j) {
      const Register b = load_register(tokens.b + t * tokens.padded + n + j * kRegister);
      const Register c = load_register(tokens.c + t * tokens.padded + n + j * kRegister);
      for (int64_t r = 0; r < kRowsAtOnce; ++r) {
        state[r][j] = fused(b, added[r], decay * state[r][j]);
        sum[r][j % 2] = fused(state[r][j], c, sum[r][j % 2]);
      }
    }
    for (int64_t r = 0; r < kRowsAtOnce; ++r) {
      float* const all = sums + (r * tokens.count + t) * kRegister;
      const Register own = sum[r][0] + sum[r][1];
      store_register(all, more ? load_register(all) + own : own);
    }
  }
  for (int64_t r = 0; r < kRowsAtOnce; ++r)
    for (int64_t j = 0; j < kRegisters; ++j)
      store_register(to.data + (p + r) * to.stride + n + j * kRegister, state[r][j]);
}

// The tokens of a tile brought into `rows` rows, and y = state C after each of them: [rows, count], with room for kLanes more.
__attribute__((noinline)) TARGET void scan(int64_t rows, const Tokens& tokens, Block from, Block to, float* y) {
  alignas(64) float sums[(kLanes + kRowsAtOnce * kScanTile) * kRegister] = {};
  int64_t waiting = 0;  // registers in `sums`
  for (int64_t p = 0; p < rows; p += kRowsAtOnce) {
    float* const own = sums + waiting * kRegister;
    int64_t n = 0;
    for (; n + kMostRegisters * kRegister <= tokens.padded; n += kMostRegisters * kRegister)
      scan_columns<kMostRegisters>(tokens, p, n, from, to, n > 0, own);
    for (; n < tokens.padded; n += kRegister) scan_columns<1>(tokens, p, n, from, to, n > 0, own);
    waiting += kRowsAtOnce * tokens.count;
    if (waiting < kRegister && p + kRowsAtOnce < rows) continue;
    for (int64_t i = 0; i < waiting; i += kRegister) store_register(y + i, sums_of<kRegister>(sums + i * kRegister));
    y += waiting;
    waiting = 0;
  }
}

// Over the tokens from `token` on: the size of their steps, and how much of the state is left after each.
template <class T>
__attribute__((noinline)) TARGET void time_steps_of(const Mamba2& p, int64_t head, int64_t token, int64_t count, float* dts,
                                                    float* decay) {
  static_assert(kScanTile == kLanes);
  const Vec rate = exponential(broadcast(p.a_log[head]));
  Vec dt = {};
  for (int64_t i = 0; i < count; ++i) dt[i] = *p.dt.at<T>(token + i, head);
  dt = softplus(dt + p.dt_bias[head]);
  dt = dt < p.dt_min ? broadcast(p.dt_min) : dt > p.dt_max ? broadcast(p.dt_max) : dt;
  store(dts, dt);
  store(decay, exp2(-rate * dt * kLog2E));
}

// One block of a state's rows over the tokens of a tile, the first of which is its request's token `done`.
template <class T>
TARGET void scan_block(const Mamba2& p, int64_t r, int64_t head, int64_t block, int64_t done, const float* dts, Tokens tokens,
                       Block kept) {
  const int64_t row = block * kRows, rows = std::min(kRows, p.head_dim - row), count = tokens.count, end = done + count;
  const bool whole = p.size % kLanes == 0 && rows % kRowsAtOnce == 0;
  const auto slot = [&](int64_t s) { return Block{p.at(s, head) + row * p.size, p.size}; };
  alignas(64) float x[kScanTile * kRows], u[kScanTile * kRows] = {}, y[kScanTile * kRows + kLanes], turned[kRows];
  Block from = kept;
  if (done == 0 && p.rows.from_zeros(r)) from = {const_cast<float*>(p.zeros), 0};
  else if (done == 0 && whole) from = slot(p.rows.read_slot[r]);
  else if (done == 0) {
    std::memset(kept.data, 0, kRows * kept.stride * sizeof(float));
    copy_block(rows, p.size, slot(p.rows.read_slot[r]), kept);
  }
  const int64_t first = p.rows.first(r) + done;
  for (int64_t t = 0; t < count; ++t)
    for_vectors(rows, [&](int64_t j, int64_t n) __attribute__((always_inline)) TARGET {
      const Vec v = load_floats(p.x.at<T>(first + t, head) + row + j, n);
      store(x + t * kRows + j, v);
      store(u + t * kRows + j, v * dts[t]);
    });
  tokens.u = u;
  // The last state is stored where it is wanted, if that is one place.
  int64_t wanted = 0, only = 0;
  for (int64_t w = 0; w < p.rows.writes; ++w)
    if (p.rows.wants(r, w, end)) ++wanted, only = p.rows.slot(r, w);
  const bool direct = end == p.rows.length(r) && wanted == 1 && whole;
  scan(rows, tokens, from, direct ? slot(only) : kept, y);
  for (int64_t w = 0; !direct && w < p.rows.writes; ++w)
    if (p.rows.wants(r, w, end)) copy_block(rows, p.size, kept, slot(p.rows.slot(r, w)));
  for (int64_t t = 0; t < count; ++t) {
    T* out = static_cast<T*>(p.out) + ((first + t) * p.heads + head) * p.head_dim + row;
    for (int64_t j = 0; j < rows; ++j) turned[j] = y[j * count + t];
    for_vectors(rows, [&](int64_t j, int64_t n) __attribute__((always_inline)) TARGET {
      store_as(out + j, load(turned + j) + p.d[head] * load(x + t * kRows + j), n);
    });
  }
}

template <class T>
TARGET void mamba2(const Mamba2& p, int64_t r, int64_t head, int64_t begin, int64_t end, float* scratch) {
  const int64_t length = p.rows.length(r), group = head / (p.heads / p.groups), padded = p.padded();
  float *bs = scratch, *cs = bs + kScanTile * padded, *kept = cs + kScanTile * padded;
  alignas(64) float dts[kScanTile], decay[kScanTile];
  for (int64_t done = 0, count; done < length; done += count) {
    count = p.rows.until_write(r, done, std::min(kScanTile, length - done));
    const int64_t token = p.rows.first(r) + done;
    time_steps_of<T>(p, head, token, count, dts, decay);
    for (int64_t i = 0; i < count; ++i)
      for_vectors(p.size, [&](int64_t n, int64_t lanes) __attribute__((always_inline)) TARGET {
        store(bs + i * padded + n, load_floats(p.b.at<T>(token + i, group) + n, lanes));
        store(cs + i * padded + n, load_floats(p.c.at<T>(token + i, group) + n, lanes));
      });
    for (int64_t block = begin; block < end; ++block)
      scan_block<T>(p, r, head, block, done, dts, {count, decay, nullptr, bs, cs, padded},
                    {kept + (block - begin) * kRows * padded, padded});
  }
}

}  // namespace ISA
}  // namespace
