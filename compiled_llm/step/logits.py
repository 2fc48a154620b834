"""What changes logits before a token is chosen, in the compiled graph: bias, penalties, users' own functions, masks.

Pure functions of tensors. A step runs them only if some row asks for any of it; rows that do not stay as they are, to
the bit.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from compiled_llm.step.logits_transforms import LogitsContext, LogitsTransform

_BITS = 32


class LogitsInput(NamedTuple):
    """What the rows of a step ask for. Padding rows, and rows that ask for nothing, have the values for off."""

    row: Tensor  # [R] int64, of token_counts
    is_due: Tensor  # [R] float32: 1 where the step chooses the request's next token, 0 amid a prompt
    presence_penalty: Tensor  # [R] float32, 0 for off
    frequency_penalty: Tensor  # [R] float32, 0 for off
    repetition_penalty: Tensor  # [R] float32, 1 for off
    bias_ids: Tensor  # [R, MAX_BIASES] int64; an id that stands twice has the same bias there
    biases: Tensor  # [R, MAX_BIASES] float32, 0 for off
    allowed: Tensor  # [R, ceil(V / 32)] int32: bit v % 32 of word v // 32 says whether token v may follow
    fields: tuple[tuple[Tensor, ...], ...]  # of each LogitsTransform, in its order


def change_logits(
    logits: Tensor,
    wanted: LogitsInput,
    position: Tensor,
    token_counts: Tensor,
    transforms: tuple[LogitsTransform, ...],
) -> Tensor:
    """``[R, V]`` -> ``[R, V]`` float32: bias, then penalties, then the users' transforms, then the mask.

    Args:
        position: ``[R]`` int32, of the token to be chosen.
        token_counts: ``[rows, V]`` float32, as in ``LogitsContext``, of all requests.
    """
    counts = token_counts[wanted.row]
    # The few logits with a bias are changed by themselves, so that one pass over the vocabulary does for the others.
    ids = wanted.bias_ids
    biased = penalised(logits.gather(1, ids).float() + wanted.biases, counts.gather(1, ids), wanted)
    logits = penalised(logits.float(), counts, wanted)
    if not transforms:
        words = wanted.allowed.gather(1, ids // _BITS)
        biased = torch.where((words >> (ids % _BITS).int()) & 1 != 0, biased, float("-inf"))
        return _allowed(logits, wanted).scatter(1, ids, biased)
    logits = logits.scatter(1, ids, biased)
    context = LogitsContext(position, counts)
    for transform, fields in zip(transforms, wanted.fields, strict=True):
        logits = transform(logits, dict(zip(transform.fields, fields, strict=True)), context)
    return _allowed(logits, wanted)


def penalised(logits: Tensor, token_counts: Tensor, wanted: LogitsInput) -> Tensor:
    """Logits ``[R, V]`` less the penalties for tokens that are there already.

    Repetition (Keskar et al., 2019, arXiv:1909.05858): of tokens of prompt or output, positive logits are divided by it
    and others multiplied. Then, of tokens of the output, the frequency penalty is subtracted once for each occurrence,
    and the presence penalty once.
    """
    repetition = wanted.repetition_penalty[:, None]
    penalty = torch.where(logits > 0, 1 / repetition, repetition)
    logits = logits * torch.where(token_counts != 0, penalty, 1.0)
    occurrences = token_counts.floor()
    presence = torch.where(occurrences > 0, wanted.presence_penalty[:, None], 0.0)
    return logits - occurrences * wanted.frequency_penalty[:, None] - presence


def _allowed(logits: Tensor, wanted: LogitsInput) -> Tensor:
    return torch.where(unpacked(wanted.allowed, logits.shape[1]), logits, float("-inf"))


def unpacked(words: Tensor, vocab_size: int) -> Tensor:
    """A mask ``[R, V]`` bool from its words ``[R, ceil(V / 32)]`` int32."""
    bits = torch.arange(_BITS, dtype=torch.int32, device=words.device)
    return ((words[:, :, None] >> bits) & 1).flatten(1)[:, :vocab_size] != 0
