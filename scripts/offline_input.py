"""The prompts of an offline run. A row that cannot be read has an error of its own, and the others are served."""

import codecs
import dataclasses
import json
from pathlib import Path
from typing import Any

from offline_process import naming

from compiled_llm.argument_checks import integer

_ROW_KEYS = {"prompt", "prompt_token_ids", "cache_salt", "priority"}


@dataclasses.dataclass(frozen=True)
class InputRow:
    """One row of an input file.

    Attributes:
        index: its place among the rows, from 0; blank lines are not rows.
        name: what messages call it, with its place in the file.
        prompt: ``{"prompt": str}`` or ``{"prompt_token_ids": [...]}``, with its ``cache_salt`` if it has one; empty
            where the row cannot be read.
        priority: as ``CompiledEngine.add_request`` takes it.
        error: why the row cannot be read; None where it can.
    """

    index: int
    name: str
    prompt: dict[str, Any]
    priority: int = 0
    error: str | None = None


def read_rows(path: Path) -> list[InputRow]:
    """All rows of a .jsonl file, or of a .txt file with a prompt on each line. UTF-8, with or without a BOM.

    Raises:
        ValueError: ``path`` has another suffix, or is not a regular file: others may never end.
        OSError: it cannot be read.
    """
    if path.suffix not in (".jsonl", ".txt"):
        raise ValueError(f"--input must end in .jsonl or .txt, given {path}")
    with naming(f"--input {path}"):
        path.stat()
        if not path.is_file():
            raise ValueError(f"--input must be a regular file, given {path}")
        content = path.read_bytes().removeprefix(codecs.BOM_UTF8)
    rows: list[InputRow] = []
    # Not splitlines(), which also splits at line separators that JSON strings may hold.
    for number, line in enumerate(content.split(b"\n"), 1):
        index = len(rows)
        name = f"row {index} ({path.name}, line {number})"
        try:
            text = line.removesuffix(b"\r").decode()
            if text.strip():
                fields = {"prompt": text} if path.suffix == ".txt" else _parse(text)
                priority = fields.pop("priority", 0)
                integer("priority", priority, -(2**31), 2**31 - 1)
                rows.append(InputRow(index, name, fields, priority))
        except UnicodeDecodeError as error:
            reason = f"not UTF-8: byte {error.start + 1} of the line is {line[error.start]:#04x}"
            rows.append(InputRow(index, name, {}, error=reason))
        except ValueError as error:
            rows.append(InputRow(index, name, {}, error=str(error)))
    return rows


def _parse(text: str) -> dict[str, Any]:
    """The fields of a row of a .jsonl file. ``ValueError`` with what is wrong."""
    try:
        row = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from error
    if not isinstance(row, dict):
        raise ValueError(f"must be a JSON object, given {text.strip():.100}")
    unknown = ", ".join(sorted(row.keys() - _ROW_KEYS))
    if unknown:
        raise ValueError(f"unknown key: {unknown:.100}; known are {', '.join(sorted(_ROW_KEYS))}")
    if ("prompt" in row) == ("prompt_token_ids" in row):
        raise ValueError(f"must have either 'prompt' or 'prompt_token_ids', given {sorted(row)}")
    return row
