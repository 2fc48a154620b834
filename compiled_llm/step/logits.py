"""Logits processing before a token is chosen, in the compiled graph: bias, penalties, users' own functions, masks.

Pure functions of tensors. A step runs them only if a request of it needs them; rows of other requests stay as they are,
bit for bit. Shapes: R rows of logits, V tokens in the vocabulary.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from compiled_llm.step.logits_transforms import LogitsContext, LogitsTransform

_BITS = 32


class DraftRows(NamedTuple):
    """Which rows of a step stand after drafts, in engines that have some. Rows of a request follow one another."""

    first: Tensor  # [R] int64, the first row of the request
    following: Tensor  # [R] int64, the draft that is computed next, which the row has to choose; -1: there is none


class TreeRows(NamedTuple):
    """As ``DraftRows``, in engines whose drafts may be trees."""

    parent: Tensor  # [R] int64, the row that has to choose the draft which is this row's token; without such, itself
    draft: Tensor  # [R] int64, the draft which is this row's token; -1: it is none


class LogitsInput(NamedTuple):
    """Parameters of the rows of a step. Padding rows, and rows of requests that need none of it, have those for off."""

    row: Tensor  # [R] int64, the request's row of token_counts
    is_due: Tensor  # [R] float32: 1 where the step chooses the request's next token, 0 within a prompt
    presence_penalty: Tensor  # [R] float32, 0 for off
    frequency_penalty: Tensor  # [R] float32, 0 for off
    repetition_penalty: Tensor  # [R] float32, 1 for off
    bias_ids: Tensor  # [R, MAX_BIASES] int64; an id that occurs twice has the same bias
    biases: Tensor  # [R, MAX_BIASES] float32, 0 for off
    allowed: Tensor  # [R, ceil(V / 32)] int32: bit v % 32 of word v // 32 is 1 if token v may follow
    fields: tuple[tuple[Tensor, ...], ...]  # those of each LogitsTransform, [R, *shape]
    drafts: DraftRows | TreeRows | None = None


def process_logits(
    logits: Tensor,
    inputs: LogitsInput,
    position: Tensor,
    token_counts: Tensor,
    transforms: tuple[LogitsTransform, ...],
    num_draft_tokens: int = 0,
    first: Tensor | None = None,
) -> Tensor:
    """``[R, V]`` of any float dtype -> ``[R, V]`` float32: bias, then penalties, then transforms, then the mask.

    Args:
        position: ``[R]`` int32, of the token to be chosen.
        token_counts: ``[rows, V]`` float32, as in ``LogitsContext``, with a row for each running request.
        transforms: those of the users, called in their order.
        num_draft_tokens: most drafts of a request: those before a row count as its output.
        first: ``[1]`` int64, where logits and counts are those of a rank's tokens alone, whole chunks: the first one.
            ``inputs`` are of the whole vocabulary, and there are no transforms.
    """
    counts = token_counts[inputs.row]
    if inputs.drafts is not None:
        drafts, is_own, _ = drafts_before(inputs.drafts, num_draft_tokens)
        if first is not None:
            drafts, is_here = in_part(drafts, first, logits.shape[1])
            is_own = is_own & is_here
        counts = counts.scatter_add(1, drafts.clamp(min=0), is_own.to(counts.dtype))
    if first is not None:
        inputs = of_part(inputs, first, logits.shape[1])
    # The few logits with a bias are processed apart, so that one pass over the vocabulary is enough for the others.
    ids = inputs.bias_ids
    biased = penalised(logits.gather(1, ids).float() + inputs.biases, counts.gather(1, ids), inputs)
    logits = penalised(logits.float(), counts, inputs)
    if not transforms:
        words = inputs.allowed.gather(1, ids // _BITS)
        biased = torch.where((words >> (ids % _BITS).int()) & 1 != 0, biased, float("-inf"))
        return _masked(logits, inputs).scatter(1, ids, biased)
    logits = logits.scatter(1, ids, biased)
    context = LogitsContext(position, counts)
    for transform, fields in zip(transforms, inputs.fields, strict=True):
        logits = transform(logits, dict(zip(transform.fields, fields, strict=True)), context)
    return _masked(logits, inputs)


def in_part(ids: Tensor, first: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Tokens as those of a rank, which has ``count`` from ``first`` [1] on: int64 below ``count``, and which it has."""
    own = ids - first
    return own.clamp(min=0, max=count - 1), (own >= 0) & (own < count)


