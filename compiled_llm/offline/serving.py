"""Serving with one engine of this process: rows from a source go through it; each ends as a result or as an error."""

import argparse
import dataclasses
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from compiled_llm.api.command_line import engine_config
from compiled_llm.api.config import EngineConfig
from compiled_llm.api.lora_request import LoRAModule, read_lora_modules
from compiled_llm.api.outputs import RequestOutput
from compiled_llm.api.sampling_params import SamplingParams, derived_seed
from compiled_llm.checkpoint.generation_config import default_sampling_params, listed, suggested_sampling, with_room
from compiled_llm.checkpoint.model_files import checkpoint_directory
from compiled_llm.engine.engine import CompiledEngine
from compiled_llm.offline.display import detailed_rows, engine_rows, one_of_many
from compiled_llm.offline.flags import DEFAULT_SAMPLING
from compiled_llm.offline.formats import answer_line, error_line
from compiled_llm.offline.rows import Row, RowResult, RowSource, RunProgress
from compiled_llm.openai.answers import TokenTexts
from compiled_llm.report import machine_limits
from compiled_llm.report.report import RunReport
from compiled_llm.system import clock
from compiled_llm.text.prompts import Prompt

QUEUED_ROWS = 1000  # in the engine at once, or twice as many as can run: enough for the scheduler


class EngineFaultsError(Exception):
    """The engine failed more often than is allowed."""


class RowServer:
    """Serves rows with one engine.

    Args:
        sampling: sampling parameters of the run; a row's own go before.
        adapters: by the names that rows give.

    Raises:
        ValueError: an adapter cannot be served.

    Attributes:
        faults: how many rows ended for each kind of fault, and not for one of their own.
    """

    def __init__(
        self,
        engine: CompiledEngine,
        sampling: Mapping[str, Any],
        adapters: Mapping[str, LoRAModule] = MappingProxyType({}),
    ) -> None:
        self._engine, self._adapters = engine, adapters
        for module in adapters.values():
            engine.begin_reading(module.lora_request).result()
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
        adapter = None if row.lora is None else self._adapters[row.lora].lora_request
        try:
            prompt, params = self._prompt_of(row), self._params_of(row)
            self._engine.add_request(request_id, prompt, params, row.priority, lora_request=adapter)
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
        return with_seed(params, self._engine.config.seed, row.index)

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


def with_seed(params: SamplingParams, engine_seed: int, index: int) -> SamplingParams:
    """``params`` of the row of this index, with a seed if it needs one and has none.

    It follows from the row's index, not from how many rows came before it: a resumed run must not change a token.
    """
    if params.seed is not None or params.greedy:
        return params
    return dataclasses.replace(params, seed=derived_seed(f"{engine_seed}/{index}"))


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


def run_sampling(config: EngineConfig, given: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """The sampling parameters of a run: each as it is given, else as the checkpoint suggests, else by default.

    Returns:
        Arguments of ``SamplingParams``, and a text of them that names generation_config.json where it decides.

    Raises:
        ValueError: they do not go together.
    """
    suggested = suggested_sampling(checkpoint_directory(config))
    suggested = {name: value for name, value in suggested.items() if name not in given}
    default_sampling_params(suggested)  # its error message names the file
    room = with_room(suggested, int(DEFAULT_SAMPLING["max_tokens"]))
    sampling = {**DEFAULT_SAMPLING, **room, **given}
    SamplingParams(**sampling)
    others = {name: sampling[name] for name in {**DEFAULT_SAMPLING, **given} if name not in suggested}
    parts = [listed(others)] + [f"by generation_config.json: {listed(suggested)}"] * bool(suggested)
    return sampling, "; ".join(filter(None, parts))


class LocalEngine:
    """Starts an engine, serves rows, and reports what it did.

    Args:
        args: flags of the command.
        sampling: sampling parameters of the run.

    Raises:
        ValueError, OSError: as the engine raises them.
    """

    def __init__(self, args: argparse.Namespace, sampling: Mapping[str, Any]) -> None:
        self._args = args
        self._engine = CompiledEngine.from_config(engine_config(args))
        self._server = RowServer(self._engine, sampling, read_lora_modules(args.lora_modules))
        self._start_seconds = time.perf_counter() - clock.PACKAGE_IMPORTED

    def prepare_report(self) -> None:
        """Measure the machine's limits and start the engine's log, if the flags ask for them.

        Raises:
            RuntimeError: the limits cannot be measured.
        """
        args, runner = self._args, self._engine.runner
        if args.report is not None or args.remeasure_limits:
            machine_limits.measured(runner.device, runner.dtype, remeasure=args.remeasure_limits)
        if args.report is not None:
            os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # torch's profiler writes its stages to the terminal else
            steps = 4 if args.report_profile_steps is None else args.report_profile_steps
            self._engine.reset_report(profile_steps=steps)

    def describe_start(self) -> str:
        return f"{self._engine.compile_report()}\n\n{self._engine.memory_report()}"

    @property
    def max_num_seqs(self) -> int:
        return self._engine.runner.limits.max_num_seqs

    def serve(self, source: RowSource) -> Iterator[RowResult | None]:
        """Each row's result as the row ends, and None after each step."""
        return self._server.serve(source)

    def faults(self) -> dict[str, int]:
        """How many rows ended for each kind of fault, and not for one of their own."""
        return dict(self._server.faults)

    def observe(self, progress: RunProgress) -> None:
        """Set what ``progress`` says of the engine."""
        stats = self._engine.stats()
        progress.running, progress.waiting = stats.num_running, stats.num_waiting
        progress.kv_share = stats.used_blocks / stats.num_kv_blocks

    def finish(self) -> tuple[dict[str, str], bool]:
        """Write what ``--report`` and ``--trace`` ask for.

        Returns:
            Rows of the summary about the engine, and whether all was written.
        """
        engine, args = self._engine, self._args
        # Known limits are measured again if this run shows that they are too low. Unknown ones only with --report.
        known = machine_limits.cached(engine.runner.device, engine.runner.dtype) is not None
        report = engine.report(measure_limits=known or args.report is not None)
        is_written = self._write(report)
        if args.report is not None and is_written:
            print(f"\nReport: {args.report / 'report.html'}")
        if args.details:
            return detailed_rows(engine, report, self._start_seconds), is_written
        rows = engine_rows(engine, report, self._start_seconds)
        return one_of_many(rows) if args.workers > 1 or args.ray is not None else rows, is_written

    def _write(self, report: RunReport) -> bool:
        """Whether the report and the trace were written, where they are asked for."""
        args, is_written = self._args, True
        for flag, path in (("--report", args.report), ("--trace", args.trace)):
            try:
                if path is not None and flag == "--report":
                    report.write(path)
                elif path is not None:
                    path.write_text(json.dumps(self._engine.trace(), indent=1) + "\n")
            except OSError as error:
                print(f"error: {flag} {path}: {error}", file=sys.stderr)
                is_written = False
        return is_written

    def close(self) -> None:
        self._engine.close()
