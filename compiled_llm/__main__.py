"""``compiled-llm COMMAND``, and ``python -m compiled_llm COMMAND``: runs a file of ``compiled_llm/commands/``."""

import importlib
import shlex
import sys
from collections.abc import Sequence

from compiled_llm.api.names import did_you_mean
from compiled_llm.api.readable import shown
from compiled_llm.commands import COMMANDS


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given and given[0] in COMMANDS:
        command = importlib.import_module(f"compiled_llm.commands.{given[0]}")
        return command.main(f"compiled-llm {given[0]}", given[1:])
    if given in (["-h"], ["--help"]):
        print("usage: compiled-llm COMMAND [--help] [FLAG ...]\n")
        for name, text in COMMANDS.items():
            print(f"  {name:10}{text}")
        return 0
    from compiled_llm.api.command_line import print_argument_error

    hint = did_you_mean(given[0], COMMANDS) if given else ""
    said = f"{shown(given[0])}{hint and ': ' + hint}" if given else "none"
    allowed = ", ".join(COMMANDS)
    print_argument_error("compiled-llm", f"the command must be one of {allowed}, given {said}", shlex.join(given)[:200])
    return 2


if __name__ == "__main__":
    sys.exit(main())