def of_part(inputs: LogitsInput, first: Tensor, count: int) -> LogitsInput:
    """Biases and masks of a rank's tokens, as those of a vocabulary of ``count``. What is said of rows stays."""
    ids, is_here = in_part(inputs.bias_ids, first, count)
    # In the place of others stands one that is here, again; or none at all, for the first token.
    other, is_none = is_here.int().argmax(1, keepdim=True), ~is_here.any(1, keepdim=True)
    ids = torch.where(is_here, ids, ids.gather(1, other))
    biases = torch.where(is_here, inputs.biases, inputs.biases.gather(1, other))
    words = first // _BITS + torch.arange(count // _BITS, device=first.device)
    return inputs._replace(
        bias_ids=torch.where(is_none, 0, ids),
        biases=torch.where(is_none, 0.0, biases),
        allowed=inputs.allowed.index_select(1, words.clamp(max=inputs.allowed.shape[1] - 1)),
    )


def drafts_before(drafts: DraftRows | TreeRows, num_draft_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of each row, up to ``num_draft_tokens`` drafts before what it chooses, and which rows had to choose them.

    Returns:
        ``[R, K]`` int64 ids, bool whether there is one, int64 rows.
    """
    if isinstance(drafts, DraftRows):
        before, is_own = rows_before(drafts, num_draft_tokens)
        return drafts.following[before], is_own, before
    path = [torch.arange(drafts.parent.shape[0], device=drafts.parent.device)]
    for _ in range(num_draft_tokens - 1):
        path.append(drafts.parent[path[-1]])
    rows = torch.stack(path, dim=1)
    tokens = drafts.draft[rows]
    return tokens, tokens >= 0, drafts.parent[rows]


def rows_before(drafts: DraftRows, num_draft_tokens: int) -> tuple[Tensor, Tensor]:
    """Of each row, the ``num_draft_tokens`` rows before it: ``[R, K]`` int64, and whether each is of its request."""
    rows = torch.arange(drafts.first.shape[0], device=drafts.first.device)[:, None]
    before = rows - 1 - torch.arange(num_draft_tokens, device=drafts.first.device)
    return before.clamp(min=0), before >= drafts.first[:, None]


def due_rows(tokens: Tensor, inputs: LogitsInput, num_draft_tokens: int) -> Tensor:
    """``[R]`` float32: ``is_due``, and 0 for rows after a draft that is not the token which was chosen there.

    ``tokens``: ``[R]`` int64, those that the step chose.
    """
    if inputs.drafts is None:
        return inputs.is_due
    if isinstance(inputs.drafts, TreeRows):
        drafts, is_own, chosen_in = drafts_before(inputs.drafts, num_draft_tokens)
        is_wrong = torch.take(tokens, chosen_in) != drafts
        return torch.where((is_wrong & is_own).any(1), 0.0, inputs.is_due)
    before, is_own = rows_before(inputs.drafts, num_draft_tokens)
    is_wrong = tokens != inputs.drafts.following
    return torch.where((is_wrong[before] & is_own).any(1), 0.0, inputs.is_due)


def penalised(logits: Tensor, token_counts: Tensor, inputs: LogitsInput) -> Tensor:
    """Logits ``[R, V]`` float32 with the penalties for tokens that ``token_counts`` of the same shape counts.

    Repetition (Keskar et al., 2019, arXiv:1909.05858): for tokens of prompt or output, positive logits are divided by
    it and others multiplied. Then, for tokens of the output, the frequency penalty is subtracted once for each
    occurrence, and the presence penalty once.
    """
    repetition = inputs.repetition_penalty[:, None]
    penalty = torch.where(logits > 0, 1 / repetition, repetition)
    logits = logits * torch.where(token_counts != 0, penalty, 1.0)
    occurrences = token_counts.floor()
    presence = torch.where(occurrences > 0, inputs.presence_penalty[:, None], 0.0)
    return logits - occurrences * inputs.frequency_penalty[:, None] - presence


def _masked(logits: Tensor, inputs: LogitsInput) -> Tensor:
    return torch.where(unpacked(inputs.allowed, logits.shape[1]), logits, float("-inf"))


def unpacked(words: Tensor, vocab_size: int) -> Tensor:
    """A mask ``[R, V]`` bool from its words ``[R, ceil(V / 32)]`` int32."""
    bits = torch.arange(_BITS, dtype=torch.int32, device=words.device)
    return ((words[:, :, None] >> bits) & 1).flatten(1)[:, :vocab_size] != 0
