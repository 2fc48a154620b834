"""Sampling as pure functions of (logits, SamplingInput): part of the compiled graphs, so tensors only.

The noise of a token depends on its request's seed, its position and its id alone. So a seeded request gives the same
tokens in any batch, bucket or chunking, and after a preemption. And a drafter that calls ``sample`` on logits of its
own, with the request's ``SamplingInput`` and the drafted token's own position, has the model's own noise there.
"""

from typing import NamedTuple

from torch import Tensor

from compiled_llm.ops import sample_tokens


class SamplingInput(NamedTuple):
    """Sampling parameters of the R rows of a step; padding rows are greedy."""

    temperature: Tensor  # [R] float32, 0 for greedy
    top_p: Tensor  # [R] float32, 1 for off
    top_k: Tensor  # [R] int32, the vocabulary's size for off
    min_p: Tensor  # [R] float32, 0 for off
    top_n_sigma: Tensor  # [R] float32, 0 for off
    seed: Tensor  # [R] int64
    position: Tensor  # [R] int32, of the token to be sampled


def sample(logits: Tensor, params: SamplingInput) -> Tensor:
    """Sample a token for each row of logits, ``[R, V]`` of any float dtype -> ``[R]`` int64.

    Temperature first, then top-k, then top-p over the tokens that top-k left, then min-p, as transformers and vLLM do;
    then top-n-sigma. Rows with temperature 0 take the most likely token; rows whose largest logit is not finite have
    ``NO_TOKEN``.
    """
    filters = params.top_k, params.top_p, params.min_p, params.top_n_sigma
    return sample_tokens(logits, params.temperature, *filters, params.seed, params.position)
