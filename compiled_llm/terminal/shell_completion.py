"""Scripts that complete a program's commands, flags and their values in bash, zsh and fish.

They are made from the parsers of the commands, and run no Python: what they offer is in them.
"""

import argparse
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from compiled_llm.api.config import NAMED_VALUES
from compiled_llm.api.flag_help import first_clause

_OF_FILES = ("FILE", "DIR", "HUB_ID", "PATH")  # in the metavars of flags whose values are paths


class Value(NamedTuple):
    """What may follow a flag.

    Attributes:
        choices: the values there are; empty: any.
        is_path: whether it is a file or a directory.
    """

    choices: tuple[str, ...]
    is_path: bool


class Flag(NamedTuple):
    """A flag of a command. ``value``: None where none follows."""

    names: tuple[str, ...]
    text: str
    value: Value | None


class Command(NamedTuple):
    """What the words of a command line so far allow next.

    Attributes:
        words: the command, such as ``("bench", "latency")``; empty for the program itself.
        following: word -> what it is: commands, or the choices of an argument.
    """

    words: tuple[str, ...]
    following: Mapping[str, str]
    flags: Sequence[Flag] = ()

    @classmethod
    def of(cls, words: tuple[str, ...], parser: argparse.ArgumentParser) -> "Command":
        """A command with the flags of its ``parser``."""
        actions = [action for action in parser._actions if action.option_strings]
        flags = [Flag(tuple(one.option_strings), first_clause(parser, one), _value(one)) for one in actions]
        choices = (str(choice) for one in parser._actions if not one.option_strings for choice in one.choices or ())
        return cls(words, dict.fromkeys(choices, ""), flags)


def _value(action: argparse.Action) -> Value | None:
    if action.nargs == 0:
        return None
    name = str(action.metavar or "")
    is_path = action.dest in ("model", "tokenizer") or any(word in name for word in _OF_FILES)
    choices = action.choices or NAMED_VALUES.get(action.dest, ())
    return Value(tuple(map(str, choices)), is_path)


def completion_script(shell: str, program: str, commands: Sequence[Command]) -> str:
    """The script of ``shell``, a key of ``SHELLS``, for ``program``."""
    return SHELLS[shell](program, commands)


def _function(program: str) -> str:
    return "_" + program.replace("-", "_")


def _find_command(commands: Iterable[Command], words: str) -> str:
    """Lines of bash and zsh that leave the command in ``command``. ``words``: those behind the program."""
    known = "|".join(shlex.quote(" ".join(one.words)) for one in commands if one.words)
    return f"""    local command="" next
    for next in {words}; do
        case "${{command:+$command }}$next" in
            {known}) command="${{command:+$command }}$next";;
            *) break;;
        esac
    done"""


def _bash(program: str, commands: Sequence[Command]) -> str:
    files: list[str] = []
    others: list[str] = []
    choices, offers = [], []
    for one in commands:
        name = " ".join(one.words)
        for flag in one.flags:
            words = "|".join(shlex.quote(f"{name} {each}") for each in flag.names)
            if flag.value is not None and flag.value.choices:
                choices.append(f"        {words}) offered={shlex.quote(' '.join(flag.value.choices))};;")
            elif flag.value is not None:
                (files if flag.value.is_path else others).append(words)
        names = [each for flag in one.flags for each in flag.names if each.startswith("--")]
        following, flags = (shlex.quote(" ".join(words)) for words in (one.following, names))
        offers.append(f"                {shlex.quote(name)}) offered={following}; flags={flags};;")
    # "-" is no word that a command line can have there: a pattern that matches nothing.
    return f"""# Completion of {program} in bash. For this shell: source <({program} completion bash)
{_function(program)}() {{
    local word="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}" offered="" flags=""
    if [[ $word == "=" ]]; then word=""; elif [[ $before == "=" ]]; then before="${{COMP_WORDS[COMP_CWORD-2]}}"; fi
{_find_command(commands, '"${COMP_WORDS[@]:1:COMP_CWORD-1}"')}
    COMPREPLY=()
    case "$command $before" in
        {"|".join(files) or "-"})
            compopt -o filenames 2>/dev/null
            mapfile -t COMPREPLY < <(compgen -f -- "$word")
            return;;
        {"|".join(others) or "-"}) return;;
{chr(10).join(choices)}
        *)
            case "$command" in
{chr(10).join(offers)}
            esac
            if [[ $word == -* ]]; then offered=$flags; fi;;
    esac
    mapfile -t COMPREPLY < <(compgen -W "$offered" -- "$word")
}}
complete -o default -F {_function(program)} {program}
"""


