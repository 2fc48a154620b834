"""Serve a file of prompts and print the results and a summary.

    python scripts/serve_offline.py --bucket-sizes 1,8,32
    python scripts/serve_offline.py --model DIR --input prompts.jsonl --output out.jsonl --resume

Without ``--input`` the bundled prompts run through the bundled model. ``--input`` takes .jsonl (rows with ``prompt`` or
``prompt_token_ids``, and optionally ``cache_salt`` and ``priority``) or .txt (a prompt a line).

``--output`` is a new file, locked for the run and written row by row, each row as soon as it is done. It holds the rows
that were served; ``index`` is the place of a row in the input, from 0. Rows that fail are named on stderr.
``--resume`` continues the file of an earlier run, however that ended: it serves the rows that are not in the file,
including those that failed, and gives the same tokens as one run would.

``--check`` serves no file: it compares compiled steps, uncompiled steps and transformers on the first prompts of
``--input``, or on a few of its own, and prints one table.

``--report DIR`` writes a report of the run and its share of the machine's limits (``report.html``, ``report.json``; see
docs/report.md), ``--trace FILE`` the shapes of its steps, which ``scripts/tune_buckets.py`` reads.

Exit status: 0 when every row was served, 1 when some failed or a result could not be written, or for a ``--check`` that
found a difference, 2 for bad arguments, 128 + the signal's number after SIGINT (130) or SIGTERM (143), 141 when stdout
was closed and there is no ``--output``.
"""

import argparse
import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
import signal
import stat
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
from offline_input import InputRow, read_rows
from offline_output import OutputFile, failure_of
from offline_process import GuardedStream, naming, stop_on_signals
from tqdm import tqdm

import compiled_llm
from compiled_llm.command_line import (
    FlagParser,
    add_engine_arguments,
    add_sampling_arguments,
    engine_config,
    errors_end,
    sampling_arguments,
    sampling_params,
)
from compiled_llm.sampling_params import SamplingParams

if TYPE_CHECKING:  # they load torch, which takes seconds: bad arguments are found before
    from compiled_llm import CompiledEngine, RequestOutput
    from compiled_llm.report.report import RunReport

BUNDLED_PROMPTS = Path(compiled_llm.__file__).parent / "demo_model" / "prompts.jsonl"
DEFAULT_SAMPLING = {"max_tokens": 64, "temperature": 0.7}  # unless flags or the checkpoint give others
QUEUED_ROWS = 1000  # in the engine at once, or twice as many as can run: enough for the scheduler
CHECKED_ROWS = 4
REPORT_FILES = ("report.html", "report.json", "trace.json")


def parse_arguments() -> argparse.Namespace:
    parser = FlagParser(description="Serve a file of prompts and print the results and a summary.")
    parser.add_argument("--input", type=Path, help="prompts, .jsonl or .txt (default: the bundled prompts)")
    parser.add_argument("--output", type=Path, metavar="FILE.jsonl", help="write a JSON row for each finished request")
    parser.add_argument("--resume", action="store_true", help="keep the rows of --output, serve the missing ones")
    parser.add_argument("--quiet", action="store_true", help="print the summary only")
    parser.add_argument("--report", type=Path, metavar="DIR", help="write a report of the run there, as HTML and JSON")
    parser.add_argument(
        "--report-profile-steps",
        type=int,
        metavar="N",
        help="for the report, run N steps of each bucket a second time under torch's profiler (default: 4)",
    )
    parser.add_argument("--trace", type=Path, metavar="FILE", help="write the shapes of all steps, for tune_buckets.py")
    remeasure = "measure the machine's limits even if they are known"
    parser.add_argument("--remeasure-limits", action="store_true", help=remeasure)
    check = (
        f"compare compiled, uncompiled and transformers on the first {CHECKED_ROWS} prompts of --input, or on our own"
    )
    parser.add_argument("--check", action="store_true", help=check)
    add_engine_arguments(parser)
    add_sampling_arguments(parser, **DEFAULT_SAMPLING)
    args = parser.parse_args()
    if args.resume and args.output is None:
        parser.error("--resume needs --output, the file to resume")
    files = {"--output": args.output, "--report": args.report, "--trace": args.trace}
    written = [flag for flag, path in files.items() if path is not None]
    if args.check and (written or sampling_arguments(args)):
        parser.error(f"--check serves no file: leave out {', '.join(written) or 'the sampling parameters'}")
    if args.report is None and args.report_profile_steps is not None:
        parser.error("--report-profile-steps needs --report, the directory to write to")
    if args.report_profile_steps is not None and not 0 <= args.report_profile_steps <= 1000:
        parser.error(f"--report-profile-steps must be from 0 to 1000, given {args.report_profile_steps}")
    return args


