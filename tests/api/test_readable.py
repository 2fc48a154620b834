"""What error messages show of a value: all of a short one, and not much of a long one, in no time."""

import dataclasses
import time
from typing import Any

import pytest

from compiled_llm import CompletionOutput, EngineConfig, Logprob, RequestOutput, SamplingParams, ScoreOutput
from compiled_llm.api.outputs import EngineStats, RequestMetrics
from compiled_llm.api.readable import readable_repr, shown, table
from compiled_llm.api.structured_outputs import StructuredOutputsParams


@pytest.mark.parametrize(
    "value", ["x", "a\0b'", 5, -(2**63), 1.5, None, [5, "x"], {"a": (1, 2)}, b"ab", {3}, [], float("nan")]
)
def test_short_values_are_shown_whole(value: Any) -> None:
    assert shown(value) == repr(value)


LONG = {
    "str": "x" * 10**8,
    "bytes": b"x" * 10**8,
    "list": [5] * 10**7,
    "dict": dict.fromkeys(range(10**6)),
    "int": 1 << 10**7,
    "nested": [["x" * 10**7] * 100] * 100,
    "deep": {"a": {"b": {"c": ["y" * 10**6]}}},
}


@pytest.mark.parametrize("name", LONG)
def test_long_values_are_cut_and_cost_nothing(name: str) -> None:
    begun = time.perf_counter()
    text = shown(LONG[name])
    assert len(text) <= 210
    assert time.perf_counter() - begun < 0.5
    if name == "str":
        assert text.startswith("'xxx")
        assert text.endswith("...")


# -- repr


@dataclasses.dataclass
class Thing:
    value: Any
    size: int = 1
    names: tuple[str, ...] | None = None

    __repr__ = readable_repr


@pytest.mark.parametrize(
    ("thing", "text"),
    [
        (Thing(1), "Thing(value=1)"),
        (Thing(None, 2, ("a",)), "Thing(value=None, size=2, names=('a',))"),
        (Thing(1, 1, ()), "Thing(value=1)"),
        (Thing(1, True), "Thing(value=1, size=True)"),
        (Thing("x" * 200), f"Thing(value={'x' * 200!r})"),
        (Thing("x" * 12345), f"Thing(value={'x' * 200!r}... (12,345 characters))"),
        (Thing(b"x" * 300), f"Thing(value={b'x' * 200!r}... (300 bytes))"),
        (Thing(list(range(17))), f"Thing(value={list(range(17))})"),
        (Thing(list(range(4096))), f"Thing(value=[{', '.join(map(str, range(16)))}, ... 4,096 in all])"),
        (Thing([[1]] * 9), "Thing(value=[[1], [1], [1], [1], ... 9 in all])"),
        (Thing({n: {} for n in range(9)}), "Thing(value={0: {}, 1: {}, 2: {}, 3: {}, ... 9 in all})"),
        (Thing({"a": Thing("y")}), "Thing(value={'a': Thing(value='y')})"),
        (Thing([]), "Thing(value=[])"),
    ],
)
def test_defaults_are_left_out_and_long_values_cut(thing: Thing, text: str) -> None:
    assert repr(thing) == text


def test_a_request_of_ten_thousand_tokens_fits_a_screen() -> None:
    logprobs = [{n: Logprob(-0.5, 1, "a"), 1: Logprob(-0.25, 2, "b")} for n in range(5000)]
    completion = CompletionOutput(0, "word " * 5000, list(range(5000)), -3.5, logprobs, "stop")
    output = RequestOutput("me", "x" * 10**6, list(range(10_000)), [completion], True, RequestMetrics(1.5))
    scored = ScoreOutput("x" * 10**6, [1] * 10_000, 1, [-0.5] * 9999, [1] * 9999, RequestMetrics(1.5), logprobs)
    assert len(repr(output)) < 2000
    assert len(repr(scored)) < 2000
    for words in ("(1,000,000 characters)", "... 10,000 in all]", "... 5,000 in all]", "finish_reason='stop'"):
        assert words in repr(output)
    assert len(repr([output] * 8)) < 20_000


def test_a_short_output_is_shown_whole() -> None:
    completion = CompletionOutput(0, "b", [5], None, None, "length")
    output = RequestOutput("me", "a", [1, 2], [completion], True, RequestMetrics(1.5))
    assert repr(output) == (
        "RequestOutput(request_id='me', prompt='a', prompt_token_ids=[1, 2], outputs=[CompletionOutput(index=0, "
        "text='b', token_ids=[5], finish_reason='length')], finished=True, metrics=RequestMetrics(arrival_time=1.5))"
    )


def test_parameters_are_those_that_differ_and_make_the_same_again() -> None:
    params = SamplingParams(temperature=0.5, stop="a", seed=1, structured_outputs={"choice": ["a", "b"]})
    config = EngineConfig(bucket_sizes=[8, 1], enforce_eager=True)  # type: ignore[arg-type]
    names = {
        "SamplingParams": SamplingParams,
        "EngineConfig": EngineConfig,
        "StructuredOutputsParams": StructuredOutputsParams,
    }
    assert repr(SamplingParams()) == "SamplingParams()"
    assert repr(config) == "EngineConfig(bucket_sizes=(1, 8), enforce_eager=True)"
    for each in (params, config, SamplingParams(), EngineConfig()):
        assert eval(repr(each), names) == each


def test_a_table_has_its_texts_below_each_other() -> None:
    assert table("Of it", {"a": "1", "long": "2"}) == "Of it\n  a     1\n  long  2"
    assert table("Of it", {}) == "Of it"


def stats(**values: int) -> EngineStats:
    return EngineStats(**{field.name: values.get(field.name, 0) for field in dataclasses.fields(EngineStats)})


def test_statistics_are_a_table_of_what_is_worth_a_look() -> None:
    text = str(stats(num_requests=3, num_finished=2, num_running=1, num_steps=1200, num_kv_blocks=64))
    assert text == repr(stats(num_requests=3, num_finished=2, num_running=1, num_steps=1200, num_kv_blocks=64))
    assert "requests      3: 2 finished, 1 running, 0 waiting" in text
    assert "steps         1,200" in text
    assert len(text.splitlines()) == 7
    assert "preemptions" not in text
    fields = ("num_preemptions", "num_draft_tokens", "num_state_slots", "num_exception_failures")
    most = str(stats(**dict.fromkeys(fields, 5)))
    assert len(most.splitlines()) == 11
    for words in ("preemptions   5: ", "0 of 5 tokens accepted", "state slots", "failures      5 exception; 0 faults"):
        assert words in most
