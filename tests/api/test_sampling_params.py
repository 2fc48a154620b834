"""SamplingParams: every field is checked at the door."""

import dataclasses
import itertools
import math
import pickle
from typing import Any

import pytest

from compiled_llm.api.sampling_params import SamplingParams
from compiled_llm.api.structured_outputs import StructuredOutputsParams

REFUSED: dict[str, list[Any]] = {
    "n": [0, -1, 257, 2.0, True, None, "2"],
    "max_tokens": [0, -1, 1.0, True, 2**31, "16"],
    "min_tokens": [-1, 17, 1.0, True, None],
    "temperature": [-0.1, 100.1, math.nan, math.inf, "hot", True, None],
    "top_p": [0, 0.0, -0.5, 1.01, math.nan, "0.5", True, None],
    "top_k": [-2, 2.0, 2**31, True, None],
    "min_p": [-0.1, 1.1, math.nan, True, None, "0.1"],
    "top_n_sigma": [-1, 100.1, math.nan, math.inf, True, None, "1"],
    "presence_penalty": [-2.1, 2.1, math.nan, -math.inf, True, None, "1"],
    "frequency_penalty": [-2.1, 2.1, math.nan, math.inf, True, None, "1"],
    "repetition_penalty": [0, 0.0, -1.0, 0.009, 100.1, math.nan, True, None],
    "seed": [2**63, -(2**63) - 1, "one", 1.0, True],
    "stop": ["", ["a", ""], 5, b"a", [5], ["x"] * 65, "x" * 1025, [["x"]]],
    "stop_token_ids": [3, [-1], ["a"], "12", [1.0], [True], [2**31], list(range(65))],
    "ignore_eos": [1, 0, None, "yes"],
    "include_stop_str_in_output": [1, None],
    "logprobs": [-2, 1001, 1.0, True, "1"],
    "prompt_logprobs": [-2, 1001, 1.0, True, "1"],
    "logit_bias": [
        [1, 2],
        "x",
        5,
        {-1: 1.0},
        {"one": 1.0},
        {"-1": 1.0},
        {1.0: 1.0},
        {True: 1.0},
        {2**31: 1.0},
        {1: 100.1},
        {1: -100.1},
        {1: math.nan},
        {1: "5"},
        {1: None},
        dict.fromkeys(range(301), 1.0),
    ],
    "allowed_token_ids": [[], (), 3, "12", [-1], ["a"], [1.5], [2**31], [True]],
    "bad_words": ["", ["a", ""], 5, [5], ["x"] * 1001, "x" * 1025],
    "structured_outputs": ["[a-z]", 5, [], {}, {"regexp": "a"}, {"regex": "a", "choice": ("a",)}, {5: "a"}],
    "logits_transforms": [[], ["x"], "x", 5, {5: 1}, {None: 1}, {f"t{n}": 1 for n in range(65)}],
    "truncate_prompt_tokens": [0, -2, 1.0, True, 2**31, "16"],
    "split_special_tokens": [1, "no"],
    "skip_special_tokens": [1, None],
    "detokenize": [0, None],
    "num_speculative_tokens": [-1, 64, 1.0, True, "3"],
    "output_kind": ["", "DELTA", "final_only", 1, True, None, ["delta"]],
}


def test_each_field_has_its_refusals() -> None:
    assert set(REFUSED) == {field.name for field in dataclasses.fields(SamplingParams)}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(name: str) -> None:
    for value in REFUSED[name]:
        with pytest.raises(ValueError, match=name if name != "structured_outputs" else "structured.outputs"):
            SamplingParams(**{name: value})


