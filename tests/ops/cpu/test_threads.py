"""parallel_for of the C++ kernels: all is computed once, whoever calls and however many do; who waits sleeps."""

import ctypes
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from compiled_llm.ops import native
from compiled_llm.ops.kernel_build import Library

SOURCE = Path(__file__).with_name("threads_check.cpp")


class Loops:
    """The functions of threads_check.cpp."""

    def __init__(self, path: Path) -> None:
        self.library = ctypes.CDLL(str(path))
        for function in (self.library.count, self.library.nested, self.library.thrown):
            function.restype = ctypes.c_int64
        self.library.first_team.restype = ctypes.c_void_p

    def count(self, threads: int, begin: int, end: int, grain: int, microseconds: int) -> tuple[list[int], int, int]:
        """(how often each of begin..end was computed, threads that took part, items of the shortest part)."""
        found, shortest = (ctypes.c_int32 * max(1, end - begin))(), ctypes.c_int64()
        sizes = [ctypes.c_int64(value) for value in (threads, begin, end, grain, microseconds)]
        seen = self.library.count(*sizes, found, ctypes.byref(shortest))
        return list(found)[: max(0, end - begin)], seen, shortest.value

    def nested(self, threads: int, outer: int, inner: int) -> int:
        return self.library.nested(*(ctypes.c_int64(value) for value in (threads, outer, inner)))

    def thrown(self, threads: int, at: int, items: int) -> int:
        return self.library.thrown(*(ctypes.c_int64(value) for value in (threads, at, items)))


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Library("threads_check", SOURCE).build(str(native.compiler()), tmp_path_factory.mktemp("built"), "one.so")


@pytest.fixture(scope="module")
def loops(built: Path) -> Loops:
    return Loops(built)


@pytest.mark.parametrize(
    ("begin", "end", "grain"), [(0, 1, 1), (0, 7, 1), (5, 1000, 1), (0, 1000, 100), (3, 1000, 999), (0, 5, 0)]
)
def test_every_part_is_computed_once(loops: Loops, begin: int, end: int, grain: int) -> None:
    for _ in range(20):
        counts, threads, shortest = loops.count(3, begin, end, grain, 0)
        assert counts == [1] * (end - begin)
        assert 1 <= threads <= 3
        assert shortest >= min(grain, end - begin)


def test_an_empty_range_computes_nothing(loops: Loops) -> None:
    assert loops.count(3, 4, 4, 1, 0)[:2] == ([], 0)
    assert loops.count(3, 4, 2, 1, 0)[:2] == ([], 0)


def test_as_many_threads_take_part_as_asked_for_at_most(loops: Loops) -> None:
    assert max(loops.count(3, 0, 100, 1, 500)[1] for _ in range(10)) == 3
    assert loops.count(3, 0, 100, 50, 500)[1] <= 2, "two parts of the grain's size"
    assert loops.count(1, 0, 100, 1, 10)[1] == 1
    assert max(loops.count(2, 0, 100, 1, 500)[1] for _ in range(10)) == 2, "fewer than there are helpers"


def test_callers_at_the_same_time_and_loops_in_loops(loops: Loops) -> None:
    def call(number: int) -> None:
        for _ in range(200):
            assert loops.count(3, 0, 64, 1, 1)[0] == [1] * 64
        assert loops.nested(3, 5, 40) == 5 * 40

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(call, range(4)))


def test_an_error_is_thrown_where_it_was_called_and_the_next_loop_works(loops: Loops) -> None:
    for at in (0, 37, 99):
        assert loops.thrown(3, at, 100) == at
        assert loops.count(3, 0, 100, 1, 0)[0] == [1] * 100
    assert loops.thrown(3, 100, 100) == -1


def test_all_libraries_of_a_process_share_one_team(loops: Loops, built: Path, tmp_path: Path) -> None:
    (tmp_path / "other.so").write_bytes(built.read_bytes())
    other = Loops(tmp_path / "other.so")
    assert other.library._handle != loops.library._handle
    assert other.library.first_team() == loops.library.first_team()


def test_helpers_sleep_when_there_is_nothing_to_do(loops: Loops) -> None:
    loops.count(3, 0, 100, 1, 100)
    time.sleep(0.1)
    before = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before < 0.25, "two that spin take a second, or what of it the machine has left"
    assert loops.count(3, 0, 100, 1, 100)[0] == [1] * 100, "and are woken"


def test_helpers_that_rest_are_woken_by_the_next_loop(loops: Loops) -> None:
    loops.count(3, 0, 100, 1, 10)
    loops.library.rest()
    assert max(loops.count(3, 0, 100, 1, 500)[1] for _ in range(10)) == 3
    with ThreadPoolExecutor(2) as pool:
        rests = pool.submit(lambda: [loops.library.rest() for _ in range(100)])
        while not rests.done():
            assert loops.count(3, 0, 64, 1, 1)[0] == [1] * 64


@pytest.mark.battery
def test_helpers_rest_at_once_where_another_process_wants_their_cores(loops: Loops) -> None:
    """On a machine that does nothing else: where helpers wait for cores they sleep in any case."""

    def sleeps(ends: Callable[[], object]) -> int:
        """How often helpers fall asleep between loops, for less time than they would spin."""
        own = threading.get_native_id()

        def of_others() -> int:
            states = [
                path.read_text() for path in Path("/proc/self/task").glob("*/status") if path.parent.name != str(own)
            ]
            return sum(int(text.split("voluntary_ctxt_switches:")[1].split()[0]) for text in states)

        assert loops.count(2, 0, 20, 1, 50)[0] == [1] * 20
        before = of_others()
        for _ in range(40):
            assert loops.count(2, 0, 20, 1, 50)[0] == [1] * 20
            ends()
            until = time.perf_counter() + 100e-6
            while time.perf_counter() < until:
                pass
        return of_others() - before

    assert any(sleeps(loops.library.rest) > 2 * sleeps(int) for _ in range(5))


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_has_no_helpers_and_computes_all_the_same(loops: Loops) -> None:
    loops.count(3, 0, 100, 1, 100)
    child = os.fork()
    if child == 0:
        os._exit(0 if loops.count(3, 0, 100, 1, 10)[0] == [1] * 100 else 1)
    killer = threading.Timer(20, os.kill, (child, 9))
    killer.start()
    assert os.waitpid(child, 0)[1] == 0
    killer.cancel()
