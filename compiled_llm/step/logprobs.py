"""Log-probabilities of tokens, in the compiled graph: of one given token and of the most likely ones.

They are the model's own: of its logits before bias, penalties, temperature and masks.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from compiled_llm.ops import log_sum_exp

_CHUNK = 256  # tokens


class LogprobRows(NamedTuple):
    """Natural log-probabilities of R rows."""

    logprob: Tensor  # [R] float32, of the given token
    rank: Tensor  # [R] int64: 1 for the most likely token; 1 more for each that is more likely
    top_logprobs: Tensor  # [R, K] float32, largest first
    top_ids: Tensor  # [R, K] int64, their tokens


def logprob_rows(logits: Tensor, token_ids: Tensor, count: int) -> LogprobRows:
    """Of ``token_ids`` ``[R]`` int64 and the ``count`` most likely tokens under logits ``[R, V]``, any float dtype."""
    logits = logits.float()
    own, (peak, total) = logits.gather(-1, token_ids[:, None]), (x[:, None] for x in log_sum_exp(logits))
    values, ids = largest(logits, count)
    rank = (logits > own).sum(dim=-1) + 1
    return LogprobRows((own - peak - total).squeeze(-1), rank, values - peak - total, ids)


def bytes_of_row(vocab_size: int, count: int) -> int:
    """Most bytes of memory that ``logprob_rows`` takes for a row, its logits among them, compiled or not."""
    searched = (count + 1) * _CHUNK if sorts_chunks(vocab_size, count) else 0
    # Logits in 16 bits and in float32, and the result. Then the columns that are sorted, twice, and their values; or,
    # for the rank, which tokens are more likely, as bools and as int64.
    return 6 * vocab_size + 12 * min(count, vocab_size) + max(24 * searched, 9 * vocab_size)


def sorts_chunks(size: int, count: int) -> bool:
    """Whether the ``count`` largest of ``size`` are looked for in chunks, which other code does than in all of them."""
    return size // _CHUNK > count


def largest(x: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The ``count`` largest of each row of ``[R, V]``, largest first, and their columns, int64: two ``[R, count]``.

    All V where there are fewer.

    They are in the ``count`` chunks with the largest maxima or after the last whole chunk, so only those are sorted.
    """
    if not sorts_chunks(x.shape[1], count):
        return x.topk(min(count, x.shape[1]), dim=-1)
    columns = columns_of(chunks_of(x).amax(dim=-1), x.shape[1], count)
    values, found = x.gather(1, columns).topk(count, dim=-1)
    return values, columns.gather(1, found)


def chunks_of(x: Tensor) -> Tensor:
    """The whole chunks of each row of ``[R, V]``."""
    num_chunks = x.shape[1] // _CHUNK
    return x[:, : num_chunks * _CHUNK].unflatten(1, (num_chunks, _CHUNK))


def columns_of(maxima: Tensor, size: int, count: int) -> Tensor:
    """Where the ``count`` largest of rows of ``size`` are, by the maxima ``[R, C]`` of their chunks: ``[R, K]`` int64.

    Maxima behind those of the whole chunks are not looked at.
    """
    num_chunks = size // _CHUNK
    best = maxima[:, :num_chunks].contiguous().topk(count, dim=-1).indices
    columns = best[:, :, None] * _CHUNK + torch.arange(_CHUNK, device=maxima.device)
    rest = torch.arange(num_chunks * _CHUNK, size, device=maxima.device).expand(maxima.shape[0], -1)
    return torch.cat([columns.flatten(1), rest], dim=1)
