"""The driver of workers, with workers that are threads: they may die at any row, and no row is lost or there twice."""

import contextlib
import itertools
import random
import socket
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence

import pytest

from compiled_llm.offline import local_workers, workers
from compiled_llm.offline.local_workers import LocalProcesses
from compiled_llm.offline.rows import Row, RowIterator, RowResult, RunProgress
from compiled_llm.offline.worker import SocketRows, send_results
from compiled_llm.offline.workers import WorkerEngines
from compiled_llm.system.child_process import Channel

MAX_NUM_SEQS = 4


class ThreadRows(SocketRows):
    """Those of a worker that is a thread: it stops where a process ends."""

    def _lose_driver(self) -> None:
        self._messages.put({"stop": True})


class ThreadProcesses(LocalProcesses):
    """Workers that are threads. ``dies(worker, row)`` is asked when a worker is about to run a row.

    Args:
        fails: for each start the failure of the engine, "" for none; later ones succeed.
        line_bytes: of each result, more or less.

    Attributes:
        served: how often each row was begun.
        starts: of each worker.
    """

    def __init__(
        self,
        dies: Callable[[int, int], bool] = lambda number, index: False,
        fails: Sequence[str] = (),
        line_bytes: int = 0,
    ) -> None:
        super().__init__([])
        self._dies, self._fails, self._line_bytes = dies, deque(fails), line_bytes
        self.served: Counter[int] = Counter()
        self.starts: Counter[int] = Counter()
        self._threads: dict[int, threading.Thread] = {}

    def start(self, number: int) -> None:
        self.starts[number] += 1
        own, theirs = socket.socketpair()
        self._channels[number] = Channel(own)
        self._threads[number] = threading.Thread(target=self._run, args=(number, Channel(theirs)))
        self._threads[number].start()

    def end(self, number: int) -> str:
        if number in self._channels:
            self._channels.pop(number).socket.close()
        self._threads.pop(number).join()
        return "signal SIGKILL"

    def close(self) -> None:
        for number in list(self._threads):
            self.end(number)

    def _run(self, number: int, channel: Channel) -> None:
        with channel.socket, contextlib.suppress(OSError, EOFError):
            try:
                self._serve(number, channel)
            finally:
                channel.socket.shutdown(socket.SHUT_RDWR)  # as the end of a process does, whoever reads from it

    def _serve(self, number: int, channel: Channel) -> None:
        channel.receive()  # the settings
        failure = self._fails.popleft() if self._fails else ""
        if failure:
            send_results(channel, [], {"failure": failure})
            return
        send_results(channel, [], {"ready": {"max_num_seqs": MAX_NUM_SEQS, "description": "an engine"}})
        source = ThreadRows(channel)
        while not source.ended:
            row = source.take(wait=True)
            if row is None:
                break
            self.served[row.index] += 1
            if self._dies(number, row.index):
                return
            error = "bad" if row.error else None
            line = f"{row.index}".ljust(self._line_bytes) + "\n"
            result = RowResult(row.index, row.name, line.encode(), error, 1, 2, 3)
            state = {"running": 1, "waiting": 2, "kv_share": 0.5, "faults": {"exception": 1}}
            send_results(channel, [result], state)
        send_results(channel, [], {"finished": {"summary": {"steps": "7"}, "is_written": number == 0}})


def rows(count: int) -> list[Row]:
    return [Row(index, f"row {index}", {"prompt": "a"}) for index in range(count)]


def serve(
    processes: ThreadProcesses, given: Iterable[Row], num_workers: int = 2
) -> tuple[list[RowResult], WorkerEngines]:
    engines = WorkerEngines(processes, [{}] * num_workers)
    with contextlib.closing(engines):
        results = [result for result in engines.serve(RowIterator(iter(given))) if result is not None]
    return results, engines


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "_PAUSE_SECONDS", 0.0)


def test_all_rows_are_served_once_and_the_engines_report() -> None:
    results, engines = serve(ThreadProcesses(), rows(100), 3)
    assert sorted(result.index for result in results) == list(range(100))
    assert all(result.line == f"{result.index}\n".encode() for result in results)
    assert engines.finish() == ({"steps (0)": "7", "steps (1)": "7", "steps (2)": "7"}, False)
    assert engines.faults() == {"exception": 3}
    progress = RunProgress()
    engines.observe(progress)
    assert (progress.running, progress.waiting, progress.kv_share, progress.workers) == (3, 6, 0.5, 3)
    assert "an engine" in engines.describe_start()
    assert serve(ThreadProcesses(), [])[0] == []


def test_rows_are_read_as_they_are_needed() -> None:
    taken = []

    def source() -> Iterable[Row]:
        for row in rows(1000):
            taken.append(row.index)
            yield row

    engines = WorkerEngines(ThreadProcesses(), [{}] * 2)
    with contextlib.closing(engines):
        results = engines.serve(RowIterator(iter(source())))
        for _ in range(20):
            next(results)
        assert len(taken) < 100
        assert len([result for result in results if result is not None]) > 900


