"""Print a script that completes the commands of ``compiled-llm``, their flags and values in a shell.

    source <(compiled-llm completion bash)                                        (for this shell)
    compiled-llm completion fish > ~/.config/fish/completions/compiled-llm.fish   (for all to come)

Exit status: 0, or 2 for bad arguments.
"""

from collections.abc import Iterator, Sequence

from compiled_llm.api.command_line import FlagParser
from compiled_llm.commands import commands_of, module_of
from compiled_llm.terminal.shell_completion import SHELLS, Command, completion_script


def parser(program: str) -> FlagParser:
    parser = FlagParser(prog=program, description="Print a script that completes commands and flags in a shell.")
    parser.add_argument("shell", choices=tuple(SHELLS), metavar="|".join(SHELLS), help="the shell it is for")
    return parser


def main(program: str, arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    args = parser(program).parse_args(arguments)
    print(completion_script(args.shell, "compiled-llm", list(all_commands("compiled_llm.commands"))), end="")
    return 0


def all_commands(package: str, words: tuple[str, ...] = ()) -> Iterator[Command]:
    """What may follow ``words`` on the command line, and what may follow each command of ``package``."""
    commands = commands_of(package)
    yield Command(words, commands)
    for name in commands:
        module = module_of(package, name)
        if hasattr(module, "COMMANDS"):
            yield from all_commands(module.__name__, (*words, name))
        else:
            yield Command.of((*words, name), module.parser(" ".join((*words, name))))
