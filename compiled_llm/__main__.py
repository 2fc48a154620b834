"""``compiled-llm COMMAND``, and ``python -m compiled_llm COMMAND``.

Commands:
    batch: serve files of rows, as ``scripts/serve_offline.py``.
"""

import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["batch"]:
        from compiled_llm.offline.command import main as batch

        return batch("compiled-llm batch", given[1:])
    usage = "usage: compiled-llm batch [--help] [FLAG ...]"
    if given in (["-h"], ["--help"]):
        print(f"{usage}\n\nbatch: serve files of rows, and write a result for each")
        return 0
    print(f"{usage}\ncompiled-llm: error: the command must be batch, given {given[:1]}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
