"""The loop of an offline run: rows from a source go through an engine, and each ends as a result or as an error."""

import dataclasses
import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from compiled_llm.api.outputs import RequestOutput
from compiled_llm.api.sampling_params import SamplingParams
from compiled_llm.engine.engine import CompiledEngine
from compiled_llm.offline.answers import answer_line, error_line
from compiled_llm.offline.progress import RowResult
from compiled_llm.offline.rows import Row
from compiled_llm.offline.token_texts import TokenTexts
from compiled_llm.text.prompts import Prompt

QUEUED_ROWS = 1000  # in the engine at once, or twice as many as can run: enough for the scheduler


class EngineFaultsError(Exception):
    """The engine failed more often than is allowed."""


class RowSource(Protocol):
    """Where rows come from.

    Attributes:
        ended: no row will come any more.
        stopped: rows that have not begun are to be dropped, those that run to be finished.
    """

    @property
    def ended(self) -> bool: ...

    @property
    def stopped(self) -> bool: ...

    def take(self, wait: bool) -> Row | None:
        """The next row. None: there is none now; with ``wait``, which waits for one, there will be none any more."""


class RowIterator:
    """The rows of an iterator as a source. ``is_stopped`` is asked before each row."""

    def __init__(self, rows: Iterator[Row], is_stopped: Callable[[], bool] = lambda: False) -> None:
        self._rows, self._is_stopped = rows, is_stopped
        self.ended = False

    @property
    def stopped(self) -> bool:
        return self._is_stopped()

    def take(self, wait: bool) -> Row | None:
        row = None if self.ended or self.stopped else next(self._rows, None)
        self.ended = row is None
        return row


class RowServer:
    """Serves rows with one engine.

    Args:
        sampling: sampling parameters of the run; those of a row go before.

    Attributes:
        faults: how many rows ended for each kind of fault, and not for one of their own.
    """

    def __init__(self, engine: CompiledEngine, sampling: Mapping[str, Any]) -> None:
        self._engine = engine
        self._sampling = {**sampling, "output_kind": "final"}
        self._params = SamplingParams(**self._sampling)
        self._texts = TokenTexts(engine.tokenizer, self._params.skip_special_tokens)
        self._queued: dict[str, Row] = {}
        self.faults: Counter[str] = Counter()
        self._failures = engine.stats().failures
        most = max(QUEUED_ROWS, 2 * engine.runner.limits.max_num_seqs)
        self._most_queued = min(most, engine.config.max_queued_requests)

    def serve(self, source: RowSource) -> Iterator[RowResult | None]:
        """Each row's result as the row ends, and None after each step.

        A row that was dropped because the source stopped has no result.
        """
        while True:
            while len(self._queued) < self._most_queued and not source.ended:
                row = source.take(wait=not self._queued)
                if row is None:
                    break
                refused = self._add(row)
                if refused is not None:
                    yield refused
            if source.stopped:
                for request_id in self._engine.abort_waiting():
                    del self._queued[request_id]
            if not self._queued and source.ended:
                return
            for output in self._step():
                if output.finished:
                    yield self._result(self._queued.pop(output.request_id), output)
            yield None

    def _step(self) -> list[RequestOutput]:
        """One step. After an error outside the device, which ends all requests, the next step says so of each."""
        try:
            return self._engine.step()
        except Exception:
            self.faults["error outside the device"] += 1
            return self._engine.step()

    def _add(self, row: Row) -> RowResult | None:
        """Queue a row; or its error, if it cannot be."""
        if row.error is not None:
            return _refused(row, row.error, is_users=True)
        request_id = str(row.index)
        try:
            self._engine.add_request(request_id, self._prompt_of(row), self._params_of(row), row.priority)
        except (ValueError, ImportError) as error:  # a package is missing that this row needs: others may not
            return _refused(row, str(error), is_users=True)
        except Exception as error:  # a fault of ours, or of a helper process: it must not cost the other rows
            return _refused(row, f"the row could not be taken in: {type(error).__name__}: {error}", is_users=False)
        self._queued[request_id] = row
        return None

    def _prompt_of(self, row: Row) -> Prompt:
        if row.messages is not None:
            return self._engine.encode_chat(row.messages, **row.chat_options)
        assert row.prompt is not None
        return row.prompt

    def _params_of(self, row: Row) -> SamplingParams:
        params = self._params
        if row.sampling:
            params = SamplingParams(**{**self._sampling, **row.sampling})
        if params.seed is not None or params.greedy:
            return params
        # From the row's index, not from how many rows came before it: a resumed run gives the same tokens.
        digest = hashlib.sha256(f"{self._engine.config.seed}/{row.index}".encode()).digest()
        return dataclasses.replace(params, seed=int.from_bytes(digest[:8], "little", signed=True))

    def _result(self, row: Row, output: RequestOutput) -> RowResult:
        num_output = sum(len(completion.token_ids) for completion in output.outputs)
        counts = len(output.prompt_token_ids), output.num_cached_tokens, num_output
        failure = failure_of(output)
        if failure is None:
            return RowResult(row.index, row.name, answer_line(row, output, self._texts), None, *counts)
        failures = self._engine.stats().failures
        self.faults.update(kind for kind, count in failures.items() if count > self._failures[kind])
        self._failures = failures
        return RowResult(row.index, row.name, error_line(row, failure, is_users=False), failure, *counts)


def _refused(row: Row, error: str, *, is_users: bool) -> RowResult:
    return RowResult(row.index, row.name, error_line(row, error, is_users=is_users), error)


def failure_of(output: RequestOutput) -> str | None:
    """Why a finished request has no result; None if every continuation came to its end."""
    for completion in output.outputs:
        if completion.finish_reason not in ("stop", "length"):
            return str(completion.stop_reason or completion.finish_reason)
    return None


def check_faults(faults: Mapping[str, int], most: int) -> None:
    """``EngineFaultsError`` if there are more than ``most`` of a kind."""
    for kind, count in faults.items():
        if count > most:
            raise EngineFaultsError(
                f"{count} rows ended for the same kind of fault ({kind}), and --max-faults allows {most}: the model, "
                "the memory or the machine may be broken; the errors of these rows say more"
            )
