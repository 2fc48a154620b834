"""ModelConfig: every field of config.json is used, known to have no effect, ignored by name, or refused by name."""

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import pytest
import transformers

from compiled_llm.models.config import ModelConfig
from compiled_llm.models.config_fields import by_own_names, ignored_fields
from compiled_llm.models.config_file import parse_config, read_config
from compiled_llm.models.registry import family
from tests.models.published_configs import DENSE, GEMMA4, MOE, REFUSED, WRAPPED

PUBLISHED = {**DENSE, **MOE}

GOOD = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 100, "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "dtype": "bfloat16",
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LONG = {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "original_max_position_embeddings": 64}
LONG_LENGTH = {"max_position_embeddings": 256}


def test_fields_and_defaults() -> None:
    config = parse_config({**GOOD, "rope_theta": 5e5, "rope_scaling": LLAMA3}, {"eos_token_id": [5, 3]})
    (rope,) = config.ropes
    assert (config.head_dim, config.num_layers, rope.theta) == (16, 2, 5e5)
    assert rope.scaling is not None
    assert rope.scaling.factor == 8.0
    assert config.eos_token_ids == (3, 5)
    assert config.dtype == "bfloat16"


def test_the_two_ways_to_write_rope_are_one() -> None:
    old = parse_config({**GOOD, "rope_theta": 5e5, "rope_scaling": LLAMA3})
    new = parse_config({**GOOD, "rope_parameters": {**LLAMA3, "rope_theta": 5e5}})
    assert old == new


def test_qwen3_head_dim_comes_from_its_own_defaults() -> None:
    assert parse_config({**GOOD, "architectures": ["Qwen3ForCausalLM"]}).head_dim == 128


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"architectures": ["BloomForCausalLM"]}, ["GPT2LMHeadModel", "LlamaForCausalLM", "Qwen3ForCausalLM"]),
        ({"architectures": []}, ["architectures"]),
        ({"architectures": "LlamaForCausalLM"}, ["architectures"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "gelu", "silu"]),
        ({"quantization_config": {"bits": 4}}, ["quantization_config", "quant_method"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor", "0.5"]),
        ({"attention_chunk_size": 8192}, ["attention_chunk_size"]),
        ({"is_causal": False}, ["is_causal"]),
        ({"model_type": "mistral"}, ["model_type", "mistral", "llama"]),
        ({"sliding_window": 1024}, ["sliding_window"]),
        ({"rope_scaling": LLAMA3, "original_max_position_embeddings": 32}, ["original_max_position_embeddings"]),
        ({"rms_norm_eps": float("nan")}, ["rms_norm_eps"]),
        ({"rms_norm_eps": 10**400}, ["rms_norm_eps"]),
        ({"eos_token_id": 100}, ["config.json", "eos_token_id", "0 to 99"]),
        ({"eos_token_id": [1, -1]}, ["config.json", "eos_token_id", "-1"]),
        ({"eos_token_id": True}, ["eos_token_id"]),
        ({"layer_types": ["sliding_attention", "full_attention"]}, ["layer_types"]),
        ({"use_sliding_window": True, "sliding_window": 4}, ["sliding_window"]),
        ({"rope_scaling": {"rope_type": "spiral", "factor": 4.0}}, ["spiral", "yarn", "llama3"]),
        ({"rope_scaling": {"rope_type": ["yarn"], "factor": 4.0}}, ["rope_type"]),
        ({"rope_scaling": {**YARN, "slope": 1.0}}, ["slope", "beta_fast"]),
        ({"rope_scaling": {**YARN, "truncate": 1}}, ["truncate"]),
        ({"rope_scaling": YARN, "rope_theta": 1.0}, ["rope_theta must be above 1"]),
        ({"rope_scaling": {"type": "linear"}}, ["factor"]),
        ({"rope_scaling": {"type": "default", "factor": 2.0}}, ["no other field"]),
        ({"rope_scaling": {**LONG, "short_factor": [1.0] * 7}, **LONG_LENGTH}, ["short_factor", "8 frequencies"]),
        ({"rope_scaling": {**LONG, "long_factor": [0.0] * 8}, **LONG_LENGTH}, ["long_factor"]),
        (
            {"rope_scaling": {**LONG, "original_max_position_embeddings": 1}, **LONG_LENGTH},
            ["original_max_position_embeddings must be a number above 1"],
        ),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 4.0}}, ["low_freq_factor"]),
        ({"rope_scaling": {**LLAMA3, "factor": -1.0}}, ["factor"]),
        ({"rope_scaling": {**LLAMA3, "factor": 8}, "rope_parameters": {"rope_theta": 5.0}}, ["contradict"]),
        ({"rope_theta": 1.0, "rope_parameters": {"rope_theta": 5.0}}, ["rope_theta"]),
        ({"rope_theta": float("inf")}, ["rope_theta"]),
        ({"architectures": [["x"]]}, ["architectures"]),
        ({"layer_types": [[]]}, ["layer_types"]),
        ({"num_hidden_layers": 2**30}, ["num_hidden_layers"]),
        ({"rope_theta": "big"}, ["rope_theta"]),
        ({"num_key_value_heads": 3}, ["num_key_value_heads"]),
        ({"num_hidden_layers": 0}, ["num_hidden_layers"]),
        ({"vocab_size": -5}, ["vocab_size"]),
        ({"vocab_size": "many"}, ["vocab_size"]),
        ({"dtype": "float8"}, ["dtype", "float8"]),
        ({"eos_token_id": "end"}, ["eos_token_id"]),
    ],
)
def test_refused_by_name(change: dict, words: list[str]) -> None:
    with pytest.raises(ValueError, match=r"config\.json|architecture|eos_token_id") as error:
        parse_config({**GOOD, **change})
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize("name", PUBLISHED)
def test_as_published(name: str, tmp_path: Path) -> None:
    """Read as transformers reads it; what it ignores is ignored, and listed once."""
    content, ignored = PUBLISHED[name]
    (tmp_path / "config.json").write_text(json.dumps(content))
    if ignored:
        with pytest.warns(UserWarning, match=r"config\.json: fields that transformers ignores") as warned:
            found = read_config(tmp_path)
        assert len(warned) == 1
        assert str(warned[0].message).endswith(": " + ", ".join(ignored))
    else:
        found = read_config(tmp_path)
    reads_as(found, transformers.AutoConfig.from_pretrained(tmp_path))
    ids = content["eos_token_id"]
    assert found.eos_token_ids == (tuple(ids) if isinstance(ids, list) else (ids,))


