"""Log-probabilities of tokens, in the compiled graph: of the token at hand and of the most likely ones.

They are those of the model: of its logits as they are, before bias, penalties, temperature and masks.
"""

from typing import NamedTuple

import torch
from torch import Tensor

_CHUNK = 256  # tokens


class LogprobRows(NamedTuple):
    """Log-probabilities (natural) of some rows, R of them."""

    logprob: Tensor  # [R] float32, of the token at hand
    rank: Tensor  # [R] int64: 1 for the most likely token; 1 more for each that is more likely
    top_logprobs: Tensor  # [R, K] float32, falling
    top_ids: Tensor  # [R, K] int64


def logprob_rows(logits: Tensor, token_ids: Tensor, count: int) -> LogprobRows:
    """Of ``token_ids`` ``[R]`` int64 and the ``count`` most likely tokens under logits ``[R, V]``."""
    logits = logits.float()
    own, peak = logits.gather(-1, token_ids[:, None]), logits.amax(dim=-1, keepdim=True)
    total = (logits - peak).exp().sum(dim=-1, keepdim=True).log()  # of what each is less than the peak: nothing is lost
    values, ids = largest(logits, min(count, logits.shape[-1]))
    rank = (logits > own).sum(dim=-1) + 1
    return LogprobRows((own - peak - total).squeeze(-1), rank, values - peak - total, ids)


def largest(x: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The ``count`` largest of each row of ``[R, V]``, falling, and where they stand: two ``[R, count]``.

    They lie in the ``count`` chunks with the largest maxima or behind the last whole chunk, so no more than those are
    sorted.
    """
    num_chunks = x.shape[1] // _CHUNK
    if num_chunks <= count:
        return x.topk(count, dim=-1)
    whole = num_chunks * _CHUNK
    best = x[:, :whole].unflatten(1, (num_chunks, _CHUNK)).amax(dim=-1).topk(count, dim=-1).indices
    places = best[:, :, None] * _CHUNK + torch.arange(_CHUNK, device=x.device)
    behind = torch.arange(whole, x.shape[1], device=x.device).expand(x.shape[0], -1)
    places = torch.cat([places.flatten(1), behind], dim=1)
    values, found = x.gather(1, places).topk(count, dim=-1)
    return values, places.gather(1, found)
