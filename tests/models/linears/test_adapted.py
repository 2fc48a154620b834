"""Layers that adapters change: which become so, where changes go, and what each kind computes, from the definitions."""

from typing import Any

import pytest
import torch
from torch import Tensor

from compiled_llm.models.linears.adapted import (
    Adaptable,
    Adapted,
    AdaptedExperts,
    Change,
    HeadsPlace,
    Place,
    experts_of,
    of_any_expert,
    with_slots,
    without_adapters,
)
from compiled_llm.models.linears.dense import Dense
from compiled_llm.models.linears.heads import AdaptedHeads
from compiled_llm.models.linears.protocol import StoredLinear
from compiled_llm.ops.linear.lora import tiles_of

RANK = 3


class Random:
    """A ``Take`` of random numbers."""

    dtype, device = torch.float32, torch.device("cpu")

    def __call__(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape)

    def rows(self, shapes: Any, put: Any) -> None:
        put(0, torch.randn(sum(rows for rows, _ in shapes.values()), next(iter(shapes.values()))[1]))


def kind(*targets: str) -> Adaptable:
    return Adaptable(Dense, 2, 8, targets or ("*",))


def change(inputs: int, outputs: int) -> tuple[Tensor, Tensor, Change]:
    a, b = torch.randn(RANK, inputs), torch.randn(outputs, RANK)
    return a, b, Change(a, tiles_of(b), torch.tensor(0.5))


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("layers.3.mlp.experts.17.w1", "layers.3.mlp.experts.*.w1"),
        ("layers.3.mlp.experts.up.17", "layers.3.mlp.experts.up.*"),
    ],
)
def test_names_of_experts(name: str, expected: str) -> None:
    assert of_any_expert(name) == expected


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        (("all-linear",), ["layers.0.q_proj", "layers.0.up_proj"]),
        (("q_proj", "experts"), ["layers.0.experts.*.up_proj", "layers.0.q_proj"]),
        (("all-linear", "lm_head", "gate"), ["layers.0.gate", "layers.0.q_proj", "layers.0.up_proj", "lm_head"]),
        (("embed_tokens",), ["embed_tokens"]),
    ],
)
def test_only_what_is_named_may_change(targets: tuple[str, ...], expected: list[str]) -> None:
    adaptable, take = kind(*targets), Random()
    for name in ("q_proj", "up_proj", "gate"):
        adaptable.take(take, [StoredLinear(f"layers.0.{name}", 6, 5)])
    adaptable.take_experts(take, [[StoredLinear(f"layers.0.experts.{e}.up_proj", 6, 5)] for e in range(2)], 1)
    adaptable.take(take, [StoredLinear("embed_tokens", 6, 5, role="head", also="lm_head")])
    assert sorted(adaptable.places) == expected
    adaptable.check_targets()


def test_names_of_no_layer_are_refused() -> None:
    adaptable = kind("all-linear", "q_porj")
    adaptable.take(Random(), [StoredLinear("q_proj", 6, 5)])
    with pytest.raises(ValueError, match=r"lora_target_modules must have .* given 'q_porj', which names no layer"):
        adaptable.check_targets()


def test_other_names_are_noted() -> None:
    adaptable = kind()
    adaptable.take(Random(), [StoredLinear("a.gate", 6, 5)])
    adaptable.take_experts(Random(), [[StoredLinear(f"a.in.{e}", 6, 5, stacked="a.in.weight")] for e in range(2)], 1)
    adaptable.note_names({"b.gate.weight": "a.gate.weight", "b.experts.gate_up_proj": "a.in.weight", "c": "d"})
    assert adaptable.places["a.gate"].part.also == "b.gate"
    assert adaptable.places["a.in.*"].part.stacked == "b.experts.gate_up_proj"


