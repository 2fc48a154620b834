"""Compile a model's buckets ahead of serving, and carry what was compiled to other machines of the same kind.

    python scripts/compile_model.py --model DIR --bucket-sizes 1,8,32 --export model.bundle
    python scripts/compile_model.py --model DIR --bucket-sizes 1,8,32 --import model.bundle

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
from pathlib import Path
from typing import Any

import bench.own_checkout
import psutil
from bench import tables
from bench.workloads import engine_parser, model_of

from compiled_llm import CompiledEngine
from compiled_llm.api.command_line import engine_config, errors_end
from compiled_llm.compiling.bundle import export_bundle, import_bundle


def parse_arguments() -> argparse.Namespace:
    parser = engine_parser(__doc__)
    parser.add_argument("--export", type=Path, metavar="FILE", help="write a bundle of what this model's start uses")
    parser.add_argument(
        "--import",
        type=Path,
        metavar="FILE",
        dest="imported",
        help="take a bundle in before starting: a program, so only of those whose programs you would run",
    )
    tables.add_json_flag(parser)
    return parser.parse_checked(check_arguments)


def check_arguments(args: argparse.Namespace) -> None:
    if args.enforce_eager:
        raise ValueError("--enforce-eager compiles nothing: leave it out")
    tables.check_target("--export", args.export)
    tables.check_target("--json", args.json)


def compile_model(args: argparse.Namespace) -> dict[str, Any]:
    """Start the engine that the flags describe, and say what its start found and made."""
    result: dict[str, Any] = {}
    imports = time.time() - psutil.Process().create_time()
    if args.imported is not None:
        print(f"taking in {args.imported}, which is a program: its code runs from now on", file=sys.stderr)
        result["imported_files"] = import_bundle(args.imported)
    with contextlib.ExitStack() as stack:
        arguments = stack.enter_context(model_of(args))
        config = engine_config(argparse.Namespace(**{**vars(args), **arguments}))
        started = time.perf_counter()
        engine = stack.enter_context(CompiledEngine.from_config(config))
        seconds = time.perf_counter() - started
        result["dtype"] = str(engine.runner.dtype).removeprefix("torch.")
        report, phases = engine.compile_report(), dataclasses.asdict(engine.runner.start_times)
        print(report)
        if args.export is not None:
            result["exported_files"] = export_bundle(args.export, engine.runner.compiled_files())
            result["bundle_bytes"] = args.export.stat().st_size
    graphs = [
        {"name": r.name, "seconds": round(r.compile_seconds, 3), "cache": r.cache, "reason": r.reason}
        for r in report.reports
    ]
    phases = {"imports": imports, **phases, "other": seconds - sum(phases.values())}
    tables.print_table(
        f"seconds of the start, {result['dtype']}", {name: f"{value:.2f}" for name, value in phases.items()}
    )
    return result | {
        "seconds": round(seconds, 3),
        "phases": {name: round(value, 3) for name, value in phases.items()},
        "hits": report.cache_count("hit"),
        "misses": report.cache_count("miss"),
        "graphs": graphs,
    }


def main() -> int:
    args = parse_arguments()
    with errors_end("compile_model"):
        result = compile_model(args)
    tables.finish(result, args.json)
    return 1 if args.imported is not None and result["misses"] else 0


if __name__ == "__main__":
    sys.exit(main())
