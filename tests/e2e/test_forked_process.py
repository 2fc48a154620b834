"""An engine in a fork of its process: what would run a step there is refused at once, and the parent's serves on."""

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from compiled_llm import AsyncCompiledEngine, CompiledEngine, SamplingParams
from tests.forked import in_fork

EAGER: dict[str, Any] = {"enforce_eager": True, "dtype": "float32", "bucket_sizes": (1, 4), "max_model_len": 256}
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
MESSAGES = [{"role": "user", "content": "def f"}]
CHOICE = SamplingParams(temperature=0, structured_outputs={"choice": ["x = 1", "y"]})
REFUSED = r"a fork of it, .*: start the process by multiprocessing.get_context\('spawn'\) and make the engine there"


@pytest.fixture(scope="module")
def engine() -> Iterator[CompiledEngine]:
    with CompiledEngine(**EAGER) as engine:
        engine.generate("import os", use_tqdm=False)
        yield engine


def refused(call: Callable[[], object]) -> Callable[[], None]:
    def work() -> None:
        signal.alarm(60)  # what hangs fails
        with pytest.raises(RuntimeError, match=REFUSED):
            call()

    return work


def test_each_method_that_runs_steps_is_refused(engine: CompiledEngine) -> None:
    stream = engine.stream("import os")
    next(stream)
    calls: list[Callable[[], object]] = [
        lambda: engine.generate("a"),
        lambda: engine.generate([]),
        lambda: engine.chat(MESSAGES, chat_template=TEMPLATE),
        lambda: engine.score("import os"),
        lambda: engine.encode_chat(MESSAGES, chat_template=TEMPLATE),
        lambda: engine.beam_search("a", 2),
        lambda: engine.check(),
        lambda: engine.prepare("a", CHOICE),
        lambda: engine.add_request("x", "a"),
        lambda: engine.step(),
        lambda: engine.stream("a"),
        lambda: next(stream),
        lambda: engine.report(),
    ]

    def all_of_them() -> None:
        for call in calls:
            refused(call)()
        stream.close()
        engine.stats()
        engine.report(measure_limits=False)

    assert in_fork(all_of_them) == 0
    list(stream)


def test_closing_there_ends_nothing_here(engine: CompiledEngine) -> None:
    def serve() -> list[Any]:
        outputs = engine.generate("v", CHOICE, use_tqdm=False)
        outputs += engine.chat(MESSAGES, SamplingParams(temperature=0), chat_template=TEMPLATE, use_tqdm=False)
        return [output.outputs[0].token_ids for output in outputs]

    def children() -> set[str]:
        return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())

    expected, before = serve(), children()

    def close() -> None:
        with engine:
            pass
        engine.close()
        with pytest.raises(RuntimeError, match=REFUSED):
            engine.generate("a", use_tqdm=False)

    assert in_fork(close) == 0
    assert (serve(), children()) == (expected, before)


def test_an_async_engine_is_refused_there_and_does_not_hang() -> None:
    async def outputs(engine: AsyncCompiledEngine, *args: Any) -> list[Any]:
        return [output.outputs[0].token_ids async for output in engine.generate(*args)]

    async def make() -> AsyncCompiledEngine:
        engine = AsyncCompiledEngine(**EAGER)
        await outputs(engine, "import os")
        return engine

    engine = asyncio.run(make())
    calls: list[Callable[[], Any]] = [
        lambda: engine.ready(),
        lambda: outputs(engine, "a"),
        lambda: engine.score("import os"),
        lambda: engine.stats(),
        lambda: engine.abort("x"),
        lambda: engine.get_tokenizer(),
    ]

    def all_of_them() -> None:
        for call in calls:
            refused(lambda call=call: asyncio.run(call()))()
        asyncio.run(engine.close())
        engine._thread._stop_at_exit()

    assert in_fork(all_of_them) == 0
    assert asyncio.run(outputs(engine, "a"))
    asyncio.run(engine.close())