def test_a_tied_embedding_and_its_head_are_changed_apart() -> None:
    adaptable = kind()
    both = adaptable.take(Random(), [StoredLinear("embed_tokens", 40, 6, role="head", also="lm_head")])
    assert isinstance(both, Adapted)
    of_rows, of_head = adaptable.places["embed_tokens"], adaptable.places["lm_head"]
    a, b, _ = change(40, 6)
    of_rows.put(2, Change(a.t().contiguous(), tiles_of(b), torch.tensor(0.5)))
    head_a, head_b, of_logits = change(6, 40)
    of_head.put(1, of_logits)
    slots, ids, x = torch.tensor([0, 2, 1], dtype=torch.int32), torch.tensor([7, 7, 39]), torch.randn(3, 6)
    layer = with_slots(both, slots)
    rows, weight = both.plain.rows(ids), both.plain.rows(torch.arange(40))
    close(layer.rows(ids), rows + 0.5 * (slots == 2)[:, None] * (b @ a).t()[ids])
    close(layer.apply(x), x @ weight.t() + 0.5 * (slots == 1)[:, None] * (x @ head_a.t() @ head_b.t()))
    assert without_adapters((both,))[0] is both.plain
    assert isinstance(of_head, Place)
    assert torch.equal(of_head.rows_of_model(ids), rows)


def test_experts() -> None:
    """Rows in the order of experts, of tokens with another slot each; the last rows belong to nobody."""
    adaptable, num_experts = kind(), 3
    parts = [[StoredLinear(f"experts.{e}.{x}", 20, 6) for x in ("gate", "up")] for e in range(num_experts)]
    experts = adaptable.take_experts(Random(), parts, 2)
    assert isinstance(experts, AdaptedExperts)
    a, b = torch.randn(num_experts, RANK, 6), torch.randn(num_experts, 20, RANK)
    scale = torch.tensor([0.5, 2.0, 1.0])
    adaptable.places["experts.*.up"].put(2, Change(a, torch.stack([*map(tiles_of, b)]), scale))
    slots = torch.tensor([2, 0, 1, 2], dtype=torch.int32)
    tokens = torch.tensor([0, 3, 1, 0, 2, -9, 10**6], dtype=torch.int32)  # what is behind is anything
    starts = torch.tensor([0, 2, 2, 5], dtype=torch.int32)
    x, layer = torch.randn(4, 6), with_slots(experts, slots)
    own = tokens[:5].long()
    plain = experts.plain.apply_to(x, tokens.clamp(0, 3), starts)[:5]
    expected = plain.clone()
    for row, expert in enumerate((0, 0, 2, 2, 2)):
        if slots[own[row]] == 2:
            expected[row, 20:] += scale[expert] * b[expert] @ a[expert] @ x[own[row]]
    given = torch.cat([x[own], torch.full((2, 6), torch.nan)])
    close(experts_of(layer, given, None, tokens, starts)[:5], expected)
    clamped = tokens.clamp(0, 3)
    close(experts_of(layer, x, clamped, clamped, starts)[:5], expected)
    assert not torch.equal(plain, expected)
    adaptable.places["experts.*.up"].put(2, None)
    assert torch.equal(experts_of(layer, x, clamped, clamped, starts)[:5], plain)


def test_heads_of_latent_attention() -> None:
    adaptable, num_heads, keys, values, latent = kind(), 2, 5, 18, 7
    part = StoredLinear("kv_b_proj", num_heads * (keys + values), latent)
    to_latent, to_value = adaptable.take_heads(Random(), [part], num_heads, keys)
    assert isinstance(to_latent, AdaptedHeads)
    assert isinstance(to_value, AdaptedHeads)
    place = adaptable.places["kv_b_proj"]
    assert isinstance(place, HeadsPlace)
    a, b, own = change(latent, part.out_features)
    place.put(1, own)
    slots = torch.tensor([1, 0, 1], dtype=torch.int32)
    on = (slots == 1)[:, None, None]
    by_head = (0.5 * b @ a).unflatten(0, (num_heads, -1))
    q, seen = torch.randn(3, num_heads, keys), torch.randn(3, num_heads, latent)
    changed = on * torch.einsum("tnk,nkc->tnc", q, by_head[:, :keys])
    close(with_slots(to_latent, slots).apply(q), to_latent.plain.apply(q) + changed)
    changed = on * torch.einsum("tnc,nvc->tnv", seen, by_head[:, keys:])
    close(with_slots(to_value, slots).apply(seen), to_value.plain.apply(seen) + changed)