def test_rows_and_results_may_be_larger_than_what_sockets_hold() -> None:
    processes = ThreadProcesses(line_bytes=2**20)
    large = [Row(index, f"row {index}", {"prompt": "a" * 2**20}) for index in range(40)]
    done: list[RowResult] = []
    thread = threading.Thread(target=lambda: done.extend(serve(processes, large)[0]), daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive(), "the driver sends rows, a worker results, and neither reads"
    assert sorted(result.index for result in done) == list(range(40))
    assert all(len(result.line) > 2**20 for result in done)


@pytest.mark.parametrize("seed", range(5))
def test_workers_that_die_now_and_then_lose_no_row(seed: int) -> None:
    rng = random.Random(seed)
    processes = ThreadProcesses(lambda number, index: rng.random() < 0.05)
    results, _ = serve(processes, rows(200))
    assert sorted(result.index for result in results) == list(range(200))
    assert sum(processes.starts.values()) > 4


def test_a_row_that_ends_every_process_is_found_and_the_others_are_served() -> None:
    processes = ThreadProcesses(lambda number, index: index in (3, 50))
    results, _ = serve(processes, rows(100))
    errors = {result.index: result.error for result in results if result.error is not None}
    assert errors.keys() == {3, 50}
    assert "the engine's process ended (signal SIGKILL)" in str(errors[3])
    assert sorted(result.index for result in results) == list(range(100))
    # A process that is sent one of them may be ended by the other one before it takes it.
    assert all(2 <= processes.served[index] <= 4 for index in (3, 50))
    assert max(processes.served.values()) <= 4


def test_two_rows_side_by_side_that_end_every_process_are_both_found() -> None:
    results, _ = serve(ThreadProcesses(lambda number, index: index in (0, 1, 2)), rows(20), 1)
    assert sorted(result.index for result in results) == list(range(20))
    assert {result.index for result in results if result.error is not None} == {0, 1, 2}


def test_the_others_go_on_without_a_worker_that_always_dies(capsys: pytest.CaptureFixture) -> None:
    starts, all_deaths = itertools.count(1), threading.Event()

    def dies(number: int, index: int) -> bool:
        if number == 1 and next(starts) == 12:
            all_deaths.set()
        if number == 0 and index > 500:
            all_deaths.wait(60)  # else the rows may be served before the other has died as often
        return number == 1

    results, _ = serve(ThreadProcesses(dies), rows(1000))
    assert sorted(result.index for result in results) == list(range(1000))
    assert sum(result.error is not None for result in results) <= 5
    assert capsys.readouterr().err == (
        "worker 1 ended 12 times without a result, the last time by signal SIGKILL; 1 of 2 workers go on\n"
    )


def test_the_run_ends_when_no_worker_is_left() -> None:
    served = itertools.count()
    with pytest.raises(OSError, match="times without a result, the last time by signal SIGKILL; no engine is left"):
        serve(ThreadProcesses(lambda number, index: next(served) >= 10), rows(10_000))


def test_an_engine_that_cannot_start_ends_the_run() -> None:
    with pytest.raises(ValueError, match="worker 0: no such model"):
        WorkerEngines(ThreadProcesses(fails=["no such model"]), [{}] * 2)
    with pytest.raises(ValueError, match="worker 1: too little memory"):
        serve(ThreadProcesses(fails=["", "too little memory"]), rows(10_000))


def test_the_others_go_on_without_an_engine_that_cannot_start_again(capsys: pytest.CaptureFixture) -> None:
    died: list[int] = []

    def dies(number: int, index: int) -> bool:
        """The first worker, once, when the other one serves."""
        is_time = number == 0 and index > 50 and not died
        died.extend([number] * is_time)
        return is_time

    results, _ = serve(ThreadProcesses(dies, fails=["", "", "no memory"]), rows(1000))
    assert sorted(result.index for result in results) == list(range(1000))
    assert capsys.readouterr().err == "worker 0 could not start again: no memory; 1 of 2 workers go on\n"


def test_a_process_that_cannot_be_started_for_the_moment_is_started_later() -> None:
    class Scarce(ThreadProcesses):
        def start(self, number: int) -> None:
            if self.starts[number] in (1, 2):
                self.starts[number] += 1
                raise OSError("Cannot allocate memory")
            super().start(number)

    died: list[int] = []

    def dies(number: int, index: int) -> bool:
        is_first = not died
        died.append(index)
        return is_first

    processes = Scarce(dies)
    results, _ = serve(processes, rows(100), 1)
    assert sorted(result.index for result in results) == list(range(100))
    assert processes.starts[0] == 4


def test_a_worker_that_is_not_ready_when_the_rows_end_is_not_waited_for() -> None:
    class Slow(ThreadProcesses):
        def _run(self, number: int, channel: Channel) -> None:
            if number == 0:
                super()._run(number, channel)
            with channel.socket, contextlib.suppress(OSError):
                channel.socket.recv(2**20)  # it gets its settings, and never answers
                channel.socket.recv(1)

    results, engines = serve(Slow(), rows(100))
    assert sorted(result.index for result in results) == list(range(100))
    assert engines.finish() == ({"steps (0)": "7"}, True)


def test_a_stop_drops_the_rows_that_wait() -> None:
    found: list[int] = []
    engines = WorkerEngines(ThreadProcesses(), [{}] * 2)
    is_enough = found.__len__
    for result in engines.serve(RowIterator(iter(rows(10_000)), lambda: is_enough() >= 30)):
        found += [] if result is None else [result.index]
    engines.close()
    assert 30 <= len(found) == len(set(found)) < 200


@pytest.mark.parametrize(("given", "threads"), [("1,1", "1"), ("", "2"), (None, "2")])
def test_a_worker_starts_whatever_the_number_of_threads_is_spelled_like(
    given: str | None, threads: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if given is None:
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    else:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    started = []
    monkeypatch.setattr(local_workers.subprocess, "Popen", lambda *args, env, **others: started.append(env))
    processes = LocalProcesses([[0, 1]])
    processes.start(0)
    processes._channels[0].socket.close()
    assert [environment["OMP_NUM_THREADS"] for environment in started] == [threads]
