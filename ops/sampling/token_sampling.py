"""Choosing tokens: the most likely one, or a sample. References in plain torch, schemas, registration.

The ops exist because plain torch needs the whole vocabulary sorted for top-k and top-p, and because what the compiler
makes of an argmax for a CPU takes several times as long as reading the logits. The kernels search for the one number
that both filters come to: the least weight that stays.

    w[v] = exp((logits[v] - max) / temperature)               1 for the most likely token
    top-k   keeps w[v] >= the k-th largest
    top-p   keeps w[v] >= t, for the largest t whose tokens have at least the share p of what top-k kept
    min-p   keeps w[v] >= min_p
    token   the first v where the sum of the kept w[0..v] exceeds uniform * (the sum of all that are kept)

Tokens of equal weight stay or go together. Every row is computed by itself, in the same order of operations whatever
the other rows are.

A row that no token can be chosen from has the token ``NO_TOKEN``: one with NaN or +inf, or with nothing but -inf. The
caller sees thereby that a model computes no numbers, and looks at no logits for it.
"""

import torch
from torch import Tensor

from compiled_llm.ops import native
from compiled_llm.ops.library import LIBRARY

# Below, a quotient of logits may overflow; such a row is greedy in all but name.
MIN_TEMPERATURE = 1e-5
NO_TOKEN = -1

LIBRARY.define("greedy_tokens(Tensor logits) -> Tensor")
LIBRARY.define(
    "sample_tokens(Tensor logits, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p, Tensor uniform)"
    " -> Tensor"
)


def greedy_tokens(logits: Tensor) -> Tensor:
    """The most likely token of each row, the lowest id where several are equal, or ``NO_TOKEN``.

    ``[R, V]`` -> ``[R]`` int64.

    Args:
        logits: ``[R, V]`` float32, bfloat16 or float16; the last stride is 1.
    """
    return torch.ops.compiled_llm.greedy_tokens(logits)


def sample_tokens(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniform: Tensor
) -> Tensor:
    """Choose a token for each row: temperature, then top-k, then top-p over what top-k left, then min-p.

    Args:
        logits: ``[R, V]`` float32, bfloat16 or float16; the last stride is 1. -inf bans a token.
        temperature: ``[R]`` float32; 0 takes the most likely token, the lowest id where several are equal.
        top_k: ``[R]`` int32, at least 1; V or more is off.
        top_p: ``[R]`` float32, above 0; 1 is off (Holtzman et al., 2020, arXiv:1904.09751).
        min_p: ``[R]`` float32, 0 to 1; 0 is off (Nguyen et al., 2024, arXiv:2407.01082).
        uniform: ``[R]`` float64 in [0, 1).

    Returns:
        ``[R]`` int64: ids of the vocabulary, or ``NO_TOKEN``.
    """
    return torch.ops.compiled_llm.sample_tokens(logits, temperature, top_k, top_p, min_p, uniform)


def greedy_tokens_reference(logits: Tensor) -> Tensor:
    """The op in plain torch."""
    largest, tokens = logits.max(dim=-1)
    return torch.where(largest.isfinite(), tokens, NO_TOKEN)


def sample_tokens_reference(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniform: Tensor
) -> Tensor:
    """The op in plain torch, by sorting. What every kernel is tested against."""
    logits = logits.float()
    largest, greedy = logits.max(dim=-1, keepdim=True)
    quotient = (logits - largest) / temperature.clamp(min=MIN_TEMPERATURE)[:, None]
    weights = torch.where(logits == largest, 1.0, quotient.exp()).double()
    falling = weights.sort(dim=-1, descending=True).values
    kth = falling.gather(-1, top_k.clamp(max=logits.shape[-1]).long()[:, None] - 1)
    falling = torch.where(falling >= kth, falling, 0.0)
    mass = falling.cumsum(dim=-1)
    # The first place where the sum reaches the share.
    place = (mass < top_p.double()[:, None] * mass[:, -1:]).sum(dim=-1, keepdim=True).clamp(max=logits.shape[-1] - 1)
    nucleus = torch.where(top_p[:, None] < 1, falling.gather(-1, place), 0.0)
    least = torch.maximum(torch.maximum(kth, nucleus), min_p.double()[:, None])
    mass = torch.where(weights >= least, weights, 0.0).cumsum(dim=-1)
    chosen = (mass <= uniform[:, None] * mass[:, -1:]).sum(dim=-1).clamp(max=logits.shape[-1] - 1)
    tokens = torch.where(temperature > 0, chosen, greedy.squeeze(-1))
    return torch.where(largest.squeeze(-1).isfinite(), tokens, NO_TOKEN)


@torch.library.register_fake("compiled_llm::greedy_tokens", lib=LIBRARY)
@torch.library.register_fake("compiled_llm::sample_tokens", lib=LIBRARY)
def _fake(logits: Tensor, *args) -> Tensor:
    return logits.new_empty(logits.shape[0], dtype=torch.int64)


# Until sampling_cpu.cpp is loaded, which registers its own implementations; or for good, without a compiler.
def _greedy_without_kernels(logits: Tensor) -> Tensor:
    return (greedy_tokens if native.load("sampling_cpu") else greedy_tokens_reference)(logits)


def _sample_without_kernels(*args) -> Tensor:
    return (sample_tokens if native.load("sampling_cpu") else sample_tokens_reference)(*args)


def _sample_cuda(*args) -> Tensor:
    from compiled_llm.ops.sampling import (
        triton_sampling as sampling_triton,  # Triton is loaded by the first call on a GPU, not by the import
    )

    return sampling_triton.sample_tokens(*args)


LIBRARY.impl("greedy_tokens", _greedy_without_kernels, "CompositeExplicitAutograd")
LIBRARY.impl("greedy_tokens", greedy_tokens_reference, "CUDA")
LIBRARY.impl("sample_tokens", _sample_without_kernels, "CompositeExplicitAutograd")
LIBRARY.impl("sample_tokens", _sample_cuda, "CUDA")
