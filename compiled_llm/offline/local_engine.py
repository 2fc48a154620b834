"""LocalEngine: an offline run with one engine, in this process."""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import psutil

from compiled_llm.api.command_line import engine_config
from compiled_llm.engine.engine import CompiledEngine
from compiled_llm.offline.progress import RowResult, RunProgress
from compiled_llm.offline.rows import Row
from compiled_llm.offline.serving import RowIterator, RowServer, RowSource
from compiled_llm.offline.summary import detailed_rows, engine_rows, one_of_many
from compiled_llm.report import machine_limits
from compiled_llm.report.report import RunReport


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
        self._server = RowServer(self._engine, sampling)
        self._start_seconds = time.time() - psutil.Process().create_time()  # of the process: imports count

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

    def serve_source(self, source: RowSource) -> Iterator[RowResult | None]:
        """As ``RowServer.serve``."""
        return self._server.serve(source)

    def serve(self, rows: Iterator[Row], is_stopped: Callable[[], bool]) -> Iterator[RowResult | None]:
        """Each row's result as the row ends, and None after each step; once stopped, of the rows that run."""
        return self._server.serve(RowIterator(rows, is_stopped))

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
