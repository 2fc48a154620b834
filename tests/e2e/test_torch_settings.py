"""What a program sets in torch changes neither a start nor a request, and is as the program left it afterwards."""

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
import torch._inductor.config

from compiled_llm import AsyncCompiledEngine, CompiledEngine, RequestsFailedWarning, SamplingParams
from tests.families import COMPILED_SIZES

EAGER: dict[str, Any] = {"enforce_eager": True, "dtype": "float32", "bucket_sizes": (1, 4), "max_model_len": 128}
COMPILED: dict[str, Any] = {"num_threads": 1, **COMPILED_SIZES}
PROMPTS = ["def add(a, b):", "import os", "x"]
GREEDY = SamplingParams(temperature=0, max_tokens=4, logprobs=2, ignore_eos=True)
SEEDED = SamplingParams(seed=3, max_tokens=4, logprobs=0, repetition_penalty=1.3, min_p=0.01, n=2)


@contextlib.contextmanager
def put_back(function: Callable[[Any], object], value: Any, before: Any) -> Iterator[None]:
    function(value)
    try:
        yield
    finally:
        function(before)


def deterministic(value: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(value[0], warn_only=value[1])


def products_of_cpu(value: str) -> None:
    torch.backends.mkldnn.matmul.fp32_precision = value


SETTINGS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "default dtype": lambda: put_back(torch.set_default_dtype, torch.float64, torch.float32),
    "short default dtype": lambda: put_back(torch.set_default_dtype, torch.bfloat16, torch.float32),
    "default device": lambda: put_back(torch.set_default_device, "meta", None),
    "device": lambda: torch.device("meta"),
    "deterministic algorithms": lambda: put_back(deterministic, (True, False), (False, False)),
    "deterministic algorithms, or warnings": lambda: put_back(deterministic, (True, True), (False, False)),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "no gradients": torch.no_grad,
    "inference mode": torch.inference_mode,
    "anomaly mode": lambda: torch.autograd.set_detect_anomaly(True),
    "products of float32": lambda: put_back(torch.set_float32_matmul_precision, "medium", "highest"),
    "products of float32 on a CPU": lambda: put_back(products_of_cpu, "bf16", "none"),
    "threads": lambda: put_back(torch.set_num_threads, torch.get_num_threads() + 1, torch.get_num_threads()),
}


# What the engines meet in the ordinary run, one at a time; a start there meets nearly all at once.
ORDINARY = {
    "compiled": ("default dtype", "default device", "deterministic algorithms", "autocast"),
    "eager": (
        "default dtype",
        "device",
        "deterministic algorithms",
        "autocast",
        "inference mode",
        "products of float32",
    ),
}
CASES = [
    pytest.param(kind, name, marks=() if name in ORDINARY[kind] else pytest.mark.battery)
    for kind in ("eager", "compiled")
    for name in SETTINGS
]


def state() -> dict[str, Any]:
    """All that a program can ask torch for."""
    precision = torch._C._get_fp32_precision_getter
    return {
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device() if torch._C._len_torch_function_stack() else None,
        "current device": torch.utils._device.CURRENT_DEVICE,
        "modes": [type(mode) for mode in torch.overrides._get_current_function_mode_stack()],
        "deterministic": torch.get_deterministic_debug_mode(),
        "compiler": torch._inductor.config.deterministic,
        "autocast": torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu"),
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "anomaly": torch.is_anomaly_enabled(),
        "products": [precision(device, "matmul") for device in ("mkldnn", "cuda")],
        "threads": torch.get_num_threads(),
    }


