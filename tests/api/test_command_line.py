"""Every engine argument and sampling parameter is a flag of the same name and default."""

import argparse
import dataclasses
import sys
from typing import Any

import pytest

from compiled_llm import EngineConfig, SamplingParams
from compiled_llm.api.command_line import (
    FlagParser,
    add_engine_arguments,
    add_sampling_arguments,
    engine_config,
    sampling_arguments,
    sampling_params,
)
from compiled_llm.api.structured_outputs import StructuredOutputsParams


def parse(*arguments: str) -> argparse.Namespace:
    parser = FlagParser()
    add_engine_arguments(parser)
    add_sampling_arguments(parser)
    return parser.parse_args(arguments)


def test_defaults_are_those_of_the_classes() -> None:
    args = parse()
    assert engine_config(args) == EngineConfig()
    assert sampling_params(args) == SamplingParams()


def test_every_field_has_a_flag_with_help_that_formats() -> None:
    parser = FlagParser()
    add_engine_arguments(parser)
    add_sampling_arguments(parser)
    text = parser.format_help()
    for cls in (EngineConfig, SamplingParams):
        for field in dataclasses.fields(cls):
            assert "--" + field.name.replace("_", "-") in text


def test_values_arrive() -> None:
    args = parse(
        *("--bucket-sizes", "4,2", "--enforce-eager", "--no-enable-chunked-prefill", "--seed", "3"),
        *("--gpu-memory-utilization", "0.5", "--max-model-len", "128", "--max-num-batched-tokens", "128"),
        *("--temperature", "0.5", "--stop", "a", "--stop", "b", "--stop-token-ids", "1,2", "--sampling-seed", "9"),
        *("--kv-cache-dtype", "int8", "--kv-cache-skip-layers", "2,0"),
    )
    config, params = engine_config(args), sampling_params(args)
    assert (config.bucket_sizes, config.enforce_eager, config.enable_chunked_prefill) == ((2, 4), True, False)
    assert (config.seed, config.gpu_memory_utilization, config.max_model_len) == (3, 0.5, 128)
    assert (config.kv_cache_dtype, config.kv_cache_skip_layers) == ("int8", (0, 2))
    assert (params.temperature, params.stop, params.stop_token_ids, params.seed) == (0.5, ("a", "b"), (1, 2), 9)


@pytest.mark.parametrize(
    ("arguments", "name", "value"),
    [
        (["--n", "3"], "n", 3),
        (["--min-tokens", "4"], "min_tokens", 4),
        (["--min-p", "0.25"], "min_p", 0.25),
        (["--top-n-sigma", "1.5"], "top_n_sigma", 1.5),
        (["--presence-penalty", "-0.5"], "presence_penalty", -0.5),
        (["--frequency-penalty", "1.5"], "frequency_penalty", 1.5),
        (["--repetition-penalty", "1.1"], "repetition_penalty", 1.1),
        (["--logprobs", "2"], "logprobs", 2),
        (["--prompt-logprobs", "-1"], "prompt_logprobs", -1),
        (["--logit-bias", '{"5": 2.5, "7": -100}'], "logit_bias", {5: 2.5, 7: -100}),
        (["--allowed-token-ids", "3,1,2"], "allowed_token_ids", (3, 1, 2)),
        (["--bad-words", "a, b", "--bad-words", "c"], "bad_words", ("a, b", "c")),
        (
            ["--structured-outputs", '{"choice": ["yes", "no"]}'],
            "structured_outputs",
            StructuredOutputsParams(choice=("yes", "no")),
        ),
        (["--sampling-logits-transforms", '{"mine": [1, 2]}'], "logits_transforms", {"mine": [1, 2]}),
    ],
)
def test_sampling_parameters_arrive_and_nothing_else_changes(arguments: list[str], name: str, value: Any) -> None:
    params = sampling_params(parse(*arguments))
    assert getattr(params, name) == value
    assert params == SamplingParams(**{name: value})


def test_values_that_may_be_none_are_given_as_none() -> None:
    args = parse(
        "--max-tokens", "none", "--truncate-prompt-tokens", "None", "--max-model-len", "none", "--logprobs", "3"
    )
    params = sampling_params(args, max_tokens=5)
    assert (params.max_tokens, params.truncate_prompt_tokens, params.logprobs) == (None, None, 3)
    assert engine_config(args).max_model_len is None
    assert sampling_params(parse("--truncate-prompt-tokens", "-1")).truncate_prompt_tokens == -1
    assert engine_config(parse("--quantization", "none")) == engine_config(parse())
    assert engine_config(parse("--quantization", "int8")).quantization == "int8"


