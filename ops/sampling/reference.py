"""What the sampling ops compute, in plain torch, and the constants that all implementations share.

    w[v] = exp((logits[v] - max) / temperature)               1 for the most likely token
    top-k   keeps w[v] >= the k-th largest
    top-p   keeps w[v] >= t, for the largest t whose tokens have at least the share p of what top-k kept
    min-p   keeps w[v] >= min_p
    top-n-sigma  keeps logits[v] >= max - top_n_sigma * (the standard deviation of the logits above -inf)
    token   the first v where the sum of the kept w[0..v] exceeds uniform * (the sum of all that are kept)

Tokens of equal weight stay or go together. A row has no token, ``NO_TOKEN``, where no weights can be computed: its
largest logit is NaN, +inf or -inf. The caller sees in the token that the model's numbers are broken and need not look
at the logits.
"""

import torch
from torch import Tensor

# At a lower temperature a quotient of logits may overflow; such a row is as good as greedy.
MIN_TEMPERATURE = 1e-5
NO_TOKEN = -1


def greedy_tokens_reference(logits: Tensor) -> Tensor:
    """The op in plain torch."""
    largest, tokens = logits.max(dim=-1)
    return torch.where(largest.isfinite(), tokens, NO_TOKEN)


def sample_tokens_reference(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    top_n_sigma: Tensor,
    uniform: Tensor,
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
    distance = largest.double() - logits.double()
    near = distance <= top_n_sigma.double()[:, None] * standard_deviations(logits)
    stays = (weights >= least) & (near | (top_n_sigma == 0)[:, None])
    mass = torch.where(stays, weights, 0.0).cumsum(dim=-1)
    chosen = (mass <= uniform[:, None] * mass[:, -1:]).sum(dim=-1).clamp(max=logits.shape[-1] - 1)
    tokens = torch.where(temperature > 0, chosen, greedy.squeeze(-1))
    return torch.where(largest.squeeze(-1).isfinite(), tokens, NO_TOKEN)


def standard_deviations(logits: Tensor) -> Tensor:
    """Of each row ``[R, V]``, over the tokens that are not banned: ``[R, 1]`` float64."""
    allowed = logits > float("-inf")
    count = allowed.sum(dim=-1, keepdim=True)
    values = torch.where(allowed, logits.double(), 0.0)
    deviations = torch.where(allowed, values - values.sum(dim=-1, keepdim=True) / count, 0.0)
    return (deviations.square().sum(dim=-1, keepdim=True) / count).sqrt()
