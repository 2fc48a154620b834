// The rows of a unit: their queries, and their states where they are kept, for one instruction set; see
// attention_cpu_kernels.h.

#include "attention_cpu_cache.h"

namespace {
namespace ISA {

// The rows of a unit's queries as operands. For Bytes a row is two, of the high and low bytes of 16 bits.
template <class O, class T>
TARGET void load_queries(const Problem& p, const Unit& unit, int64_t lanes, float* to, Scoring* scoring) {
  using Element = typename O::Element;
  const int64_t first = p.starts[unit.request] + unit.first_token;
  for (int64_t row = 0; row < unit.tokens * p.group; ++row) {
    const int64_t head = unit.kv_head * p.group + row % p.group;
    const T* from = static_cast<const T*>(p.q) + (first + row / p.group) * p.q_token + head * p.q_head;
    Element* x = reinterpret_cast<Element*>(to + row * kRowsOf<O> * lanes);
    std::memset(static_cast<void*>(x), 0, kRowsOf<O> * lanes * sizeof(float));
    scoring[row] = {p.sm_scale * (p.soft_cap > 0 ? 1.f : kLog2E), p.soft_cap, 0};
    if constexpr (std::is_same_v<O, Bytes>) {
      constexpr float kMost = 127 * 256;
      const Range range = range_of(from, p.head_dim);
      scoring[row].scale *= range.finite ? range.maximum / kMost : std::numeric_limits<float>::quiet_NaN();
      IntVec sum = {};
      for (int64_t i = 0; i < p.head_dim && range.finite; i += kLanes) {
        const IntVec code = nearest(load_floats(from + i, p.head_dim - i) * (kMost / range.maximum));
        const IntVec low = (code << 24) >> 24;
        const ByteVec bytes[2] = {__builtin_convertvector((code - low) >> 8, ByteVec),
                                  __builtin_convertvector(low, ByteVec)};
        for (int j = 0; j < 2; ++j) std::memcpy(x + j * 4 * lanes + i, &bytes[j], std::min(kLanes, p.head_dim - i));
        sum += code;
      }
      for (int i = 0; i < kLanes; ++i) scoring[row].excess += 128 * static_cast<uint32_t>(sum[i]);
    } else if constexpr (std::is_same_v<O, Pairs> && std::is_same_v<T, BFloat16>) {
      std::memcpy(x, from, p.head_dim * sizeof(T));
    } else {
      for (int64_t i = 0; i < p.head_dim; ++i) x[i] = to_operand<O>(from[i]);
    }
  }
}

// Copies what several units have of a partition to where each of them keeps it.
TARGET void keep_states(const Problem& p, const Item& item, int64_t partition, const State& from, float* states) {
  const int64_t dim = p.padded_dim();
  for (int64_t i = 0, row = 0; i < item.count; row += item.units[i++]->rows(p)) {
    const Unit& unit = *item.units[i];
    const int64_t rows = unit.rows(p), room = unit.room(p), at = partition - unit.first_partition();
    const State to(states + unit.state + at * State::size(room, dim), room, dim);
    std::copy_n(from.values + row * dim, rows * dim, to.values);
    std::copy_n(from.maximum + row, rows, to.maximum);
    std::copy_n(from.sum + row, rows, to.sum);
  }
}

template <class T>
TARGET void merge(const Problem& p, const Unit& unit, const float* states) {
  const int64_t rows = unit.rows(p), room = unit.room(p), dim = p.padded_dim(), state_size = State::size(room, dim);
  const State total(scratch(state_size), room, dim);
  clear(total, rows);
  for (int64_t i = 0; i < unit.partitions(); ++i)
    fold(total, State(const_cast<float*>(states) + unit.state + i * state_size, room, dim), rows, dim);
  write_out<T>(p, unit, total);
}

}  // namespace ISA
}  // namespace
