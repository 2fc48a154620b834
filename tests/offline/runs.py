"""Runs of the command in this process, and what they leave, for the tests of this room."""

import json
import sys
from pathlib import Path

from compiled_llm.commands.batch import main

# Flags of an engine that starts in a second, and is kept (conftest.py).
FAST = ["--enforce-eager", "--bucket-sizes", "1,4", "--token-bucket-sizes", "32", "--num-kv-blocks", "300"]
FAST += ["--max-tokens", "6", "--progress", "off"]

# The command in a process of its own; its arguments follow.
COMMAND = [sys.executable, "-c", "import sys; from compiled_llm.commands.batch import main; sys.exit(main('x'))"]


def run(*arguments: str) -> int:
    """The exit status."""
    try:
        return main("serve_offline", arguments)
    except SystemExit as bad_arguments:
        return int(bad_arguments.code or 0)


def rows(path: Path) -> dict[int, dict]:
    """The lines of an output by the index of their row."""
    parsed = [json.loads(line) for line in path.read_text().split("\n")[:-1]]
    assert len({row["index"] for row in parsed}) == len(parsed), "a row is there twice"
    return {row["index"]: row for row in parsed}


def write_prompts(path: Path, count: int) -> Path:
    path.write_text("".join(json.dumps({"prompt": f"def f{n}(x):"}) + "\n" for n in range(count)))
    return path
