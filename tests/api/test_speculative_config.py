"""SpeculativeConfig: what each method takes, and what is refused by name."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest

from compiled_llm.api.config import EngineConfig
from compiled_llm.api.speculative_config import METHODS, MOST_DRAFT_TOKENS, NETWORK_METHODS, SpeculativeConfig
from compiled_llm.drafting.methods import HOST_METHODS

# Field -> (a method that takes it, values that are refused).
REFUSED: dict[str, tuple[str, list[Any]]] = {
    "method": ("ngram", ["", "ngrm", None, 3, ["ngram"]]),
    "num_speculative_tokens": ("ngram", [0, 64, 1.0, True, "3"]),
    "adaptive": ("ngram", [0, None, "no"]),
    "prompt_lookup_min": ("ngram", [0, 17, 2.0, True]),
    "prompt_lookup_max": ("ngram", [0, 17, 2.0, True]),
    "suffix_decoding_max_tree_depth": ("suffix", [1, 65, 2.0, True]),
    "suffix_decoding_max_cached_requests": ("suffix", [-1, 10**7, 1.0, True]),
    "suffix_decoding_max_spec_factor": ("suffix", [0, -1.0, 65, math.nan, math.inf, True, "1"]),
    "suffix_decoding_min_token_prob": ("suffix", [-0.1, 1.1, math.nan, True, "1"]),
    "model": ("draft_model", ["", 3, None, Path("somewhere")]),
    "revision": ("draft_model", ["", 3]),
    "quantization": ("draft_model", ["", "int5", 8]),
    "num_draft_layers": ("layer_skip", [0, 1024, 1.0, True, "1"]),
    "lookahead_window": ("lookahead", [0, 8, 64, 1.0, True]),
    "lookahead_ngram": ("lookahead", [1, 9, 2.0, True]),
    "speculative_token_tree": (
        "ngram",
        ["", "chain", 3, [(0,)], "[]", "[0]", "[(1,)]", "[(0,), (0, 0, 0)]", "[(0,), (0, 1)]", "[(-1,)]", "[(False,)]"],
    ),
}


def _needed(method: str) -> dict[str, Any]:
    return dict.fromkeys(METHODS[method].needs, "somewhere") if method in METHODS else {}


def test_each_field_has_its_refusals() -> None:
    assert set(REFUSED) == {field.name for field in dataclasses.fields(SpeculativeConfig)}
    assert {name for method in METHODS.values() for name in method.fields} <= set(REFUSED)


@pytest.mark.parametrize(("name", "value"), [(name, value) for name in REFUSED for value in REFUSED[name][1]])
def test_values_out_of_range_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"^{name} must .*given"):
        SpeculativeConfig(**{"method": REFUSED[name][0]} | _needed(REFUSED[name][0]) | {name: value})


@pytest.mark.parametrize("name", [name for name in REFUSED if "_" in name and name != "num_speculative_tokens"])
def test_a_field_of_another_method_is_refused_with_the_method_that_takes_it(name: str) -> None:
    other = next(other for other, method in METHODS.items() if name not in method.fields and not method.needs)
    with pytest.raises(ValueError, match=rf"^{name} must be left out with method '{other}' \(it belongs to '"):
        SpeculativeConfig(**{"method": other, name: 2})


def test_a_network_that_drafts_needs_graphs_of_the_engine() -> None:
    for config in ({"method": "draft_model", "model": "somewhere"}, {"method": "layer_skip"}):
        with pytest.raises(ValueError, match=r"^cuda_graphs must not be 'trees' with a network that drafts"):
            EngineConfig(speculative_config=config, cuda_graphs="trees")
    EngineConfig(speculative_config={"method": "ngram"}, cuda_graphs="trees")


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (3, "speculative_config must be a SpeculativeConfig or a dict of its fields"),
        ([], "speculative_config must be a SpeculativeConfig or a dict of its fields"),
        ({}, f"speculative_config must have a method, one of {', '.join(METHODS)}, given {{}}"),
        ({"adaptive": True}, "speculative_config must have a method"),
        ({5: 3}, "speculative_config must be"),
        ({"methd": "ngram"}, r"unknown field of speculative_config 'methd': did you mean 'method'\?"),
        ({"method": "custom_class"}, "method must be one of .*give the engine argument drafter"),
        ({"method": "ngram", "draft_sample_method": "greedy"}, "unknown field .*a draft counts where it is the token"),
        ({"method": "ngram", "prompt_lookup_min": 5, "prompt_lookup_max": 3}, "prompt_lookup_min must be at most .* 3"),
    ],
)
def test_the_engine_argument_is_refused_by_name(given: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        EngineConfig(speculative_config=given)


def test_a_dict_becomes_a_config_with_all_that_the_method_takes() -> None:
    config = EngineConfig(speculative_config={"method": "ngram", "prompt_lookup_max": 4}).speculation
    assert config == SpeculativeConfig(
        method="ngram", num_speculative_tokens=7, prompt_lookup_min=4, prompt_lookup_max=4
    )
    assert config.num_tokens == 7
    assert EngineConfig(speculative_config=config).speculation is config
    assert EngineConfig(speculative_config=dataclasses.asdict(config)).speculation == config
    assert EngineConfig().speculation is None


def test_defaults() -> None:
    ngram, suffix = SpeculativeConfig(method="ngram"), SpeculativeConfig(method="suffix")
    assert (ngram.prompt_lookup_min, ngram.prompt_lookup_max) == (2, 5)
    assert (suffix.num_tokens, suffix.suffix_decoding_max_tree_depth) == (15, 24)
    assert (suffix.suffix_decoding_max_cached_requests, suffix.suffix_decoding_max_spec_factor) == (10_000, 1.0)
    assert (suffix.suffix_decoding_min_token_prob, suffix.prompt_lookup_min) == (0.1, None)


@pytest.mark.parametrize(
    ("given", "window"), [({}, 7), ({"num_speculative_tokens": 3}, 3), ({"lookahead_window": 2}, 2)]
)
def test_a_lookahead_window_is_as_long_as_a_proposal(given: dict[str, int], window: int) -> None:
    config = SpeculativeConfig(method="lookahead", **given)
    assert (config.lookahead_window, config.lookahead_ngram) == (window, 4)


def test_each_method_is_a_networks_or_drafts_on_the_host() -> None:
    assert {*METHODS} == {*HOST_METHODS} | {*NETWORK_METHODS}


def test_a_tree_has_as_many_drafts_as_nodes() -> None:
    config = SpeculativeConfig(method="suffix", speculative_token_tree="[(0,), (1,), (0, 0)]")
    assert (config.num_tokens, config.tree_shape) == (3, {(0,), (1,), (0, 0)})
    assert SpeculativeConfig(method="suffix", speculative_token_tree="auto").tree_shape is None
    with pytest.raises(ValueError, match="num_speculative_tokens must be left out with speculative_token_tree"):
        SpeculativeConfig(method="ngram", speculative_token_tree="[(0,)]", num_speculative_tokens=2)


def test_what_networks_draft_at_most() -> None:
    """A chain is one graph; a tree has as many nodes as a mask has bits, less the last known token's."""
    given = {"model": "somewhere", "num_speculative_tokens": MOST_DRAFT_TOKENS}
    for method in ("draft_model", "eagle3", "medusa"):
        with pytest.raises(ValueError, match="num_speculative_tokens must be an integer from 1 to 15 with method"):
            SpeculativeConfig(method=method, **given)
        tree = SpeculativeConfig(method=method, speculative_token_tree="auto", **given).network_tree
        assert tree is not None
        # The rows of all levels but the last one are a tree for the attention op as well.
        assert 1 + tree.width * (max(tree.depth, 1) - 1) <= 64
        assert SpeculativeConfig(method=method, model="x", speculative_token_tree="auto").num_tokens == 15
    assert SpeculativeConfig(method="ngram", speculative_token_tree="auto").network_tree is None
    shape = SpeculativeConfig(method="medusa", model="x", speculative_token_tree="[(0,), (1,), (1, 0)]")
    assert shape.network_tree == (2, 1, 2)
    with pytest.raises(ValueError, match='speculative_token_tree must be "auto" or left out with method'):
        SpeculativeConfig(method="eagle3", model="x", speculative_token_tree="[(0,)]")
