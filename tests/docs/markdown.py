"""What the documents say that can be checked: code blocks, inline code, links, headings."""

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    ROOT / "compiled_llm" / "demo_model" / "README.md",
]


class Block(NamedTuple):
    """A fenced block. ``line``: of its first line of text, counted from 1."""

    path: Path
    line: int
    language: str
    text: str


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def blocks(path: Path, language: str) -> list[Block]:
    """The fenced blocks of one language, in their order."""
    found, opened = [], None
    lines = path.read_text(encoding="utf-8").split("\n")
    for number, line in enumerate(lines, start=1):
        fence = re.match(r"\s*```(\w*)", line)
        if fence and opened is None:
            opened = number, fence[1]
        elif fence and opened is not None:
            start, kind = opened
            if kind == language:
                found.append(Block(path, start + 1, kind, "\n".join(lines[start : number - 1]) + "\n"))
            opened = None
    assert opened is None, f"{name_of(path)}: the block at line {opened[0] if opened else 0} is not closed"
    return found


def statements(block: Block) -> list[str]:
    """The commands of a bash block as they are written: comments and empty lines left out, continued lines joined."""
    joined = re.sub(r"\\\n\s*", " ", block.text)
    lines = [re.sub(r"(^|\s+)# .*$", "", line).strip() for line in joined.split("\n")]
    return [statement.strip() for line in lines for statement in line.split(" && ") if statement.strip()]


def prose(path: Path) -> str:
    """The text outside of fenced blocks."""
    return re.sub(r"^\s*```.*?^\s*```[^\n]*$", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def inline_code(path: Path) -> list[str]:
    """Code spans of the running text, those over a line's end joined."""
    return [" ".join(span.split()) for span in re.findall(r"(?<!`)`([^`]+)`(?!`)", prose(path))]


def links(path: Path) -> list[str]:
    """Where the links and pictures of a document point."""
    text = re.sub(r"`[^`\n]*`", "", prose(path))
    return re.findall(r"\]\(([^)\s]+)\)", text)


def anchors(path: Path) -> set[str]:
    """What GitHub calls the headings of a document."""
    seen: dict[str, int] = {}
    found = set()
    for title in re.findall(r"^#+ +(.+?) *$", prose(path), flags=re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).replace("`", "").lower()
        slug = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        count = seen.get(slug, 0)
        seen[slug] = count + 1
        found.add(f"{slug}-{count}" if count else slug)
    return found
