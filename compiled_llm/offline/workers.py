"""Workers: an offline run with many engines, each in a process of its own.

The driver reads, orders and writes; workers compute. A worker that dies is started again, and its rows are served
again: by one worker, few of them at a time, so that a row that ends every process it runs in is found. The driver alone
writes, and a row that has a result is done, so no row is there twice.
"""

import itertools
import sys
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from compiled_llm.offline.formats import error_line
from compiled_llm.offline.rows import Row, RowResult, RowSource, RunProgress, row_to_json
from compiled_llm.offline.worker import read_results
from compiled_llm.system.child_process import encoded

_POLL_SECONDS = 0.25
_MOST_STARTS = 12  # of a worker without a result between them: enough to find some rows in a row that end it
_PAUSE_SECONDS = 0.1  # before the first start after an end; four times as long before each one that follows
_LONGEST_PAUSE_SECONDS = 5.0
# A row that was in so many processes when they died is served in a group of so many, and after the last one not at all.
_GROUP_SIZES = (8, 1, 1)


class WorkerProcesses(Protocol):
    """The processes of workers, wherever they run, and messages between them and the driver. Workers have numbers."""

    def start(self, number: int) -> None:
        """Start a process. ``OSError`` if there is none to be had."""

    def send(self, number: int, message: bytes) -> None:
        """Send a message; it is lost if the process has ended."""

    def receive(self, seconds: float) -> list[tuple[int, bytes | None]]:
        """Messages that come within so many seconds, at most one of each worker; None: its process has ended."""

    def end(self, number: int) -> str:
        """End the process, if it runs still; returns how it ended."""

    def close(self) -> None:
        """End all processes."""


