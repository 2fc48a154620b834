"""The last layer by itself, of what went into it: in every family it gives the bits that it gives in a step."""

from typing import Any

import pytest
import torch

from compiled_llm.checkpoint import loader
from compiled_llm.models.config_file import read_config
from compiled_llm.models.draft_heads.taps import Taps
from compiled_llm.models.last_layer import last_layer, last_layer_function
from compiled_llm.models.layers.attention import for_queries
from compiled_llm.models.linears.packed import Packed
from compiled_llm.models.registry import family_of
from compiled_llm.models.weights import tensors
from tests.families import EVERY_CONFIG, checkpoint
from tests.models.draft_heads.test_taps import REFUSED
from tests.models.steps import empty_cache, step_input
from tests.models.test_last_rows import WHOLE

# Layers without a norm of their input, with experts or more behind the MLP, with a state, or without keys of their own.
IN_THE_STEP = {*REFUSED, *WHOLE, "lfm2", "lfm2-tied", "granite-hybrid"}
TABLES = [[1, 2, 3, 4], [5, 6, 7, 8]]


def loaded(name: str) -> tuple[Any, Any]:
    config = read_config(checkpoint(name))
    return config, loader.load_weights(checkpoint(name), config, torch.bfloat16, torch.device("cpu"), Packed)


@pytest.mark.parametrize("name", EVERY_CONFIG)
def test_it_has_the_bits_that_it_has_in_a_step(name: str) -> None:
    config, weights = loaded(name)
    own = last_layer(config, weights, ())
    assert (own is None) == (name in IN_THE_STEP)
    if own is None:
        return
    model, cache, taps = family_of(config), empty_cache(config, torch.bfloat16), Taps((own.number,))
    prompt, other = list(range(3, 16)), list(range(40, 46))
    through_last = last_layer_function(own.config, 13)
    with torch.no_grad():
        step = step_input([(prompt, 0), (other, 0)], TABLES)
        specs = for_queries(model.layers(config), 13)
        hidden = model.forward(taps.on(weights), step, cache, config, specs)
        inputs = taps.taken(hidden)
        before = [tensor.clone() for tensor in tensors(cache)]
        whole = through_last(own.weights, inputs, step, cache[-1])
        # Tokens 7 to 9 of one request and the last of another, as if they were lacking.
        part = step_input([(prompt[7:10], 7), (other[5:], 5)], TABLES)
        rows = torch.tensor([7, 8, 9, 18])
        some = through_last(own.weights, inputs[rows], part, cache[-1])
    assert not hidden.isnan().any()
    assert torch.equal(whole, hidden)
    assert torch.equal(some, hidden[rows])
    for tensor, known in zip(tensors(cache), before, strict=True):  # nothing but the slots that nobody reads
        assert torch.equal(tensor[1:].nan_to_num(7.0), known[1:].nan_to_num(7.0))
    assert not any(tensor[0].isnan().any() for tensor in tensors(cache[-1])), "not all of them go to one slot"


def test_a_layer_whose_keys_are_gone_does_not_wait() -> None:
    """One with a window, where the caches of such layers hold little more than that."""
    config, weights = loaded("gemma3")
    own = last_layer(config, weights, (8,))
    assert own is not None
    assert own.number == config.num_layers - 1
    assert last_layer(config, weights, (6, 8)) is None


def test_nothing_of_it_is_in_memory_twice() -> None:
    config, weights = loaded("qwen3")
    own = last_layer(config, weights, ())
    assert own is not None
    known = {tensor.data_ptr() for tensor in tensors(weights)}
    assert {tensor.data_ptr() for tensor in tensors(own.weights)} < known
    assert len(own.weights.layers) == 1
