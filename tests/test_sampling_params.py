"""SamplingParams: every field is checked at the door."""

import math

import pytest

from compiled_llm.sampling_params import SamplingParams


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", 1.0),
        ("max_tokens", True),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "hot"),
        ("top_p", 0),
        ("top_p", 1.01),
        ("top_k", -2),
        ("top_k", 2.0),
        ("seed", 2**63),
        ("seed", "one"),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", 5),
        ("stop", ["x"] * 100),
        ("stop", "x" * 2000),
        ("stop_token_ids", 3),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", ["a"]),
        ("stop_token_ids", list(range(1000))),
        ("ignore_eos", 1),
        # of later versions
        ("n", 2),
        ("min_tokens", 1),
        ("min_p", 0.1),
        ("presence_penalty", 0.5),
        ("frequency_penalty", 0.5),
        ("repetition_penalty", 1.1),
        ("logprobs", 1),
        ("prompt_logprobs", 1),
        ("logit_bias", {1: 2.0}),
        ("allowed_token_ids", (1,)),
        ("bad_words", ("x",)),
    ],
)
def test_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=name):
        SamplingParams(**{name: value})


def test_unknown_parameter_is_named() -> None:
    with pytest.raises(TypeError, match="'max_token'"):
        SamplingParams(max_token=5)  # type: ignore[call-arg]


def test_stop_without_text_is_refused() -> None:
    with pytest.raises(ValueError, match="stop strings need detokenize"):
        SamplingParams(stop="x", detokenize=False)


def test_forms_of_stop() -> None:
    assert SamplingParams(stop="x").stop == ("x",)
    assert SamplingParams(stop=["x", "yz"]).stop == ("x", "yz")
    assert SamplingParams(stop_token_ids=[3]).stop_token_ids == (3,)
    assert SamplingParams().stop == ()