class WorkerState:
    """What the driver knows of one worker.

    Attributes:
        rows: the rows that it has, by index.
        is_ready: its engine has started. ``was_ready``: the engine of its process, or of a process before, had.
        is_finished: it takes part no more. ``is_told``: it was told that no rows follow.
        is_on_trial: it has rows of a process that died, and gets no others.
        starts: how often its process was started since its last result.
        starts_at: the moment when its process is to be started again; None: it runs.
        load: what its engine said last of itself.
        faults: those of its earlier processes, by kind.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.rows: dict[int, Row] = {}
        self.is_ready = self.was_ready = self.is_finished = self.is_told = self.is_on_trial = False
        self.starts = 0
        self.starts_at: float | None = None
        self.max_num_seqs = 1
        self.load: dict[str, Any] = {}
        self.faults = Counter[str]()


class WorkerEngines:
    """Serves rows with the engines of many workers; its methods are those of ``serving.LocalEngine``.

    It is ready when the first worker is: the others may take longer, and join in.

    Args:
        processes: of the workers.
        settings: for each worker: what ``worker.run_worker`` gets first.

    Raises:
        ValueError: an engine cannot start.
        OSError: a process cannot be started, or ends each time.
    """

    def __init__(self, processes: WorkerProcesses, settings: Sequence[Mapping[str, Any]]) -> None:
        self._processes, self._settings = processes, settings
        self._workers = [WorkerState(number) for number in range(len(settings))]
        self._returned: deque[Row] = deque()  # rows of processes that died
        self._deaths: dict[int, int] = {}  # by the index of such a row
        self._summaries: dict[int, dict[str, str]] = {}
        self._is_written = True
        self._description = ""
        try:
            self._start(self._workers[0])
            while not self._workers[0].is_ready:
                self._start_again()
                for _ in self._receive():
                    raise AssertionError("a result without a row")
            for worker in self._workers[1:]:  # they find what the first one compiled, if they share its disk
                self._start(worker)
        except BaseException:
            self.close()
            raise

    def prepare_report(self) -> None:
        """Nothing to do: each worker has prepared its own."""

    def describe_start(self) -> str:
        return f"{self._description}\n\n{len(self._workers)} workers; above is the first"

    def faults(self) -> dict[str, int]:
        """How many rows of all workers ended for each kind of fault, and not for one of their own."""
        sums = Counter[str]()
        for worker in self._workers:
            sums.update(worker.faults)
            sums.update(worker.load.get("faults", {}))
        return dict(sums)

    def observe(self, progress: RunProgress) -> None:
        """Set what ``progress`` says of the engines."""
        states = [worker.load for worker in self._workers if worker.is_ready]
        progress.workers = len(states)
        progress.running = sum(state.get("running", 0) for state in states)
        progress.waiting = sum(state.get("waiting", 0) for state in states)
        progress.kv_share = sum(state.get("kv_share", 0.0) for state in states) / max(1, len(states))

    def serve(self, source: RowSource) -> Iterator[RowResult | None]:
        """Each row's result as the row ends, and None now and then."""
        while True:
            self._start_again()
            for worker in self._workers:
                if not source.stopped:
                    self._hand_out(worker, source)
            if source.stopped:
                self._tell_all({"stop": True})
                self._returned.clear()
            elif source.ended and not self._returned and not any(worker.rows for worker in self._workers):
                self._tell_all({"end": True})
            if all(worker.is_finished for worker in self._workers):
                return
            yield from self._receive()
            yield None

    def finish(self) -> tuple[dict[str, str], bool]:
        """The summary of each worker, and whether all wrote what ``--report`` asks for."""
        rows: dict[str, str] = {}
        for number, summary in sorted(self._summaries.items()):
            rows |= {f"{name} ({number})": value for name, value in summary.items()}
        return rows, self._is_written

    def close(self) -> None:
        self._processes.close()

    # -- Rows

    def _hand_out(self, worker: WorkerState, source: RowSource) -> None:
        """Give a worker as many rows as it needs."""
        if not worker.is_ready or worker.is_told or worker.is_on_trial:
            return
        if self._returned:
            if not worker.rows:
                size = min(_GROUP_SIZES[min(self._deaths[row.index], len(_GROUP_SIZES)) - 1] for row in self._returned)
                group = [self._returned.popleft() for _ in range(min(size, len(self._returned)))]
                worker.is_on_trial = True
                self._send_rows(worker, group)
        elif not source.ended and len(worker.rows) <= worker.max_num_seqs:
            wanted = 2 * worker.max_num_seqs - len(worker.rows)
            rows = list(itertools.islice(iter(lambda: source.take(wait=True), None), wanted))
            if rows:
                self._send_rows(worker, rows)

    def _send_rows(self, worker: WorkerState, rows: list[Row]) -> None:
        worker.rows |= {row.index: row for row in rows}
        self._send(worker, {"rows": [row_to_json(row) for row in rows]})

    def _tell_all(self, message: Mapping[str, Any]) -> None:
        for worker in self._workers:
            if worker.is_ready and not worker.is_told:
                worker.is_told = True
                self._send(worker, message)
            elif not worker.is_ready:
                worker.is_finished = True  # it has nothing, and will get nothing

    def _send(self, worker: WorkerState, message: Mapping[str, Any]) -> None:
        self._processes.send(worker.number, encoded(message))

    def _receive(self) -> Iterator[RowResult]:
        """The results that come within some time."""
        for number, message in self._processes.receive(_POLL_SECONDS):
            worker = self._workers[number]
            if worker.is_finished:
                continue
            if message is None:
                yield from self._bury(worker)
                continue
            results, state = read_results(message)
            for result in results:
                del worker.rows[result.index]
                self._deaths.pop(result.index, None)
                worker.starts = 0
                yield result
            worker.is_on_trial &= bool(worker.rows)
            self._take_state(worker, state)

    def _take_state(self, worker: WorkerState, state: dict[str, Any]) -> None:
        if "failure" in state and worker.was_ready:
            self._give_up(worker, f"worker {worker.number} could not start again: {state['failure']}")
        elif "failure" in state:
            raise ValueError(f"worker {worker.number}: {state['failure']}")
        elif "ready" in state:
            worker.is_ready = worker.was_ready = True
            worker.max_num_seqs = state["ready"]["max_num_seqs"]
            self._description = self._description or state["ready"]["description"]
        elif "finished" in state:
            worker.is_finished, worker.rows = True, {}
            self._summaries[worker.number] = state["finished"]["summary"]
            self._is_written &= state["finished"]["is_written"]
        else:
            worker.load = state

    # -- Processes

    def _start(self, worker: WorkerState) -> None:
        worker.starts += 1
        worker.starts_at = None
        self._processes.start(worker.number)
        self._send(worker, self._settings[worker.number])

    def _start_again(self) -> None:
        """The workers whose moment has come."""
        for worker in self._workers:
            if worker.starts_at is not None and worker.starts_at <= time.monotonic() and not worker.is_finished:
                try:
                    self._start(worker)
                except OSError as error:  # as where there is no memory for a process now
                    self._start_later(worker, str(error))

    def _bury(self, worker: WorkerState) -> Iterator[RowResult]:
        """A process has ended. Its rows come back, or end if they were in too many that did; it is started again."""
        how = self._processes.end(worker.number)
        worker.faults.update(worker.load.get("faults", {}))
        rows, worker.rows, worker.load = list(worker.rows.values()), {}, {}
        worker.is_ready = worker.is_on_trial = False
        returned = []
        for row in rows:
            self._deaths[row.index] = self._deaths.get(row.index, 0) + 1
            if self._deaths[row.index] > len(_GROUP_SIZES):
                del self._deaths[row.index]
                error = f"the engine's process ended ({how}) each time that this row ran"
                yield RowResult(row.index, row.name, error_line(row, error, is_users=False), error)
            else:
                returned.append(row)
        self._returned.extendleft(reversed(returned))  # so that a row to blame is found before the next one runs
        if worker.is_told:
            worker.is_finished = True
        else:
            self._start_later(worker, how)

    def _start_later(self, worker: WorkerState, how: str) -> None:
        """After a pause, or give it up. ``how``: the last process ended."""
        if worker.starts >= _MOST_STARTS:
            times = f"{worker.starts} times without a result"
            self._give_up(worker, f"worker {worker.number} ended {times}, the last time by {how}")
        else:
            pause = min(_LONGEST_PAUSE_SECONDS, _PAUSE_SECONDS * 4 ** max(0, worker.starts - 1))
            worker.starts_at = time.monotonic() + pause

    def _give_up(self, worker: WorkerState, reason: str) -> None:
        """Go on without a worker. ``OSError`` if it was the last one."""
        worker.is_finished = True
        left = sum(not other.is_finished for other in self._workers)
        if not left or not any(other.was_ready for other in self._workers):
            raise OSError(f"{reason}; no engine is left")
        print(f"{reason}; {left} of {len(self._workers)} workers go on", file=sys.stderr)