@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p", "presence_penalty", "repetition_penalty"])
def test_an_integer_beyond_all_floats_is_refused_too(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        SamplingParams(**{name: 10**400})  # type: ignore[arg-type]


def test_messages_say_what_is_allowed_and_what_was_given() -> None:
    for arguments, message in [
        ({"n": 257}, "n must be .*1.*256.*257"),
        ({"temperature": 101}, "temperature must be a number from 0.0 to 100.0, given 101"),
        ({"top_p": 0}, r"top_p must be above 0 \(1 is off; temperature=0 is greedy\), given 0"),
        ({"presence_penalty": "1"}, "presence_penalty must be a number from -2.0 to 2.0, given '1'"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens must be .*0.*8.*9"),
        ({"logit_bias": {7: 101}}, "logit_bias of token 7 must be a number from -100.0 to 100.0, given 101"),
        ({"logit_bias": dict.fromkeys(range(301), 1)}, "logit_bias may hold 300 ids at most, given 301"),
        ({"allowed_token_ids": []}, "allowed_token_ids must hold at least one id, or be None, given none"),
        ({"bad_words": ["x"] * 1001}, "bad_words may hold 1000 strings"),
        ({"logits_transforms": {f"t{n}": 1 for n in range(65)}}, "may name 64 at most, given 65"),
        ({"structured_outputs": {"regexp": "a"}}, "unknown field of structured_outputs 'regexp': did you mean 'regex'"),
        ({"structured_outputs": 5}, "structured_outputs must be a StructuredOutputsParams or a dict, given int"),
        ({"structured_outputs": {}}, r"structured outputs: exactly one of json, .* must be given, given \[\]"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, r"exactly one of .* given \['regex', 'choice'\]"),
        ({"structured_outputs": {"json": "{"}}, "json must be a JSON schema, given what is not JSON"),
        ({"structured_outputs": {"regex": "\ud800"}}, "regex must be Unicode text, given half a surrogate pair"),
        ({"structured_outputs": {"json_object": False}}, "json_object must be True or None, given False"),
        ({"max_tokens": "16"}, "max_tokens must be an integer from 1 to .* given '16'"),
        ({"stop": ["a", 5]}, r"stop must be a non-empty string or a list of them, given \['a', 5\]"),
        ({"stop": "x" * 2000}, "stop may hold 64 strings of 1024 characters"),
        ({"stop_token_ids": 5}, "stop_token_ids must be a list of token ids, given 5"),
        ({"stop_token_ids": ["x"]}, "stop_token_ids must be .* given 'x'"),
        ({"logit_bias": [1]}, r"logit_bias must be a dict of bias by token id, given \[1\]"),
        ({"logit_bias": {"five": 1}}, "logit_bias: a token id must be an integer .* given 'five'"),
        ({"allowed_token_ids": "abc"}, "allowed_token_ids must be a list of token ids, given 'abc'"),
        ({"logits_transforms": ["x"]}, r"logits_transforms must be a dict of argument by name, given \['x'\]"),
        ({"ignore_eos": 1}, "ignore_eos must be True or False, given 1"),
    ]:
        with pytest.raises(ValueError, match=message):
            SamplingParams(**arguments)  # type: ignore[arg-type]


ACCEPTED: dict[str, list[Any]] = {
    "n": [1, 2, 256],
    "max_tokens": [1, 2**31 - 1, None],
    "min_tokens": [0, 1, 16],
    "temperature": [0, 0.0, 1e-9, 1, 100.0],
    "top_p": [1e-9, 0.5, 1],
    "top_k": [-1, 0, 1, 2**31 - 1],
    "min_p": [0, 0.3, 1.0],
    "top_n_sigma": [0, 1.5, 100.0],
    "presence_penalty": [-2, 0, 2.0],
    "frequency_penalty": [-2.0, 0.0, 2],
    "repetition_penalty": [0.01, 1, 1.5, 100.0],
    "seed": [None, 0, -(2**63), 2**63 - 1],
    "ignore_eos": [True, False],
    "include_stop_str_in_output": [True, False],
    "logprobs": [None, -1, 0, 1, 1000],
    "prompt_logprobs": [None, -1, 0, 1, 1000],
    "logit_bias": [None, {}, {0: -100, 5: 100.0}, dict.fromkeys(range(300), 0.0)],
    "logits_transforms": [None, {}, {"mine": None, "yours": [1, {"a": 2}]}],
    "truncate_prompt_tokens": [None, -1, 1, 2**31 - 1],
    "split_special_tokens": [None, True, False],
    "skip_special_tokens": [True, False],
    "detokenize": [True, False],
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_accepted_as_it_is(name: str) -> None:
    for value in ACCEPTED[name]:
        assert getattr(SamplingParams(**{name: value}), name) == value


def test_what_has_several_forms_is_kept_in_one() -> None:
    for name in ("stop", "bad_words"):
        for given, kept in [("x", ("x",)), (["x", "yz"], ("x", "yz")), (("x",), ("x",)), (None, ()), ([], ())]:
            assert getattr(SamplingParams(**{name: given}), name) == kept
    assert SamplingParams(stop_token_ids=[3, 4]).stop_token_ids == (3, 4)  # type: ignore[arg-type]
    assert SamplingParams(stop_token_ids=range(2)).stop_token_ids == (0, 1)  # type: ignore[arg-type]
    assert SamplingParams().stop_token_ids == SamplingParams(stop_token_ids=[]).stop_token_ids == ()  # type: ignore[arg-type]
    assert SamplingParams(allowed_token_ids=[5, 5]).allowed_token_ids == (5, 5)  # type: ignore[arg-type]
    made = SamplingParams(structured_outputs={"choice": ["a", "b"]}).structured_outputs
    assert made == StructuredOutputsParams(choice=("a", "b"))
    assert SamplingParams(structured_outputs=made).structured_outputs is made


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"stop": "x", "detokenize": False}, "stop strings need detokenize=True, given False; use stop_token_ids"),
        ({"n": 2, "temperature": 0}, "n must be 1 with temperature=0, .* given 2"),
        ({"min_tokens": 3, "max_tokens": 2}, "min_tokens must be"),
        (
            {"structured_outputs": {"regex": "a"}, "min_tokens": 1},
            "min_tokens must be 0 with structured_outputs, given 1",
        ),
        (
            {"structured_outputs": {"regex": "a"}, "allowed_token_ids": [1]},
            r"allowed_token_ids must be None with structured_outputs, given \(1,\)",
        ),
        ({"structured_outputs": {"regex": "a"}, "bad_words": "b"}, r"bad_words must be \(\) with structured_outputs"),
        (
            {"structured_outputs": {"regex": "a"}, "ignore_eos": True},
            "ignore_eos must be False with structured_outputs",
        ),
    ],
)
def test_combinations_that_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingParams(**arguments)


