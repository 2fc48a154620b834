"""The inputs of layers, read on the way: those that transformers has, and no number of the model is another one."""

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from compiled_llm.checkpoint import loader
from compiled_llm.models.config_file import read_config
from compiled_llm.models.draft_heads.taps import KeptTaps, Taps, check_taps
from compiled_llm.models.layers.attention import for_queries
from compiled_llm.models.layers.residual import Residual
from compiled_llm.models.registry import family_of
from tests.families import EVERY_CONFIG, checkpoint, transformers_model
from tests.models.steps import empty_cache, step_input

REFUSED = ("olmo2", "olmo3", "nemotron-h", "nemotron-h-moe")
SMALL = ("llama", "gpt2", "gemma2", "lfm2", "deepseek-v2", "qwen3-next")


@pytest.mark.parametrize("name", REFUSED)
def test_families_whose_layers_do_not_begin_with_a_norm_are_refused(name: str) -> None:
    config = read_config(checkpoint(name))
    check_taps(config, ())
    with pytest.raises(ValueError, match=r"must be another for .*, the inputs of whose layers are not within reach"):
        check_taps(config, (0, 1))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in SMALL else pytest.mark.battery)
        for name in EVERY_CONFIG
        if name not in REFUSED
    ],
)
def test_they_are_the_inputs_of_layers_and_change_nothing(name: str) -> None:
    config = read_config(checkpoint(name))
    layers = tuple(range(config.num_layers + 1))
    check_taps(config, layers)
    model, prompt = family_of(config), list(range(5, 18))
    weights = loader.load_weights(checkpoint(name), config, torch.float32, torch.device("cpu"))
    step, specs = step_input([(prompt, 0)], [[1, 2, 3, 4]]), for_queries(model.layers(config), len(prompt))
    taps = Taps(layers)
    with torch.no_grad():
        plain = model.forward(weights, step, empty_cache(config), config, specs)
        hidden = model.forward(taps.on(weights), step, empty_cache(config), config, specs)
        taken = taps.taken(hidden).chunk(len(layers), 1)
        expected = inputs_of_layers(name, prompt)
        cache, slots = hidden.new_zeros(4, 5, len(layers) * hidden.shape[1]), torch.arange(18, 5, -1, dtype=torch.int32)
        kept = KeptTaps(layers, cache, slots)
        kept.keep_last(model.forward(kept.on(weights), step, empty_cache(config), config, specs))
    assert torch.equal(cache.flatten(0, 1)[slots], torch.cat(taken, 1))
    assert torch.equal(plain, hidden)
    for number, (one, wanted) in enumerate(zip(taken, expected, strict=False)):
        torch.testing.assert_close(one, wanted, atol=2e-4, rtol=1e-3, msg=lambda text, n=number: f"layer {n}: {text}")
    assert len(taken) == len(expected) + 1  # what the last layer gives is no layer's input


class Layer(NamedTuple):
    input_norm: Any


class Weights(NamedTuple):
    layers: tuple[Layer, ...]


@pytest.mark.parametrize("times", [0, 2])
def test_a_norm_that_is_not_read_once_is_told(times: int) -> None:
    """What the last layer gave would take the place of an input that was not noted."""
    taps, layer = Taps((0, 1)), Layer(torch.ones(4))
    weights = Weights((layer, layer))
    x, tapped = torch.randn(3, 4, generator=torch.Generator().manual_seed(0)), taps.on(weights)
    for one, count in zip(tapped.layers, (1, times), strict=True):
        normed = Residual(x, 1e-5).normed(one.input_norm)
        for _ in range(count):
            normed.tensor()
    with pytest.raises(AssertionError, match=rf"when it is read: {1 + times} of \(0, 1\) are noted"):
        taps.taken(x)
    kept = KeptTaps((0, 1), torch.zeros(1, 3, 12), torch.arange(3, dtype=torch.int32))
    for one, count in zip(kept.on(weights).layers, (1, times), strict=True):
        for _ in range(count):
            Residual(x, 1e-5).normed(one.input_norm).tensor()
    with pytest.raises(AssertionError, match="when it is read"):
        kept.keep_last(x)


def inputs_of_layers(name: str, prompt: list[int]) -> list[Tensor]:
    """What transformers' layers get, ``[T, D]`` each."""
    model = transformers_model(name)
    found = (getattr(module, "layers", getattr(module, "h", None)) for module in model.modules())
    layers = next(one for one in found if isinstance(one, torch.nn.ModuleList))
    seen: list[Tensor] = []

    def note(module: torch.nn.Module, args: tuple, kwargs: dict) -> None:
        seen.append((args[0] if args else kwargs["hidden_states"])[0])

    hooks = [layer.register_forward_pre_hook(note, with_kwargs=True) for layer in layers]
    model(torch.tensor([prompt]))
    for hook in hooks:
        hook.remove()
    return seen
