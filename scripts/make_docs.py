"""Write the tables of docs/engine_arguments.md and docs/sampling_parameters.md from the classes' docstrings, and
docs/rooms.svg from the imports.

    python scripts/make_docs.py

Exit status: 0, or 1 with ``--check`` if a file is out of date.
"""

import dataclasses
import sys
import types
import typing
from pathlib import Path
from typing import Any

import own_checkout
import rooms

from compiled_llm import EngineConfig, SamplingParams, SpeculativeConfig, StructuredOutputsParams
from compiled_llm.api.command_line import FlagParser, attribute_docs

DOCS = Path(__file__).resolve().parents[1] / "docs"
_NOTE = "<!-- Written by scripts/make_docs.py from the docstrings: change those, and run it. -->"

_ENGINE = """# Engine arguments

The arguments of `CompiledEngine(model, **engine_args)`, `AsyncCompiledEngine` and `EngineConfig`. All are checked when
the engine is made: one that is unknown, out of range or in conflict with another raises a `ValueError` that says what
is allowed.

On the command line each is a flag of the same name with dashes, such as `--bucket-sizes 1,8,32` or
`--no-enable-prefix-caching`.

They are those of one engine. Several side by side are for [the server](serving.md#replicas) to start
(`--data-parallel-size`) and, for files of rows, for [`compiled-llm batch`](offline.md) (`--workers`).
"""
_SAMPLING = """# Sampling parameters

The arguments of `SamplingParams(...)`, all given by name. They are checked when it is made: one that is out of range
raises a `ValueError` that says what is allowed. [sampling.md](sampling.md) says in which order they apply.

On the command line each is a flag of the same name with dashes, such as `--top-p 0.9`; `--sampling-seed`,
`--sampling-split-special-tokens` and `--sampling-logits-transforms` are those of the request, since the engine has
arguments of the same names.
"""


def table(cls: type) -> str:
    """A row for each field: name, flag, type, default, meaning."""
    docs, hints = attribute_docs(cls), typing.get_type_hints(cls)
    rows = ["| name | type | default | meaning |", "|---|---|---|---|"]
    for field in dataclasses.fields(cls):
        meaning = docs[field.name].replace("``", "`").replace("|", r"\|").replace("<", "&lt;")
        default = f'"{field.default}"' if isinstance(field.default, str) else repr(field.default)
        rows.append(f"| `{field.name}` | {type_text(hints[field.name])} | `{default}` | {meaning} |")
    return "\n".join(rows)


def type_text(hint: Any) -> str:
    """A type, in words for users."""
    if isinstance(hint, types.UnionType):
        return " or ".join(dict.fromkeys(type_text(kind) for kind in typing.get_args(hint)))
    if typing.get_origin(hint) is typing.Literal:
        return ", ".join(f'`"{value}"`' for value in typing.get_args(hint))
    if typing.get_origin(hint) is tuple:
        items = typing.get_args(hint)[0]
        return "list" if items is Any else f"list of {type_text(items)}"
    named = {kind: f"`{kind.__name__}`" for kind in (StructuredOutputsParams, SpeculativeConfig)}
    names = {type(None): "None", Any: "any", **named}
    return names.get(hint) or (typing.get_origin(hint) or hint).__name__


def pages() -> dict[Path, str]:
    """File -> its content."""
    return {
        DOCS / "engine_arguments.md": f"{_ENGINE}\n{_NOTE}\n\n{table(EngineConfig)}\n",
        DOCS / "sampling_parameters.md": f"{_SAMPLING}\n{_NOTE}\n\n{table(SamplingParams)}\n",
        DOCS / "rooms.svg": rooms.picture(),
    }


def main() -> int:
    parser = FlagParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; print which file is out of date")
    args = parser.parse_args()
    stale = {path: text for path, text in pages().items() if not path.exists() or path.read_text() != text}
    for path, text in stale.items():
        print(f"{path.name} {'is out of date: run python scripts/make_docs.py' if args.check else 'written'}")
        if not args.check:
            path.write_text(text)
    return 1 if args.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
