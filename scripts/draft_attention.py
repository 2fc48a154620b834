"""Attention of a layer that drafts several tokens, each from its own output for the one before, as it is trained.

Pass j computes all rows of the draft j. A row of it sees what a row sees when the engine drafts: the keys of pass 0,
made of the model's hidden states, up to j rows before, and one key of each later pass, those of the drafts between.
"""

import own_checkout
import torch
import torch.nn.functional as F
from torch import Tensor


def attended(q: Tensor, keys: Tensor, values: Tensor, theta: float, seen: list[tuple[Tensor, Tensor]]) -> Tensor:
    """What the heads of a pass read, ``[B, T, N * H]``.

    Args:
        q: ``[B, N, T, H]``, not turned by positions yet.
        keys, values: ``[B, K, T, H]``, where K divides N.
        theta: the base of the rotary embedding.
        seen: keys and values of the passes before, first to last; those of this one are added.
    """
    n, k, count, h = q.shape[1], keys.shape[1], *q.shape[2:]
    q, keys = _turned(q, theta), _turned(keys, theta)
    seen.append((keys.repeat_interleave(n // k, 1), values.repeat_interleave(n // k, 1)))
    j = len(seen) - 1
    first_keys, first_values = seen[0]
    mask = torch.ones(count, count, dtype=torch.bool).tril(-j)
    scores = [(q @ first_keys.transpose(-1, -2)).masked_fill(~mask, -torch.inf)]
    later = [_moved(pair, j - number) for number, pair in enumerate(seen[1:], 1)]
    scores += [(q * own_keys).sum(-1, keepdim=True) for own_keys, _ in later]
    shares = (torch.cat(scores, -1) * h**-0.5).softmax(-1)
    read = shares[..., :count] @ first_values
    for place, (_, own_values) in enumerate(later):
        read = read + shares[..., count + place, None] * own_values
    return read.transpose(1, 2).flatten(2)


def of_row_before(x: Tensor) -> Tensor:
    """``[B, T, D]``, each row in the place of the next; zeros in that of the first."""
    return F.pad(x, (0, 0, 1, 0))[:, :-1]


def _turned(x: Tensor, theta: float) -> Tensor:
    count, h = x.shape[-2:]
    angles = torch.arange(count)[:, None] * theta ** (-torch.arange(0, h, 2) / h)
    first, second = x.chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def _moved(pair: tuple[Tensor, Tensor], by: int) -> tuple[Tensor, Tensor]:
    """Keys and values ``[B, N, T, H]``, each of ``by`` rows before."""
    keys, values = (F.pad(x, (0, 0, by, 0))[:, :, : x.shape[2]] for x in pair)
    return keys, values
