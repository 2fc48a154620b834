"""An offline run from the input to the summary, once the flags are known to be good."""

import argparse
import contextlib
import itertools
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

from compiled_llm.api.command_line import engine_config, errors_end, sampling_arguments
from compiled_llm.api.lora_request import read_lora_modules
from compiled_llm.checkpoint.model_files import DEMO_MODEL, checkpoint_directory, has_tokenizer
from compiled_llm.engine.engine import CompiledEngine
from compiled_llm.offline.display import Display, PrintedResults, print_summary, run_rows
from compiled_llm.offline.files import check_writable, manifest_path
from compiled_llm.offline.flags import CHECKED_ROWS
from compiled_llm.offline.local_workers import LocalProcesses, local_settings, visible_gpus
from compiled_llm.offline.manifest import check_manifest, check_replaceable, digests_of, make_manifest, write_manifest
from compiled_llm.offline.order import OrderGain, ordered_for_speed
from compiled_llm.offline.output_file import OutputFile
from compiled_llm.offline.ray_workers import RayCluster, RayProcesses, ray_settings
from compiled_llm.offline.reading import RowReader
from compiled_llm.offline.rows import Row, RowIterator, RowResult, RunProgress, with_adapter
from compiled_llm.offline.serving import LocalEngine, check_faults, run_sampling
from compiled_llm.offline.workers import WorkerEngines
from compiled_llm.system.process import GuardedStream, StopSignals
from compiled_llm.worker.device import resolve_device

BUNDLED_PROMPTS = DEMO_MODEL / "prompts.jsonl"
_OBSERVE_SECONDS = 0.25
_NAMED_FAILURES = 20


class Results:
    """What becomes of results: lines of the output file, or text on stdout; and a count of each.

    Args:
        output: where the lines go; None: they are printed in the order of the input, if ``shown``.
    """

    def __init__(self, output: OutputFile | None, shown: bool, progress: RunProgress) -> None:
        self._output, self.progress = output, progress
        self._printed = PrintedResults() if shown and output is None else None

    def add(self, result: RowResult) -> None:
        """``OSError`` if it cannot be written."""
        self.progress.add(result)
        if self._output is not None:
            self._output.write(result.index, result.line, result.error is not None)
        if result.error is not None:
            self._name_failure(result)
        if self._printed is not None:
            self._printed.add(result.index, None if result.error is not None else result.line)

    def sync_if_due(self) -> None:
        """Let ``OutputFile.sync_if_due`` look at its clock, also while no row ends."""
        if self._output is not None:
            self._output.sync_if_due()

    def close(self) -> None:
        """No more will come: print what waits for rows that have none."""
        if self._printed is not None:
            self._printed.end()

    def _name_failure(self, result: RowResult) -> None:
        """Say why a row failed, on stderr: of the first ones, or of all where there is no file that has the reasons."""
        if self._output is None or self.progress.failed <= _NAMED_FAILURES:
            print(f"{result.name} failed: {result.error}", file=sys.stderr)
        elif self.progress.failed == _NAMED_FAILURES + 1:
            print("More rows failed: --output has the reason of each", file=sys.stderr)


