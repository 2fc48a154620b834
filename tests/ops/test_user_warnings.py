"""A warning points to the line of the user's program, through any depth, other packages, threads and engines."""

import asyncio
import functools
import inspect
import types
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from compiled_llm import AsyncCompiledEngine, CompiledEngine
from compiled_llm.ops.user_warnings import at_callers_line, warn
from tests.families import checkpoint


def function_of(package: str, function: Callable[[], Any]) -> Callable[[], Any]:
    """A function of a module of ``package``, which calls ``function``."""
    module = types.ModuleType(f"{package}.module")
    vars(module).update(function=function, __package__=package)
    exec(compile("def call():\n    return function()", f"{package}/module.py", "exec"), vars(module))
    return module.call  # type: ignore[no-any-return]


def through(packages: str) -> Callable[[], Any]:
    """A function that calls others, in this order of their packages, the last of which warns."""
    return functools.reduce(lambda inner, package: function_of(package, inner), reversed(packages.split()), _warn)


def _warn() -> None:
    function_of("compiled_llm.ops", lambda: warn("look", FutureWarning))()


def places_of(call: Callable[[], Any]) -> list[tuple[str, int, type[Warning]]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [(warning.filename, warning.lineno, warning.category) for warning in caught]


@pytest.mark.parametrize(
    "packages",
    [
        "compiled_llm",
        "compiled_llm.engine compiled_llm.worker compiled_llm.models.layers",
        "compiled_llm.engine torch._inductor compiled_llm.compiling",
        "compiled_llm compiled_llm_of_another compiled_llm.step",
    ],
)
def test_it_is_the_caller_of_the_outermost_frame_of_the_package(packages: str) -> None:
    call = through(packages)

    def program() -> None:
        call()

    line = inspect.getsourcelines(program)[1] + 1
    assert places_of(program) == [(__file__, line, FutureWarning)]


def test_a_package_of_a_longer_name_is_another_one() -> None:
    call = through("compiled_llm_of_another compiled_llm.step")
    assert [place[0] for place in places_of(call)] == ["compiled_llm_of_another/module.py"]


def test_in_a_thread_it_is_where_the_thread_was_asked_for() -> None:
    def program() -> None:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(call()).result()

    call = function_of("compiled_llm.compiling", lambda: at_callers_line(_warn))
    line = inspect.getsourcelines(program)[1] + 2
    assert places_of(program) == [(__file__, line, FutureWarning)]
    assert places_of(_warn)[0][0] == __file__, "the thread's place is forgotten"


def test_it_is_shown_once_for_each_line_and_obeys_filters() -> None:
    call = through("compiled_llm.engine")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            call()
        call()
    assert len(caught) == 2
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        with pytest.raises(FutureWarning, match="look"):
            call()


# Which no step can meet: found at the end of the start, deep in the worker.
IMPOSSIBLE = {"target_itl_ms": 1e-6, "enforce_eager": True, "bucket_sizes": (1,), "num_kv_blocks": 40, "device": "cpu"}


def test_of_the_start_of_an_engine_it_is_the_line_that_makes_it() -> None:
    model = str(checkpoint("llama"))

    def program() -> None:
        CompiledEngine(model, progress="off", **IMPOSSIBLE).close()

    line = inspect.getsourcelines(program)[1] + 1
    assert places_of(program) == [(__file__, line, UserWarning)]


def test_of_an_engine_that_starts_in_its_thread_it_is_too() -> None:
    model = str(checkpoint("llama"))

    async def serve() -> None:
        engine = AsyncCompiledEngine(model, progress="off", **IMPOSSIBLE)
        await engine.ready()
        await engine.close()

    line = inspect.getsourcelines(serve)[1] + 1
    assert places_of(lambda: asyncio.run(serve())) == [(__file__, line, UserWarning)]
