// The gated delta rule's kernel for one instruction set, for recurrent_cpu_kernels.h.
//
// The columns of a head's state do not depend on each other. kColumns of them stay in the L1 cache over a row's tokens,
// and one pass over them does what two tokens need: it brings in the token before, S = g S + k d, and multiplies the result
// with this token's key and query. With these products this token's delta and output are known, since
//
//   d = beta (v - g S^T k)   and   o = g S^T q + d (k . q).
//
// The order of all sums is that of a state's rows. So a token has the same bits in whatever step it is computed; what may
// be fused is written out as `fused`, since a pass is compiled for the first, the last and the tokens between.

#include "short_convolution_cpu.h"

namespace {
namespace ISA {

constexpr int64_t kRegister = WIDTH / 32;  // floats
constexpr int64_t kStep = 2 * kRegister;   // columns of a pass at once: more would not leave their sums in registers

INLINE Register load_register(const float* from) {
  Register x;
  std::memcpy(&x, from, sizeof(x));
  return x;
}
INLINE void store_register(float* to, Register x) { std::memcpy(to, &x, sizeof(x)); }
INLINE Register broadcast_register(float x) { return x - Register{}; }

// a * b + c, rounded once where there is an instruction for it.
INLINE Register fused(Register a, Register b, Register c) {
#if WIDTH == 512
  return reinterpret_cast<Register>(
      _mm512_fmadd_ps(reinterpret_cast<__m512>(a), reinterpret_cast<__m512>(b), reinterpret_cast<__m512>(c)));
#elif WIDTH == 256
  return reinterpret_cast<Register>(
      _mm256_fmadd_ps(reinterpret_cast<__m256>(a), reinterpret_cast<__m256>(b), reinterpret_cast<__m256>(c)));
#else
  return a * b + c;
#endif
}

// Rows of kColumns columns, `stride` apart.
struct Block {
  float* data;
  int64_t stride;
};

// The token that is brought in.
struct Change {
  float decay;
  const float *key, *delta;
};

// Over `rows` rows of `from`: with `kChanges` brings `change` in and stores the result to `to`; with `kReduces` multiplies
// with a key and a query, summed up over the rows. Rows of `next` are asked for.
template <bool kChanges, bool kReduces>
__attribute__((noinline)) TARGET void pass(int64_t rows, Block from, Block to, const Change& change, const float* key,
                                           const float* query, float* by_key, float* by_query, Block next) {
  for (int64_t c = 0; c < kColumns; c += kStep) {
    const Register decay = broadcast_register(kChanges ? change.decay : 0);
    Register delta[2] = {}, keys[2][2] = {}, queries[2][2] = {};
    for (int64_t x = 0; kChanges && x < 2; ++x) delta[x] = load_register(change.delta + c + x * kRegister);
    const auto row = [&](int64_t i, Register (&k)[2], Register (&q)[2]) __attribute__((always_inline)) TARGET {
      for (int64_t x = 0; x < 2; ++x) {
        Register s = load_register(from.data + i * from.stride + c + x * kRegister);
        if constexpr (kChanges) {
          s = fused(broadcast_register(change.key[i]), delta[x], decay * s);
          store_register(to.data + i * to.stride + c + x * kRegister, s);
        }
        if constexpr (kReduces) {
          k[x] = fused(s, broadcast_register(key[i]), k[x]);
          q[x] = fused(s, broadcast_register(query[i]), q[x]);
        }
      }
      if (next.data != nullptr) __builtin_prefetch(next.data + i * next.stride + c, 0, 2);
    };
    int64_t i = 0;
    for (; i + 2 <= rows; i += 2) {
      row(i, keys[0], queries[0]);
      row(i + 1, keys[1], queries[1]);
    }
    if (i < rows) row(i, keys[0], queries[0]);
    for (int64_t x = 0; kReduces && x < 2; ++x) {
      store_register(by_key + c + x * kRegister, keys[0][x] + keys[1][x]);
      store_register(by_query + c + x * kRegister, queries[0][x] + queries[1][x]);
    }
  }
}

// Key and query of one token in floats, of length 1 and `scale`. The result is their product.
template <class T>
__attribute__((noinline)) TARGET float prepare(const T* k, const T* q, int64_t size, float eps, float scale, float* key,
                                               float* query) {
  Vec k_squares = {}, q_squares = {}, products = {};
  for_vectors(size, [&](int64_t i, int64_t n) __attribute__((always_inline)) TARGET {
    const Vec x = load_floats(k + i, n), y = load_floats(q + i, n);
    k_squares += x * x;
    q_squares += y * y;
  });
  const float by_k = 1 / std::sqrt(sum_of_lanes(k_squares) + eps);
  const float by_q = scale / std::sqrt(sum_of_lanes(q_squares) + eps);
  for_vectors(size, [&](int64_t i, int64_t n) __attribute__((always_inline)) TARGET {
    const Vec x = load_floats(k + i, n) * by_k, y = load_floats(q + i, n) * by_q;
    store_as(key + i, x, n);
    store_as(query + i, y, n);
    products += x * y;
  });
  return sum_of_lanes(products);
}

struct Gates {
  alignas(64) float decay[kTile], beta[kTile];
};

template <class T>
__attribute__((noinline)) TARGET void gates_of(const GatedDelta& p, int64_t head, int64_t token, int64_t count, Gates& gates) {
  const Vec rate = exponential(broadcast(p.a_log[head]));
  for (int64_t from = 0; from < count; from += kLanes) {
    Vec a = {}, b = {};
    for (int64_t i = 0; i < std::min(kLanes, count - from); ++i) {
      a[i] = *p.a.at<T>(token + from + i, head);
      b[i] = *p.b.at<T>(token + from + i, head);
    }
    store(gates.decay + from, exp2(-rate * softplus(a + p.dt_bias[head]) * kLog2E));
    store(gates.beta + from, sigmoid(b));
  }
}

inline TARGET void copy_block(int64_t rows, int64_t columns, Block from, Block to) {
  for (int64_t i = 0; i < rows; ++i) std::memcpy(to.data + i * to.stride, from.data + i * from.stride, columns * sizeof(float));
}

// One block of columns over `count` tokens of a row, the first of which is its token `done`.
template <class T>
TARGET void delta_block(const GatedDelta& p, int64_t r, int64_t head, int64_t block, int64_t done, int64_t count,
                        const Gates& gates, const float* keys, const float* queries, const float* products, float* kept_data,
                        Block next) {
  const int64_t column = block * kColumns, columns = std::min(kColumns, p.dv - column), length = p.rows.length(r);
  const bool whole = columns == kColumns, last = done + count == length;
  const Block kept = {kept_data, kColumns};
  const auto slot = [&](int64_t s) { return Block{p.at(s, head) + column, p.dv}; };
  const auto write = [&](int64_t after) {
    for (int64_t w = 0; w < p.rows.writes; ++w)
      if (p.rows.wants(r, w, after)) copy_block(p.dk, columns, kept, slot(p.rows.slot(r, w)));
  };
  alignas(64) float zeros[kColumns] = {}, by_key[kColumns], by_query[kColumns], delta[kColumns], value[kColumns];

  Block from = kept;
  if (done == 0 && p.rows.from_zeros(r)) from = {zeros, 0};
  else if (done == 0 && whole) from = slot(p.rows.read_slot[r]);
  else if (done == 0) {
    std::memset(kept.data, 0, p.dk * kColumns * sizeof(float));
    copy_block(p.dk, columns, slot(p.rows.read_slot[r]), kept);
  }
  Change change = {0, nullptr, delta};
  for (int64_t i = 0; i < count; ++i) {
    const float *key = keys + i * p.dk, *query = queries + i * p.dk;
    if (i == 0) {
      pass<false, true>(p.dk, from, kept, change, key, query, by_key, by_query, next);
    } else {
      pass<true, true>(p.dk, from, kept, change, key, query, by_key, by_query, {nullptr, 0});
      from = kept;
      write(done + i);
    }
    const T* v = p.v.at<T>(done + i + p.rows.first(r), head) + column;
    T* out = static_cast<T*>(p.out) + ((done + i + p.rows.first(r)) * p.heads + head) * p.dv + column;
    for_vectors(columns, [&](int64_t c, int64_t n) __attribute__((always_inline)) TARGET {
      store(value + c, load_floats(v + c, n));
    });
    change = {gates.decay[i], key, delta};
    const Register decay = broadcast_register(gates.decay[i]), beta = broadcast_register(gates.beta[i]);
    for (int64_t c = 0; c < kColumns; c += kRegister) {
      const Register d = beta * fused(-decay, load_register(by_key + c), load_register(value + c));
      store_register(delta + c, d);
      store_register(value + c, fused(d, broadcast_register(products[i]), decay * load_register(by_query + c)));
    }
    for_vectors(columns, [&](int64_t c, int64_t n) __attribute__((always_inline)) TARGET { store_as(out + c, load(value + c), n); });
  }

  // A state that goes to one slot is stored there, not kept first.
  int64_t wanted = 0, only = 0;
  for (int64_t w = 0; w < p.rows.writes; ++w)
    if (p.rows.wants(r, w, done + count)) ++wanted, only = p.rows.slot(r, w);
  if (last && wanted == 0) return;
  const bool direct = last && wanted == 1 && whole;
  pass<true, false>(p.dk, from, direct ? slot(only) : kept, change, nullptr, nullptr, nullptr, nullptr, {nullptr, 0});
  if (!direct) write(done + count);
}

template <class T>
TARGET void gated_delta(const GatedDelta& p, int64_t r, int64_t head, int64_t begin, int64_t end, const float* next_state,
                        float* scratch) {
  const int64_t first = p.rows.first(r), length = p.rows.length(r), key_head = head / (p.heads / p.key_heads);
  const float scale = 1 / std::sqrt(static_cast<float>(p.dk));
  float *keys = scratch, *queries = keys + kTile * p.dk, *kept = queries + kTile * p.dk;
  const bool reads = !p.rows.from_zeros(r);
  Gates gates;
  float products[kTile];
  for (int64_t done = 0; done < length; done += kTile) {
    const int64_t count = std::min(kTile, length - done);
    gates_of<T>(p, head, first + done, count, gates);
    for (int64_t i = 0; i < count; ++i)
      products[i] = prepare(p.k.at<T>(first + done + i, key_head), p.q.at<T>(first + done + i, key_head), p.dk, p.eps, scale,
                            keys + i * p.dk, queries + i * p.dk);
    for (int64_t block = begin; block < end; ++block) {
      // A decode waits for memory: the columns that are needed next come meanwhile.
      Block next = {nullptr, p.dv};
      if (length == 1 && block + 1 < end && reads) next.data = p.at(p.rows.read_slot[r], head) + (block + 1) * kColumns;
      if (length == 1 && block + 1 == end) next.data = const_cast<float*>(next_state);
      delta_block<T>(p, r, head, block, done, count, gates, keys, queries, products, kept + (block - begin) * p.dk * kColumns,
                     next);
    }
  }
}

}  // namespace ISA
}  // namespace