# -- Files


def check_files(args: argparse.Namespace) -> None:
    """``ValueError`` or ``OSError`` unless the files of the run are different ones and reports can be written.

    Creates the directory of ``--report``.
    """
    files = {"--input": args.input, "--output": args.output, "--trace": args.trace, "--report": args.report}
    reports = {} if args.report is None else {f"{name} of --report": args.report / name for name in REPORT_FILES}
    given = [(flag, path) for flag, path in (files | reports).items() if path is not None]
    for (flag, path), (other_flag, other_path) in itertools.combinations(given, 2):
        if is_same_file(path, other_path):
            raise ValueError(f"{flag} and {other_flag} must be different files, given {path} and {other_path}")
    if args.report is not None:
        with naming(f"--report {args.report}"):
            try:
                args.report.mkdir(parents=True, exist_ok=True)
            except FileExistsError:
                raise ValueError(f"--report must be a directory, given {args.report}") from None
    for flag, path in (reports | ({} if args.trace is None else {"--trace": args.trace})).items():
        check_writable(flag, path)


def is_same_file(path: Path, other: Path) -> bool:
    """Whether two names, links followed, are of one file; it need not be there."""
    both_exist = os.path.exists(path) and os.path.exists(other)
    return os.path.samefile(path, other) if both_exist else os.path.realpath(path) == os.path.realpath(other)


def check_writable(flag: str, path: Path) -> None:
    """``ValueError`` or ``OSError`` unless a regular file can be written there. A file that is there is kept."""
    target = os.path.realpath(path)
    with naming(f"{flag} {path}"):
        try:
            os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
            os.unlink(target)
        except FileExistsError:
            descriptor = os.open(target, os.O_WRONLY | os.O_NONBLOCK)
            is_regular = stat.S_ISREG(os.fstat(descriptor).st_mode)
            os.close(descriptor)
            if not is_regular:
                raise ValueError(f"{flag} must be a regular file, given {path}") from None


# -- Serving


def serve(
    engine: "CompiledEngine", rows: Sequence[InputRow], params: SamplingParams
) -> "Iterator[tuple[InputRow, RequestOutput | ValueError]]":
    """Each row with its output as it finishes, or with the ``ValueError`` that refused it; more urgent rows first."""
    waiting = deque(sorted(rows, key=lambda row: row.priority))
    queued: dict[str, InputRow] = {}
    most_queued = max(QUEUED_ROWS, 2 * engine.runner.limits.max_num_seqs)
    most_queued = min(most_queued, engine.config.max_queued_requests)
    while waiting or engine.has_unfinished_requests():
        while waiting and len(queued) < most_queued:
            row = waiting.popleft()
            # From the row's index, not from how many rows came before it: a resumed run gives the same tokens.
            digest = hashlib.sha256(f"{engine.config.seed}/{row.index}".encode()).digest()
            seed = int.from_bytes(digest[:8], "little", signed=True) if params.seed is None else params.seed
            try:
                engine.add_request(str(row.index), row.prompt, dataclasses.replace(params, seed=seed), row.priority)
                queued[str(row.index)] = row
            except ValueError as error:
                yield row, error
        for output in engine.step():
            if output.finished:
                yield queued.pop(output.request_id), output
    for row in queued.values():
        yield row, ValueError("the engine returned no result")


