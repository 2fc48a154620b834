"""AsyncCompiledEngine: concurrent consumers, those who go away or lag, and every way for the thread to end."""

import asyncio
import gc
import itertools
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from compiled_llm import AsyncCompiledEngine, CompiledEngine, EngineConfig, RequestOutput, SamplingParams
from compiled_llm.constraints.grammar_processes import GrammarProcesses
from tests.drawn import marked
from tests.e2e.test_failures import break_once

EAGER: dict[str, Any] = {
    "enforce_eager": True, "dtype": "float32", "bucket_sizes": (1, 4), "token_bucket_sizes": (32,),
    "max_model_len": 128, "check_invariants": True,
}  # fmt: skip
PROMPT = "def add(a, b):\n    return"
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)  # some 120 steps: longer than what a test does
FAULT = RuntimeError("the device is on fire")


def run(main: Coroutine[Any, Any, Any]) -> Any:
    """A hang is a failure."""
    return asyncio.run(asyncio.wait_for(main, 120))


async def collect(outputs: AsyncIterator[RequestOutput]) -> list[RequestOutput]:
    return [output async for output in outputs]


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    while not await condition():
        await asyncio.sleep(0.001)


async def nothing_is_left(engine: AsyncCompiledEngine) -> None:
    """All requests end, by the consumers that went away, and leave no block behind. Then the engine serves on."""

    async def is_idle() -> bool:
        stats = await engine.stats()
        return stats.num_finished == stats.num_requests and stats.used_blocks == 0

    await until(is_idle)
    assert (await collect(engine.generate(PROMPT, GREEDY)))[-1].outputs[0].finish_reason == "length"


def reason(output: RequestOutput) -> str | None:
    assert output.finished
    return output.outputs[0].finish_reason


@pytest.fixture
def sync_engine() -> CompiledEngine:
    """For ``from_engine``, which then closes it."""
    return CompiledEngine(**EAGER)


# -- Serving


def test_a_conversation_is_served_as_chat_serves_it(sync_engine: CompiledEngine) -> None:
    template = "{% for m in messages %}# {{ m.role }}: {{ m.content }}\n{% endfor %}"
    messages = [{"role": "user", "content": PROMPT}]
    (expected,) = sync_engine.chat(messages, GREEDY, use_tqdm=False, chat_template=template)

    async def main() -> None:
        async with AsyncCompiledEngine.from_engine(sync_engine) as engine:
            outputs = await collect(engine.chat(messages, GREEDY, chat_template=template))
            assert outputs[-1].outputs[0].token_ids == expected.outputs[0].token_ids
            assert outputs[-1].prompt == expected.prompt == f"# user: {PROMPT}\n"
            with pytest.raises(ValueError, match="chat_template must be a str, given int"):
                await collect(engine.chat(messages, GREEDY, chat_template=5))
            async with aclosing(engine.chat(messages, LONG, chat_template=template)) as stream:
                async for _ in stream:
                    break
            await nothing_is_left(engine)

    run(main())


def test_twenty_at_once_are_served_as_generate_serves_them(sync_engine: CompiledEngine) -> None:
    prompts = [f"def function_{n}(a, b):\n    return" * (1 + n % 3) for n in range(20)]
    settings: list[dict[str, Any]] = [{"temperature": n % 2, "seed": n, "max_tokens": 4 + n} for n in range(20)]
    params = [SamplingParams(**setting, n=1 + (n % 4 == 1), stop="\n\n") for n, setting in enumerate(settings)]
    expected = sync_engine.generate(prompts, params, use_tqdm=False)

    async def main() -> None:
        async with AsyncCompiledEngine.from_engine(sync_engine) as engine:
            streams = [engine.generate(prompt, param) for prompt, param in zip(prompts, params, strict=True)]
            for outputs, whole in zip(await asyncio.gather(*map(collect, streams)), expected, strict=True):
                assert outputs[-1].outputs == whole.outputs
                assert (outputs[-1].prompt, outputs[-1].prompt_token_ids) == (whole.prompt, whole.prompt_token_ids)
                assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
                assert len({output.request_id for output in outputs}) == 1
                for index, completion in enumerate(whole.outputs):
                    texts = ["", *(output.outputs[index].text for output in outputs)]
                    deltas = [later.removeprefix(earlier) for earlier, later in itertools.pairwise(texts)]
                    assert "".join(deltas) == completion.text
            await nothing_is_left(engine)

    run(main())


