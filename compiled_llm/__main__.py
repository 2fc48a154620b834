"""``compiled-llm COMMAND``, and ``python -m compiled_llm COMMAND``: runs a file of ``compiled_llm/commands/``."""

import shlex
import sys
from collections.abc import Sequence

from compiled_llm.api.names import did_you_mean
from compiled_llm.api.readable import shown
from compiled_llm.commands import commands_of, module_of


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    return run("compiled-llm", "compiled_llm.commands", list(sys.argv[1:] if arguments is None else arguments))


def run(program: str, package: str, given: list[str]) -> int:
    """Run the command of ``package`` that the first word of ``given`` names, with the others; returns the status.

    Args:
        program: the words of the command line before ``given``, for messages.
        package: a package with the table ``COMMANDS``.
    """
    commands = commands_of(package)
    if given and given[0] in commands:
        name, module = f"{program} {given[0]}", module_of(package, given[0])
        if hasattr(module, "COMMANDS"):  # a group of commands
            return run(name, module.__name__, given[1:])
        return module.main(name, given[1:])
    if given in ([], ["-h"], ["--help"], ["--help=all"]):
        lines = [f"  {name:12}{text}" for name, text in commands.items()]
        usage = [f"usage: {program} COMMAND [FLAG ...]", "", *lines, "", f"{program} COMMAND --help: its flags"]
        print("\n".join(usage), file=sys.stdout if given else sys.stderr)
        return 0 if given else 2
    from compiled_llm.api.command_line import print_argument_error

    hint = did_you_mean(given[0], commands)
    said = f"{shown(given[0])}{hint and ': ' + hint}"
    allowed = ", ".join(commands)
    print_argument_error(program, f"the command must be one of {allowed}, given {said}", shlex.join(given)[:200])
    return 2


if __name__ == "__main__":
    sys.exit(main())
