"""Rotary embeddings: every kind of scaling against transformers; parts of a head, and neighbouring elements."""

from typing import Any

import pytest
import torch
import transformers
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding, apply_rotary_pos_emb

from compiled_llm.models.layers.rope import head_arrangement, inverse_frequencies, rope_cos_sin, rope_table
from compiled_llm.models.rope_config import Rope, read_partial_rope, read_rope
from compiled_llm.ops import rope as rope_op

CPU = torch.device("cpu")
HEAD_DIM, LENGTH = 64, 2048
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
KINDS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"type": "dynamic", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
    },
    "yarn": YARN, "yarn of another ramp": {**YARN, "beta_fast": 20.0, "beta_slow": 2.0},
    "yarn with bounds between frequencies": {**YARN, "truncate": False},
    "yarn with magnitudes": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5},
    "yarn with equal magnitudes": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
    "yarn with an attention factor": {**YARN, "attention_factor": 1.5},
    "yarn without a factor": {**YARN, "factor": None, "original_max_position_embeddings": 1024},
    "yarn without a length": {"rope_type": "yarn", "factor": 4.0},
    "proportional": {"rope_type": "proportional"},
    "proportional, a part": {"rope_type": "proportional", "factor": 3.0, "partial_rotary_factor": 0.3},
}  # fmt: skip


@pytest.mark.parametrize("theta", [10000.0, 1000000.0])
@pytest.mark.parametrize("kind", KINDS)
def test_equal_to_transformers(kind: str, theta: float) -> None:
    parameters = {"rope_type": "default", "rope_theta": theta, **KINDS[kind]}
    parameters["rope_type"] = parameters.get("type", parameters["rope_type"])
    config = transformers.LlamaConfig(head_dim=HEAD_DIM, max_position_embeddings=LENGTH, rope_parameters=parameters)
    theirs = LlamaRotaryEmbedding(config)
    rope = read_rope(config.rope_parameters, LENGTH)
    cos, sin = theirs(torch.zeros(1), torch.arange(LENGTH)[None])
    table = rope_table(rope, HEAD_DIM, LENGTH, CPU)
    assert table.shape == (LENGTH, HEAD_DIM)
    for own, wanted in zip(table.chunk(2, dim=-1), (cos, sin), strict=True):
        # Angles up to 2047 have steps of 1.2e-4 in float32.
        torch.testing.assert_close(own, wanted[0, :, : HEAD_DIM // 2], atol=4e-4, rtol=0)
    own_angles = inverse_frequencies(rope, HEAD_DIM, LENGTH)
    still = torch.zeros(HEAD_DIM // 2 - len(own_angles))  # of pairs that are not turned
    torch.testing.assert_close(torch.cat([own_angles, still]), theirs.inv_freq, atol=0, rtol=1e-6)


@pytest.mark.parametrize("length", [256, 257])
@pytest.mark.parametrize("extra", [{}, {"factor": 3.0}, {"attention_factor": 1.25}])
@pytest.mark.parametrize("partial", [1.0, 0.75])
def test_longrope_and_a_part_of_each_head_equal_phi3s(partial: float, extra: dict[str, float], length: int) -> None:
    """The table for 256 tokens has the short divisors, a longer one the long."""
    pairs = int(HEAD_DIM * partial) // 2
    short, long = (torch.rand(pairs).add(1).tolist() for _ in range(2))
    scaling = {"type": "longrope", "short_factor": short, "long_factor": long, **extra}
    config = {"rope_scaling": scaling, "partial_rotary_factor": partial, "max_position_embeddings": LENGTH}
    config["original_max_position_embeddings"] = 256
    full = transformers.Phi3Config(hidden_size=4 * HEAD_DIM, num_attention_heads=4, pad_token_id=0, **config)
    cos, sin = (x[None] for x in Phi3RotaryEmbedding(full)(torch.zeros(1), torch.arange(length)[None])[:2])
    with_parts = read_partial_rope(full.rope_parameters, LENGTH)
    if length > 256:
        with pytest.warns(UserWarning, match="longer than original_max_position_embeddings"):
            table = rope_table(with_parts, HEAD_DIM, length, CPU)
    else:
        table = rope_table(with_parts, HEAD_DIM, length, CPU)

    # As the op applies it to heads in its order, and transformers to the same in the checkpoint's.
    q, k = torch.randn(length, 2, HEAD_DIM), torch.randn(length, 1, HEAD_DIM)
    arrange = head_arrangement(with_parts, HEAD_DIM) or (lambda rows: rows)
    parts = [arrange(x.flatten(1).t()).t() for x in (q, k)]
    qkv = torch.cat([*parts, torch.zeros(length, HEAD_DIM)], dim=1)
    positions = torch.arange(length, dtype=torch.int32)
    own = rope_op(qkv, rope_cos_sin(positions, table), None, None, 2, 1, 0.0)
    wanted = apply_rotary_pos_emb(q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos[0], sin[0])
    for found, expected in zip(own, wanted, strict=True):
        in_order = arrange(expected[0].transpose(0, 1).flatten(1).t()).t()
        torch.testing.assert_close(found.flatten(1), in_order, atol=2e-4, rtol=1e-4)


def test_the_table_holds_the_angles_of_every_position() -> None:
    scaled, positions = read_rope({**KINDS["llama3"], "rope_theta": 1e4}, LENGTH), torch.tensor([0, 1, 17, 255])
    table = rope_table(scaled, HEAD_DIM, 256, CPU)
    cos, sin = rope_cos_sin(positions.int(), table).chunk(2, dim=-1)
    angles = positions[:, None].double() * inverse_frequencies(scaled, HEAD_DIM, 256).double()
    torch.testing.assert_close(cos.double(), angles.cos(), atol=2e-5, rtol=0)  # of float32 angles up to 255
    torch.testing.assert_close(sin.double(), angles.sin(), atol=2e-5, rtol=0)


POSITIONS = torch.tensor([0, 3, 17])


def turned(heads: torch.Tensor, rope: Rope) -> torch.Tensor:
    """``[T, N, H]``, each pair turned by its angle: by definition."""
    size = rope.rotary_dim(heads.shape[-1])
    angles = POSITIONS[:, None, None] * inverse_frequencies(rope, heads.shape[-1], 18)
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
    q, k = rope_op(rows.flatten(1), angles, None, None, 2, 1, 0.0)
    wanted = torch.stack([arrange(token.flatten()).unflatten(0, (4, head_dim)) for token in turned(heads, rope)])
    torch.testing.assert_close(torch.cat([q, k], dim=1), wanted[:, :3])


def test_a_whole_head_of_halves_stays_as_it_is() -> None:
    assert head_arrangement(Rope(1e4, None), 16) is None


@pytest.mark.parametrize("partial", [0.01, 0.19])
def test_half_a_pair_is_refused(partial: float) -> None:
    with pytest.raises(ValueError, match=r"config\.json: partial_rotary_factor must turn an even number"):
        Rope(1e4, None, partial).rotary_dim(16)
