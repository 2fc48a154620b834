"""What linear layers of all kinds take of a checkpoint."""

from collections.abc import Sequence

import torch
from torch import Tensor

from compiled_llm.models.linears.protocol import StoredLinear, Take


def weight_shapes(parts: Sequence[StoredLinear]) -> dict[str, tuple[int, ...]]:
    """Name -> shape of the parts' weights in a checkpoint."""
    return {f"{part.name}.weight": (part.out_features, part.in_features) for part in parts}


def take_bias(take: Take, parts: Sequence[StoredLinear]) -> Tensor | None:
    """The biases of all ``parts`` one after the other, ``[out_features]``; None where they have none."""
    assert len({part.bias for part in parts}) == 1, "either all of the layers have a bias or none"
    if not parts[0].bias:
        return None
    bias = torch.empty(sum(part.out_features for part in parts), dtype=take.dtype, device=take.device)
    taken = [take(f"{part.name}.bias", (part.out_features,)) for part in parts]
    return bias if bias.is_meta else torch.cat(taken, out=bias)


def take_split(take: Take, parts: Sequence[StoredLinear], num_heads: int, first: int) -> tuple[Tensor, Tensor]:
    """The weight of the only part, of each head the first rows, transposed, and the others; or of two parts these.

    A head's rows are side by side. Returns ``[N, K, first]`` and ``[N, rows of a head - first, K]``.
    """
    weights = [take(name, shape).unflatten(0, (num_heads, -1)) for name, shape in weight_shapes(parts).items()]
    if len(weights) == 2:
        return weights[0], weights[1]
    return weights[0][:, :first].transpose(1, 2).contiguous(), weights[0][:, first:].contiguous()
