"""parallel_for of the C++ kernels: all is computed once, whoever calls and however many do; who waits sleeps."""

import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from compiled_llm.ops import native


@pytest.fixture(scope="module")
def loops() -> Any:
    return native.load_source(Path(__file__).with_name("threads_check.cpp"))


@pytest.fixture(autouse=True)
def _three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("begin", "end", "grain"), [(0, 1, 1), (0, 7, 1), (5, 1000, 1), (0, 1000, 100), (3, 1000, 999), (0, 5, 0)]
)
def test_every_part_is_computed_once(loops: Any, begin: int, end: int, grain: int) -> None:
    for _ in range(50):
        counts, threads, shortest = loops.counts(begin, end, grain, 0)
        assert counts == [1] * (end - begin)
        assert 1 <= threads <= 3
        assert shortest >= min(grain, end - begin)


def test_an_empty_range_computes_nothing(loops: Any) -> None:
    assert loops.counts(4, 4, 1, 0)[:2] == ([], 0)
    assert loops.counts(4, 2, 1, 0)[:2] == ([], 0)


def test_as_many_threads_take_part_as_torch_has_at_most(loops: Any) -> None:
    assert max(loops.counts(0, 100, 1, 500)[1] for _ in range(10)) == 3
    assert loops.counts(0, 100, 50, 500)[1] <= 2, "two parts of the grain's size"
    torch.set_num_threads(1)
    assert loops.counts(0, 100, 1, 10)[1] == 1
    torch.set_num_threads(2)
    assert max(loops.counts(0, 100, 1, 500)[1] for _ in range(10)) == 2, "fewer than there are helpers"


def test_callers_at_the_same_time_and_loops_in_loops(loops: Any) -> None:
    def call(number: int) -> None:
        torch.set_num_threads(3)
        for _ in range(200):
            assert loops.counts(0, 64, 1, 1)[0] == [1] * 64
        assert loops.nested(5, 40) == 5 * 40

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(call, range(4)))


def test_an_error_is_thrown_where_it_was_called_and_the_next_loop_works(loops: Any) -> None:
    for at in (0, 37, 99):
        with pytest.raises(ValueError, match=f"part {at}"):
            loops.throws_at(at, 100)
        assert loops.counts(0, 100, 1, 0)[0] == [1] * 100


def test_helpers_sleep_when_there_is_nothing_to_do(loops: Any) -> None:
    loops.counts(0, 100, 1, 100)
    time.sleep(0.05)
    before = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before < 0.05
    assert loops.counts(0, 100, 1, 100)[0] == [1] * 100, "and are woken"


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_has_no_helpers_and_computes_all_the_same(loops: Any) -> None:
    loops.counts(0, 100, 1, 100)
    child = os.fork()
    if child == 0:
        os._exit(0 if loops.counts(0, 100, 1, 10)[0] == [1] * 100 else 1)
    killer = threading.Timer(20, os.kill, (child, 9))
    killer.start()
    assert os.waitpid(child, 0)[1] == 0
    killer.cancel()
