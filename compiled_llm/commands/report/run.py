"""Serve rows, and write how near the machine's limits that was and where the rest of the time went.

    compiled-llm report run
    compiled-llm report run --report DIR --model DIR --input rows.jsonl --max-tokens 64

This is ``compiled-llm batch --quiet --report DIR`` with all its flags; the directory is ``report`` unless it is given.
See docs/report.md.
"""

from collections.abc import Sequence

from compiled_llm.commands import batch
from compiled_llm.commands.batch import parser

__all__ = ["main", "parser"]


def main(program: str, arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    return batch.main(program, ["--quiet", "--report", "report", *(arguments or ())])
