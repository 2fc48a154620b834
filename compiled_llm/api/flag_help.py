"""The help of a program in a screen: its most used flags, group by group, in a line each."""

import argparse
import re
import shutil
from collections.abc import Collection

_LEAST_WIDTH, _MOST_WIDTH = 60, 120  # characters of a line
_TEXT_COLUMN = 28  # where the text of a flag begins, unless the flag is longer
_LEAST_TEXT = 16  # characters of a text that is cut


def short_help(parser: argparse.ArgumentParser, seldom: Collection[str]) -> str:
    """Usage, description and the flags that are not among ``seldom``; the last line says how many were left out."""
    width = min(max(shutil.get_terminal_size().columns, _LEAST_WIDTH), _MOST_WIDTH)
    lines = [f"usage: {usage(parser)}", "", *(parser.description or "").splitlines()]
    left = 0
    for group in parser._action_groups:
        actions = [action for action in group._group_actions if "--help" not in action.option_strings]
        shown = [action for action in actions if not {*action.option_strings} & {*seldom}]
        left += len(actions) - len(shown)
        if shown:
            lines += ["", f"{group.title}:", *(_line(parser, action, width) for action in shown)]
    lines += ["", f"--help=all: {f'{left} more flags, and ' if left else ''}all that is to be said of each flag"]
    return "\n".join(lines) + "\n"


def usage(parser: argparse.ArgumentParser) -> str:
    """``program [TEXT] [FLAG ...]``: a line, however many flags there are."""
    words = [_invocation(action) for action in parser._actions if not action.option_strings]
    required = [_invocation(action) for action in parser._actions if action.option_strings and action.required]
    return " ".join([parser.prog, *words, *required, "[FLAG ...]"])


def first_clause(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    """What a flag is for: its help up to the first full stop or semicolon."""
    text = parser._get_formatter()._expand_help(action) if action.help else ""
    text = re.sub(r"\s+", " ", text.partition(" (default: ")[0])
    return re.split(r"(?<=[\w)\"'`])[.;] ", text)[0].rstrip(".").replace("``", "")


def _line(parser: argparse.ArgumentParser, action: argparse.Action, width: int) -> str:
    flag, text = f"  {_invocation(action):{_TEXT_COLUMN - 4}}  ", first_clause(parser, action)
    if action.choices is not None and action.option_strings:
        text = f"{text.partition(': ')[0]}: {', '.join(map(str, action.choices))}"
    default = re.search(r" \(default: (.*)\)$", action.help or "")
    shown = f" ({default[1]})" if default and default[1].lower() not in ("none", "false", "true") else ""
    return (flag + _cut(text, width - len(flag) - len(shown)) + shown).rstrip()


def _cut(text: str, most: int) -> str:
    """``text``, if it is longer than ``most`` characters: up to a colon, else the words that fit."""
    if len(text) <= most:
        return text
    colons = [match.start() for match in re.finditer(": ", text) if _LEAST_TEXT <= match.start() <= most]
    return text[: colons[-1]] if colons else f"{text[: max(0, most - 3)].rpartition(' ')[0].rstrip(',:')}..."


def _invocation(action: argparse.Action) -> str:
    """``--model STR``, ``--[no-]exact``, ``[TEXT]``."""
    if not action.option_strings:
        name = "|".join(map(str, action.choices)) if action.choices is not None else str(action.metavar or action.dest)
        return f"[{name}]" if action.nargs in ("?", "*") else name
    flag = next(option for option in action.option_strings if option.startswith("--"))
    if isinstance(action, argparse.BooleanOptionalAction):
        return f"--[no-]{flag[2:]}"
    if action.nargs == 0:
        return flag
    default = "NAME" if action.choices is not None else "N" if action.type in (int, float) else action.dest.upper()
    name = str(action.metavar or default).removesuffix("|none")
    return f"{flag} [{name}]" if action.nargs in ("?", "*") else f"{flag} {name}"
