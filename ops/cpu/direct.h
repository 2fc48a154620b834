// How a program (program_cpu.cpp) calls an op: not through torch, which takes 2 to 6 us to find the function and to make
// its arguments.

#pragma once

#include <optional>

#include "tensor.h"

namespace {

// A tensor, or none.
using Slot = std::optional<Tensor>;

// Each argument is at the address of a Tensor, a Slot (of "Tensor?"), int64_t, double, bool or std::string, as the schema
// says. Results are written into slots. `spare` may be null.
using Direct = void (*)(const void* const* arguments, Slot* const* results, Spare* spare);

}  // namespace
