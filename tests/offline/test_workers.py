"""The driver of workers, with workers that are threads: they may die at any row, and no row is lost or there twice."""

import contextlib
import random
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterable

import pytest

from compiled_llm.child_process import Channel
from compiled_llm.offline import workers
from compiled_llm.offline.local_workers import part_of
from compiled_llm.offline.progress import RowResult, RunProgress
from compiled_llm.offline.rows import Row
from compiled_llm.offline.worker import SocketRows, send_results
from compiled_llm.offline.workers import WorkerEngines

MAX_NUM_SEQS = 4


class DriverGoneError(Exception):
    """In the place of the end of a process."""


class ThreadLauncher:
    """Workers that are threads. ``dies(worker, row)`` is asked when a worker is about to run a row.

    Attributes:
        served: how often each row was begun.
        most_rows: most rows that a worker had at once.
    """

    def __init__(self, dies: Callable[[int, int], bool] = lambda number, index: False, fails: str = "") -> None:
        self._dies, self._fails = dies, fails
        self.served: Counter[int] = Counter()
        self.starts: Counter[int] = Counter()
        self._threads: dict[int, threading.Thread] = {}

    def start(self, number: int) -> Channel:
        self.starts[number] += 1
        own, theirs = socket.socketpair()
        self._threads[number] = threading.Thread(target=self._run, args=(number, Channel(theirs)))
        self._threads[number].start()
        return Channel(own)

    def end(self, number: int) -> str:
        self._threads[number].join()
        return "signal SIGKILL"

    def _run(self, number: int, channel: Channel) -> None:
        with channel.socket, contextlib.suppress(OSError, DriverGoneError):
            channel.receive()  # the settings
            if self._fails:
                send_results(channel, [], {"failure": self._fails})
                return
            send_results(channel, [], {"ready": {"max_num_seqs": MAX_NUM_SEQS, "description": "an engine"}})
            source = SocketRows(channel)
            while not source.ended:
                row = source.take(wait=True)
                if row is None:
                    break
                self.served[row.index] += 1
                if self._dies(number, row.index):
                    return
                error = "bad" if row.error else None
                result = RowResult(row.index, row.name, f"{row.index}\n".encode(), error, 1, 2, 3)
                state = {"running": 1, "waiting": 2, "kv_share": 0.5, "faults": {"exception": 1}}
                send_results(channel, [result], state)
            send_results(channel, [], {"finished": {"summary": {"steps": "7"}, "is_written": number == 0}})


def rows(count: int) -> list[Row]:
    return [Row(index, f"row {index}", {"prompt": "a"}) for index in range(count)]


def serve(
    launcher: ThreadLauncher, given: Iterable[Row], num_workers: int = 2
) -> tuple[list[RowResult], WorkerEngines]:
    engines = WorkerEngines(launcher, [{}] * num_workers)
    with contextlib.closing(engines):
        results = [result for result in engines.serve(iter(given), lambda: False) if result is not None]
    return results, engines


@pytest.fixture(autouse=True)
def _no_driver_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that loses its driver ends its process, which here is that of the tests."""

    def end(status: int) -> None:
        raise DriverGoneError

    monkeypatch.setattr("compiled_llm.offline.worker.os._exit", end)
    monkeypatch.setattr(workers.time, "sleep", lambda seconds: None)


def test_all_rows_are_served_once_and_the_engines_report() -> None:
    results, engines = serve(ThreadLauncher(), rows(100), 3)
    assert sorted(result.index for result in results) == list(range(100))
    assert all(result.line == f"{result.index}\n".encode() for result in results)
    assert engines.finish() == ({"steps (0)": "7", "steps (1)": "7", "steps (2)": "7"}, False)
    assert engines.faults() == {"exception": 3}
    progress = RunProgress()
    engines.observe(progress)
    assert (progress.running, progress.waiting, progress.kv_share, progress.workers) == (3, 6, 0.5, 3)
    assert "an engine" in engines.describe_start()
    assert serve(ThreadLauncher(), [])[0] == []


def test_rows_are_read_as_they_are_needed() -> None:
    taken = []

    def source() -> Iterable[Row]:
        for row in rows(1000):
            taken.append(row.index)
            yield row

    engines = WorkerEngines(ThreadLauncher(), [{}] * 2)
    with contextlib.closing(engines):
        results = engines.serve(iter(source()), lambda: False)
        for _ in range(20):
            next(results)
        assert len(taken) < 100
        assert len([result for result in results if result is not None]) > 900


@pytest.mark.parametrize("seed", range(5))
def test_workers_that_die_now_and_then_lose_no_row(seed: int) -> None:
    rng = random.Random(seed)
    launcher = ThreadLauncher(lambda number, index: rng.random() < 0.05)
    results, _ = serve(launcher, rows(200))
    assert sorted(result.index for result in results) == list(range(200))
    assert sum(launcher.starts.values()) > 4


def test_a_row_that_ends_every_process_is_found_and_the_others_are_served() -> None:
    launcher = ThreadLauncher(lambda number, index: index in (3, 50))
    results, _ = serve(launcher, rows(100))
    errors = {result.index: result.error for result in results if result.error is not None}
    assert errors.keys() == {3, 50}
    assert "the engine's process ended (signal SIGKILL)" in str(errors[3])
    assert sorted(result.index for result in results) == list(range(100))
    assert launcher.served[3] == launcher.served[50] == 4
    assert max(launcher.served.values()) == 4


def test_a_worker_that_always_dies_ends_the_run() -> None:
    with pytest.raises(OSError, match="worker 1 ended 5 times without a result"):
        serve(ThreadLauncher(lambda number, index: number == 1), rows(10_000))


def test_an_engine_that_cannot_start_ends_the_run() -> None:
    with pytest.raises(ValueError, match="worker 0: no such model"):
        WorkerEngines(ThreadLauncher(fails="no such model"), [{}] * 2)


def test_a_stop_drops_the_rows_that_wait() -> None:
    found: list[int] = []
    engines = WorkerEngines(ThreadLauncher(), [{}] * 2)
    is_enough = found.__len__
    for result in engines.serve(iter(rows(10_000)), lambda: is_enough() >= 30):
        found += [] if result is None else [result.index]
    engines.close()
    assert 30 <= len(found) == len(set(found)) < 200


def test_parts_are_neighbours_of_about_one_size() -> None:
    assert [part_of(range(10), number, 3) for number in range(3)] == [[0, 1, 2], [3, 4, 5], [6, 7, 8, 9]]
