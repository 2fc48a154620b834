"""Serve files of rows and write the results: the command of ``scripts/serve_offline.py`` and ``compiled-llm batch``.

    python scripts/serve_offline.py --bucket-sizes 1,8,32
    compiled-llm batch --model DIR --input rows.jsonl --output out.jsonl
    compiled-llm batch --model DIR --input rows.jsonl --output out.jsonl --resume

Without ``--input`` the bundled prompts run through the bundled model. ``--input`` takes .jsonl (rows of ours, or of
OpenAI's batch format), .txt (a prompt a line) and .parquet, each also as .gz or .zst, and - for standard input.

``--output`` is a new file, locked for the run. Each row is written with one write when it ends, as a result or as an
error; ``index`` is its place in the input, from 0. Beside it stands a manifest of what decides the results.
``--resume`` goes on with the file of an earlier run, however that ended, and gives the same tokens as one run would.

``--check`` serves no file: it compares compiled steps, uncompiled steps and transformers on the first prompts of
``--input``, or on a few of its own, and prints one table.

Exit status: 0 when every row has a result, 1 when some have an error or something could not be written, or for a
``--check`` that found a difference, 2 for bad arguments, 128 + the signal's number after SIGINT (130) or SIGTERM (143),
141 when stdout was closed and there is no ``--output``. See docs/offline.md.
"""

import sys
from collections.abc import Sequence

from compiled_llm.api.command_line import errors_end
from compiled_llm.offline.files import check_files, check_writable, manifest_path
from compiled_llm.offline.flags import flag_parser as parser
from compiled_llm.offline.flags import parse_arguments
from compiled_llm.system.process import GuardedStream, StopSignals
from compiled_llm.system.program import as_program

__all__ = ["main", "parser"]


@as_program
def main(program: str, arguments: Sequence[str] | None, stdout: GuardedStream, signals: StopSignals) -> int:
    """Run the command; returns the exit status."""
    args = parse_arguments(program, arguments)
    if args.mode_text is not None and not args.quiet:
        print(args.mode_text)
    with errors_end(program):
        manifest = None if args.output is None else manifest_path(args.output)
        written = {"--output": args.output, "the manifest of --output": manifest, "--trace": args.trace}
        check_files(args.input or (), written, args.report)
        if args.trace is not None:
            check_writable("--trace", args.trace)
    from compiled_llm.offline.run import run  # it loads torch, which takes seconds
    from compiled_llm.offline.serving import EngineFaultsError

    try:
        status = run(program, args, stdout, signals)
    except EngineFaultsError as error:
        print(f"{program}: error: {error}", file=sys.stderr)
        status = 1
    stdout.flush()
    if args.output is not None and isinstance(stdout.failure, BrokenPipeError):  # the rows are in a file
        stdout.failure = None
    return status
