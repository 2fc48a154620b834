"""What becomes of the results of a run: lines of the output file, or text on stdout; and a count of each."""

import json
import sys

from compiled_llm.offline.output_file import OutputFile
from compiled_llm.offline.progress import RowResult, RunProgress

_NAMED_FAILURES = 20


class Results:
    """Takes each result once.

    Args:
        output: where the lines go; None: they are printed, if ``shown``.
    """

    def __init__(self, output: OutputFile | None, shown: bool, progress: RunProgress) -> None:
        self._output, self._shown, self.progress = output, shown and output is None, progress

    def add(self, result: RowResult) -> None:
        """``OSError`` if it cannot be written."""
        self.progress.add(result)
        if self._output is not None:
            self._output.write(result.index, result.line, result.error is not None)
        if result.error is not None:
            self._name_failure(result)
        elif self._shown:
            _print_row(result.line)

    def sync_if_due(self) -> None:
        """As ``OutputFile.sync_if_due``, for times without results."""
        if self._output is not None:
            self._output.sync_if_due()

    def _name_failure(self, result: RowResult) -> None:
        """On stderr, the first ones; all, where there is no file that has them."""
        if self._output is None or self.progress.failed <= _NAMED_FAILURES:
            print(f"{result.name} failed: {result.error}", file=sys.stderr)
        elif self.progress.failed == _NAMED_FAILURES + 1:
            print("More rows failed: --output has the reason of each", file=sys.stderr)


def _print_row(line: bytes) -> None:
    """A result as a person reads it. Answers in OpenAI's format stay as they are."""
    row = json.loads(line)
    if "index" not in row:
        print(line.decode(), end="")
        return
    prompt, completions = row["prompt"] or "", row.get("outputs", [row])
    for index, completion in enumerate(completions):
        name = row["index"] if len(completions) == 1 else f"{row['index']}.{index}"
        print(f"\n--- {name}: {completion['finish_reason']}, {len(completion['token_ids'])} tokens")
        text = f"\033[1m{completion['text']}\033[0m" if sys.stdout.isatty() else completion["text"]
        print(f"{prompt}{text}")
