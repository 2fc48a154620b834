"""What is known of transformers' config classes without them is what they do."""

import copy
import importlib.metadata
import json
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import transformers

from compiled_llm.models import config_file, known_classes
from compiled_llm.models.architecture_name import language_model, with_architecture
from compiled_llm.models.config import ModelConfig
from compiled_llm.models.config_fields import class_parameters
from compiled_llm.models.config_file import parse_config, parsed_by
from compiled_llm.models.known_classes import TABLE, KnownClass, NotKnown, known_class
from compiled_llm.models.registry import ARCHITECTURES, family
from tests.battery.config_mutations import CONFIGS, Mutation, mutated, mutations
from tests.models.published_configs import PUBLISHED

CLASSES = sorted({family(architecture).hf_config for architecture in ARCHITECTURES})
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 1e4}
PARTIAL_ROPE = {"rope_parameters": {**PLAIN_ROPE, "partial_rotary_factor": 0.5}}
# What the table needs besides, of models whose small configs leave it to their classes.
KNOWN_OF: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("glm", "glm4", "glm4-moe", "qwen3-next", "qwen3.5-moe"), PARTIAL_ROPE),
    **{name: {"initializer_range": 0.02} for name in ("llama", "llama-rope3-tied", "llama-biases")},
    "qwen2": {"use_sliding_window": False, "sliding_window": None},
    **{name: {"sliding_window": None} for name in ("qwen3", "qwen3-untied")},
}
for _name in ("gemma2", "gpt-oss", "qwen3.5-moe"):
    _types = ["full_attention"] * CONFIGS[_name][1]["num_hidden_layers"]
    KNOWN_OF[_name] = {**KNOWN_OF.get(_name, {}), "layer_types": _types}
# Left to their classes also so: these act on fields that the small configs need.
ASKED = {"smollm3", "phi3", "gemma4", "gemma4-moe", "gpt-neox", "gpt-neox-in-turn", "mistral4", "qwen3.5"}
ASKED |= {"deepseek-v2", "deepseek-v3", "deepseek-v3-halves", "granite-hybrid", "granite-hybrid-moe"}
ASKED |= {"nemotron-h", "nemotron-h-moe", "lfm2-tied"}
NUM_PAIRS = 1000


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """transformers remarks on fields."""
    told = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    yield
    transformers.logging.set_verbosity(told)


def known(name: str) -> KnownClass:
    one = known_class(name)
    assert one is not None, "the table is of another version of transformers: run scripts/make_known_classes.py"
    return one


def by_table(config: dict[str, Any]) -> ModelConfig:
    """What the table alone makes of a ``config.json``; else ``NotKnown``."""
    config = language_model(with_architecture(copy.deepcopy(config)))
    model = family(config["architectures"][0])
    return parsed_by(config, None, model, known(model.hf_config))


def by_class(config: dict[str, Any]) -> ModelConfig:
    """What transformers' class makes of it."""
    config = language_model(with_architecture(copy.deepcopy(config)))
    model = family(config["architectures"][0])
    return parsed_by(config, None, model, getattr(transformers, model.hf_config))


def spoilt(model: str, *chosen: Mutation) -> dict[str, Any]:
    """A small config of the model that the table knows, unless the model is in ``ASKED``, with some fields altered."""
    class_name, fields = CONFIGS[model]
    config = {"architectures": [class_name], "rope_parameters": PLAIN_ROPE, **fields, **KNOWN_OF.get(model, {})}
    for mutation in chosen:
        name, altered = mutation.path[0], mutated(mutation)
        config.pop(name, None)
        config |= {name: altered[name]} if name in altered else {}
    return copy.deepcopy(config)


LLAMA = spoilt("llama")


def test_the_table_has_the_classes_of_all_families() -> None:
    classes, old_fields = json.loads(TABLE.read_text())["classes"], dict[str, set[str]]()
    for one in map(family, ARCHITECTURES):
        old_fields.setdefault(one.hf_config, set()).update(one.old_fields)
    assert classes.keys() == old_fields.keys()
    assert all(old_fields[name].issuperset(one["others"]) for name, one in classes.items())