@pytest.mark.parametrize(("flag", "value"), [("--max-tokens", "many"), ("--temperature", "none"), ("--n", "none")])
def test_other_numbers_are_not(flag: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        parse(flag, value)
    assert f"argument {flag}: " in capsys.readouterr().err


def test_defaults_hold_for_the_flags_that_are_not_given() -> None:
    args = parse("--temperature", "1.0", "--top-k", "0")
    assert sampling_arguments(args) == {"temperature": 1.0, "top_k": 0}
    params = sampling_params(args, temperature=0.5, top_k=20, top_p=0.9)
    assert (params.temperature, params.top_k, params.top_p, params.max_tokens) == (1.0, 0, 0.9, 16)


@pytest.mark.parametrize(
    ("arguments", "error", "given"),
    [
        (["--seed", "1", "--modle", "DIR"], "unknown flag --modle: did you mean '--model'?", "--modle DIR"),
        (["--modle=DIR"], "unknown flag --modle: did you mean '--model'?", "--modle=DIR"),
        (["--seed", "x", "--n", "2"], "argument --seed: invalid int value: 'x'", "--seed x"),
        (["--n"], "argument --n: expected one argument", "--n"),
        (
            ["--cuda-graphs", "manul"],
            "argument --cuda-graphs: must be one of auto, manual, programmatic, pinned, trees, given 'manul': "
            "did you mean 'manual'?",
            "--cuda-graphs manul",
        ),
        (["a b.txt", "c"], "'a b.txt' c belongs to no flag: give each value after its flag", "'a b.txt' c"),
        (
            ["--seed", "1", "--max-num-seqs", "0"],
            "max_num_seqs must be an integer from 1 to 281474976710656, given 0",
            "--max-num-seqs 0",
        ),
        (
            ["--target-itl-ms", "2", "--no-enable-chunked-prefill"],
            "target_itl_ms must be None without chunked prefill (a prompt is one step then), given 2.0",
            "--target-itl-ms 2",
        ),
        (["--n", "2"], "what my check says", "--n 2"),
        ([], "what my check says", "nothing"),
    ],
)
def test_an_error_is_three_lines_what_where_and_what_to_do(
    arguments: list[str], error: str, given: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = FlagParser(prog="bench_it.py")
    add_engine_arguments(parser)
    add_sampling_arguments(parser)
    monkeypatch.setattr(sys, "argv", ["scripts/bench_it.py", *arguments])

    def check(args: argparse.Namespace) -> None:
        engine_config(args)
        raise ValueError("what my check says")

    with pytest.raises(SystemExit, match="2"):
        parser.parse_checked(check)
    assert capsys.readouterr().err.splitlines() == [
        f"bench_it.py: error: {error}",
        f"  given: {given}",
        "  see:   python scripts/bench_it.py --help",
    ]


def test_a_misspelt_flag_is_told_before_the_one_that_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    parser = FlagParser(prog="it")
    parser.add_argument("--input", required=True)
    parser.add_argument("rest", nargs="*")
    with pytest.raises(SystemExit, match="2"):
        parser.parse_args(["--inptu=a b", "c"])
    assert capsys.readouterr().err.splitlines()[:2] == [
        "it: error: unknown flag --inptu: did you mean '--input'?",
        "  given: '--inptu=a b' c",
    ]
    with pytest.raises(SystemExit, match="2"):
        parser.parse_args([])
    assert "the following arguments are required: --input" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="0"):
        parser.parse_args(["--inptu", "--help"])
    assert parser.parse_args(["--input", "a", "--", "--inptu"]).rest == ["--inptu"], "flags of another program"
    assert parser.parse_args(["--input", "-- a"]).input == "-- a", "a text"


def test_engine_arguments_are_checked_without_a_check_of_the_program(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = FlagParser(prog="it")
    add_engine_arguments(parser)
    monkeypatch.setattr(sys, "argv", ["it", "--dtype", "int3"])
    with pytest.raises(SystemExit, match="2"):
        parser.parse_checked()
    assert capsys.readouterr().err.splitlines()[1:] == ["  given: --dtype int3", "  see:   it --help"]


def test_a_long_command_line_is_cut(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        parse("--qqq", "x" * 10**6)
    assert len(capsys.readouterr().err) < 400


def test_no_flag_may_be_abbreviated() -> None:
    for flag in ("--bucket-size=1", "--enforce-eag", "--temp=1", "--no-enable-chunked", "--hel"):
        with pytest.raises(SystemExit, match="2"):
            parse(flag)


def test_names_may_be_given_several_times() -> None:
    parser = FlagParser()
    add_engine_arguments(parser)
    args = parser.parse_args(["--quantization", "int8", "--quantization-skip", "a", "--quantization-skip", "b"])
    assert engine_config(args).quantization_skip == ("a", "b")
    assert engine_config(parser.parse_args([])).quantization_skip == ()
