"""What a ``config.json`` leaves out, or says as older or other programs write it, is read as transformers reads it."""

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from compiled_llm.models.config_file import parse_config, read_config
from compiled_llm.models.registry import ARCHITECTURES, WRAPPERS, family
from compiled_llm.models.rope_config import Rope, YarnRopeScaling
from tests.families import CONFIGS, EVERY_CONFIG


def config_of(model: str, **changes: Any) -> dict[str, Any]:
    """``config.json`` of one of the small models; ``...`` leaves a field out."""
    class_name, fields = EVERY_CONFIG[model]
    fields = {"architectures": [class_name], **fields, **changes}
    return {name: value for name, value in fields.items() if value is not ...}


def ropes_of(model: str, **changes: Any) -> tuple[Rope, ...]:
    return parse_config(config_of(model, **changes)).ropes


@pytest.mark.parametrize("model", ["lfm2", "lfm2-moe", "mixtral"])
def test_the_base_that_is_left_out_is_that_of_transformers_class(model: str) -> None:
    (rope,) = ropes_of(model)
    assert rope.theta == 1e6


@pytest.mark.parametrize("model", EVERY_CONFIG)
def test_rotary_embeddings_that_are_left_out_are_those_of_transformers_class(model: str) -> None:
    class_name, fields = EVERY_CONFIG[model]
    without = {name: value for name, value in fields.items() if name != "rope_parameters"}
    theirs = getattr(transformers, class_name).config_class(**without)
    given = getattr(theirs, "rope_parameters", None) or {}
    kinds = [given[kind] for kind in ("full_attention", "sliding_attention") if kind in given] or [given]
    ropes = ropes_of(model, rope_parameters=...)
    assert [rope.theta for rope in ropes] == [kind["rope_theta"] for kind in kinds if "rope_theta" in kind]
    assert [rope.scaling is None for rope in ropes] == [kind["rope_type"] == "default" for kind in kinds[: len(ropes)]]


def test_empty_rope_parameters_are_not_those_that_are_left_out() -> None:
    """As for transformers, whose gpt-oss is scaled by yarn where the file says nothing."""
    (rope,), (empty,) = ropes_of("gpt-oss"), ropes_of("gpt-oss", rope_parameters={})
    assert isinstance(rope.scaling, YarnRopeScaling)
    assert empty == Rope(150000.0)


def test_flat_rope_parameters_beside_those_of_layer_types_are_ignored_as_by_transformers() -> None:
    by_type = CONFIGS["olmo3"][1]["rope_parameters"]
    flat = {"rope_type": "yarn", "rope_theta": 7.0, "factor": 8.0}
    assert ropes_of("olmo3", rope_parameters={**flat, **by_type}) == ropes_of("olmo3")
    theirs = transformers.Olmo3Config(**{**CONFIGS["olmo3"][1], "rope_parameters": {**flat, **by_type}})
    assert theirs.rope_parameters["full_attention"] == by_type["full_attention"]


@pytest.mark.parametrize("beside", [{}, {"truncate": False}])
def test_transformers_takes_truncate_from_beside_layer_types_alone(beside: dict[str, bool]) -> None:
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
    plain = {"rope_type": "default", "rope_theta": 1e4}
    given = {"full_attention": {**yarn, "truncate": bool(beside)}, "sliding_attention": plain, **beside}
    with pytest.raises(ValueError, match="truncate among the rope_parameters of full_attention must be"):
        ropes_of("olmo3", rope_parameters=given)


@pytest.mark.parametrize(
    ("model", "text", "number"),
    [
        ("llama", {"rope_theta": "10000"}, {"rope_theta": 10000.0}),
        ("mixtral", {"rope_scaling": {"rope_theta": "5e5"}}, {"rope_theta": 5e5}),
        (
            "gemma3",
            {"rope_parameters": ..., "rope_local_base_freq": "77.5"},
            {"rope_parameters": ..., "rope_local_base_freq": 77.5},
        ),
        ("gpt-neox", {"rotary_emb_base": "300"}, {"rotary_emb_base": 300}),
    ],
)
def test_a_base_may_be_a_number_in_a_string(model: str, text: dict[str, Any], number: dict[str, Any]) -> None:
    assert ropes_of(model, **text) == ropes_of(model, **number)


@pytest.mark.parametrize("field", ["dtype", "torch_dtype"])
def test_a_dtype_may_have_torchs_name(field: str) -> None:
    assert parse_config(config_of("llama", **{field: "torch.bfloat16"})).dtype == "bfloat16"
    for value in ("", [], {}, 0, "torch.float8", "torch.torch.float32"):
        with pytest.raises(ValueError, match=f"config.json: {field} must be one of float32, bfloat16, float16, given"):
            parse_config(config_of("llama", **{field: value}))


@pytest.mark.parametrize("absent", [..., None])
@pytest.mark.parametrize("model", ["llama", "mistral4", "gemma4", "qwen3.5-moe", "nemotron-h"])
def test_model_type_says_enough_where_architectures_is_left_out(model: str, absent: Any) -> None:
    config = config_of(model)
    model_type = getattr(transformers, EVERY_CONFIG[model][0]).config_class.model_type
    assert parse_config({**config_of(model, architectures=absent), "model_type": model_type}) == parse_config(config)


def test_of_every_architecture() -> None:
    for architecture in ARCHITECTURES:
        model_type = getattr(transformers, family(architecture).hf_config).model_type
        fields = next(fields for name, fields in EVERY_CONFIG.values() if _text_of(name) == _text_of(architecture))
        assert parse_config({"model_type": model_type, **fields}).architecture == architecture


def _text_of(architecture: str) -> str:
    """Two have no small config of their own."""
    return architecture.replace("Unified", "").replace("MinistralFor", "MistralFor")


@pytest.mark.parametrize(
    ("whole", "text"),
    [("gemma3", "gemma3_text"), ("mistral3", "ministral3"), ("qwen3_5", "qwen3_5_text"), ("gemma4", "gemma4_text")],
)
def test_of_models_with_more_than_text(whole: str, text: str, tmp_path: Path) -> None:
    architecture = next(names[text] for names in WRAPPERS.values() if text in names)
    fields = next(fields for name, fields in EVERY_CONFIG.values() if name == architecture)
    content = {"model_type": whole, "text_config": {"model_type": text, **fields}}
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.warns(UserWarning, match="the language model alone"):
        assert read_config(tmp_path).architecture == architecture


@pytest.mark.parametrize("model_type", ["bert", "clip", "x"])
def test_a_model_type_of_no_language_model(model_type: str) -> None:
    with pytest.raises(ValueError, match=r"architectures must be|architecture '.*' is not supported"):
        parse_config({"model_type": model_type})


def test_fields_without_which_transformers_class_would_do_are_named() -> None:
    with pytest.raises(ValueError, match=r"Gemma3TextConfig refuses sliding_window_pattern=0: ZeroDivisionError"):
        parse_config(config_of("gemma3", sliding_window_pattern=0, layer_types=...))
    with pytest.raises(ValueError, match=r"LlamaConfig refuses hidden_size=112, beside .*num_attention_heads=32"):
        parse_config(config_of("llama", num_attention_heads=...))
