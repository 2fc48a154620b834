"""Command-line flags for the fields of EngineConfig and SamplingParams: same names with dashes, same defaults.

``FlagParser`` is the parser of all programs: flags are written out, ``--help`` shows the most used ones, and a bad
argument ends in three lines.
"""

import argparse
import contextlib
import dataclasses
import inspect
import itertools
import json
import re
import shlex
import sys
import types
import typing
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from compiled_llm.api.config import EngineConfig
from compiled_llm.api.flag_help import short_help, usage
from compiled_llm.api.names import ENGINE_ARGUMENTS, SAMPLING_PARAMETERS, did_you_mean, name_hint
from compiled_llm.api.sampling_params import SamplingParams
from compiled_llm.api.speculative_config import METHODS

_MAX_SHOWN = 200  # characters of the command line in an error
# The arguments that ``--help`` shows, in its order; ``--help=all`` shows the others, too.
_MOST_USED = (
    *("model", "device", "dtype", "quantization", "kv_cache_dtype", "max_model_len", "bucket_sizes", "enforce_eager"),
    *("max_tokens", "temperature", "top_p", "top_k", "n", "stop", "sampling_seed"),
)


class FlagParser(argparse.ArgumentParser):
    """An ``ArgumentParser`` that takes no abbreviations, and whose errors are three lines: what, where, what to do.

    ``--help`` has a line for each flag, group by group, in the order in which they were added: the most used first.

    Attributes:
        elsewhere: flags of other libraries, as the names of arguments -> what to do here.
        seldom: flags that ``--help`` leaves to ``--help=all``.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **options, "add_help": False})
        self._positionals.title, self._optionals.title = "arguments", "flags"
        self.elsewhere: dict[str, str] = {}
        self.seldom: set[str] = set()
        self.add_argument("-h", "--help", action=_Help, help="show the most used flags; --help=all: every flag")
        self._has_engine_arguments = False
        self._given: list[str] = []  # the arguments that are parsed

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        self._given = list(sys.argv[1:] if args is None else args)
        flags = [word for word in itertools.takewhile("--".__ne__, self._given) if re.match(r"--[^\s=]+(=|$)", word)]
        unknown = [word for word in flags if word.partition("=")[0] not in self._option_string_actions]
        wants_help = "--help" in flags or "--help=all" in flags
        if unknown and not wants_help:  # before argparse says what is missing, as where one is misspelt
            self._refuse(unknown)
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self._refuse(unknown)
        return parsed

    def parse_checked(
        self, check: Callable[[Any], object] | None = None, arguments: Sequence[str] | None = None, **least: float
    ) -> Any:
        """The arguments. A ``ValueError`` of ``check`` ends the program as other bad arguments do, with status 2.

        Args:
            check: gets the arguments, and may complete them.
            arguments: the words to parse; None: those of the command line.
            least: by the name of an argument its smallest value, or that of each value in a list; None is no value.
        """
        args = self.parse_args(arguments)
        with self.ending_errors():
            check_least(args, **least)
            if check is not None:
                check(args)
            if self._has_engine_arguments:
                engine_config(args)
        return args

    @contextlib.contextmanager
    def ending_errors(self) -> Iterator[None]:
        """A ``ValueError`` in it is one of the arguments, and ends the program as ``error`` does."""
        try:
            yield
        except ValueError as error:
            self.error(str(error))

    def error(self, message: str) -> NoReturn:
        """End the program with status 2 and three lines on stderr."""
        print_argument_error(self.prog, message, self._words_of(message))
        self.exit(2)

    def _words_of(self, message: str) -> str:
        """The part of the command line that ``message`` names, by a flag or by the name of an argument; else all."""
        words = self._given
        for name in re.findall(r"--?[\w-]+|\w+", message):
            flag = name if name.startswith("-") else f"--{name.replace('_', '-')}"
            for place, word in enumerate(words):
                if word.partition("=")[0] in (flag, flag.replace("--", "--no-", 1)):
                    values = itertools.takewhile(lambda text: not text.startswith("--"), words[place + 1 :])
                    return _cut(shlex.join([word, *values]))
        return _cut(shlex.join(words))

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """As argparse does it, with the nearest of the allowed values."""
        if action.choices is not None and value not in action.choices:
            hint = did_you_mean(str(value), map(str, action.choices))
            allowed = ", ".join(map(str, action.choices))
            text = f"must be one of {allowed}, given {value!r:.200}{hint and ': ' + hint}"
            raise argparse.ArgumentError(action, text)

    def _refuse(self, unknown: Sequence[str]) -> NoReturn:
        flag = next((text.partition("=")[0] for text in unknown if text.startswith("-")), None)
        if flag is None:
            example = ", as in --input FILE" if "--input" in self._option_string_actions else ""
            self.error(f"{_cut(shlex.join(unknown))} belongs to no flag: give each value after its flag{example}")
        known = [option for option in self._option_string_actions if option.startswith("--")]
        elsewhere = {"--" + name.replace("_", "-"): hint for name, hint in self.elsewhere.items()}
        hint = name_hint(flag, known, elsewhere)
        self.error(f"unknown flag {flag}{hint and ': ' + hint}")


class _Help(argparse.Action):
    """``--help``: the most used flags in a line each; ``--help=all``: every flag with all that is said of it."""

    def __init__(self, option_strings: Sequence[str], dest: str, **options: Any) -> None:
        more = {"nargs": "?", "choices": ("all",), "default": argparse.SUPPRESS}
        super().__init__(option_strings, argparse.SUPPRESS, **{**options, **more})

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        parser.usage = usage(parser)  # a line, where argparse would name every flag
        print(parser.format_help() if values == "all" else short_help(parser, parser.seldom), end="")
        parser.exit()


def print_argument_error(program: str, message: str, given: str) -> None:
    """What is wrong, where, and what to do, a line each on stderr. ``given``: the words that are wrong."""
    script = Path(sys.argv[0])
    is_script = script.suffix == ".py" and script.stem == Path(program).stem
    command = f"python {sys.argv[0]}" if is_script else program
    print(f"{program}: error: {message}\n  given: {given or 'nothing'}\n  see:   {command} --help", file=sys.stderr)


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


def check_least(args: argparse.Namespace, **least: float) -> None:
    """``ValueError`` unless each value of the named arguments, lists or numbers, is at least as large as given here."""
    for name, low in least.items():
        given = getattr(args, name)
        if given is not None and not min(given if isinstance(given, tuple | list) else [given]) >= low:
            raise ValueError(f"--{name.replace('_', '-')} must be at least {low}, given {given}")


@contextlib.contextmanager
def errors_end(
    program: str, errors: tuple[type[Exception], ...] = (ValueError, OSError), status: int = 2
) -> Iterator[None]:
    """One of ``errors`` in it ends the program with its message and status."""
    try:
        yield
    except errors as error:
        print(f"{program}: error: {error}", file=sys.stderr)
        raise SystemExit(status) from error


def add_engine_arguments(parser: argparse.ArgumentParser, *names: str, **defaults: Any) -> None:
    """A flag for every engine argument, or for those of these ``names`` alone. ``defaults``: other ones."""
    _add(parser, "engine", EngineConfig, ENGINE_ARGUMENTS, defaults, names=names)
    if isinstance(parser, FlagParser) and not names:
        parser._has_engine_arguments = True


def add_sampling_arguments(parser: argparse.ArgumentParser, without: Collection[str] = (), /, **defaults: Any) -> None:
    """A flag for every sampling parameter; ``--sampling-seed`` where the engine has an argument of that name.

    A flag that is not given leaves no attribute: ``sampling_arguments`` has the given ones. ``defaults`` are shown.

    Args:
        without: parameters that would have no effect in a program, and get no flag.
    """
    _add(parser, "sampling", SamplingParams, SAMPLING_PARAMETERS, defaults, without=without, default=argparse.SUPPRESS)


def add_drafters_flag(parser: argparse.ArgumentParser) -> None:
    """``--drafters``: pairs of a method and the ``model`` of its ``speculative_config``."""
    drafters = "what drafts by methods that need a model: draft_model=DIR eagle3=DIR"
    parser.add_argument(
        "--drafters", nargs="+", type=_drafter, action=_EachOnce, default=[], metavar="METHOD=DIR", help=drafters
    )


class _EachOnce(argparse.Action):
    """Joins the pairs of all such flags, and refuses two that have the same first part."""

    def __call__(
        self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: str | None = None
    ) -> None:
        found = [*getattr(namespace, self.dest), *values]
        for place, (name, _) in enumerate(found):
            if name in [earlier for earlier, _ in found[:place]]:
                raise argparse.ArgumentError(self, f"must have each method once, given {name} twice: leave one out")
        setattr(namespace, self.dest, found)


def _drafter(text: str) -> tuple[str, str]:
    """``"eagle3=DIR"`` -> its two parts, for argparse."""
    method, separator, directory = text.partition("=")
    if method not in METHODS or "model" not in METHODS[method].fields or not separator:
        methods = ", ".join(name for name in METHODS if "model" in METHODS[name].fields)
        raise argparse.ArgumentTypeError(f"must be METHOD=DIR with a METHOD of {methods}, given {text!r}")
    return method, directory


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """The EngineConfig that the flags say; what has no flag is its default. ``ValueError`` as the config raises it."""
    names = [field.name for field in dataclasses.fields(EngineConfig)]
    return EngineConfig(**{name: getattr(args, name) for name in names if hasattr(args, name)})


def sampling_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """The sampling parameters that flags were given for, by their names."""
    names = {field.name: _flag_name(SamplingParams, field.name) for field in dataclasses.fields(SamplingParams)}
    return {name: getattr(args, flag) for name, flag in names.items() if hasattr(args, flag)}


def sampling_params(args: argparse.Namespace, **defaults: Any) -> SamplingParams:
    """The SamplingParams that the flags say, over ``defaults``. ``ValueError`` as they raise it themselves."""
    return SamplingParams(**{**defaults, **sampling_arguments(args)})


def sampling_value(name: str, text: str, without: Collection[str] = ()) -> Any:
    """The value that ``text`` gives to a sampling parameter, as it would after its flag.

    Raises:
        ValueError: there is no such parameter, it is one of ``without``, or the text is no value of its type.
    """
    hints = {name: hint for name, hint in typing.get_type_hints(SamplingParams).items() if name not in without}
    field = name.replace("-", "_")
    if field not in hints:
        hint = name_hint(field, list(hints), SAMPLING_PARAMETERS)
        raise ValueError(f"there is no sampling parameter {name!r:.100}{hint and ': ' + hint}")
    parser = FlagParser(prog="", exit_on_error=False)
    action = parser.add_argument("--value", **_options(hints[field]))
    if isinstance(action, argparse.BooleanOptionalAction):
        if text.lower() not in ("true", "false"):
            raise ValueError(f"{field} must be true or false, given {text!r:.100}")
        return text.lower() == "true"
    try:
        return vars(parser.parse_known_args([f"--value={text}"])[0])["value"]
    except argparse.ArgumentError as error:
        raise ValueError(f"{field}: {error.message}") from error


def _flag_name(cls: type, name: str) -> str:
    of_both = name in {field.name for field in dataclasses.fields(EngineConfig)}
    return f"sampling_{name}" if cls is SamplingParams and of_both else name


def _add(
    parser: argparse.ArgumentParser,
    title: str,
    cls: type,
    elsewhere: Mapping[str, str],
    defaults: Mapping[str, Any] = types.MappingProxyType({}),
    names: Sequence[str] = (),
    without: Collection[str] = (),
    **common: Any,
) -> None:
    group = parser.add_argument_group(title)
    hints, docs = typing.get_type_hints(cls), attribute_docs(cls)
    chosen = [field for field in dataclasses.fields(cls) if field.name in (names or hints)]
    fields = {_flag_name(cls, field.name): field for field in chosen if field.name not in without}
    most_used = [name for name in names or _MOST_USED if name in fields]
    for name in dict.fromkeys([*most_used, *fields]):
        field = fields[name]
        default = defaults.get(field.name, field.default)
        text = docs.get(field.name, "").replace("%", "%%")
        shown = ",".join(map(str, default)) or None if isinstance(default, tuple) else default
        if isinstance(default, tuple) and hints[field.name] == tuple[str, ...]:
            default = list(default)  # to which argparse appends
        options = {"help": f"{text} (default: {shown})".strip(), **_options(hints[field.name])}
        group.add_argument("--" + name.replace("_", "-"), **{"default": default, **options, **common})
    if isinstance(parser, FlagParser):
        parser.elsewhere |= elsewhere
        parser.seldom |= {"--" + name.replace("_", "-") for name in fields if name not in most_used}


def _options(hint: Any) -> dict[str, Any]:
    """argparse options for a field's type."""
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    kind = kinds[0]
    if kind is bool:
        return {"action": argparse.BooleanOptionalAction}
    if kind in (int, float, str):
        if type(None) in kinds:
            return {"type": _or_none(kind), "metavar": f"{kind.__name__.upper()}|none"}
        return {"type": kind, "metavar": kind.__name__.upper()}
    if typing.get_origin(kind) is typing.Literal:
        return {"choices": typing.get_args(kind)}
    if kind == tuple[int, ...]:
        return {"type": integers, "metavar": "INT[,INT...]"}
    if kind == tuple[str, ...]:
        return {"action": "append", "metavar": "STR"}
    if kind == tuple[Any, ...]:
        return {"type": lambda text: tuple(text.split(",")), "metavar": "MODULE:NAME[,...]"}
    return {"type": json.loads, "metavar": "JSON"}


def _or_none(kind: Callable[[str], Any]) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        try:
            return None if text.lower() == "none" else kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be {kind.__name__} or none, given {text!r}") from None

    return read


def integers(text: str) -> tuple[int, ...]:
    """``"1,8,32"`` -> ``(1, 8, 32)``, for argparse."""
    try:
        return tuple(int(item) for item in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be integers with commas between, given {text!r}") from None


def attribute_docs(cls: type) -> dict[str, str]:
    """Name -> text from the ``Attributes:`` section of a class's docstring; none under ``python -OO``."""
    section = (inspect.getdoc(cls) or "").partition("Attributes:")[2]
    entries = [entry.partition(": ") for entry in re.split(r"\n    (?=\w+: )", section)[1:]]
    return {name.strip(): " ".join(text.split()) for name, _, text in entries}
