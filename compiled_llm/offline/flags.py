"""The flags of an offline run, and how they are checked by themselves."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from compiled_llm.api.command_line import (
    FlagParser,
    add_engine_arguments,
    add_sampling_arguments,
    engine_config,
    sampling_arguments,
    sampling_params,
)
from compiled_llm.api.lora_request import read_lora_modules
from compiled_llm.offline.modes import MODES, as_flags, faster_but_rounded, mode_arguments

DEFAULT_SAMPLING = {"max_tokens": 64, "temperature": 0.7}  # unless flags or the checkpoint give others
CHECKED_ROWS = 4
ORDER_WINDOW = 16_384
_SELDOM = {
    "--retry-errors", "--order-window", "--max-faults", "--report-profile-steps", "--trace", "--remeasure-limits",
}  # fmt: skip
_RANGES = {
    "report_profile_steps": (0, 1000), "order_window": (1, 10**6), "max_faults": (0, 10**6), "workers": (1, 1024),
}  # fmt: skip


def flag_parser(program: str) -> FlagParser:
    """The parser of the command's flags."""
    parser = FlagParser(prog=program, description="Serve files of rows, and write a result for each.")
    _add_arguments(parser)
    parser.seldom |= _SELDOM
    add_sampling_arguments(parser, **DEFAULT_SAMPLING)
    add_engine_arguments(parser)
    return parser


def parse_arguments(program: str, arguments: Sequence[str] | None) -> argparse.Namespace:
    """The arguments, as far as they can be checked by themselves. A bad one ends the program with status 2.

    Returns:
        With ``mode_text``, which says what ``--mode`` stands for; None without one.
    """
    parser = flag_parser(program)
    args = parser.parse_args(arguments)
    if args.mode is not None:
        args = _with_mode(parser, arguments, args)
    args.arguments = list(sys.argv[1:] if arguments is None else arguments)
    files = {"--output": args.output, "--report": args.report, "--trace": args.trace}
    written = [flag for flag, path in files.items() if path is not None]
    if args.check and (written or sampling_arguments(args)):
        parser.error(f"--check serves no file: leave out {', '.join(written) or 'the sampling parameters'}")
    if (args.workers > 1 or args.ray is not None) and (args.trace is not None or args.check):
        flag = "--workers" if args.ray is None else "--ray"
        parser.error(f"{'--check' if args.check else '--trace'} needs one engine in this process: leave out {flag}")
    if args.ray is not None and args.report is not None:
        parser.error("--report is of engines on this machine: leave out --ray")
    for flag in ("resume", "ordered"):
        if getattr(args, flag) and args.output is None:
            parser.error(f"--{flag} needs --output, the file to write")
    if args.resume and "-" in (args.input or ()):
        parser.error("--resume cannot tell whether standard input is the same as before: save it to a file")
    if args.retry_errors and not args.resume:
        parser.error("--retry-errors needs --resume")
    if args.lora_modules and (args.check or not args.enable_lora):
        parser.error(f"--lora-modules {'cannot go with --check' if args.check else 'needs --enable-lora'}")
    if args.report is None and args.report_profile_steps is not None:
        parser.error("--report-profile-steps needs --report, the directory to write to")
    for name, (least, most) in _RANGES.items():
        given = getattr(args, name)
        if given is not None and not least <= given <= most:
            parser.error(f"--{name.replace('_', '-')} must be from {least} to {most}, given {given}")
    with parser.ending_errors():
        engine_config(args)
        sampling_params(args, **DEFAULT_SAMPLING)
        read_lora_modules(args.lora_modules)
    return args


def _with_mode(parser: FlagParser, arguments: Sequence[str] | None, args: argparse.Namespace) -> argparse.Namespace:
    """The arguments once more, with those of ``args.mode`` where no flag gives others."""
    with parser.ending_errors():
        of_mode = mode_arguments(args.mode, _device_type(args.device))
    if args.mode == "throughput-offload" and args.weights_path is None:
        parser.error("--mode throughput-offload needs --weights-path DIR, from which weights are read for each step")
    parser.set_defaults(**of_mode)
    args = parser.parse_args(arguments)
    set_by_mode = {name: value for name, value in of_mode.items() if getattr(args, name) == value}
    lines = [
        f"--mode {args.mode}: {as_flags(set_by_mode) or 'as without it'}",
        faster_but_rounded(args.mode, vars(args)),
    ]
    args.mode_text = "\n".join(filter(None, lines))
    return args


def _device_type(device: str) -> Literal["cpu", "cuda"]:
    if device == "auto":
        import torch  # which takes seconds

        return "cuda" if torch.cuda.is_available() else "cpu"
    return "cuda" if device.startswith("cuda") else "cpu"


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of the command itself."""
    add = parser.add_argument_group("rows").add_argument
    add("--input", nargs="+", metavar="FILE", help="rows to serve, - for stdin (default: bundled prompts)")
    add("--output", type=Path, metavar="FILE.jsonl", help="write a JSON row for each row of the input")
    add("--ordered", action="store_true", help="put the rows in the order of the input at the end")
    add("--resume", action="store_true", help="keep the rows of --output, serve the missing ones")
    add("--retry-errors", action="store_true", help="with --resume, serve the rows again that ended as an error")
    add(
        "--order-window",
        type=int,
        default=ORDER_WINDOW,
        metavar="N",
        help="read so many rows ahead, and serve those that begin alike near each other; 1: the given order "
        f"(default: {ORDER_WINDOW})",
    )
    add(
        "--lora-modules",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME=PATH",
        help='adapters that rows name: with "lora", or as the "model" of an OpenAI row; with --enable-lora',
    )
    add = parser.add_argument_group("run").add_argument
    add(
        "--max-faults",
        type=int,
        default=1,
        metavar="N",
        help="end the run when steps failed, or gave no numbers, more often than this in the same way (default: 1)",
    )
    add(
        "--workers",
        type=int,
        default=1,
        metavar="N",
        help="serve with N engines: each in a process of its own with its share of the cores, or a GPU (default: 1)",
    )
    add(
        "--ray",
        nargs="?",
        const="",
        metavar="ADDRESS",
        help="run the engines of --workers on a Ray cluster: the one at HOST:PORT; without ADDRESS: that of "
        "RAY_ADDRESS, else a new one of this machine alone",
    )
    add(
        "--mode",
        choices=MODES,
        help="sizes that go together: shown as flags at the start; flags that are given go before. Results stay as "
        "without it",
    )
    parser.set_defaults(mode_text=None)
    add("--quiet", action="store_true", help="print the summary only")
    add("--details", action="store_true", help="print also what was compiled, and a long summary")
    add("--report", type=Path, metavar="DIR", help="write a report of the run there, as HTML and JSON")
    profiled = "for the report, run N steps of each bucket a second time under torch's profiler (default: 4)"
    add("--report-profile-steps", type=int, metavar="N", help=profiled)
    add("--trace", type=Path, metavar="FILE", help="write the shapes of all steps, for compiled-llm tune buckets")
    remeasure = "measure the machine's limits even if they are known"
    add("--remeasure-limits", action="store_true", help=remeasure)
    check = f"""compare with transformers on a few rows: compiled steps, uncompiled steps and transformers on the first
        {CHECKED_ROWS} rows of --input, or on our own"""
    add("--check", action="store_true", help=check)
