"""What becomes of the results of a run: lines of the output file, or text on stdout; and a count of each."""

import sys

from compiled_llm.offline.output_file import OutputFile
from compiled_llm.offline.printed import PrintedResults
from compiled_llm.offline.progress import RowResult, RunProgress

_NAMED_FAILURES = 20


class Results:
    """Takes each result once.

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
        """As ``OutputFile.sync_if_due``, for times without results."""
        if self._output is not None:
            self._output.sync_if_due()

    def close(self) -> None:
        """No more will come: print what waits for rows that have none."""
        if self._printed is not None:
            self._printed.end()

    def _name_failure(self, result: RowResult) -> None:
        """On stderr, the first ones; all, where there is no file that has them."""
        if self._output is None or self.progress.failed <= _NAMED_FAILURES:
            print(f"{result.name} failed: {result.error}", file=sys.stderr)
        elif self.progress.failed == _NAMED_FAILURES + 1:
            print("More rows failed: --output has the reason of each", file=sys.stderr)
