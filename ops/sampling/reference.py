"""What the sampling ops compute, in plain torch, and the constants that all implementations share.

    w[v] = exp((logits[v] - max) / temperature)               1 for the most likely token
    top-k   keeps w[v] >= the k-th largest
    top-p   keeps w[v] >= t, for the largest t whose tokens have at least the share p of what top-k kept
    min-p   keeps w[v] >= min_p
    top-n-sigma  keeps logits[v] >= max - top_n_sigma * (the standard deviation of the logits above -inf)
    token   of the kept v with the largest noise[v] - depth[v] the first; depth is -log2(w), noise that of noise.py

Tokens of equal weight stay or go together. Noise and depth are whole numbers of the same unit, and all implementations
have the same ones: if their filters keep the same tokens, they choose the same one. A row has no token, ``NO_TOKEN``,
where no weights can be computed: its largest logit is NaN, +inf or -inf. The caller sees in the token that the model's
numbers are broken and need not look at the logits.
"""

import torch
from torch import Tensor

from compiled_llm.ops.sampling.noise import BLOCK, HALVING, block_noise, token_noise

# At a lower temperature a quotient of logits may overflow; such a row is as good as greedy.
MIN_TEMPERATURE = 1e-5
NO_TOKEN = -1
LOG2_E = 1.4426950408889634
DEEPEST = 2**30  # a depth that no noise makes up for, and -inf's


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
    seed: Tensor,
    position: Tensor,
) -> Tensor:
    """The op in plain torch, by sorting. What every kernel is tested against."""
    logits = logits.float()
    largest, greedy = logits.max(dim=-1)
    stays = kept_tokens(logits, temperature, top_k, top_p, min_p, top_n_sigma)
    chosen = _winners(depths(logits, temperature), stays, seed, position)
    tokens = torch.where(temperature > 0, chosen, greedy)
    return torch.where(largest.isfinite(), tokens, NO_TOKEN)


def kept_tokens(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, top_n_sigma: Tensor
) -> Tensor:
    """Which tokens the filters leave of logits ``[R, V]`` float32: ``[R, V]`` bool. The others as in the op."""
    largest = logits.max(dim=-1, keepdim=True).values
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
    return (weights >= least) & (near | (top_n_sigma == 0)[:, None])


def depths(logits: Tensor, temperature: Tensor) -> Tensor:
    """``-log2(w)`` of logits ``[R, V]`` float32, in units of noise: ``[R, V]`` int32, at most ``DEEPEST``."""
    # Each operation is rounded once, as it is everywhere.
    unit = temperature.new_tensor(LOG2_E * HALVING) / temperature.clamp(min=MIN_TEMPERATURE)
    largest = logits.max(dim=-1, keepdim=True).values
    return ((largest - logits) * unit[:, None]).clamp(max=DEEPEST).int()


def standard_deviations(logits: Tensor) -> Tensor:
    """Of each row ``[R, V]``, over the tokens that are not banned: ``[R, 1]`` float64."""
    allowed = logits > float("-inf")
    count = allowed.sum(dim=-1, keepdim=True)
    values = torch.where(allowed, logits.double(), 0.0)
    deviations = torch.where(allowed, values - values.sum(dim=-1, keepdim=True) / count, 0.0)
    return (deviations.square().sum(dim=-1, keepdim=True) / count).sqrt()


def _winners(depth: Tensor, stays: Tensor, seed: Tensor, position: Tensor) -> Tensor:
    """Of the tokens that stay, the first with the largest sum: ``[R]`` int64. Noise is computed for those in question.

    In question is a token whose block's largest noise would bring it as far as the best of those that have this noise.
    """
    rows, vocabulary = depth.shape
    blocks = torch.arange(-(-vocabulary // BLOCK), device=depth.device)
    largest, place = block_noise(seed[:, None], position[:, None], blocks)
    loses = -(2**31)
    of_tokens = torch.where(stays, largest.repeat_interleave(BLOCK, dim=1)[:, :vocabulary] - depth, loses)
    first = blocks * BLOCK + place
    best = torch.where(first < vocabulary, of_tokens.gather(1, first.clamp(max=vocabulary - 1)), loses).amax(dim=1)
    row, token = (stays & (of_tokens >= best[:, None])).nonzero().unbind(1)
    noise = token_noise(seed[row], position[row], token)
    sums = depth.new_full((rows, vocabulary), loses)
    sums[row, token] = noise - depth[row, token]
    return sums.max(dim=-1).indices