@pytest.mark.parametrize("name", [*WRAPPED, *GEMMA4])
def test_of_a_model_with_more_than_text_the_language_model_is_read(name: str, tmp_path: Path) -> None:
    content = (WRAPPED | GEMMA4)[name]
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.warns(UserWarning, match=r"the language model alone is loaded|fields that transformers") as warned:
        found = read_config(tmp_path)
    assert "the language model alone is loaded" in str(warned[0].message)
    assert all("fields that transformers ignores" in str(other.message) for other in warned[1:])
    wanted = transformers.AutoConfig.from_pretrained(tmp_path).get_text_config()
    wanted.allow_global_per_layer_attribute_access = True  # Gemma 4's heads are not all of one size
    reads_as(found, wanted)
    assert found.eos_token_ids == tuple(content.get("eos_token_id", ()))
    assert found.dtype == "bfloat16"


def reads_as(found: ModelConfig, wanted: Any) -> None:
    """``found`` has what transformers' ``wanted`` has."""
    for own, theirs in {
        "vocab_size": "vocab_size",
        "hidden_size": "hidden_size",
        "intermediate_size": "intermediate_size",
        "num_layers": "num_hidden_layers",
        "num_heads": "num_attention_heads",
        "num_kv_heads": "num_key_value_heads",
        "head_dim": "head_dim",
        "rms_norm_eps": "rms_norm_eps",
        "max_position_embeddings": "max_position_embeddings",
        "tie_word_embeddings": "tie_word_embeddings",
        "attention_bias": "attention_bias",
    }.items():
        value = getattr(found, own, None)  # not all families have biases to speak of
        if own == "head_dim" and getattr(wanted, theirs, None) is None:
            assert value == wanted.hidden_size // wanted.num_attention_heads
        else:
            assert value == getattr(wanted, theirs, value), own
    given = getattr(wanted, "rope_parameters", None)
    if given is None:
        assert not found.ropes
        given = {}
    by_kind = [given[kind] for kind in ("full_attention", "sliding_attention") if kind in given] or [given] * bool(
        given
    )
    for rope, parameters in zip(found.ropes, by_kind, strict=True):
        assert rope.theta == parameters["rope_theta"]
        assert (rope.scaling is None) == (parameters["rope_type"] == "default")
    assert getattr(found, "layer_types", ()) in ((), tuple(getattr(wanted, "layer_types", None) or ()))
    if wanted.dtype is not None:
        assert f"torch.{found.dtype}" == str(wanted.dtype)


@pytest.mark.parametrize("name", REFUSED)
def test_published_but_not_supported(name: str) -> None:
    content, field = REFUSED[name]
    with pytest.raises(ValueError, match=field) as error:
        parse_config(content)
    assert "remove" not in str(error.value).lower(), "to edit the file is no remedy"


def test_fields_of_other_models_are_ignored_where_transformers_ignores_them() -> None:
    """None of them is a parameter of the class, and no code of transformers for this class looks at one."""
    extra = {"final_logit_softcapping": 30.0, "num_experts": 8, "temperature": 0.6, "auto_map": {}, "mlp_bias": True}
    qwen = {**GOOD, "architectures": ["Qwen3ForCausalLM"]}
    assert ignored_fields({**qwen, **extra}, family("Qwen3ForCausalLM"), transformers.Qwen3Config) == sorted(extra)
    assert not parse_config({**qwen, **extra}).mlp_bias
    assert parse_config({**GOOD, "mlp_bias": True}).mlp_bias


