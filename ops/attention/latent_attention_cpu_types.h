// One call of latent attention, as the two parts of its keys, for latent_attention_cpu.cpp, which explains them.

#pragma once

#include "attention_cpu_types.h"

namespace {

// What `Problem` says of latents, and besides: the turned part of queries and keys. k and k_cache are those of the turned
// part, v and v_cache of the latents; head_dim is that of the latents, which are values as well.
struct LatentProblem : Problem {
  const void* q_turned;
  int64_t q_turned_token, q_turned_head, turned_dim, turned_stride;  // the last from a block to the next
};

// The keys of a part, in the places of keys: what loads, writes and finds keys goes by these.
inline Problem turned_part(const Problem& both) {
  const auto& p = static_cast<const LatentProblem&>(both);
  Problem part = p;
  part.q = p.q_turned, part.q_token = p.q_turned_token, part.q_head = p.q_turned_head;
  part.head_dim = p.turned_dim, part.block_stride = p.turned_stride;
  part.v_cache = p.k_cache, part.v_scale = p.k_scale;
  return part;
}
inline Problem latent_part(const Problem& both) {
  Problem part = both;
  part.k = both.v, part.k_token = both.v_token, part.k_head = both.v_head;
  part.k_cache = both.v_cache, part.k_scale = both.v_scale;
  return part;
}

}  // namespace