@pytest.mark.parametrize("name", CLASSES)
def test_fields_and_defaults_are_those_of_the_class(name: str) -> None:
    config_class = getattr(transformers, name)
    assert class_parameters(known(name)) == class_parameters(config_class)
    assert (known(name).model_type, known(name).attribute_map) == (config_class.model_type, config_class.attribute_map)


def test_published_configs_are_read_alike() -> None:
    """With the table as without; some need more than it says."""
    counts = Counter[str]()
    for name, config in PUBLISHED.items():
        try:
            own = by_table(config)
        except NotKnown:
            counts["asked"] += 1
            continue
        assert own == by_class(config), name
        counts["known"] += 1
    assert counts["known"] >= 40


@pytest.mark.parametrize("model", CONFIGS)
def test_small_configs_are_known(model: str) -> None:
    config = spoilt(model)
    if model in ASKED:
        with pytest.raises(NotKnown):
            by_table(config)
    else:
        assert by_table(config) == by_class(config)


@pytest.mark.battery
@pytest.mark.parametrize("model", CONFIGS)
def test_spoilt_configs_are_read_alike_or_left_to_the_class(model: str, battery_counts: Counter[str]) -> None:
    """One field, and pairs of fields."""
    every, num_known = mutations(model), 0
    generator = random.Random(model)
    pairs = [generator.sample(every, 2) for _ in range(NUM_PAIRS)]
    for chosen in [[mutation] for mutation in every] + pairs:
        config = spoilt(model, *chosen)
        try:
            own = by_table(config)
        except (NotKnown, ValueError):
            battery_counts["asked"] += 1
            continue
        assert own == by_class(config), chosen
        battery_counts["known"] += 1
        num_known += 1
    assert num_known or model in ASKED


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_act": "gelu"},  # refused
        {"hidden_size": 65},  # no multiple of the heads
        {"rms_norm_eps": 1},  # no float
        {"num_key_value_heads": None},
        {"head_dim": None},
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}},  # the length is added
        {"rope_parameters": {"rope_theta": 77.0}},  # the kind is added
        {"rope_parameters": ..., "rope_theta": 77.0},
        {"rope_parameters": ...},
        {"initializer_range": 2.0},
    ],
)
def test_one_field_that_the_class_acts_on(changes: dict[str, Any]) -> None:
    config = {name: value for name, value in {**LLAMA, **changes}.items() if value is not ...}
    outcomes = []
    for read in (parse_config, by_class):
        try:
            outcomes.append(read(config))
        except ValueError as error:
            outcomes.append(f"{error}")
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize(
    ("model", "changes"),
    [
        ("llama", {"hidden_size": 66, "head_dim": 16}),  # no multiple of the heads
        ("llama", {"rms_norm_eps": 1}),
        ("llama", {"initializer_range": 2.0}),
        ("llama", {"partial_rotary_factor": 1}),
        ("llama", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}),
        ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}}),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 4}),
        ("gemma3", {"use_bidirectional_attention": True}),
        ("gemma2", {"layer_types": None}),
        ("gemma2", {"layer_types": ["full_attention"] * 5}),
        ("glm", {"rope_parameters": PLAIN_ROPE}),
    ],
)
def test_what_only_the_class_can_say(model: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The table does not guess it."""
    monkeypatch.setattr(config_file, "ignored_fields", lambda *args: [])  # which refuses some of these before
    by_table(spoilt(model))
    with pytest.raises(NotKnown):
        by_table({**spoilt(model), **changes})


def test_heads_that_do_not_divide_the_hidden_size() -> None:
    """Some classes refuse them, GLM-4-MoE's has them by default."""
    config = {**spoilt("glm4-moe"), "hidden_size": 66, "head_dim": 16}
    assert by_table(config) == by_class(config)


def test_another_version_of_transformers_is_asked_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = parse_config(LLAMA)
    monkeypatch.setattr(importlib.metadata, "version", lambda package: "5.99.0")
    known_classes._table.cache_clear()
    try:
        assert known_class("LlamaConfig") is None
        assert parse_config(LLAMA) == expected
    finally:
        monkeypatch.undo()
        known_classes._table.cache_clear()
    assert known_class("LlamaConfig") is not None