def test_a_field_that_transformers_knows_and_this_engine_does_not_must_have_its_default() -> None:
    class Newer(transformers.LlamaConfig):
        residual_scale: float = 1.0

    llama = family("LlamaForCausalLM")
    assert ignored_fields({**GOOD, "residual_scale": 1.0}, llama, Newer) == []
    with pytest.raises(ValueError, match=r"residual_scale=0\.5 is not supported.*Supported value: 1\.0"):
        ignored_fields({**GOOD, "residual_scale": 0.5}, llama, Newer)


def test_a_field_under_its_second_name_is_not_ignored() -> None:
    class Renamed(transformers.LlamaConfig):
        attribute_map = {"n_embd": "hidden_size", "num_heads": "heads"}  # noqa: RUF012
        num_heads: int = 4

    own = by_own_names({"n_embd": 64, "heads": 8, "other": 1}, Renamed)
    assert own == {"hidden_size": 64, "num_heads": 8, "other": 1}
    assert by_own_names({"n_embd": 64, "hidden_size": 64}, Renamed) == {"hidden_size": 64}
    with pytest.raises(ValueError, match=r"hidden_size=32 and n_embd=64 contradict each other"):
        by_own_names({"n_embd": 64, "hidden_size": 32}, Renamed)
    llama = family("LlamaForCausalLM")
    with pytest.raises(ValueError, match=r"num_heads=8 is not supported.*Supported value: 4"):
        ignored_fields(own, llama, Renamed)


def test_fields_of_training_are_of_no_effect() -> None:
    extra = {"resid_pdrop": 0.1, "router_aux_loss_coef": 0.01, "num_mtp_layers": 1}
    assert ignored_fields({**GOOD, **extra}, family("LlamaForCausalLM"), transformers.LlamaConfig) == []


@dataclasses.dataclass(frozen=True)
class SwitchedConfig(ModelConfig):
    """Of a family of a test's own, whose layers may have windows."""

    sliding_window: int | None
    layer_types: tuple[str, ...]
    use_sliding_window: bool
    residual_scale: float = 1.0  # transformers' class lacks it


def test_a_field_that_one_family_uses_is_refused_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = ["sliding_attention", "full_attention"]
    config = {**GOOD, "architectures": ["Qwen3ForCausalLM"], "sliding_window": 4, "layer_types": kinds}
    config |= {"use_sliding_window": True, "residual_scale": 0.5}
    plain = dataclasses.replace(family("Qwen3ForCausalLM"), config=ModelConfig)
    monkeypatch.setattr("compiled_llm.models.config_file.family", lambda architecture: plain)
    with pytest.raises(ValueError, match="sliding_window=4 is not supported"):
        parse_config(config)
    windowed = dataclasses.replace(
        family("Qwen3ForCausalLM"), config=SwitchedConfig, requires={"hidden_act": ("gelu",), "attention_bias": (True,)}
    )
    monkeypatch.setattr("compiled_llm.models.config_file.family", lambda architecture: windowed)
    found = parse_config({**config, "hidden_act": "gelu", "attention_bias": True})
    assert isinstance(found, SwitchedConfig)
    assert (found.sliding_window, found.layer_types, found.residual_scale) == (4, tuple(kinds), 1.0)
    with pytest.raises(ValueError, match=r"hidden_act='silu' is not supported.*Supported value: 'gelu'"):
        parse_config({**config, "hidden_act": "silu"})


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3ForCausalLM"])
def test_sizes_are_bounded_before_transformers_sees_them(architecture: str) -> None:
    begun = time.monotonic()
    with pytest.raises(ValueError, match="num_hidden_layers must be an integer from 1 to 1024"):
        parse_config({**GOOD, "architectures": [architecture], "num_hidden_layers": 10**7})
    assert time.monotonic() - begun < 3, "Qwen3Config makes a list of that length"


def test_windows_that_change_nothing_are_accepted() -> None:
    assert parse_config({**GOOD, "sliding_window": 2048, "max_position_embeddings": 2048})
    assert parse_config({**GOOD, "sliding_window": 16, "use_sliding_window": False})
    assert parse_config({**GOOD, "architectures": ["Qwen3ForCausalLM"], "sliding_window": 16})


def test_end_of_text_ids_of_either_file_are_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GOOD))
    for token in (100, -1, 2**70):
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, token]}))
        with pytest.raises(ValueError, match=r"generation_config\.json: eos_token_id .* 0 to 99"):
            read_config(tmp_path)


@pytest.mark.parametrize("content", ["", "[]", '{"a": ', "\x00", "[" * 100_000])
def test_unreadable_json_names_the_file(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError, match=r"config\.json"):
        read_config(tmp_path)


def test_missing_file_names_it(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"config\.json: no such file"):
        read_config(tmp_path)


def test_auto_map_is_never_followed(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**GOOD, "auto_map": {"AutoModelForCausalLM": "evil.Evil"}}))
    (tmp_path / "evil.py").write_text("raise SystemExit('executed')")
    with pytest.warns(UserWarning, match="auto_map"):
        assert read_config(tmp_path).architecture == "LlamaForCausalLM"
