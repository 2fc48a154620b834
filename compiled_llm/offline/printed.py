"""Results as text on stdout, in the order of the input, where a run has no output file."""

import json
import sys
from typing import Any

_DIM, _BOLD, _PLAIN = "\033[2m", "\033[1m", "\033[0m"
# What a terminal would take for commands. A model may write anything.
_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


class PrintedResults:
    """Prints each result when those of all rows before it are printed; rows that failed are told of elsewhere."""

    def __init__(self) -> None:
        self._waiting: dict[int, bytes | None] = {}
        self._next = 0

    def add(self, index: int, line: bytes | None) -> None:
        """Take the result of row ``index``, as its line of an output file; None: it failed."""
        self._waiting[index] = line
        while self._next in self._waiting:
            _print(self._waiting.pop(self._next))
            self._next += 1

    def end(self) -> None:
        """Print what still waits: a run that is stopped leaves rows out."""
        for index in sorted(self._waiting):
            _print(self._waiting.pop(index))


def _print(line: bytes | None) -> None:
    """As a person reads it. Answers in OpenAI's format stay as they are."""
    if line is None:
        return
    row = json.loads(line)
    if "index" not in row:
        print(line.decode(), end="", flush=True)
        return
    on_terminal = sys.stdout.isatty()
    completions = row.get("outputs", [row])
    texts = [("prompt", row["prompt"])] if row["prompt"] is not None else []
    for number, completion in enumerate(completions, 1):
        which = "" if len(completions) == 1 else f" {number} of {len(completions)}"
        text = completion["text"] or _without_text(row, completion)
        texts.append((f"continuation{which}, {_length_of(completion)}", text))
    print()
    for place, (label, text) in enumerate(texts):
        heading = f"--- row {row['index']}: {label}"
        is_continuation = place > 0 or row["prompt"] is None
        if on_terminal:
            heading, text = f"{_DIM}{heading}{_PLAIN}", text.translate(_CONTROLS)
            text = f"{_BOLD}{text}{_PLAIN}" if is_continuation else text
        print(f"{heading}\n{text}", flush=True)


def _length_of(completion: dict[str, Any]) -> str:
    count = len(completion["token_ids"])
    reason = completion["stop_reason"]
    by = "the length limit" if completion["finish_reason"] == "length" else "itself" if reason is None else repr(reason)
    return f"{count} token{'s' * (count != 1)}, ended by {by}"


def _without_text(row: dict[str, Any], completion: dict[str, Any]) -> str:
    """What stands for an empty text: the token ids, where the prompt was given as such."""
    if row["prompt"] is not None or not completion["token_ids"]:
        return "(no text)"
    return f"token ids {', '.join(map(str, completion['token_ids']))}"
