"""What commands print in the end: tables for people, and a line of JSON for programs."""

import argparse
import importlib.util
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def text_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Lines of aligned columns, one for each key of the first row: text to the left, numbers to the right.

    Floats have four digits, None is empty.
    """

    def text(value: Any) -> str:
        return f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)

    columns = []
    for name, first in rows[0].items():
        cells = [name, *(text(row.get(name)) for row in rows)]
        width, align = max(map(len, cells)), str.ljust if isinstance(first, str) else str.rjust
        columns.append([align(cell, width) for cell in cells])
    return "\n".join("  ".join(line).rstrip() for line in zip(*columns, strict=True))


def titled(title: str, rows: Mapping[str, str]) -> str:
    """A line for each name and its value, below a title."""
    return "\n".join([title, *(f"  {name:<26} {value}" for name, value in rows.items())])


def print_table(title: str, rows: Mapping[str, str]) -> None:
    print(f"\n{titled(title, rows)}")


def output_file(text: str) -> Path:
    """A file to write, for argparse: refused at once where it could not be written after the work was done."""
    path = Path(text)
    if not os.access(path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{path}: its directory is not there, or may not be written to")
    return path


def picture_file(text: str) -> Path:
    """A picture to write, for argparse."""
    path = output_file(text)
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise argparse.ArgumentTypeError(f"must end in .png, .svg or .pdf, given {text!r}")
    if importlib.util.find_spec("matplotlib") is None:
        raise argparse.ArgumentTypeError("needs matplotlib: pip install matplotlib, or compiled-llm[plot]")
    return path


def add_json_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the JSON line there too")


def finish(result: Mapping[str, Any], path: Path | None, details: Mapping[str, Any] | None = None) -> None:
    """Print the result as one line of JSON, and write it to ``path``, there with the details of each request."""
    print(json.dumps(result), flush=True)
    if path is not None:
        path.write_text(json.dumps({**result, **(details or {})}) + "\n", encoding="utf-8")