def test_combinations_that_are_not() -> None:
    SamplingParams(min_tokens=2**20, max_tokens=None)
    SamplingParams(n=1, temperature=0)
    SamplingParams(stop_token_ids=[1], detokenize=False)  # type: ignore[arg-type]
    SamplingParams(structured_outputs={"regex": "a"}, temperature=0, logit_bias={1: 1.0}, repetition_penalty=1.1, n=1)
    SamplingParams(structured_outputs={"regex": "a"}, n=4, stop="b", logprobs=3)


def test_unknown_parameter_is_named() -> None:
    with pytest.raises(ValueError, match="'max_token'"):
        SamplingParams(max_token=5)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="positional"):
        SamplingParams(2)  # type: ignore[misc]


@pytest.mark.parametrize(
    ("arguments", "counts", "masks", "changes"),
    [
        ({}, False, False, False),
        ({"temperature": 0, "top_k": 5, "top_p": 0.5, "min_p": 0.1, "seed": 1, "logprobs": 1}, False, False, False),
        ({"logit_bias": {}, "logits_transforms": {}}, False, False, False),
        ({"logit_bias": {1: 1.0}}, False, False, True),
        ({"presence_penalty": 0.1}, True, False, True),
        ({"frequency_penalty": -0.1}, True, False, True),
        ({"repetition_penalty": 0.9}, True, False, True),
        ({"logits_transforms": {"mine": None}}, True, False, True),
        ({"allowed_token_ids": [0]}, False, True, True),
        ({"bad_words": "x"}, False, True, True),
        ({"min_tokens": 1}, False, True, True),
        ({"structured_outputs": {"regex": "a"}}, False, True, True),
    ],
)
def test_what_follows_from_the_fields(arguments: dict[str, Any], counts: bool, masks: bool, changes: bool) -> None:
    params = SamplingParams(**arguments)
    assert (params.counts_tokens, params.masks_tokens, params.changes_logits) == (counts, masks, changes)
    assert params.greedy == (arguments.get("temperature") == 0)


def test_frozen() -> None:
    params = SamplingParams(logit_bias={1: 1.0}, logits_transforms={"mine": 1})
    for field in dataclasses.fields(SamplingParams):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(params, field.name, None)


def test_later_changes_of_what_was_given_change_nothing() -> None:
    biases, transforms, stops = {1: 1.0}, {"mine": 1}, ["a"]
    params = SamplingParams(logit_bias=biases, logits_transforms=transforms, stop=stops)  # type: ignore[arg-type]
    biases[2], transforms["yours"] = 500.0, 2
    stops.append("")
    assert (params.logit_bias, params.logits_transforms, params.stop) == ({1: 1.0}, {"mine": 1}, ("a",))


def test_picklable_and_replaceable() -> None:
    params = SamplingParams(
        n=3,
        max_tokens=None,
        stop="x",
        stop_token_ids=[5],  # type: ignore[arg-type]
        logit_bias={1: 2.0},
        structured_outputs={"json": {"type": "object"}},
        logits_transforms={"mine": [1, 2]},
        logprobs=3,
    )
    assert pickle.loads(pickle.dumps(params)) == params
    assert dataclasses.replace(params, n=2) == SamplingParams(**{**vars(params), "n": 2})
    with pytest.raises(ValueError, match="top_p"):
        dataclasses.replace(params, top_p=2.0)


@pytest.mark.parametrize("name", ["stop", "bad_words", "stop_token_ids", "allowed_token_ids"])
def test_lists_are_not_read_beyond_their_limits(name: str) -> None:
    item = "x" if name in ("stop", "bad_words") else 5
    with pytest.raises(ValueError, match=rf"^{name} may hold \d+ .* given more"):
        SamplingParams(**{name: itertools.repeat(item)})


def test_what_was_given_is_not_repeated_at_length() -> None:
    for name, value in [
        ("stop", ["x" * 10**6, 5]),
        ("logit_bias", [5] * 10**6),
        ("ignore_eos", "x" * 10**6),
        ("n", 1 << 10**6),
    ]:
        with pytest.raises(ValueError, match=name) as error:
            SamplingParams(**{name: value})
        assert len(str(error.value)) < 500