def run(program: str, args: argparse.Namespace, stdout: GuardedStream, signals: StopSignals) -> int:
    """Serve the rows that are left to serve; returns the exit status."""
    if args.check:
        return run_check(program, args)
    with errors_end(program):
        reader = RowReader(args.input or [str(BUNDLED_PROMPTS)])
        sampling, sampling_text = run_sampling(engine_config(args), sampling_arguments(args))
        output = None if args.output is None else OutputFile(args.output, resume=args.resume)
    with contextlib.ExitStack() as files:
        files.enter_context(output or contextlib.nullcontext())
        with errors_end(program):
            cluster = connect(args, files)
            adapters = read_lora_modules(args.lora_modules)
            digests = {} if output is None and cluster is None else digests_of(engine_config(args), adapters)
            manifest = None
            if output is not None:
                manifest = new_manifest(args, output, reader, sampling, digests)
        progress = RunProgress(resumed=0 if output is None else len(output.done))
        if progress.resumed:
            print(f"{progress.resumed} rows were there already")
        rows: Iterator[Row] = (
            with_adapter(row, adapters) for row in reader if output is None or row.index not in output.done
        )
        first = next(rows, None)
        if first is None:
            put_in_order(program, args, output)
            print("No row is left to serve: the engine did not start, and there is no summary, report or trace.")
            return 1 if output is not None and output.num_failed else 0
        with errors_end(program):
            check_tokenizer(args, first)
            engine = start_engines(program, args, sampling, cluster, digests)
            files.callback(engine.close)
        with errors_end(program, (RuntimeError,), status=1):
            engine.prepare_report()
        if args.details and not args.quiet:
            print(engine.describe_start(), flush=True)
        if manifest is not None:
            write_manifest(manifest_path(args.output), manifest)
        gain = OrderGain()
        rows = ordered_for_speed(itertools.chain([first], rows), args.order_window, sampling["max_tokens"], gain)
        results = Results(output, not args.quiet, progress)
        serve(engine, reader, rows, results, signals, stdout, args)
        if stdout.failure is not None and output is None:
            return 1  # no output is possible; main() prints the reason
        reader.check_unchanged()
        if signals.number is None:
            put_in_order(program, args, output)

        engine_rows, is_written = engine.finish()
    order = {"order": str(gain)} if args.details or gain.is_worth_saying else {}
    print_summary({**run_rows(progress, sampling_text), **order, **engine_rows})
    print_failures(progress, output)
    if signals.number is not None:
        if output is not None:
            print(output.describe(), file=sys.stderr)
        raise KeyboardInterrupt(signals.number)
    num_failed = progress.failed if output is None else output.num_failed
    return 0 if is_written and not num_failed else 1


def print_failures(progress: RunProgress, output: OutputFile | None) -> None:
    """How many rows failed, on stderr, if any did."""
    if progress.failed:
        again = "" if output is None else "; --resume --retry-errors serves them again"
        print(f"{progress.failed} of {progress.rows} rows failed{again}", file=sys.stderr)


def connect(args: argparse.Namespace, files: contextlib.ExitStack) -> RayCluster | None:
    """To the cluster of ``--ray``, which decides what the engines run on. ``files`` closes the connection."""
    if args.ray is None:
        return None
    cluster = RayCluster(args.ray)
    files.callback(cluster.close)
    args.device = cluster.device_type(args.device)
    return cluster


def serve(
    engine: LocalEngine | WorkerEngines,
    reader: RowReader,
    rows: Iterator[Row],
    results: Results,
    signals: StopSignals,
    stdout: GuardedStream,
    args: argparse.Namespace,
) -> None:
    """Serve ``rows`` until they end, or until a signal comes and the rows that run have ended.

    Without an output file the results go to ``stdout``: then its failure stops the run as a signal does.

    Raises:
        EngineFaultsError: faults of a kind ended more rows than ``--max-faults`` allows.
        OSError: the input cannot be read any further, or the output not be written.
    """
    progress, started, observed = results.progress, time.monotonic(), 0.0

    def is_stopped() -> bool:
        return signals.number is not None or (args.output is None and stdout.failure is not None)

    display = Display(sys.stderr, shown=args.progress != "off")
    with signals.gracefully(), contextlib.closing(results), display:
        for result in engine.serve(RowIterator(rows, is_stopped)):
            if result is not None:
                results.add(result)
            if result is not None and result.error is not None:
                check_faults(engine.faults(), args.max_faults)
            now = time.monotonic()
            if now - observed >= _OBSERVE_SECONDS:
                observed = now
                results.sync_if_due()
                progress.seconds, progress.stopping = now - started, is_stopped()
                progress.total, progress.total_is_estimate = reader.total_rows()
                engine.observe(progress)
                display.update(progress)
    progress.seconds = time.monotonic() - started