# -- The run


def prepare(args: argparse.Namespace) -> tuple[list[InputRow], OutputFile | None]:
    """The rows and the output file. Ends the program if an argument is bad, as far as that shows without the model."""
    with errors_end("serve_offline"):
        engine_config(args)
        sampling_params(args, **DEFAULT_SAMPLING)
        rows = read_rows(args.input or BUNDLED_PROMPTS)
        check_files(args)
        return rows, None if args.output is None else OutputFile(args.output, rows, resume=args.resume)


def prepare_sampling(args: argparse.Namespace, rows: Sequence[InputRow]) -> tuple[SamplingParams, str]:
    """The parameters and a text of them: those of the flags, else the checkpoint's, else our defaults.

    Ends the program where they do not go together, or ``rows`` have text and the model has no tokenizer.
    """
    from compiled_llm.engine.generation_config import default_sampling_params, listed, suggested_sampling
    from compiled_llm.engine.model_files import checkpoint_directory, has_tokenizer

    with errors_end("serve_offline"):
        config = engine_config(args)
        directory = checkpoint_directory(config)
        texts = [row for row in rows if "prompt" in row.prompt]
        if texts and not has_tokenizer(config, directory):
            raise ValueError(
                f"{directory} has no tokenizer, and {len(texts)} of {len(rows)} rows are text, first {texts[0].name}: "
                "give --tokenizer, or rows with prompt_token_ids"
            )
        given = sampling_arguments(args)
        suggested = {name: value for name, value in suggested_sampling(directory).items() if name not in given}
        default_sampling_params(suggested)  # its error message names the file
        params = SamplingParams(**{**DEFAULT_SAMPLING, **suggested, **given})
    others = {name: value for name, value in {**DEFAULT_SAMPLING, **given}.items() if name not in suggested}
    parts = [listed(others), suggested and f"by generation_config.json: {listed(suggested)}"]
    return params, "; ".join(filter(None, parts))


def prepare_report(engine: "CompiledEngine", args: argparse.Namespace) -> None:
    """Measure the machine's limits and start the engine's log, if the flags ask for them."""
    from compiled_llm.report import machine_limits

    if args.report is not None or args.remeasure_limits:
        with errors_end("serve_offline", (RuntimeError,), status=1):
            machine_limits.measured(engine.runner.device, engine.runner.dtype, remeasure=args.remeasure_limits)
    if args.report is not None:
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # torch's profiler writes its stages to the terminal otherwise
        engine.reset_report(profile_steps=4 if args.report_profile_steps is None else args.report_profile_steps)


def serve_all(
    engine: "CompiledEngine", rows: Sequence[InputRow], params: SamplingParams, results: OutputFile | None
) -> "list[RequestOutput]":
    """Serve ``rows`` and write them to ``results``; returns the outputs. Rows that fail are left out, and named."""
    outputs, failures = [], {}
    try:
        with tqdm(total=len(rows), unit="prompt") as bar:
            for row, output in serve(engine, rows, params):
                failure = str(output) if isinstance(output, ValueError) else failure_of(output)
                if failure is not None:
                    failures[row.index] = f"{row.name} failed: {failure}"
                else:
                    if results is not None:
                        results.write(row.index, output)
                    outputs.append(output)
                bar.update()
    finally:
        for _, message in sorted(failures.items()):
            print(message, file=sys.stderr)
    return outputs


def write_reports(engine: "CompiledEngine", report: "RunReport", args: argparse.Namespace) -> bool:
    """Write what ``--report`` and ``--trace`` ask for; returns whether that worked."""
    failed = False
    for flag, path in (("--report", args.report), ("--trace", args.trace)):
        try:
            if path is not None and flag == "--report":
                report.write(path)
            elif path is not None:
                path.write_text(json.dumps(engine.trace(), indent=1) + "\n")
        except OSError as error:
            print(f"serve_offline: error: {flag} {path}: {error}", file=sys.stderr)
            failed = True
    return not failed


