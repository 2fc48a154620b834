// The types of cpu_vectors.h: vectors that may stand at any address.

#pragma once

#include <cstdint>
#include <limits>

namespace {

constexpr int64_t kLanes = 16;
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kLog2E = 1.44269504f;

typedef float Vec __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint32_t UintVec __attribute__((vector_size(64), aligned(4), may_alias));
typedef int32_t IntVec __attribute__((vector_size(64), aligned(4), may_alias));
typedef int32_t Lane __attribute__((may_alias));
typedef uint16_t HalfVec __attribute__((vector_size(32), aligned(1), may_alias));

}  // namespace