def new_manifest(
    args: argparse.Namespace, output: OutputFile, reader: RowReader, sampling: dict[str, Any], digests: dict[str, str]
) -> dict[str, Any] | None:
    """The manifest of the run; None if it goes on with the rows of an earlier one, whose manifest stays.

    Raises:
        ValueError: it goes on and gives other results than the earlier one.
        OSError: the manifest cannot be written.
    """
    config = engine_config(args)
    device = args.device if args.ray is not None else resolve_device(config.device).type
    manifest = make_manifest(reader.files, config, sampling, device=device, digests=digests)
    if not output.done:
        check_writable("the manifest of --output", manifest_path(args.output))
        check_replaceable(manifest_path(args.output))
        return manifest
    others = check_manifest(manifest_path(args.output), manifest)
    highest = output.done.highest
    if highest is not None and not reader.has_row(highest):
        raise ValueError(
            f"--resume: --output {args.output} has a line of row {highest}, and the input has no such row: the file "
            "was changed, or is of another input. It is left as it is: give another --output"
        )
    if others:
        print(f"Other versions than before, so rows may differ from those of one run: {'; '.join(others)}")
    if args.retry_errors:
        output.remove_errors()
    return None


def start_engines(
    program: str,
    args: argparse.Namespace,
    sampling: dict[str, Any],
    cluster: RayCluster | None,
    digests: dict[str, str],
) -> LocalEngine | WorkerEngines:
    """``ValueError`` if there is not a core or a GPU on this machine for each of them, or one cannot start."""
    if cluster is None and args.workers == 1:
        return LocalEngine(args, sampling)
    common = {
        "program": program,
        "arguments": args.arguments,
        "sampling": sampling,
        "directory": os.getcwd(),
        "digests": {} if cluster is None else digests,  # other machines may have another model at its path
    }
    if cluster is not None:
        settings = ray_settings(args, cluster, common)
        num_threads = settings[0]["overrides"].get("num_threads", 1)
        needs = {"num_cpus": num_threads, "num_gpus": int(args.device == "cuda")}
        return WorkerEngines(RayProcesses(cluster, needs), settings)
    gpus = visible_gpus(args.device)
    settings = local_settings(args, len(gpus), common)
    return WorkerEngines(LocalProcesses([each["cpus"] for each in settings], gpus), settings)


def put_in_order(program: str, args: argparse.Namespace, output: OutputFile | None) -> None:
    """What ``--ordered`` asks for, once every row has a line. An error ends the program with status 1."""
    if output is not None and args.ordered:
        with errors_end(program, status=1):
            output.put_in_order()


def check_tokenizer(args: argparse.Namespace, first: Row) -> None:
    """``ValueError`` if the first row is text and the model has no tokenizer: then so are most of the others."""
    config = engine_config(args)
    directory = checkpoint_directory(config)
    is_text = first.messages is not None or "prompt" in (first.prompt or {})
    if is_text and not has_tokenizer(config, directory):
        raise ValueError(
            f"{directory} has no tokenizer, and {first.name} is text: give --tokenizer, or rows with prompt_token_ids"
        )


def run_check(program: str, args: argparse.Namespace) -> int:
    """Compare the ways to compute the model; returns the exit status."""
    with errors_end(program):
        rows = [] if args.input is None else list(itertools.islice(RowReader(args.input), CHECKED_ROWS))
        bad = next((row for row in rows if row.error is not None), None)
        if bad is not None:
            raise ValueError(f"{bad.name}: {bad.error}")
        with CompiledEngine.from_config(engine_config(args)) as engine:
            report = engine.check([row.prompt for row in rows if row.prompt is not None] or None)
    print(report)
    return 0 if report.agrees else 1