def test_the_engines_arguments_make_it_in_its_own_thread() -> None:
    async def main(engine: AsyncCompiledEngine) -> list[int]:
        async with engine:
            outputs = await collect(engine.generate(PROMPT, GREEDY))
            assert {graph.cache for graph in (await engine.compile_report()).reports} == {"eager"}
            return outputs[-1].outputs[0].token_ids

    with CompiledEngine(**EAGER) as plain:
        (expected,) = plain.generate(PROMPT, GREEDY, use_tqdm=False)
    assert run(main(AsyncCompiledEngine(**EAGER))) == expected.outputs[0].token_ids
    assert run(main(AsyncCompiledEngine.from_config(EngineConfig(**EAGER)))) == expected.outputs[0].token_ids


def test_event_loops_in_several_threads_share_an_engine() -> None:
    engine = AsyncCompiledEngine(**EAGER)
    tokens: list[list[int]] = []

    async def main() -> None:
        streams = [engine.generate(PROMPT, GREEDY) for _ in range(4)]
        tokens.extend(outputs[-1].outputs[0].token_ids for outputs in await asyncio.gather(*map(collect, streams)))

    threads = [threading.Thread(target=run, args=(main(),)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(tokens) == 12
    assert len(set(map(tuple, tokens))) == 1
    run(engine.close())


def test_priorities_are_those_of_the_engine() -> None:
    async def main() -> None:
        arguments = EAGER | {"bucket_sizes": (1,), "scheduling_policy": "priority"}
        async with AsyncCompiledEngine(**arguments) as engine:
            streams = [engine.generate(PROMPT, GREEDY, priority=priority) for priority in (3, 1, 2, 0)]
            outputs = await asyncio.gather(*map(collect, streams))
            finished = [output[-1].metrics.finished_time for output in outputs]
            assert sorted(range(4), key=lambda n: finished[n] or 0.0) == [3, 1, 2, 0]

    run(main())


def test_an_idle_thread_sleeps(sync_engine: CompiledEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    turns = itertools.count()
    has_unfinished_requests = sync_engine.has_unfinished_requests
    monkeypatch.setattr(sync_engine, "has_unfinished_requests", lambda: next(turns) < 0 or has_unfinished_requests())

    async def main() -> None:
        async with AsyncCompiledEngine.from_engine(sync_engine) as engine:
            await collect(engine.generate(PROMPT, GREEDY))

            async def has_slept() -> bool:
                before = next(turns)
                await asyncio.sleep(0.02)
                return next(turns) == before + 1

            await until(has_slept)

    run(main())


def test_an_idle_thread_asks_for_memory_and_no_request_waits_for_it(
    sync_engine: CompiledEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While there is ever more to ask for, and not while a request is unfinished."""
    pages, asked = sync_engine.own_runner.pool_pages, asyncio.Event()
    assert pages is not None
    unfinished: list[bool] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()

        def ask(used: int) -> bool:
            unfinished.append(sync_engine.has_unfinished_requests())
            loop.call_soon_threadsafe(asked.set)
            return True

        monkeypatch.setattr(pages, "ask", ask)
        async with AsyncCompiledEngine.from_engine(sync_engine) as engine:
            await asked.wait()
            outputs = await collect(engine.generate(PROMPT, GREEDY))
            assert outputs[-1].outputs[0].finish_reason == "length"
            asked.clear()
            await asked.wait()

    run(main())
    assert not any(unfinished)


# -- Consumers that lag or go away


def test_a_slow_consumer_holds_nobody_up_and_misses_no_text() -> None:
    params = SamplingParams(temperature=0, max_tokens=80, ignore_eos=True)

    async def main() -> None:
        async with AsyncCompiledEngine(**EAGER) as engine:
            slow = engine.generate(PROMPT, params)
            seen = [await anext(slow)]
            prompt_one = (await collect(engine.generate(PROMPT, params)))[-1]

            async def is_done() -> bool:
                return (await engine.stats()).num_finished == 2

            await until(is_done)  # while nobody reads the slow one's outputs
            seen += await collect(slow)
            assert len(seen) <= 1 + 16, "what waits is bounded"
            counts = [len(output.outputs[0].token_ids) for output in seen]
            assert counts == sorted(set(counts)), "in order, none twice"
            assert counts[:16] == list(range(1, 17)), "none is missing while it does not lag"
            texts = [output.outputs[0].text for output in seen]
            assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))
            assert seen[-1].outputs == prompt_one.outputs

    run(main())


@pytest.mark.parametrize(
    ("leaves_by", "overlaps"), [("cancel", False), ("break", True), ("aclose", False), ("timeout", True)]
)
def test_who_goes_away_aborts_its_request_and_no_other(leaves_by: str, overlaps: bool) -> None:
    async def main() -> None:
        async with AsyncCompiledEngine(**EAGER, async_scheduling=overlaps) as engine:
            others = [asyncio.create_task(collect(engine.generate(PROMPT, GREEDY))) for _ in range(5)]
            has_begun = asyncio.Event()

            async def leave() -> None:
                async for _ in engine.generate(PROMPT, LONG):
                    has_begun.set()
                    if leaves_by == "break":
                        break

            if leaves_by == "aclose":
                async with aclosing(engine.generate(PROMPT, LONG)) as stream:
                    await anext(stream)
            elif leaves_by == "timeout":
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(leave(), 0.02)
            else:
                task = asyncio.create_task(leave())
                await has_begun.wait()
                if leaves_by == "cancel":
                    task.cancel()
                    with pytest.raises(asyncio.CancelledError):
                        await task
                else:
                    await task
            ends = [(await other)[-1] for other in others]
            assert [reason(output) for output in ends] == ["length"] * 5
            assert len({tuple(output.outputs[0].token_ids) for output in ends}) == 1
            before = await engine.stats()
            await nothing_is_left(engine)
            # 12 steps at most serve the one of the line above: the long one was not finished, it was aborted.
            assert (await engine.stats()).num_output_tokens - before.num_output_tokens < 60

    run(main())


def test_who_is_cancelled_before_the_engine_took_the_request_leaves_nothing() -> None:
    async def main() -> None:
        async with AsyncCompiledEngine(**EAGER) as engine:
            for pauses in range(4):
                tasks = [asyncio.create_task(collect(engine.generate(PROMPT, LONG))) for _ in range(8)]
                for _ in range(pauses):
                    await asyncio.sleep(0)
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
            stream = engine.generate(PROMPT, LONG)  # never iterated: never begun
            await nothing_is_left(engine)
            await stream.aclose()

    run(main())


def test_a_loop_that_was_closed_over_its_consumer_aborts_the_request() -> None:
    engine = AsyncCompiledEngine(**EAGER)
    loop = asyncio.new_event_loop()
    stream = engine.generate(PROMPT, LONG)
    loop.run_until_complete(anext(stream))
    loop.close()
    run(nothing_is_left(engine))
    run(engine.close())


def test_abort_by_id_tells_the_consumer() -> None:
    async def main() -> None:
        async with AsyncCompiledEngine(**EAGER) as engine:
            stream = engine.generate(PROMPT, LONG, request_id="mine")
            first = await anext(stream)
            assert first.request_id == "mine"
            await engine.abort(["mine", "unknown"])
            assert (await engine.stats()).num_running == 0
            *_, last = await collect(stream)
            assert reason(last) == "abort"
            assert last.outputs[0].text.startswith(first.outputs[0].text)
            assert last.metrics.finished_time is not None
            await engine.abort("mine")
            assert (await collect(engine.generate(PROMPT, GREEDY, request_id="mine")))[-1].request_id == "mine"
            await nothing_is_left(engine)

    run(main())


# -- Faults


def test_a_bad_request_is_refused_and_the_others_go_on() -> None:
    async def main() -> None:
        async with AsyncCompiledEngine(**EAGER) as engine:
            mine = engine.generate(PROMPT, LONG, request_id="mine")
            await anext(mine)
            for arguments, words in (
                ({"prompt": ""}, "empty"),
                ({"prompt": [10**6]}, "prompt_token_ids"),
                ({"prompt": PROMPT, "sampling_params": {"n": 1}}, "sampling_params"),
                ({"prompt": PROMPT, "priority": 1}, "priority"),
                ({"prompt": PROMPT, "request_id": "mine"}, "request_id"),
                ({"prompt": PROMPT, "request_id": 5}, "request_id"),
            ):
                stream = engine.generate(**arguments)
                with pytest.raises(ValueError, match=words):
                    await anext(stream)
            assert reason((await collect(mine))[-1]) == "length", "the one whose id was taken goes on, too"
            await nothing_is_left(engine)

    run(main())


@pytest.mark.parametrize(("where", "num_failed"), [("launch", 0), ("schedule", 6)])
def test_a_step_that_breaks_once_and_the_engine_serves_on(
    sync_engine: CompiledEngine, monkeypatch: pytest.MonkeyPatch, where: str, num_failed: int
) -> None:
    """Four run at once. A device that breaks once costs none of these; a scheduler that breaks costs all."""
    owner = sync_engine.runner if where == "launch" else sync_engine.scheduler

    async def main() -> None:
        async with AsyncCompiledEngine.from_engine(sync_engine) as engine:
            streams = [engine.generate(PROMPT, LONG) for _ in range(6)]
            for stream in streams[:4]:
                await anext(stream)
            tasks = [asyncio.create_task(collect(stream)) for stream in streams]

            async def all_are_there() -> bool:
                stats = await engine.stats()
                return (stats.num_running, stats.num_waiting) == (4, 2)

            await until(all_are_there)
            break_once(monkeypatch, owner, where, 0, FAULT)
            ends = [(await task)[-1] for task in tasks]
            failed = [output for output in ends if reason(output) == "error"]
            assert [output.outputs[0].stop_reason for output in failed] == [f"RuntimeError: {FAULT}"] * num_failed
            assert [reason(output) for output in ends].count("length") == 6 - num_failed
            await nothing_is_left(engine)

    run(main())


def break_always(monkeypatch: pytest.MonkeyPatch, engine: CompiledEngine, fault: str) -> None:
    if fault == "lost":
        monkeypatch.setattr(engine, "has_unfinished_requests", lambda: False)
        return

    def step() -> list[RequestOutput]:
        raise SystemExit("enough") if fault == "exit" else FAULT

    monkeypatch.setattr(engine, "step", step)


@pytest.mark.parametrize(
    ("fault", "words"), [("error", "on fire"), ("exit", "SystemExit: enough"), ("lost", "lost .*async-0")]
)
def test_when_the_thread_dies_everyone_hears_why(
    sync_engine: CompiledEngine, monkeypatch: pytest.MonkeyPatch, fault: str, words: str
) -> None:
    async def main() -> None:
        engine = AsyncCompiledEngine.from_engine(sync_engine)
        streams = [engine.generate(PROMPT, LONG) for _ in range(6)]
        await anext(streams[0])
        tasks = [asyncio.create_task(collect(stream)) for stream in streams]
        break_always(monkeypatch, sync_engine, fault)
        for task in tasks:
            with pytest.raises(RuntimeError, match=f"the engine's thread has ended: .*{words}"):
                await task
        for call in (engine.stats, engine.compile_report, lambda: collect(engine.generate(PROMPT))):
            with pytest.raises(RuntimeError, match=words):
                await call()
        await engine.close()

    run(main())
    with pytest.raises(RuntimeError, match="closed"):
        sync_engine.generate(PROMPT)


# -- Start and end


def test_close_ends_what_runs_and_what_waits() -> None:
    prompt_ids = [5, 6, 7]

    async def main() -> None:
        async with AsyncCompiledEngine(**EAGER | {"bucket_sizes": (1,)}) as engine:
            running = engine.generate(PROMPT, LONG)
            first = await anext(running)
            waiting = [asyncio.create_task(collect(engine.generate(prompt, LONG))) for prompt in (PROMPT, prompt_ids)]

            async def all_wait() -> bool:
                return (await engine.stats()).num_waiting == 2

            await until(all_wait)
            await asyncio.gather(engine.close(), engine.close())
            *_, last = await collect(running)
            assert reason(last) == "abort"
            assert last.outputs[0].text.startswith(first.outputs[0].text)
            (text_end,), (ids_end,) = [await task for task in waiting]
            assert [reason(text_end), reason(ids_end)] == ["abort", "abort"]
            assert (text_end.prompt, text_end.prompt_token_ids) == (PROMPT, first.prompt_token_ids)
            assert (ids_end.prompt, ids_end.prompt_token_ids) == (None, prompt_ids)
            assert (ids_end.outputs[0].text, ids_end.outputs[0].token_ids) == ("", [])
            for call in (engine.stats, lambda: engine.abort("x"), lambda: collect(engine.generate(PROMPT))):
                with pytest.raises(RuntimeError, match="the engine is closed"):
                    await call()

    run(main())


def test_a_start_that_fails_is_raised_and_nobody_waits_for_it(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="bucket_size"):
        AsyncCompiledEngine(bucket_size=(1,))

    async def main() -> None:
        engine = AsyncCompiledEngine(str(tmp_path))
        with pytest.raises(RuntimeError, match=r"could not be started: ValueError: .*config\.json"):
            await anext(engine.generate(PROMPT))
        with pytest.raises(ValueError, match=r"config\.json"):
            async with engine:
                pass
        await engine.close()

    run(main())


def test_the_event_loop_runs_while_the_engine_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    may_go_on, made = threading.Event(), []
    from_config = CompiledEngine.from_config

    def slow(config: EngineConfig, **options: Any) -> CompiledEngine:
        assert may_go_on.wait(60)
        made.append(from_config(config, **options))
        return made[-1]

    monkeypatch.setattr(CompiledEngine, "from_config", slow)

    async def main() -> None:
        async def enter() -> None:
            async with engine:
                raise AssertionError("not reached")

        engine = AsyncCompiledEngine(**EAGER)
        entering = asyncio.create_task(enter())
        early = asyncio.create_task(collect(engine.generate(PROMPT, GREEDY)))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not entering.done()
        entering.cancel()
        with pytest.raises(asyncio.CancelledError):
            await entering
        may_go_on.set()
        assert reason((await early)[-1]) == "abort", "who gives up entering stops the engine"
        await engine.close()

    run(main())
    with pytest.raises(RuntimeError, match="closed"):
        made[0].generate(PROMPT)


def test_only_an_engine_with_nothing_to_do_is_taken_over(sync_engine: CompiledEngine) -> None:
    sync_engine.add_request("mine", PROMPT, GREEDY)
    with pytest.raises(ValueError, match="unfinished requests: finish or abort them first"):
        AsyncCompiledEngine.from_engine(sync_engine)
    sync_engine.close()


def test_an_engine_that_nobody_holds_ends(sync_engine: CompiledEngine) -> None:
    engine = AsyncCompiledEngine.from_engine(sync_engine)
    run(collect(engine.generate(PROMPT, GREEDY)))
    thread = engine._thread._thread
    assert thread.is_alive()
    del engine
    gc.collect()
    thread.join(60)
    assert not thread.is_alive()
    with pytest.raises(RuntimeError, match="closed"):
        sync_engine.generate(PROMPT)


def test_the_interpreter_ends_without_close() -> None:
    """In the middle of a request."""
    code = """
import asyncio
from compiled_llm import AsyncCompiledEngine, SamplingParams
engine = AsyncCompiledEngine(enforce_eager=True, dtype="float32", bucket_sizes=(1,), progress="off")
stream = engine.generate("def", SamplingParams(max_tokens=None, ignore_eos=True))
loop = asyncio.new_event_loop()
print(loop.run_until_complete(anext(stream)).finished)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "False\n", "")


# -- Requests that take long, or make a library panic, before they are served


class PanicException(BaseException):
    """As that of pyo3, which cannot be imported."""


class Gate:
    """Holds calls of a function back, as if it took long, until ``open``; notes in which threads they were."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, word: str = "") -> None:
        self.open, self.is_reached = threading.Event(), threading.Event()
        self.threads: list[str] = []
        function = getattr(owner, name)

        def held_back(*args: Any, **options: Any) -> Any:
            self.threads.append(threading.current_thread().name)
            if word in repr(args):
                self.is_reached.set()
                assert self.open.wait(60)
            return function(*args, **options)

        monkeypatch.setattr(owner, name, held_back)

    async def reached(self) -> None:
        await asyncio.to_thread(self.is_reached.wait, 60)


SLOW: dict[str, tuple[Callable[[CompiledEngine], tuple[Any, str]], dict[str, Any]]] = {
    "text": (lambda engine: (engine.tokenizer, "encode"), {}),
    "long text": (lambda engine: (engine.tokenizer, "encode"), {"prompt": "slow = 1\n" * 20}),
    "bad words": (lambda engine: (engine.tokenizer, "encode_pieces"), {"bad_words": "slow"}),
    "grammar": (lambda engine: (GrammarProcesses, "start"), {"structured_outputs": {"regex": "slow"}}),
    "chat template": (lambda engine: (engine._chat_encoder._process, "ask"), {"chat_template": "slow"}),
}


def test_requests_that_are_being_prepared_count_as_unfinished(monkeypatch: pytest.MonkeyPatch) -> None:
    sync_engine = CompiledEngine(**EAGER | {"max_queued_requests": 2})
    gate = Gate(monkeypatch, sync_engine.tokenizer, "encode", "slow")

    async def main() -> None:
        async with AsyncCompiledEngine.from_engine(sync_engine) as engine:
            tasks = [asyncio.create_task(collect(engine.generate("slow", GREEDY))) for _ in range(2)]
            await gate.reached()
            await engine.stats()  # both have their names by then
            with pytest.raises(ValueError, match=r"at most 2 requests may be unfinished at once .* given 1 beside 2"):
                await anext(engine.generate([5], GREEDY))
            gate.open.set()
            assert all(outputs[-1].finished for outputs in await asyncio.gather(*tasks))

    asyncio.run(main())


@pytest.mark.parametrize("what", marked(SLOW, ("grammar",)))
def test_a_request_that_takes_long_to_prepare_stalls_no_stream(
    sync_engine: CompiledEngine, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    find, asked = SLOW[what]
    gate = Gate(monkeypatch, *find(sync_engine), "slow")
    monkeypatch.setattr("compiled_llm.engine.async_engine._LONG_PROMPT", 100)

    def slow(engine: AsyncCompiledEngine, request_id: str) -> AsyncIterator[RequestOutput]:
        ask = {"temperature": 0, "max_tokens": 4, **asked}
        if template := ask.pop("chat_template", None):
            messages = [{"role": "user", "content": "x"}]
            return engine.chat(messages, SamplingParams(**ask), request_id=request_id, chat_template=template)
        return engine.generate(ask.pop("prompt", "slow"), SamplingParams(**ask), request_id=request_id)

    async def main() -> None:
        async with AsyncCompiledEngine.from_engine(sync_engine) as engine:
            stream = engine.generate([5, 6, 7], LONG)
            await anext(stream)
            task = asyncio.create_task(collect(slow(engine, "mine")))
            aborted = asyncio.create_task(collect(slow(engine, "aborted")))
            cancelled = asyncio.create_task(collect(slow(engine, "cancelled")))
            await gate.reached()
            for _ in range(30):
                await anext(stream)
            with pytest.raises(ValueError, match="request_id"):
                await anext(engine.generate([5], GREEDY, request_id="mine"))
            await engine.abort("aborted")
            (last,) = await aborted
            assert (last.request_id, reason(last), last.outputs[0].token_ids) == ("aborted", "abort", [])
            cancelled.cancel()
            with pytest.raises(asyncio.CancelledError):
                await cancelled
            assert not task.done()
            gate.open.set()
            assert reason((await task)[-1]) in ("length", "stop")
            assert reason((await collect(stream))[-1]) == "length"
            await nothing_is_left(engine)
            assert (await engine.stats()).num_requests == 3, "the aborted and the cancelled one never came"

    run(main())
    assert gate.threads
    assert "compiled_llm engine" not in gate.threads


def test_close_ends_what_is_being_prepared(sync_engine: CompiledEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch, sync_engine.tokenizer, "encode", "slow")

    async def main() -> None:
        async with AsyncCompiledEngine.from_engine(sync_engine) as engine:
            task = asyncio.create_task(collect(engine.generate("slow", SamplingParams(n=2))))
            await gate.reached()
        (last,) = await task
        assert (reason(last), last.prompt, len(last.outputs)) == ("abort", "slow", 2)
        gate.open.set()

    run(main())


def test_requests_keep_their_order_and_do_not_wait_for_those_that_take_long(
    sync_engine: CompiledEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch, sync_engine.tokenizer, "encode_pieces")
    added: list[str] = []
    add_request = sync_engine.add_request

    def adding(request_id: str, *args: Any, **options: Any) -> None:
        added.append(request_id)
        add_request(request_id, *args, **options)

    monkeypatch.setattr(sync_engine, "add_request", adding)

    async def main() -> None:
        async with AsyncCompiledEngine.from_engine(sync_engine) as engine:
            names = ["long", *map(str, range(20))]
            params = {"long": SamplingParams(max_tokens=2, bad_words="x")}
            streams = [
                engine.generate(PROMPT * (1 + n % 5), params.get(name, GREEDY), request_id=name)
                for n, name in enumerate(names)
            ]
            tasks = [asyncio.create_task(collect(stream)) for stream in streams]
            await asyncio.gather(*tasks[1:])
            assert added == names[1:]
            gate.open.set()
            await tasks[0]
            assert added[-1] == "long"

    run(main())


@pytest.mark.parametrize("method", marked(("add_request", "prepare", "encode_chat"), ("prepare",)))
def test_a_panic_costs_the_request_that_made_it_alone(
    sync_engine: CompiledEngine, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    function = getattr(sync_engine, method)

    def panic(*args: Any, **options: Any) -> Any:
        if "'bad'" in repr(args):
            raise PanicException("at the library")
        return function(*args, **options)

    monkeypatch.setattr(sync_engine, method, panic)

    async def main() -> None:
        async with AsyncCompiledEngine.from_engine(sync_engine) as engine:
            other = asyncio.create_task(collect(engine.generate(PROMPT, LONG)))
            bad = engine.generate("bad", GREEDY, request_id="bad")
            if method == "encode_chat":
                bad = engine.chat([{"role": "user", "content": "bad"}], GREEDY)
            with pytest.raises(RuntimeError, match="PanicException: at the library"):
                await collect(bad)
            assert reason((await other)[-1]) == "length"
            await nothing_is_left(engine)

    run(main())


def test_a_panic_in_a_step_costs_the_requests_of_that_step_alone(
    sync_engine: CompiledEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_once(monkeypatch, sync_engine.runner, "launch", 0, PanicException("at the library"))

    async def main() -> None:
        async with AsyncCompiledEngine.from_engine(sync_engine) as engine:
            assert reason((await collect(engine.generate(PROMPT, GREEDY)))[-1]) == "error"
            await nothing_is_left(engine)

    run(main())


def test_a_hostile_grammar_stalls_nobody_and_ends_alone() -> None:
    patterns = [{"type": "string", "pattern": f"^(a|b)*a(a|b){{{count}}}$"} for count in range(29)]
    hostile = SamplingParams(structured_outputs={"json": {"allOf": patterns}})

    async def main() -> None:
        async with AsyncCompiledEngine(**EAGER, max_grammar_seconds=1.0) as engine:
            await engine.ready()
            task = asyncio.create_task(collect(engine.generate(PROMPT, hostile)))
            params = SamplingParams(structured_outputs={"regex": "[ab]{3}"})
            for _ in range(3):
                assert reason((await collect(engine.generate(PROMPT, params)))[-1]) == "stop"
                assert reason((await collect(engine.generate(PROMPT, GREEDY)))[-1]) == "length"
            with pytest.raises(ValueError, match="took more than 1 s of processor time to compile"):
                await task
            await nothing_is_left(engine)

    run(main())
