"""``output_kind``: deltas, cumulative and final outputs of one request are three views of the same."""

import asyncio
import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest

from compiled_llm import AsyncCompiledEngine, CompiledEngine, CompletionOutput, RequestOutput, SamplingParams
from compiled_llm.text.output_text import OutputText

PROMPT = "def add(a, b):\n    return"
ENGINE: dict[str, Any] = {
    "enforce_eager": True, "dtype": "float32", "bucket_sizes": (1, 4), "token_bucket_sizes": (32,),
    "max_model_len": 256,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "several": {"n": 3, "temperature": 1.0, "seed": 3},
    "several that end apart": {"n": 3, "temperature": 1.5, "seed": 4, "stop": ["e", "\n"], "max_tokens": 40},
    "log-probabilities": {"logprobs": 2, "prompt_logprobs": 1},
    "a stop string": {"stop": "\n\n"},
    "a stop string in the text": {"stop": "\n", "include_stop_str_in_output": True, "min_tokens": 5},
    "text that is held back to the end": {
        "stop": ["\n" + "x" * 40, "    return a + b + c + d + e + f"],
        "max_tokens": 9,
    },
    "no text": {"detokenize": False},
    "one token": {"max_tokens": 1},
    "a grammar": {"structured_outputs": {"regex": "[ab]{6}"}},
}


def params_of(case: str, kind: str) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": 16, **CASES[case]}, output_kind=kind)  # type: ignore[arg-type]


def joined(parts: list[CompletionOutput]) -> CompletionOutput:
    """The whole, of all deltas of a completion."""
    logprobs = None if parts[0].logprobs is None else [item for part in parts for item in part.logprobs or []]
    return CompletionOutput(
        index=parts[0].index,
        text="".join(part.text for part in parts),
        token_ids=[token_id for part in parts for token_id in part.token_ids],
        cumulative_logprob=parts[-1].cumulative_logprob,
        logprobs=logprobs,
        finish_reason=parts[-1].finish_reason,
        stop_reason=parts[-1].stop_reason,
    )


def check(
    deltas: list[RequestOutput], cumulative: list[RequestOutput], final: list[RequestOutput], *, in_step: bool = True
) -> None:
    """``in_step``: each request ran by itself, so that their steps are the same."""
    (whole,) = final
    assert cumulative[-1].outputs == whole.outputs
    assert len(deltas) == len(cumulative) or not in_step
    for count in range(1, len(deltas) + 1) if in_step else [len(deltas)]:
        for index, completion in enumerate(cumulative[count - 1 if in_step else -1].outputs):
            assert joined([delta.outputs[index] for delta in deltas[:count]]) == completion
    for outputs in (deltas, cumulative, final):
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
        assert all(output.prompt_token_ids == whole.prompt_token_ids for output in outputs)
    assert [delta.prompt_logprobs for delta in deltas] == [whole.prompt_logprobs] + [None] * (len(deltas) - 1)


@pytest.fixture(scope="module")
def engine() -> Iterator[CompiledEngine]:
    with CompiledEngine(**ENGINE, check_invariants=True) as engine:
        yield engine


@pytest.mark.parametrize("case", CASES)
def test_streams(engine: CompiledEngine, case: str) -> None:
    (whole,) = engine.generate(PROMPT, params_of(case, "delta"), use_tqdm=False)
    found = {kind: list(engine.stream(PROMPT, params_of(case, kind))) for kind in ("delta", "cumulative", "final")}
    check(found["delta"], found["cumulative"], found["final"])
    assert found["final"][0].outputs == whole.outputs, "generate gives the whole, whatever the parameters ask"
    assert found["final"][0].prompt_logprobs == whole.prompt_logprobs


@pytest.mark.parametrize("case", CASES)
def test_joined_deltas(engine: CompiledEngine, case: str) -> None:
    """Of several steps. The first and the last do not wait, nor do those that may be the last."""
    (whole,) = engine.generate(PROMPT, params_of(case, "delta"), use_tqdm=False)
    engine.join_deltas(1000, 0, 1000)
    try:
        deltas = list(engine.stream(PROMPT, params_of(case, "delta")))
    finally:
        engine.join_deltas(0, 0, 0)
    for completion in whole.outputs:
        assert joined([delta.outputs[completion.index] for delta in deltas]) == completion
    assert [delta.prompt_logprobs for delta in deltas] == [whole.prompt_logprobs] + [None] * (len(deltas) - 1)
    if case in ("plain", "log-probabilities", "no text"):
        assert [len(delta.outputs[0].token_ids) for delta in deltas] == [1, 15]


