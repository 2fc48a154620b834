"""A call that serves nothing says so: one warning at the caller's line, with the reason and what to do."""

import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from compiled_llm import CompiledEngine, RequestOutput, RequestsFailedWarning, SamplingParams

JSON = SamplingParams(structured_outputs={"json": {"type": "object"}})
CHAT: list[dict[str, Any]] = [{"role": "user", "content": "Hello"}]
Call = Callable[[CompiledEngine], list[RequestOutput]]


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
        (lambda engine: engine.chat(CHAT, use_tqdm=False, chat_template="{{"), "chat template"),
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
    with pytest.warns(RequestsFailedWarning, match=r"pip install 'compiled-llm\[structured\]'") as caught:
        (output,) = engine.generate("config = ", JSON, use_tqdm=False)
    assert len(caught) == 1
    assert (output.outputs[0].text, output.outputs[0].finish_reason) == ("", "error")


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
