"""Compile a model's graphs ahead of serving, and carry what was compiled to other machines of the same kind.

    compiled-llm compile --model DIR --bucket-sizes 1,8,32 --export model.bundle
    compiled-llm compile --model DIR --bucket-sizes 1,8,32 --import model.bundle

Without ``--export`` it fills this user's cache, so that the next start with the same flags compiles nothing.
``--import`` takes a bundle in first, and then starts on it. A bundle is a program: import only those of people whose
programs you would run.

The report says what the start took, phase by phase, from the start of this process: with an empty cache directory
(``COMPILED_LLM_CACHE``) a cold start, and the next one a warm start. It ends in one JSON line.

Exit status: 0 when done, 1 when an imported bundle did not spare all compiling, 2 for bad arguments.
"""

import argparse
import contextlib
import dataclasses
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from compiled_llm.api import tables
from compiled_llm.api.command_line import FlagParser, engine_config, errors_end
from compiled_llm.checkpoint.shapes import engine_parser, model_of
from compiled_llm.system import clock


def parser(program: str) -> FlagParser:
    made = engine_parser(program, "Compile a model's graphs ahead of serving, or carry them to other machines.")
    bundle = "write a bundle of what this model's start uses"
    made.add_argument("--export", type=tables.output_file, metavar="FILE", help=bundle)
    taken = "take a bundle in before starting: a program, so only of those whose programs you would run"
    made.add_argument("--import", type=Path, metavar="FILE", dest="imported", help=taken)
    tables.add_json_flag(made)
    return made


def main(program: str, arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    args = parser(program).parse_checked(_check, arguments)
    with errors_end(program):
        result = _compile(args)
    seconds = {name: f"{value:.2f}" for name, value in result["phases"].items()}
    tables.print_table(f"seconds of the start, {result['dtype']}", seconds)
    tables.finish(result, args.json)
    return 1 if args.imported is not None and result["misses"] else 0


def _check(args: argparse.Namespace) -> None:
    if args.enforce_eager:
        raise ValueError("--enforce-eager compiles nothing: leave it out")
    if not args.wait_for_compile:
        raise ValueError("--no-wait-for-compile compiles only while requests are served: leave it out")


def _compile(args: argparse.Namespace) -> dict[str, Any]:
    """Start the engine that the flags describe, and say what its start found and made."""
    from compiled_llm.compiling.bundle import export_bundle, import_bundle
    from compiled_llm.engine.engine import CompiledEngine

    result: dict[str, Any] = {}
    imports = time.perf_counter() - clock.PACKAGE_IMPORTED
    if args.imported is not None:
        print(f"taking in {args.imported}, which is a program: its code runs from now on", file=sys.stderr)
        result["imported_files"] = import_bundle(args.imported)
    with contextlib.ExitStack() as stack:
        arguments = stack.enter_context(model_of(args))
        config = engine_config(argparse.Namespace(**{**vars(args), **arguments}))
        started = time.perf_counter()
        engine = stack.enter_context(CompiledEngine.from_config(config))
        seconds = time.perf_counter() - started
        report, phases = engine.compile_report(), dataclasses.asdict(engine.runner.start_times)
        print(report)
        if args.export is not None:
            result["exported_files"] = export_bundle(args.export, engine.own_runner.compiled_files())
            result["bundle_bytes"] = args.export.stat().st_size
    phases = {"imports": imports, **phases, "other": seconds - sum(phases.values())}
    return result | {
        "dtype": str(engine.runner.dtype).removeprefix("torch."),
        "seconds": round(seconds, 3),
        "phases": {name: round(value, 3) for name, value in phases.items()},
        "hits": report.cache_count("hit"),
        "misses": report.cache_count("miss"),
        "graphs": [
            {"name": r.name, "seconds": round(r.compile_seconds, 3), "cache": r.cache, "reason": r.reason}
            for r in report.reports
        ],
    }