def test_a_loop_of_ones_own(engine: CompiledEngine) -> None:
    found: dict[str, list[RequestOutput]] = {"delta": [], "cumulative": [], "final": []}
    for kind in found:
        engine.add_request(kind, PROMPT, params_of("several", kind))
    while engine.has_unfinished_requests():
        for output in engine.step():
            found[output.request_id].append(output)
    check(found["delta"], found["cumulative"], found["final"], in_step=False)


def test_text_that_nobody_sees_before_the_end_is_decoded_at_once(
    engine: CompiledEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Token by token it is for whoever sees it, and where a stop string may end it."""
    pieces: list[int] = []
    append, extend = OutputText.append, OutputText.extend

    def counted_append(text: OutputText, token_id: int, may_stop: bool = True) -> str | None:
        pieces.append(1)
        return append(text, token_id, may_stop)

    def counted_extend(text: OutputText, token_ids: list[int]) -> None:
        pieces.append(len(token_ids))
        extend(text, token_ids)

    monkeypatch.setattr(OutputText, "append", counted_append)
    monkeypatch.setattr(OutputText, "extend", counted_extend)
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    (output,) = engine.generate(PROMPT, params, use_tqdm=False)
    assert pieces == [1, 64, 35]  # with the first one, other continuations start
    pieces.clear()
    *_, last = engine.stream(PROMPT, params)
    assert pieces == [1] * 100
    assert last.outputs[0].text == output.outputs[0].text
    pieces.clear()
    engine.generate(PROMPT, dataclasses.replace(params, stop="\ufdd0"), use_tqdm=False)
    assert pieces == [1] * 100


def test_an_abort_gives_the_rest(engine: CompiledEngine) -> None:
    """What was held back for a stop string is text when nothing follows."""
    (free,) = engine.generate(PROMPT, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True), use_tqdm=False)
    stop = free.outputs[0].text[:8] + "never"
    found: dict[str, list[RequestOutput]] = {}
    for kind in ("delta", "cumulative", "final"):
        params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True, stop=stop, output_kind=kind)  # type: ignore[arg-type]
        stream = engine.stream(PROMPT, params)
        beside = engine.stream(PROMPT, SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
        found[kind] = [next(stream) for _ in range(3 * (kind != "final"))]
        for _ in beside:
            pass
        engine.abort(list(engine._streams))
        found[kind] += list(stream)
    check(found["delta"], found["cumulative"], found["final"])
    last = found["final"][0].outputs[0]
    assert last.finish_reason == "abort"
    assert last.text == free.outputs[0].text[: len(last.text)] != ""
    assert [delta.outputs[0].text for delta in found["delta"]] == [""] * (len(found["delta"]) - 1) + [last.text]


@pytest.mark.parametrize("case", ["several", "log-probabilities"])
def test_the_async_engine(case: str) -> None:
    async def main() -> None:
        async with AsyncCompiledEngine(**ENGINE) as engine:

            async def collect(kind: str) -> list[RequestOutput]:
                return [output async for output in engine.generate(PROMPT, params_of(case, kind))]

            check(await collect("delta"), await collect("cumulative"), await collect("final"), in_step=False)

    asyncio.run(asyncio.wait_for(main(), 120))


def test_a_slow_reader_of_deltas_misses_nothing_and_what_waits_is_bounded() -> None:
    params = {"n": 2, "temperature": 1.0, "seed": 1, "max_tokens": 100, "ignore_eos": True, "logprobs": 1}

    async def main() -> None:
        async with AsyncCompiledEngine(**ENGINE) as engine:
            stream = engine.generate(PROMPT, SamplingParams(**params, output_kind="delta"))
            seen = [await anext(stream)]
            while (await engine.stats()).num_finished < 1:
                await asyncio.sleep(0.001)
            (whole,) = [out async for out in engine.generate(PROMPT, SamplingParams(**params, output_kind="final"))]
            seen += [output async for output in stream]
            assert len(seen) <= 1 + 16
            assert [joined([output.outputs[index] for output in seen]) for index in range(2)] == whole.outputs

    asyncio.run(asyncio.wait_for(main(), 120))
