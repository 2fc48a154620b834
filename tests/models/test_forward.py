"""Every family's forward against transformers, with odd shapes and random weights."""

import dataclasses
import functools
import itertools
from collections.abc import Collection
from typing import Any

import pytest
import torch
from torch import Tensor

from compiled_llm.checkpoint import loader
from compiled_llm.models.config_file import read_config
from compiled_llm.models.linears.dense import Dense
from compiled_llm.models.linears.packed import Packed
from compiled_llm.models.linears.protocol import LinearKind
from compiled_llm.models.weights import experts, tensors
from compiled_llm.ops import route
from tests.families import EVERY_CONFIG, HYBRID_CONFIGS, checkpoint, transformers_model
from tests.models.steps import BLOCKS, empty_cache, step_input, step_logits

ROUTER_NOISE = 0.02  # of the spread of its logits; bfloat16 rounds by 0.004 once


# Layers with states, whose experts are those of other families: to find prompts with clear choices takes seconds.
HYBRID_EXPERTS = [name for name in HYBRID_CONFIGS if name.endswith("-moe") or name == "qwen3-next"]


def in_turns(first: LinearKind, second: LinearKind, but_for: Collection[str] = ()) -> list[Any]:
    """Each family with one of the two kinds, in turns; with the other one, and ``but_for`` these, as a battery."""
    return [
        pytest.param(
            name,
            kind,
            id=f"{name}-{kind.__name__}",
            marks=() if kind is ordinary and name not in but_for else pytest.mark.battery,
        )
        for name, ordinary in zip(EVERY_CONFIG, itertools.cycle((first, second)), strict=False)
        for kind in (Dense, Packed)
    ]


@pytest.mark.parametrize(("name", "kind"), in_turns(Packed, Dense))
def test_logits_equal_transformers_through_chunks_and_decodes(name: str, kind: LinearKind) -> None:
    config = read_config(checkpoint(name))
    weights = loader.load_weights(checkpoint(name), config, torch.float32, torch.device("cpu"), kind)
    prompts = torch.randint(0, config.vocab_size, (2, 21)).tolist()
    with torch.no_grad():
        expected = transformers_model(name)(torch.tensor(prompts)).logits
    tables = torch.randperm(BLOCKS - 1)[:12].add(1).view(2, 6).tolist()
    cache = empty_cache(config)

    # A prefill of both, then a chunk beside a decode, then decodes; padding rows in the first.
    steps = [([0, 0], [13, 7]), ([13, 7], [14, 20]), ([14, 20], [15, 21])]
    for step, (before, after) in enumerate(steps):
        chunks = [(prompts[r][before[r] : after[r]], before[r]) for r in range(2)]
        inputs = step_input(chunks, tables, padding=3 if step == 0 else 0)
        logits = step_logits(config, weights, inputs, cache)[inputs.logits_indices]
        for r in range(2):
            torch.testing.assert_close(logits[r], expected[r, after[r] - 1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("name", "kind"), in_turns(Dense, Packed, but_for=HYBRID_EXPERTS))
def test_bfloat16_is_as_close_as_transformers_is(name: str, kind: LinearKind) -> None:
    """To the float32 logits of the weights that bfloat16 rounded."""
    config, dtype = read_config(checkpoint(name)), torch.bfloat16
    weights = loader.load_weights(checkpoint(name), config, dtype, torch.device("cpu"), kind)
    prompt = torch.arange(5, 26) if not experts(weights) else prompt_of_clear_choices(name)
    theirs = transformers_model(name).to(dtype)
    step = step_input([(prompt.tolist(), 0)], [list(range(1, 7))])
    with torch.no_grad():
        rounded = theirs(prompt[None]).logits[0].float()
        exact = theirs.float()(prompt[None]).logits[0]
    own = step_logits(config, weights, step, empty_cache(config, dtype)).float()
    error, allowed = (x.sub(exact).square().mean() for x in (own, rounded))
    assert error.sqrt() <= 1.2 * allowed.sqrt()


@functools.cache
def prompt_of_clear_choices(name: str) -> Tensor:
    """A prompt of which each token keeps its experts in all layers when the router's logits are a little different.

    Otherwise rounding may choose another expert of nearly the same score, which makes a token another one.
    """
    config = read_config(checkpoint(name))
    weights = loader.load_weights(checkpoint(name), config, torch.float32, torch.device("cpu"), Dense)
    generator = torch.Generator().manual_seed(0)
    changed: list[bool] = []

    def route_and_look(logits: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
        chosen, noise = route(logits, *args), ROUTER_NOISE * logits.std()
        for _ in range(8):
            other = route(logits + noise * torch.randn(logits.shape, generator=generator), *args)
            changed.append(not torch.equal(other[1].sort(1).values, chosen[1].sort(1).values))
        return chosen

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr("compiled_llm.ops.moe.routing.route", route_and_look)
        for _ in range(500):
            prompt = torch.randint(3, config.vocab_size, (12,), generator=generator)
            changed.clear()
            step = step_input([(prompt.tolist(), 0)], [[1, 2, 3]])
            step_logits(config, weights, step)
            assert changed
            if not any(changed):
                return prompt
    raise AssertionError("no prompt without a choice that is nearly even")


def test_dummy_weights_are_seeded_and_shaped_like_a_checkpoint() -> None:
    config = read_config(checkpoint("llama"))
    one, same, other = (loader.dummy_weights(config, torch.float32, torch.device("cpu"), seed) for seed in (1, 1, 2))
    real = loader.load_weights(checkpoint("llama"), config, torch.float32, torch.device("cpu"))
    assert torch.equal(one.embedding.weight, same.embedding.weight)
    assert not torch.equal(one.embedding.weight, other.embedding.weight)
    assert one.layers[1].mlp.gate_up.weight.shape == real.layers[1].mlp.gate_up.weight.shape


def test_a_dummy_tensor_depends_on_its_name_alone() -> None:
    config = read_config(checkpoint("llama"))
    less = dataclasses.replace(config, num_layers=1)
    many, one = (loader.dummy_weights(c, torch.float32, torch.device("cpu"), 1) for c in (config, less))
    assert torch.equal(one.head.weight, many.head.weight)
    assert torch.equal(one.layers[0].mlp.down.weight, many.layers[0].mlp.down.weight)
    assert not torch.equal(many.layers[0].mlp.down.weight, many.layers[1].mlp.down.weight)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("name", ["qwen3", "qwen3-untied"])
def test_tied_weights_are_one_tensor_packed_or_not(name: str, dtype: torch.dtype) -> None:
    config = read_config(checkpoint(name))
    plain, packed = (
        loader.load_weights(checkpoint(name), config, dtype, torch.device("cpu"), kind) for kind in (Dense, Packed)
    )
    assert isinstance(packed.head, Packed)
    for weights in (plain, packed):
        assert (weights.embedding is weights.head) == config.tie_word_embeddings
    tables = {id(t) for t in tensors(packed)} & {id(packed.head.packed), id(tensors((packed.embedding,))[0])}
    assert len(tables) == (1 if config.tie_word_embeddings else 2)
    ids = torch.tensor([0, config.vocab_size - 1, 5, 5, 200], dtype=torch.int32)
    assert torch.equal(packed.embedding.rows(ids), plain.embedding.rows(ids))
