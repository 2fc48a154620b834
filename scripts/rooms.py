"""The rooms of the code and their imports, read from the files; and their picture in docs/design.md.

``make_docs.py`` writes the picture, and ``tests/test_house.py`` holds the imports against the table beside it.
"""

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted(path for top in ("scripts", "compiled_llm", "models", "ops") for path in (ROOT / top).rglob("*.py"))
_WIDTH, _HEIGHT, _COLUMN, _ROW, _MARGIN = 124, 34, 164, 84, 20  # of a box, of its place, and around all of them
_STYLE = "font-family:sans-serif;font-size:15px;text-anchor:middle;dominant-baseline:central"


def module_of(path: Path) -> str:
    """The dotted name of a file; ``ops`` and ``models`` are imported as part of the package."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    dotted = ".".join(part for part in parts if part != "__init__")
    return dotted if parts[0] in ("compiled_llm", "scripts") else f"compiled_llm.{dotted}"


MODULES = frozenset(map(module_of, FILES))


def room_of(module: str) -> str | None:
    """The room that a module lies in; None for other people's modules."""
    top, *parts = module.split(".")
    if top == "scripts":
        return "scripts"
    if top != "compiled_llm":
        return None
    return "compiled_llm" if parts in ([], ["__main__"]) else parts[0]


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """All nodes of a file's syntax tree."""
    return tuple(ast.walk(ast.parse(path.read_text())))


@cache
def imports(path: Path) -> tuple[str, ...]:
    """The modules that a file imports, also within functions and for types alone."""
    found: list[str] = []
    for node in nodes(path):
        if isinstance(node, ast.Import):
            found += (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found += (name if name in MODULES else str(node.module) for name in names)
    return tuple(found)


def imported_rooms() -> dict[str, set[str]]:
    """Room -> the rooms that its files import."""
    found: dict[str, set[str]] = {}
    for path in FILES:
        own = str(room_of(module_of(path)))
        found.setdefault(own, set()).update(room for module in imports(path) if (room := room_of(module)))
    return {room: below - {room} for room, below in found.items()}


def floors(below: dict[str, set[str]]) -> dict[str, int]:
    """Room -> its floor: 0 imports no room, and each other room is one above the highest that it imports."""

    @cache
    def floor(room: str) -> int:
        return max((floor(other) + 1 for other in below[room]), default=0)

    return {room: floor(room) for room in below}


def without_shortcuts(below: dict[str, set[str]]) -> dict[str, set[str]]:
    """``below`` without the arrows that a way over other rooms stands for."""

    @cache
    def reached(room: str) -> frozenset[str]:
        return frozenset(below[room]).union(*(reached(other) for other in below[room]))

    return {room: {to for to in own if not any(to in reached(other) for other in own)} for room, own in below.items()}


def picture() -> str:
    """The rooms as boxes on their floors, as SVG; an arrow for each import that no way over other rooms stands for."""
    below = imported_rooms()
    floor, arrows = floors(below), without_shortcuts(below)
    rows: list[list[str]] = [[] for _ in range(max(floor.values()) + 1)]
    for room in sorted(below):
        rows[floor[room]].append(room)
    columns = max(map(len, rows))
    centre: dict[str, float] = {}

    def place(row: list[str]) -> None:
        for index, room in enumerate(row):
            centre[room] = _MARGIN + (index + (columns - len(row)) / 2 + 0.5) * _COLUMN

    def under(room: str) -> float:
        return sum(centre[other] for other in arrows[room]) / max(len(arrows[room]), 1)

    for row in rows:  # from the ground up, each room above those that it imports
        place(sorted(row, key=under))

    def top(room: str) -> int:
        return _MARGIN + (len(rows) - 1 - floor[room]) * _ROW

    width, height = 2 * _MARGIN + columns * _COLUMN, 2 * _MARGIN + (len(rows) - 1) * _ROW + _HEIGHT
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">',
        '<defs><marker id="head" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
        '<path d="M0 0L8 4L0 8z" fill="#667"/></marker></defs>',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
    ]
    for room in sorted(below):
        for other in sorted(arrows[room]):
            start, end = f"{centre[room]:.0f} {top(room) + _HEIGHT}", f"{centre[other]:.0f} {top(other)}"
            lines.append(f'<path d="M{start}L{end}" stroke="#99a" fill="none" marker-end="url(#head)"/>')
    for room in sorted(below):
        x, y = centre[room], top(room)
        lines.append(
            f'<rect x="{x - _WIDTH / 2:.0f}" y="{y}" width="{_WIDTH}" height="{_HEIGHT}" fill="#eef" stroke="#446"/>'
            f'<text x="{x:.0f}" y="{y + _HEIGHT // 2}" style="{_STYLE}">{room}</text>'
        )
    return "\n".join([*lines, "</svg>", ""])
