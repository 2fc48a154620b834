"""Rotary embeddings of a part of a head, and of neighbouring elements: turned as complex numbers are."""

import pytest
import torch

from compiled_llm.models.layers.rope import head_arrangement, inverse_frequencies, rope_cos_sin, rope_table
from compiled_llm.models.rope_config import Rope
from compiled_llm.ops import rope as rotate

POSITIONS = torch.tensor([0, 3, 17])


def turned(heads: torch.Tensor, rope: Rope) -> torch.Tensor:
    """``[T, N, H]``, each pair turned by its angle: by definition."""
    size = rope.rotary_dim(heads.shape[-1])
    angles = POSITIONS[:, None, None] * inverse_frequencies(rope, heads.shape[-1])
    part, rest = heads[..., :size], heads[..., size:]
    pairs = part.unflatten(-1, (-1, 2)) if rope.interleaved else part.unflatten(-1, (2, -1)).transpose(-1, -2)
    numbers = torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones_like(angles), angles)
    pairs = torch.view_as_real(numbers)
    part = (pairs if rope.interleaved else pairs.transpose(-1, -2)).flatten(-2)
    return torch.cat([part, rest], dim=-1)


@pytest.mark.parametrize(("partial", "interleaved"), [(1.0, True), (0.5, True), (0.5, False), (0.75, False)])
def test_an_arranged_head_is_turned_where_the_checkpoint_means_it(partial: float, interleaved: bool) -> None:
    rope, head_dim = Rope(100.0, None, partial, interleaved), 16
    arrange = head_arrangement(rope, head_dim)
    assert arrange is not None
    # As a linear layer whose weight is the heads themselves: one token after the other.
    heads = torch.randn(3, 4, head_dim)
    rows = torch.stack([arrange(token.flatten()).unflatten(0, (4, head_dim)) for token in heads])
    angles = rope_cos_sin(POSITIONS, rope_table(rope, head_dim, 18, torch.device("cpu")))
    q, k = rotate(rows.flatten(1), angles, None, None, 2, 1, 0.0)
    wanted = torch.stack([arrange(token.flatten()).unflatten(0, (4, head_dim)) for token in turned(heads, rope)])
    torch.testing.assert_close(torch.cat([q, k], dim=1), wanted[:, :3])


def test_a_whole_head_of_halves_stays_as_it_is() -> None:
    assert head_arrangement(Rope(1e4, None), 16) is None


@pytest.mark.parametrize("partial", [0.01, 0.19])
def test_half_a_pair_is_refused(partial: float) -> None:
    with pytest.raises(ValueError, match=r"config\.json: partial_rotary_factor must turn an even number"):
        Rope(1e4, None, partial).rotary_dim(16)
