"""What a user prints of an engine: engines are one line, reports some lines, and nothing is a wall."""

import asyncio
import copy
from collections.abc import Iterator

import pytest

from compiled_llm import AsyncCompiledEngine, CompiledEngine, SamplingParams
from tests.families import checkpoint

SIZES = {"enforce_eager": True, "bucket_sizes": (1, 4), "num_kv_blocks": 1200, "progress": "off", "device": "cpu"}


@pytest.fixture(scope="module")
def engine() -> Iterator[CompiledEngine]:
    with CompiledEngine(dtype="float32", **SIZES) as engine:
        engine.generate(["import os", "def f"], SamplingParams(max_tokens=4, logprobs=1), use_tqdm=False)
        yield engine


def test_an_engine_is_one_line(engine: CompiledEngine) -> None:
    line = "<CompiledEngine the bundled model: float32 on cpu, buckets 1, 4, 1,200 KV blocks of 16 tokens, open>"
    assert str(engine) == repr(engine) == line
    unstarted = CompiledEngine.__new__(CompiledEngine)
    assert repr(unstarted) == "<CompiledEngine without a model: not started>"
    closed = copy.copy(engine)
    closed._closed = True
    assert repr(closed) == line.replace("open", "closed")


def test_one_of_a_directory_names_it_and_is_closed_in_the_end() -> None:
    model = str(checkpoint("llama"))
    with CompiledEngine(model, **{**SIZES, "num_kv_blocks": 40}) as engine:
        assert f"<CompiledEngine {model}: float32 on cpu" in repr(engine)
    assert repr(engine).endswith("40 KV blocks of 16 tokens, closed>")


def test_an_async_engine_is_one_line_at_any_time() -> None:
    async def shown() -> list[str]:
        engine = AsyncCompiledEngine(str(checkpoint("llama")), **{**SIZES, "num_kv_blocks": 40})
        texts = [repr(engine)]
        await engine.ready()
        texts.append(repr(engine))
        await engine.close()
        failing = AsyncCompiledEngine("/no/such/model", progress="off")
        with pytest.raises(ValueError, match="neither a directory"):
            await failing.ready()
        return [*texts, repr(engine), repr(failing)]

    starting, ready, closed, failed = asyncio.run(shown())
    assert starting == "<AsyncCompiledEngine: starting>"
    assert ready.startswith("<AsyncCompiledEngine: <CompiledEngine /")
    assert ready.endswith(", open>>")
    assert closed == ready.replace("open", "closed")
    assert failed.startswith("<AsyncCompiledEngine: not started, ValueError: model='/no/such/model' is neither")


def test_a_report_is_a_dozen_lines_that_say_where_the_rest_is(engine: CompiledEngine) -> None:
    report = engine.report(measure_limits=False)
    lines = str(report).splitlines()
    assert str(report) == repr(report)
    assert 8 <= len(lines) <= 15
    assert max(map(len, lines)) <= 120
    assert lines[0] == "RunReport of the bundled model"
    assert lines[-1] == '  write("DIR") writes all of it: HTML, JSON, a trace'
    for words in (
        "requests      2 ended in ",
        "tokens        4 of prompts, 8 generated",
        "decode        3 steps, 6 tokens",
    ):
        assert words in str(report)
    assert repr(report.phases[0]).startswith("StepsReport of decode: 3 steps, 6 tokens in ")


def test_a_report_before_anything_was_served(engine: CompiledEngine) -> None:
    with CompiledEngine(str(checkpoint("llama")), **{**SIZES, "num_kv_blocks": 40}) as idle:
        text = str(idle.report(measure_limits=False))
    assert "0 ended in 0.00 s" in text
    assert "first token   none" in text


def test_tables_are_tables_however_they_are_printed(engine: CompiledEngine) -> None:
    for table in (engine.compile_report(), engine.memory_report(), engine.stats()):
        assert repr(table) == str(table)
        assert len(str(table).splitlines()) <= 15


def test_what_the_smaller_doors_return_is_no_address_and_no_wall(engine: CompiledEngine) -> None:
    stream = engine.stream("import", SamplingParams(max_tokens=2))
    assert repr(stream) == "<RequestStream: running, 0 outputs not read>"
    list(stream)
    assert repr(stream) == "<RequestStream: ended, 0 outputs not read>"
    prepared = engine.prepare("import os\n" * 300, SamplingParams(max_tokens=2))
    assert repr(prepared) == "<PreparedRequest: 900 prompt tokens, SamplingParams(max_tokens=2)>"
