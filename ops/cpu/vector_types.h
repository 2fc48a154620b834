// The types of vectors.h: vectors of the compiler, which may be stored at any address, and the dtypes of 16 bits.

#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cstdint>
#include <limits>

namespace {

using BFloat16 = c10::BFloat16;
using Half = c10::Half;

constexpr int64_t kLanes = 16;
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kLog2E = 1.44269504f;

typedef float Vec __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint32_t UintVec __attribute__((vector_size(64), aligned(4), may_alias));
typedef int32_t IntVec __attribute__((vector_size(64), aligned(4), may_alias));
typedef int32_t Lane __attribute__((may_alias));
typedef uint16_t HalfVec __attribute__((vector_size(32), aligned(1), may_alias));

}  // namespace