def _zsh(program: str, commands: Sequence[Command]) -> str:
    cases = []
    for one in commands:
        words = {_escaped(word, ":"): text for word, text in one.following.items()}
        offered = " ".join(shlex.quote(f"{word}:{text}" if text else word) for word, text in words.items())
        specs = " ".join(shlex.quote(spec) for flag in one.flags for spec in _zsh_specs(flag))
        others = "'*: :->offered'" if offered else "'*: :_files'"
        cases.append(
            f"        {shlex.quote(' '.join(one.words))})\n            offered=({offered})\n"
            f"            _arguments {specs} {others};;"
        )
    name = _function(program)
    return f"""#compdef {program}
# Completion of {program} in zsh. For this shell: source <({program} completion zsh)
{name}() {{
    local -a offered
    local state
{_find_command(commands, '"${(@)words[2,CURRENT-1]}"')}
    local -a found=(${{(z)command}})
    shift $#found words
    (( CURRENT -= $#found ))
    case "$command" in
{chr(10).join(cases)}
    esac
    if [[ $state == offered ]]; then _describe word offered; fi
}}
if [[ $funcstack[1] == {name} ]]; then
    {name} "$@"
else
    compdef {name} {program}
fi
"""


def _zsh_specs(flag: Flag) -> list[str]:
    text = f"[{_escaped(flag.text, '[]:')}]"
    if flag.value is None:
        return [f"{name}{text}" for name in flag.names]
    values = " ".join(_escaped(choice, " :()") for choice in flag.value.choices)
    action = f"({values})" if values else "_files" if flag.value.is_path else " "
    return [f"{name}{'=' if name.startswith('--') else ''}{text}:value:{action}" for name in flag.names]


def _escaped(text: str, characters: str) -> str:
    for character in characters:
        text = text.replace(character, f"\\{character}")
    return text


def _fish(program: str, commands: Sequence[Command]) -> str:
    lines = [
        f"# Completion of {program} in fish. For this shell: {program} completion fish | source",
        f"complete -c {program} -f",
    ]
    beginnings = {one.words for one in commands}
    for one in commands:
        seen = [f"__fish_seen_subcommand_from {shlex.quote(word)}" for word in one.words]
        commands_here = [word for word in one.following if (*one.words, word) in beginnings]
        no_more = [f"not __fish_seen_subcommand_from {' '.join(map(shlex.quote, commands_here))}"] * bool(commands_here)
        condition = shlex.quote("; and ".join([*seen, *no_more])) if seen or no_more else "true"
        start = f"complete -c {program} -n {condition}"
        lines += [f"{start} -a {shlex.quote(word)} -d {shlex.quote(text)}" for word, text in one.following.items()]
        for flag in one.flags:
            names = " ".join(f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}" for name in flag.names)
            if flag.value is None:
                value = ""
            elif flag.value.choices:
                value = f" -x -a {shlex.quote(' '.join(flag.value.choices))}"
            else:
                value = " -r -F" if flag.value.is_path else " -x"
            lines.append(f"{start} {names} -d {shlex.quote(flag.text)}{value}")
    return "\n".join(lines) + "\n"


SHELLS: dict[str, Callable[[str, Sequence[Command]], str]] = {"bash": _bash, "zsh": _zsh, "fish": _fish}
