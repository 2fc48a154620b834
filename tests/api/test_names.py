"""Names that are not ours are refused with what to give instead; the classes stay what dataclasses are."""

import dataclasses
import inspect
import random
import re

import pytest
import torch

from compiled_llm import EngineConfig, SamplingParams
from compiled_llm.api.command_line import FlagParser, add_engine_arguments, add_sampling_arguments
from compiled_llm.api.names import ENGINE_ARGUMENTS, SAMPLING_PARAMETERS, VALUES, nearest

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
    methods = {"sampling_params", "chat_template", "it", "drafter", "lora_request"}
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
    for name in ("logits_processors", "distributed_executor_backend", "quantization_config", "max_seq_len_to_capture"):
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
        ("--distributed-executor-backend", "give tensor_parallel_size"),
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


# -- The nearest known name


FLAGS = ["--input", "--output", "--ordered", "--order-window", "--mode", "--check", "--report", "--quiet", "--trace"]
FLAGS += [
    "--" + field.name.replace("_", "-") for cls in (EngineConfig, SamplingParams) for field in dataclasses.fields(cls)
]


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("--modle", ["--model", "--mode"]),
        ("--modes", ["--mode", "--model"]),
        ("--inptu", ["--input"]),
        ("--bucket", ["--bucket-sizes"]),
        ("--max_num_seqs", ["--max-num-seqs"]),
        ("--topk", ["--top-k"]),
        ("--quant", ["--quantization", "--quantization-skip", "--quantization-head"]),
        ("--quite", ["--quiet"]),
        ("--order", ["--ordered", "--order-window"]),
        ("--num-blocks", ["--num-kv-blocks"]),
        ("--qqq", []),
        ("--", []),
        ("", []),
        ("x" * 10**6, []),
    ],
)
def test_the_best_is_first(given: str, found: list[str]) -> None:
    assert nearest(given, FLAGS) == found


def slips(word: str) -> list[str]:
    """Each letter left out, doubled, or in the place of the next one."""
    left_out = [word[:place] + word[place + 1 :] for place in range(len(word))]
    doubled = [word[:place] + word[place] + word[place:] for place in range(len(word))]
    swapped = [word[:place] + word[place + 1] + word[place] + word[place + 2 :] for place in range(len(word) - 1)]
    return [*left_out, *doubled, *swapped]


@pytest.mark.parametrize("count", [20, pytest.param(None, marks=pytest.mark.battery)])
def test_one_slip_leads_to_the_flag_that_was_meant(count: int | None) -> None:
    """Of flags of five letters and more."""
    typed = [(flag, f"--{slip}") for flag in FLAGS if len(flag) > 6 for slip in slips(flag[2:])]
    typed = [(flag, slip) for flag, slip in typed if slip not in FLAGS]
    sample = typed if count is None else random.Random(0).sample(typed, count)
    found = {slip: nearest(slip, FLAGS) for _, slip in sample}
    assert not [(flag, slip, found[slip]) for flag, slip in sample if flag not in found[slip][:2]]
    firsts = sum(found[slip][0] == flag for flag, slip in sample)
    assert firsts >= (0.98 if count is None else 0.9) * len(sample), "best first"
