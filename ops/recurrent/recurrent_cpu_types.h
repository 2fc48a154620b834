// What the kernels of layers with a state of a fixed size get, for recurrent_cpu.cpp. Sizes and strides are in elements.

#pragma once

#include "../cpu/vector_types.h"

namespace {

constexpr int64_t kMostWidth = 8;       // of a short convolution
constexpr int64_t kChannels = 128;      // of a short convolution, at once
constexpr int64_t kColumns = 32;        // of a head's state, at once: 16 KiB with 128 rows
constexpr int64_t kRows = 32;           // of a head's state in a scan, at once
constexpr int64_t kTile = 32;           // tokens whose keys and queries are prepared at once
constexpr int64_t kScanTile = 16;       // tokens of a scan at once

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// The requests of a step; state_rows.py says what the tensors hold.
struct StepRows {
  const int32_t *starts, *seq_lens, *read_slot, *write_slot, *write_after;
  int64_t requests, tokens, slots, writes;

  int64_t first(int64_t r) const { return starts[r]; }
  int64_t length(int64_t r) const { return seq_lens[r] == 0 ? 0 : starts[r + 1] - starts[r]; }
  bool from_zeros(int64_t r) const { return seq_lens[r] == length(r); }
  int64_t slot(int64_t r, int64_t w) const { return write_slot[r * writes + w]; }
  // Whether the w-th write of a request is wanted after so many of its tokens.
  bool wants(int64_t r, int64_t w, int64_t after) const {
    return write_after[r * writes + w] == after && slot(r, w) != 0;
  }
  // Of the `count` tokens of a request after the first `done`, those up to the next wanted write, or all.
  int64_t until_write(int64_t r, int64_t done, int64_t count) const {
    for (int64_t w = 0; w < writes; ++w) {
      const int64_t after = write_after[r * writes + w] - done;
      if (slot(r, w) != 0 && after > 0 && after < count) count = after;
    }
    return count;
  }
};

// [T, heads, size] whose last stride is 1.
struct Heads {
  const void* data;
  int64_t token, head;  // strides

  template <class T>
  const T* at(int64_t t, int64_t h) const {
    return static_cast<const T*>(data) + t * token + h * head;
  }
};

struct Convolution {
  StepRows rows;
  const void *x, *gate_before, *gate_after;    // rows `x_row`, `before_row` and `after_row` apart; gates may be null
  int64_t x_row, before_row, after_row;
  const void *weight, *bias;                   // bias may be null
  void *state, *out;
  int64_t slot_stride, channels, width;
  bool silu;
};

struct GatedDelta {
  StepRows rows;
  Heads q, k, v, a, b;
  const float *a_log, *dt_bias;
  float* state;
  void* out;
  int64_t slot_stride, key_heads, heads, dk, dv;
  float eps;

  int64_t blocks() const { return ceil_div(dv, kColumns); }
  // Floats that a call for `blocks` blocks works in.
  int64_t scratch(int64_t blocks) const { return 2 * kTile * dk + blocks * dk * kColumns; }
  // The state of a head in a slot.
  float* at(int64_t slot, int64_t head) const { return state + slot * slot_stride + head * dk * dv; }
};

struct Mamba2 {
  StepRows rows;
  Heads x, dt, b, c;
  const float *a_log, *d, *dt_bias, *zeros;  // zeros: a row of a state
  float* state;
  void* out;
  int64_t slot_stride, heads, head_dim, groups, size;
  float dt_min, dt_max;

  int64_t blocks() const { return ceil_div(head_dim, kRows); }
  int64_t padded() const { return ceil_div(size, kLanes) * kLanes; }
  int64_t scratch(int64_t blocks) const { return (2 * kScanTile + blocks * kRows) * padded(); }
  float* at(int64_t slot, int64_t head) const { return state + slot * slot_stride + head * head_dim * size; }
};

// The kernels for one dtype of tokens.
struct RecurrentKernels {
  // Channels from `channel` on, kChannels or what is left, of the requests `begin` to `end`.
  void (*convolution)(const Convolution&, int64_t channel, int64_t begin, int64_t end);
  // The blocks of columns `begin` to `end` of one request and value head. `next`: the state that is read after this one,
  // null for none.
  void (*gated_delta)(const GatedDelta&, int64_t request, int64_t head, int64_t begin, int64_t end, const float* next,
                      float* scratch);
  // The blocks of rows `begin` to `end` of one request and head.
  void (*mamba2)(const Mamba2&, int64_t request, int64_t head, int64_t begin, int64_t end, float* scratch);
};

struct Kernels {
  RecurrentKernels float32, bfloat16, float16;
};

}  // namespace
