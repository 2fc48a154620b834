"""``compiled-llm COMMAND``, and ``python -m compiled_llm COMMAND``.

Commands:
    batch: serve files of rows, as ``scripts/serve_offline.py``.
"""

import shlex
import sys
from collections.abc import Sequence

from compiled_llm.api.error_texts import shown
from compiled_llm.api.names import did_you_mean


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["batch"]:
        from compiled_llm.offline.command import main as batch

        return batch("compiled-llm batch", given[1:])
    if given in (["-h"], ["--help"]):
        print("usage: compiled-llm batch [--help] [FLAG ...]")
        print("\nbatch: serve files of rows, and write a result for each")
        return 0
    from compiled_llm.api.command_line import print_argument_error

    hint = did_you_mean(given[0], ["batch"]) if given else ""
    said = f"{shown(given[0])}{hint and ': ' + hint}" if given else "none"
    print_argument_error("compiled-llm", f"the command must be batch, given {said}", shlex.join(given)[:200])
    return 2


if __name__ == "__main__":
    sys.exit(main())