def run_check(args: argparse.Namespace) -> int:
    """Compare the ways to compute the model; returns the exit status."""
    with errors_end("serve_offline"):
        rows = [] if args.input is None else read_rows(args.input)
        bad = next((row for row in rows[:CHECKED_ROWS] if row.error is not None), None)
        if bad is not None:
            raise ValueError(f"{bad.name}: {bad.error}")
        config = engine_config(args)
        from compiled_llm import CompiledEngine

        with CompiledEngine.from_config(config) as engine:
            report = engine.check([row.prompt for row in rows[:CHECKED_ROWS]] or None)
    print(report)
    return 0 if report.agrees else 1


def run(args: argparse.Namespace, stdout: GuardedStream) -> int:
    """Serve the rows that are left to serve; returns the exit status."""
    if args.check:
        return run_check(args)
    rows, results = prepare(args)
    with results or contextlib.nullcontext():
        done = set(results.done) if results is not None else set()
        todo = [row for row in rows if row.error is None and row.index not in done]
        for row in rows:
            if row.error is not None:
                print(f"{row.name} failed: {row.error}", file=sys.stderr)
        if done:
            print(f"{len(done)} rows were there already")
        if not todo:
            print("No row is left to serve: the engine did not start, and there is no summary, report or trace.")
            return 0 if len(done) == len(rows) else 1
        params, sampling = prepare_sampling(args, todo)
        from compiled_llm import CompiledEngine

        with errors_end("serve_offline"):
            engine = CompiledEngine.from_config(engine_config(args))
        start_seconds = time.time() - psutil.Process().create_time()  # of the process: imports count
        prepare_report(engine, args)
        if not args.quiet:
            print(engine.compile_report())
            print(f"\n{engine.memory_report()}", flush=True)
        if stdout.failure is not None and results is None:
            return 1  # no output is possible; main() prints the reason
        started = time.perf_counter()
        outputs = serve_all(engine, todo, params, results)
        seconds = time.perf_counter() - started

    from offline_summary import print_results, print_summary

    from compiled_llm.report import machine_limits

    if not args.quiet:
        print_results(outputs)
    # Known limits are measured again if this run shows that they are too low. Unknown ones only with --report.
    known = machine_limits.cached(engine.runner.device, engine.runner.dtype) is not None
    report = engine.report(measure_limits=known or args.report is not None)
    print_summary(engine, report, outputs, max(seconds, 1e-9), start_seconds, sampling)
    is_reported = write_reports(engine, report, args)
    if args.report is not None and is_reported:
        print(f"\nReport: {args.report / 'report.html'}")
    num_failed = len(rows) - len(done) - len(outputs)
    if num_failed:
        again = "" if results is None else "; --resume serves them again"
        print(f"{num_failed} of {len(rows)} rows failed{again}", file=sys.stderr)
    return 0 if is_reported and not num_failed else 1


def main() -> int:
    with (
        contextlib.redirect_stdout(GuardedStream(sys.stdout)) as stdout,
        contextlib.redirect_stderr(GuardedStream(sys.stderr)),
    ):
        try:
            with stop_on_signals():
                args = parse_arguments()
                status = run(args, stdout)
        except KeyboardInterrupt as interrupt:
            number = signal.Signals(interrupt.args[0] if interrupt.args else signal.SIGINT)
            print(f"serve_offline: stopped by {number.name}", file=sys.stderr)
            return 128 + number
        except OSError as error:
            print(f"serve_offline: error: {error}", file=sys.stderr)
            return 1
        finally:
            stdout.flush()  # here, where its failure is dealt with
        if isinstance(stdout.failure, BrokenPipeError):  # as with `| head`: no error, if the rows are in a file
            return status if args.output is not None else 128 + signal.SIGPIPE
        if stdout.failure is not None:
            print(f"serve_offline: error: stdout: {stdout.failure.strerror}", file=sys.stderr)
            return 1
    return status


if __name__ == "__main__":
    sys.exit(main())
