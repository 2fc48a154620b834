"""Names that are not ours are refused with what to give instead; the classes stay what dataclasses are."""

import dataclasses
import inspect
import re

import pytest
import torch

from compiled_llm import EngineConfig, SamplingParams
from compiled_llm.api.command_line import FlagParser, add_engine_arguments, add_sampling_arguments
from compiled_llm.api.names import ENGINE_ARGUMENTS, SAMPLING_PARAMETERS, VALUES

CLASSES = {EngineConfig: ENGINE_ARGUMENTS, SamplingParams: SAMPLING_PARAMETERS}


@pytest.mark.parametrize(
    ("cls", "name", "nearest"),
    [
        (EngineConfig, "bucket_size", "bucket_sizes"),
        (EngineConfig, "max_seq_len", "max_model_len"),
        (EngineConfig, "kv_cache_dtypes", "kv_cache_dtype"),
        (SamplingParams, "temprature", "temperature"),
        (SamplingParams, "max_token", "max_tokens"),
        (SamplingParams, "topk", "top_k"),
        (EngineConfig, "modle", "model"),
        (SamplingParams, "temp", "temperature"),
    ],
)
def test_the_nearest_name_is_offered_and_all_are_listed(cls: type, name: str, nearest: str) -> None:
    with pytest.raises(ValueError, match=f"unknown .* '{name}': did you mean '{nearest}'.*\\?; allowed: ") as refusal:
        cls(**{name: 1})
    for field in dataclasses.fields(cls):
        assert field.name in str(refusal.value)


def test_a_name_that_nothing_is_near_to_is_refused_without_a_guess() -> None:
    with pytest.raises(ValueError, match="unknown sampling parameter 'zzz'; allowed: n, max_tokens, "):
        SamplingParams(zzz=1)  # type: ignore[call-arg]


@pytest.mark.parametrize("cls", CLASSES)
def test_names_of_other_libraries_are_answered(cls: type) -> None:
    for name, answer in CLASSES[cls].items():
        with pytest.raises(ValueError, match=re.escape(f"{name!r}: a name of other libraries; {answer}")):
            cls(**{name: None})


@pytest.mark.parametrize("cls", CLASSES)
def test_the_tables_hold_no_name_of_ours_and_answer_with_names_that_are(cls: type) -> None:
    """An answer that begins with ``give x`` names an argument of this engine, or one of the methods' arguments."""
    known = {field.name for field in dataclasses.fields(cls)}
    # Arguments of chat(), generate(), add_request() and the engine itself, as the answers say.
    methods = {"sampling_params", "chat_template", "it", "drafter"}
    assert not known & CLASSES[cls].keys()
    for answer in CLASSES[cls].values():
        match = re.match(r"give (\w+)", answer)
        assert match or answer.startswith(("there is none", "set the env", "call engine.", "give '")), answer
        if match and not answer.startswith("give chat("):
            assert match[1] in known | methods, answer


def test_what_users_of_vllm_type_most_is_there() -> None:
    swap, sizes = ENGINE_ARGUMENTS["swap_space"], ENGINE_ARGUMENTS["cudagraph_capture_sizes"]
    assert "swap_space_bytes" in swap
    assert "bucket_sizes" in sizes
    for name in ("logits_processors", "tensor_parallel_size", "quantization_config", "max_seq_len_to_capture"):
        assert name in ENGINE_ARGUMENTS
    for name in ("logits_processors", "best_of", "use_beam_search", "guided_decoding"):
        assert name in SAMPLING_PARAMETERS


@pytest.mark.parametrize(
    ("name", "value", "answer"),
    [
        ("dtype", "half", "'float16'"),
        ("dtype", torch.float16, "'float16'"),
        ("dtype", torch.bfloat16, "'bfloat16'"),
        ("dtype", "float", "'float32'"),
        ("kv_cache_dtype", "fp8_e4m3", "'fp8', which is e4m3"),
        ("kv_cache_dtype", "fp8_e5m2", "there is none: give 'fp8', which is e4m3"),
        ("kv_cache_dtype", "half", "'float16'"),
        ("device", "gpu", "'cuda'"),
        ("load_format", "gguf", "only safetensors files are read"),
    ],
)
def test_values_of_other_libraries_are_answered(name: str, value: object, answer: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be .*, given .*: (give|there is none: )?.*{re.escape(answer)}"):
        EngineConfig(**{name: value})  # type: ignore[arg-type]


def test_no_value_in_the_table_is_taken() -> None:
    for name, values in VALUES.items():
        for value in values:
            with pytest.raises(ValueError, match=name):
                EngineConfig(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("cls", CLASSES)
def test_the_signature_is_that_of_the_fields(cls: type) -> None:
    parameters = inspect.signature(cls).parameters
    assert list(parameters) == [field.name for field in dataclasses.fields(cls)]
    for field in dataclasses.fields(cls):
        assert parameters[field.name].kind is inspect.Parameter.KEYWORD_ONLY
        assert parameters[field.name].default == field.default


def test_replacing_an_unknown_name_is_refused_alike() -> None:
    with pytest.raises(ValueError, match="did you mean 'temperature'"):
        dataclasses.replace(SamplingParams(), temperatur=1)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("flag", "answer"),
    [
        ("--bucket-size", "unknown flag --bucket-size: did you mean '--bucket-sizes'?"),
        ("--bucket", "unknown flag --bucket: did you mean '--bucket-sizes'?"),
        ("--swap-space", "unknown flag --swap-space: a name of other libraries; give swap_space_bytes"),
        ("--best-of", "unknown flag --best-of: a name of other libraries; there is none"),
        ("--tensor-parallel-size", "an engine runs on one device"),
        ("--modle", "unknown flag --modle: did you mean '--model'?"),
        ("--bucket_sizes", "unknown flag --bucket_sizes: did you mean '--bucket-sizes'?"),
        ("-modle", "unknown flag -modle: did you mean '--model'?"),
        ("--qqq", "unknown flag --qqq\n"),
    ],
)
@pytest.mark.parametrize("joined", [False, True])
def test_flags_are_answered_alike(flag: str, answer: str, joined: bool, capsys: pytest.CaptureFixture[str]) -> None:
    parser = FlagParser()
    add_engine_arguments(parser)
    add_sampling_arguments(parser)
    with pytest.raises(SystemExit, match="2"):
        parser.parse_args([f"{flag}=4"] if joined else [flag, "4"])
    assert answer in capsys.readouterr().err
