"""Choosing tokens over ranks, of which each has the logits of some tokens: what is chosen of all logits, bit for bit.

Nobody gathers the logits. A rank draws among its own tokens, with the noise of their ids in the vocabulary, and of the
ranks' draws the best one wins, of equal ones the one with the lowest id. What filters need to know of all logits is
joined as it is computed in one process: the largest, the k largest weights of each rank for top-k, sums of chunks for
top-p and top-n-sigma, which all ranks add up in the order of the vocabulary.
"""

from typing import Any

import torch
from torch import Tensor

from compiled_llm.ops.library import define_op
from compiled_llm.ops.parallel.rank_group import RankGroup
from compiled_llm.ops.parallel.reductions import all_gather_reference
from compiled_llm.ops.sampling.reference import sample_tokens_reference

VOCABULARY_CHUNK = 256
"""Tokens of which a rank has all or none: what sampling adds up at once."""


def sample_tokens_of_ranks(
    own: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    top_n_sigma: Tensor,
    seed: Tensor,
    position: Tensor,
    *,
    group: RankGroup,
    vocab_size: int,
) -> Tensor:
    """``sample_tokens`` of the logits of all ranks. Each calls it with the same parameters.

    Args:
        own: ``[R, n]``, the logits of the rank's tokens: the ranks' one after the other are the vocabulary's. n is a
            multiple of ``VOCABULARY_CHUNK``. What stands past the vocabulary is not looked at.
        vocab_size: V, at most n times the number of ranks. The other arguments are those of ``sample_tokens``.

    Returns:
        ``[R]`` int64, the same in all ranks.

    Raises:
        ValueError: a tensor of another shape, dtype or layout. RuntimeError: another rank has failed.
    """
    filters = top_k, top_p, min_p, top_n_sigma
    return torch.ops.compiled_llm.sample_tokens_of_ranks(own, temperature, *filters, seed, position, *group, vocab_size)


def _reference(own: Tensor, *args: Any) -> Tensor:
    *params, place, memory, vocab_size = args
    logits = all_gather_reference(own, place, memory, int(place[1]))
    return sample_tokens_reference(logits[:, :vocab_size], *params)


def _on_gpu(own: Tensor, *args: Any) -> Tensor:
    """Of all logits, which are gathered: at the speed of links between GPUs that takes less than more meetings."""
    *params, place, memory, vocab_size = args
    logits = torch.ops.compiled_llm.all_gather(own.contiguous(), place, memory, place.numel() - 1)
    return torch.ops.compiled_llm.sample_tokens(logits[:, :vocab_size], *params)


define_op(
    "sample_tokens_of_ranks(Tensor own, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p,"
    " Tensor top_n_sigma, Tensor seed, Tensor position, Tensor place, Tensor(a!) memory, int vocab_size) -> Tensor",
    reference=_reference,
    fake=lambda own, *args: own.new_empty(own.shape[0], dtype=torch.int64),
    cpu="sampling_cpu",
    gpu=_on_gpu,
)
