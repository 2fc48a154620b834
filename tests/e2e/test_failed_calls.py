"""A call that serves nothing says so: one warning at the caller's line, with the reason and what to do."""

import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from compiled_llm import CompiledEngine, RequestsFailedWarning, SamplingParams

JSON = SamplingParams(structured_outputs={"json": {"type": "object"}})
CHAT: list[dict[str, Any]] = [{"role": "user", "content": "Hello"}]
Call = Callable[[Any], Any]


@pytest.fixture(scope="module")
def engine() -> Iterator[CompiledEngine]:
    with CompiledEngine(enforce_eager=True, dtype="float32", bucket_sizes=(4,), num_kv_blocks=32) as engine:
        yield engine


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda engine: engine.generate(["", ""], use_tqdm=False), "all 2 requests .* prompt must not be empty"),
        (lambda engine: engine.generate([5] * 2000, use_tqdm=False), "the request .* prompt must be shorter than"),
        (lambda engine: engine.chat([], use_tqdm=False), "messages must be a list of one or more"),
        (
            lambda engine: engine.chat(CHAT, use_tqdm=False, chat_template="{{ raise_exception('no') }}"),
            "refuses .*: no",
        ),
        (lambda engine: engine.beam_search(["", [10**9]], 2), "prompt must not be empty, given ''; prompt_token_ids"),
    ],
)
def test_one_warning_at_the_callers_line(engine: CompiledEngine, call: Call, words: str) -> None:
    with pytest.warns(RequestsFailedWarning, match=words) as caught:
        outputs = call(engine)
    assert [warning.filename for warning in caught] == [__file__]
    assert all(output.outputs[0].finish_reason == "error" for output in outputs)


def test_structured_outputs_without_their_extra_name_it(
    engine: CompiledEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)  # what an import of it then finds
    for call in (
        lambda: engine.generate(["a", "config = "], [SamplingParams(), JSON], use_tqdm=False),
        lambda: engine.chat(CHAT, JSON, use_tqdm=False, chat_template="x"),
        lambda: engine.stream("config = ", JSON),
        lambda: engine.add_request("named", "config = ", JSON),
    ):
        with pytest.raises(ImportError, match=r"llguidance: pip install 'compiled-llm\[structured\]'"):
            call()
    assert not engine.has_unfinished_requests()


TEXT_AMONG = [[5], "text", [6]]
WRONG: dict[str, tuple[Call, str]] = {
    "no prompt": (lambda e: e.generate(None), "prompts must be a prompt .* or a list of these, given NoneType"),
    "a number": (lambda e: e.generate(5), "prompts must be a prompt .* given int"),
    "bytes": (lambda e: e.generate(b"x"), "prompts must be a prompt .* given bytes"),
    "a generator": (lambda e: e.generate(x for x in "ab"), "prompts must be a prompt .* given generator"),
    "beams": (lambda e: e.beam_search(None, 2), "prompts must be a prompt .* given NoneType"),
    "scores": (lambda e: e.score(None), "prompts must be a prompt .* given NoneType"),
    "continuations": (lambda e: e.score("a", 5), "continuations must be a continuation .* given int"),
    "no messages": (lambda e: e.chat(None), "messages must be a list of dicts .* given NoneType"),
    "a text for messages": (lambda e: e.chat("Hello"), "messages must be a list of dicts .* given str"),
    "a broken chat template": (lambda e: e.chat(CHAT, chat_template="{{"), "chat template cannot be compiled"),
    "a chat template that is none": (lambda e: e.chat(CHAT, chat_template=5), "chat_template must be a str, given int"),
    "a flag that is none": (
        lambda e: e.chat(CHAT, chat_template="x", add_generation_prompt=1), "add_generation_prompt must be True or"),
    "tools for nothing": (lambda e: e.chat(CHAT, chat_template="x", tools=[{}]), "no use for 'tools'"),
    "parameters": (lambda e: e.generate("a", 5), "sampling_params must be a SamplingParams or a list, given int"),
    "a dict among them": (lambda e: e.generate(["a"], [{}]), "sampling_params must be a SamplingParams, given dict"),
    "too few": (lambda e: e.generate(["a", "b"], [SamplingParams()]), "sampling_params must be one or as many"),
    "a priority": (lambda e: e.generate(["a"], priority=["x"]), "priority must be an integer"),
    "a useless priority": (lambda e: e.generate(["a"], priority=[3]), "priority must be 0 unless"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_no_other_prompt_would_mend_is_raised(engine: CompiledEngine, name: str) -> None:
    call, words = WRONG[name]
    with pytest.raises(ValueError, match=words):
        call(engine)
    assert not engine.has_unfinished_requests()


def test_a_chat_without_a_template_is_raised(engine: CompiledEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    assert engine.tokenizer is not None
    monkeypatch.setattr(engine.tokenizer, "chat_templates", {})
    with pytest.raises(ValueError, match="the model has no chat template: give one"):
        engine.chat([CHAT, CHAT], use_tqdm=False)


def test_text_without_a_tokenizer_is_raised(engine: CompiledEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine._admission, "_tokenizer", None)
    calls: list[Call] = [
        lambda engine: engine.generate("text", use_tqdm=False),
        lambda engine: engine.generate(TEXT_AMONG, use_tqdm=False),
        lambda engine: engine.beam_search(TEXT_AMONG, 2),
        lambda engine: engine.score(TEXT_AMONG, use_tqdm=False),
        lambda engine: engine.stream("text"),
        lambda engine: engine.generate([[5]], SamplingParams(stop=["x"]), use_tqdm=False),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=r"has no tokenizer|the model has none"):
            call(engine)
    assert not engine.has_unfinished_requests()
    assert engine.generate([[5]], use_tqdm=False)[0].outputs[0].finish_reason == "length"


def test_steps_that_break_are_said_too(engine: CompiledEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(scheduled: object) -> None:
        raise RuntimeError("the device is on fire")

    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "launch", broken)
        with pytest.warns(RequestsFailedWarning, match="the device is on fire"):
            engine.generate(["a", "b"], use_tqdm=False)
    assert engine.generate("a", use_tqdm=False)[0].outputs[0].finish_reason == "length"


def test_one_that_is_served_keeps_it_quiet(engine: CompiledEngine) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(engine.generate(["", "a"], use_tqdm=False)) == 2
        assert engine.generate([], use_tqdm=False) == []
    with pytest.raises(ValueError, match="empty"):
        engine.generate("", use_tqdm=False, raise_on_error=True)
