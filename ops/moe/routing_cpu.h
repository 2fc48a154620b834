// Mixture of experts on the CPU: the choice of each token's experts, and the sum of what they give. routing.py says what
// these compute. Part of ../rowwise/rowwise_cpu.cpp, whose kernels they call.
//
// A row's bits depend on the row alone: its sums have one order, by the number of the expert or by the choice.

#pragma once

#include <algorithm>
#include <cmath>
#include <numeric>
#include <string>
#include <tuple>
#include <vector>

#include "../rowwise/rowwise_cpu_rows.h"

namespace {

enum class Scoring { softmax, softmax_of_chosen, sigmoid };

struct Router {
  int64_t experts, top_k;
  Scoring scoring;
  float scale;
  int64_t groups, top_groups;
  const float* choice_bias;  // or null
};

// The places of the `count` largest of `values`, the largest first and of equal ones the first.
inline void take_largest(const float* values, int64_t size, int64_t count, int32_t* places) {
  for (int64_t i = 0; i < size; ++i) {
    if (i >= count && !(values[i] > values[places[count - 1]])) continue;
    int64_t at = std::min(i, count - 1);
    for (; at > 0 && values[i] > values[places[at - 1]]; --at) places[at] = places[at - 1];
    places[at] = static_cast<int32_t>(i);
  }
}

// Leaves the experts of the best groups; the scores of the others become -infinity.
inline void keep_best_groups(const Router& router, float* choice, std::vector<float>& sums, std::vector<int32_t>& kept) {
  const int64_t size = router.experts / router.groups;
  for (int64_t g = 0; g < router.groups; ++g) {
    float first = -kInfinity, second = -kInfinity;
    for (int64_t e = g * size; e < (g + 1) * size; ++e) {
      second = std::max(second, std::min(first, choice[e]));
      first = std::max(first, choice[e]);
    }
    sums[g] = router.scoring == Scoring::sigmoid && size > 1 ? first + second : first;
  }
  take_largest(sums.data(), router.groups, router.top_groups, kept.data());
  for (int64_t g = 0; g < router.groups; ++g)
    if (std::find(kept.begin(), kept.end(), static_cast<int32_t>(g)) == kept.end())
      std::fill_n(choice + g * size, size, -kInfinity);
}

// Of one row of float32 logits; `scores` and `choice` have room for it.
inline void route_row(const Router& router, float* scores, float* choice, std::vector<float>& sums,
                      std::vector<int32_t>& kept, float* weights, int32_t* experts) {
  const int64_t E = router.experts, k = router.top_k;
  if (router.scoring == Scoring::sigmoid)
    for (int64_t e = 0; e < E; ++e) scores[e] = 1.f / (1.f + std::exp(-scores[e]));
  for (int64_t e = 0; e < E; ++e) choice[e] = scores[e] + (router.choice_bias != nullptr ? router.choice_bias[e] : 0.f);
  if (router.top_groups < router.groups) keep_best_groups(router, choice, sums, kept);
  take_largest(choice, E, k, experts);
  float total = 0;
  if (router.scoring == Scoring::sigmoid) {
    for (int64_t j = 0; j < k; ++j) total += weights[j] = scores[experts[j]];
    total += 1e-20f;
  } else {
    const float peak = *std::max_element(scores, scores + E);
    for (int64_t j = 0; j < k; ++j) weights[j] = std::exp(scores[experts[j]] - peak);
    if (router.scoring == Scoring::softmax_of_chosen) total = std::accumulate(weights, weights + k, 0.f);
    else
      for (int64_t e = 0; e < E; ++e) total += std::exp(scores[e] - peak);
  }
  for (int64_t j = 0; j < k; ++j) weights[j] = weights[j] / total * router.scale;
}

inline std::tuple<Tensor, Tensor> route(const Tensor& logits, const OptionalTensor& choice_bias, int64_t top_k,
                                        const std::string& scoring, double scale, int64_t groups, int64_t top_groups) {
  const RowKernels& kernels = kernels_for(logits, "route");
  const Rows from = rows_of(logits, "route", "logits");
  const int64_t rows = logits.size(0), E = logits.size(1);
  CHECK_VALUE(scoring == "softmax" || scoring == "softmax_of_chosen" || scoring == "sigmoid",
              "route: scoring must be softmax, softmax_of_chosen or sigmoid, got ", scoring);
  CHECK_VALUE(groups > 0 && E % groups == 0 && top_groups > 0 && top_groups <= groups && top_k > 0 &&
                  top_k <= E / groups * top_groups,
              "route: top_k must be from 1 to the experts of top_groups of the groups, which are equal parts of ", E,
              ", got top_k ", top_k, ", top_groups ", top_groups, " and groups ", groups);
  CHECK_VALUE(!choice_bias || (choice_bias->dtype() == kFloat && choice_bias->is_contiguous() && choice_bias->is_cpu() &&
                               choice_bias->sizes() == Shape{E}),
              "route: choice_bias must be a contiguous [", E, "] of float32, got ", choice_bias->sizes(), " of ",
              choice_bias->dtype());
  const Router router = {E,
                         top_k,
                         scoring == "sigmoid"   ? Scoring::sigmoid
                         : scoring == "softmax" ? Scoring::softmax
                                                : Scoring::softmax_of_chosen,
                         static_cast<float>(scale),
                         groups,
                         top_groups,
                         choice_bias ? choice_bias->data<const float>() : nullptr};
  Tensor weights = empty({rows, top_k}, kFloat), experts = empty({rows, top_k}, kInt);
  auto* const w = weights.data<float>();
  auto* const chosen_experts = experts.data<int32_t>();
  parallel_for(0, rows, 16, [&](int64_t begin, int64_t end) {
    std::vector<float> scores(E), choice(E), sums(groups);
    std::vector<int32_t> kept(top_groups);
    for (int64_t row = begin; row < end; ++row) {
      kernels.widen(from[row], scores.data(), E);
      route_row(router, scores.data(), choice.data(), sums, kept, w + row * top_k, chosen_experts + row * top_k);
    }
  });
  return {std::move(weights), std::move(experts)};
}

inline std::tuple<Tensor, Tensor, Tensor> expert_rows(const Tensor& experts, const Tensor& num_tokens,
                                                      const Tensor& used, int64_t num_experts) {
  CHECK_VALUE(experts.dim() == 2 && experts.dtype() == kInt && experts.is_contiguous() && experts.is_cpu(),
              "expert_rows: experts must be a contiguous [T, k] of int32 on the CPU, got ", experts.sizes(), " of ",
              experts.dtype());
  CHECK_VALUE(num_tokens.sizes() == Shape{1} && num_tokens.dtype() == kInt && num_tokens.is_cpu() && num_experts > 0,
              "expert_rows: num_tokens must be [1] of int32 on the CPU, and num_experts above 0");
  CHECK_VALUE(used.sizes() == Shape{1} && used.dtype() == kLong && used.is_cpu(),
              "expert_rows: used must be [1] of int64 on the CPU, got ", used.sizes(), " of ", used.dtype());
  const int64_t count = experts.size(0), k = experts.size(1);
  const int64_t real = *num_tokens.data<const int32_t>();
  CHECK_INDEX(real >= 0 && real <= count, "expert_rows: num_tokens must be from 0 to ", count, ", got ", real);
  const auto* const expert = experts.data<const int32_t>();
  CHECK_INDEX(std::all_of(expert, expert + real * k, [&](int32_t e) { return e >= 0 && e < num_experts; }),
              "expert_rows: experts must be from 0 to ", num_experts - 1);
  Tensor places = empty({count, k}, kInt), tokens = empty({count * k}, kInt), starts = empty({num_experts + 1}, kInt);
  auto* const place = places.data<int32_t>();
  auto* const token = tokens.data<int32_t>();
  auto* const start = starts.data<int32_t>();
  std::fill_n(start, num_experts + 1, 0);
  for (int64_t i = 0; i < real * k; ++i) ++start[expert[i] + 1];
  *used.data<int64_t>() += num_experts - std::count(start + 1, start + num_experts + 1, 0);
  std::partial_sum(start, start + num_experts + 1, start);
  std::vector<int32_t> next(start, start + num_experts);
  for (int64_t i = 0; i < real * k; ++i) token[place[i] = next[expert[i]]++] = static_cast<int32_t>(i / k);
  std::fill(place + real * k, place + count * k, -1);
  for (int64_t i = real * k; i < count * k; ++i) token[i] = static_cast<int32_t>(i / k);
  return {std::move(places), std::move(tokens), std::move(starts)};
}

inline Tensor weighted_sum(const Tensor& y, const Tensor& places, const Tensor& weights) {
  const RowKernels& kernels = kernels_for(y, "weighted_sum");
  const Rows from = rows_of(y, "weighted_sum", "y");
  CHECK_VALUE(places.dim() == 2 && places.dtype() == kInt && places.is_contiguous() && places.is_cpu() &&
                  weights.sizes() == places.sizes() && weights.dtype() == kFloat && weights.is_contiguous() &&
                  weights.is_cpu(),
              "weighted_sum: places and weights must be contiguous [T, k] of int32 and float32 on the CPU, got ",
              places.sizes(), " of ", places.dtype(), " and ", weights.sizes(), " of ", weights.dtype());
  const int64_t rows = places.size(0), k = places.size(1), size = y.size(1);
  const auto* const place = places.data<const int32_t>();
  const auto* const weight = weights.data<const float>();
  CHECK_INDEX(std::all_of(place, place + rows * k, [&](int32_t i) { return i >= -1 && i < y.size(0); }),
              "weighted_sum: places must be from -1 to ", y.size(0) - 1);
  Tensor out = empty({rows, size}, y.dtype());
  const Rows to = rows_of(out, "weighted_sum", "out");
  for_rows(rows, k * size, [&](int64_t row) {
    kernels.weighted_sum(from.data, from.stride, place + row * k, weight + row * k, k, to[row], size);
  });
  return out;
}

}  // namespace
