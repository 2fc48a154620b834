"""Propose buckets for the work of earlier runs: --bucket-sizes and --token-bucket-sizes.

    compiled-llm batch --input prompts.jsonl --trace trace.json
    compiled-llm tune buckets --trace trace.json
    compiled-llm tune buckets --trace monday.json tuesday.json --runs-per-start 20 --max-buckets 6

``compiled_llm/tuning/buckets.py`` says how they are found. The output lists where a time was not measured, and warns if
the steps of the trace, computed with these times, take much more or less than the measured time.

Exit status: 0, or 2 if a trace cannot be read or the traces do not belong together.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from compiled_llm.api import tables
from compiled_llm.api.command_line import FlagParser, errors_end


def parser(program: str) -> FlagParser:
    made = FlagParser(prog=program, description="Propose buckets for the work of earlier runs.")
    add = made.add_argument
    add("--trace", type=Path, nargs="+", required=True, metavar="FILE", help="traces of earlier runs")
    add("--max-buckets", type=int, default=8, metavar="N", help="most buckets of a kind (default: 8)")
    runs = "number of such runs per start (default: 1)"
    add("--runs-per-start", type=float, default=1.0, metavar="X", help=runs)
    add("--shrink", action="store_true", help="reduce the capacity to what was used")
    tables.add_json_flag(made)
    return made


def main(program: str, arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    args = parser(program).parse_checked(_check, arguments, max_buckets=1)

    import torch  # which takes seconds

    from compiled_llm.system import hardware
    from compiled_llm.tuning import buckets

    with errors_end(program):
        traces = [buckets.read_trace(path) for path in args.trace]
        result = buckets.tune(traces, args.max_buckets, args.runs_per_start, args.shrink)
    rounded = buckets.rounded_steps(traces)
    if any("gpu" not in trace["machine"] for trace in traces):
        print("steps of a CPU compute no padding: there the sizes matter to target_itl_ms alone\n")
    print(buckets.text_of(result, args.runs_per_start, rounded))
    settings = {name: getattr(args, name) for name in ("max_buckets", "runs_per_start", "shrink")}
    facts = {"machine": hardware.describe(torch.device("cpu")), "rounded_steps": rounded}
    tables.finish(buckets.as_json(result) | settings | facts, args.json)
    return 0


def _check(args: argparse.Namespace) -> None:
    if not args.runs_per_start > 0:
        raise ValueError(f"--runs-per-start must be above 0, given {args.runs_per_start}")
