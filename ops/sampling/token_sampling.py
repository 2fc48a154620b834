"""The ops that choose tokens: the most likely one, or a sample. Schemas and registration.

What they compute is said in ``reference.py``. They are ops because plain torch has to sort the whole vocabulary for
top-k and top-p, and because the argmax that the compiler makes for a CPU takes several times as long as reading the
logits. The kernels search for one number, which both filters are equal to: the smallest weight that stays. They compute
each row by itself, in the same order of operations whatever the other rows are. The noise (``noise.py``) has the same
bits in all of them, so where they keep the same tokens they choose the same one.
"""

import torch
from torch import Tensor

from compiled_llm.ops.library import define_op, on_gpu
from compiled_llm.ops.sampling.reference import greedy_tokens_reference, sample_tokens_reference


def greedy_tokens(logits: Tensor) -> Tensor:
    """The most likely token of each row, the lowest id where several are equal, or ``NO_TOKEN``.

    Args:
        logits: ``[R, V]`` float32, bfloat16 or float16; the last stride is 1.

    Returns:
        ``[R]`` int64.
    """
    return torch.ops.compiled_llm.greedy_tokens(logits)


def keep_greedy_tokens(logits: Tensor, last_tokens: Tensor) -> None:
    """Write ``greedy_tokens`` to the first R of ``last_tokens``, int64, of which there may be more.

    On a GPU that is one op: nothing is left to be copied.
    """
    if logits.is_cuda:
        torch.ops.compiled_llm.keep_greedy_tokens(logits, last_tokens)
    else:
        last_tokens[: logits.shape[0]] = greedy_tokens(logits)


def sample_tokens(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    top_n_sigma: Tensor,
    seed: Tensor,
    position: Tensor,
) -> Tensor:
    """Choose a token for each row: temperature, then top-k, top-p over what top-k left, min-p and top-n-sigma.

    Of what is left, the largest sum of log-weight and noise. A noise follows from seed, position and token alone: a
    drafter that samples with a request's seed, position and filters has the noise that the request's own model will
    have there.

    Args:
        logits: ``[R, V]`` float32, bfloat16 or float16; the last stride is 1. -inf bans a token.
        temperature: ``[R]`` float32; 0 takes the most likely token, the lowest id where several are equal.
        top_k: ``[R]`` int32, at least 1; V or more is off.
        top_p: ``[R]`` float32, above 0; 1 is off (Holtzman et al., 2020, arXiv:1904.09751).
        min_p: ``[R]`` float32, 0 to 1; 0 is off (Nguyen et al., 2024, arXiv:2407.01082).
        top_n_sigma: ``[R]`` float32, at least 0, which is off (Tang et al., 2024, arXiv:2411.07641).
        seed: ``[R]`` int64.
        position: ``[R]`` int32, of the token to be sampled.

    Returns:
        ``[R]`` int64: ids of the vocabulary, or ``NO_TOKEN``.
    """
    return torch.ops.compiled_llm.sample_tokens(logits, temperature, top_k, top_p, min_p, top_n_sigma, seed, position)


def _keep_greedy_tokens_reference(logits: Tensor, last_tokens: Tensor) -> None:
    last_tokens[: logits.shape[0]] = greedy_tokens(logits)


def _fake(logits: Tensor, *args) -> Tensor:
    return logits.new_empty(logits.shape[0], dtype=torch.int64)


define_op(
    "greedy_tokens(Tensor logits) -> Tensor",
    reference=greedy_tokens_reference,
    fake=_fake,
    cpu="sampling_cpu",
    gpu=on_gpu("sampling.triton_greedy:greedy_tokens"),
)
define_op(
    "keep_greedy_tokens(Tensor logits, Tensor(a!) last_tokens) -> ()",
    reference=_keep_greedy_tokens_reference,
    fake=lambda logits, last_tokens: None,
    gpu=on_gpu("sampling.triton_greedy:keep_greedy_tokens"),
)
define_op(
    "sample_tokens(Tensor logits, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p, Tensor top_n_sigma,"
    " Tensor seed, Tensor position) -> Tensor",
    reference=sample_tokens_reference,
    fake=_fake,
    cpu="sampling_cpu",
    gpu=on_gpu("sampling.triton_sampling:sample_tokens"),
)