def served(engine: CompiledEngine) -> list[Any]:
    """What requests give that are served in every way; meanwhile the program sees its own settings."""
    before = state()
    outputs = engine.generate(PROMPTS, [GREEDY, SEEDED, GREEDY], use_tqdm=False)
    for output in engine.stream(PROMPTS[0], GREEDY):
        assert state() == before, "between two outputs of a stream"
        outputs += [output] if output.finished else []
    engine.add_request("added", PROMPTS[1], SEEDED)
    while engine.has_unfinished_requests():
        outputs += [output for output in engine.step() if output.finished]
        assert state() == before, "between two steps"
    outputs += engine.beam_search(PROMPTS[:1], 2, max_tokens=3)
    found: list[Any] = [[(x.token_ids, x.logprobs, x.cumulative_logprob) for x in o.outputs] for o in outputs]
    found += [output.logprobs for output in engine.score(PROMPTS[:2], top_logprobs=1, use_tqdm=False)]
    assert state() == before
    return found


@pytest.fixture(scope="module")
def eager() -> Iterator[CompiledEngine]:
    with CompiledEngine(**EAGER) as engine:
        yield engine


@pytest.fixture(scope="module")
def compiled() -> Iterator[CompiledEngine]:
    with CompiledEngine(**COMPILED) as engine:
        yield engine


@pytest.fixture(scope="module")
def expected(eager: CompiledEngine, compiled: CompiledEngine) -> dict[str, list[Any]]:
    return {"eager": served(eager), "compiled": served(compiled)}


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_requests_give_the_same(
    kind: str, name: str, expected: dict[str, list[Any]], request: pytest.FixtureRequest
) -> None:
    engine = request.getfixturevalue(kind)
    with SETTINGS[name]():
        assert served(engine) == expected[kind]
    assert engine.compile_report().recompiles == 0


def started_and_served(kind: str, settings: list[Callable[[], AbstractContextManager[Any]]]) -> list[Any]:
    with contextlib.ExitStack() as stack:
        for setting in settings:
            stack.enter_context(setting())
        before = state()
        with CompiledEngine(**(EAGER if kind == "eager" else COMPILED)) as engine:
            assert state() == before
            if kind == "compiled":
                found = {(graph.cache, graph.reason) for graph in engine.compile_report().reports}
                assert found == {("hit", "")}, "they are in no key"
            found = served(engine)
        assert state() == before
    return found


@pytest.mark.battery
@pytest.mark.parametrize("kind", ["eager", "compiled"])
@pytest.mark.parametrize("name", SETTINGS)
def test_a_start_gives_the_same_engine(name: str, kind: str, expected: dict[str, list[Any]]) -> None:
    assert started_and_served(kind, [SETTINGS[name]]) == expected[kind]


@pytest.mark.parametrize("kind", ["eager", "compiled"])
def test_a_start_with_all_of_them_gives_the_same_engine(kind: str, expected: dict[str, list[Any]]) -> None:
    alone = (
        "short default dtype",
        "device",
        "deterministic algorithms",
        "products of float32 on a CPU",
        "no gradients",
    )
    together = [setting for name, setting in SETTINGS.items() if name not in alone]
    assert started_and_served(kind, together) == expected[kind]


def test_an_async_engine_gives_the_same(expected: dict[str, list[Any]]) -> None:
    """What belongs to the process reaches the engine's thread; the rest does not."""

    async def main() -> tuple[Any, ...]:
        async with AsyncCompiledEngine(**EAGER) as engine:
            outputs = [output async for output in engine.generate(PROMPTS[0], GREEDY)]
            await engine.score(PROMPTS[0])
        completion = outputs[-1].outputs[0]
        return completion.token_ids, completion.logprobs, completion.cumulative_logprob

    with contextlib.ExitStack() as stack:
        for setting in SETTINGS.values():
            stack.enter_context(setting())
        before = state()
        assert [asyncio.run(main())] == expected["eager"][0]
        assert state() == before


def test_after_a_step_that_fails(eager: CompiledEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any) -> None:
        raise MemoryError("no memory")

    with torch.device("meta"), torch.autocast("cpu", torch.bfloat16):
        before = state()
        with monkeypatch.context() as patch:
            patch.setattr(eager.runner, "_launch", broken)
            with pytest.warns(RequestsFailedWarning, match="no memory"):
                eager.generate(PROMPTS[0], GREEDY, use_tqdm=False)
        assert state() == before
