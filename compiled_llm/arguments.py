"""Command-line flags for the fields of EngineConfig and SamplingParams: same names with dashes, same defaults."""

import argparse
import dataclasses
import inspect
import json
import re
import types
import typing
from typing import Any

from compiled_llm.config import EngineConfig
from compiled_llm.sampling_params import SamplingParams


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """A flag for every engine argument."""
    _add(parser.add_argument_group("engine"), EngineConfig, {})


def add_sampling_arguments(parser: argparse.ArgumentParser, **defaults: Any) -> None:
    """A flag for every sampling parameter; ``--sampling-seed`` where the engine has an argument of the same name."""
    _add(parser.add_argument_group("sampling"), SamplingParams, defaults)


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """The EngineConfig that the flags say. ``ValueError`` as the config itself raises it."""
    return EngineConfig(**{field.name: getattr(args, field.name) for field in dataclasses.fields(EngineConfig)})


def sampling_params(args: argparse.Namespace) -> SamplingParams:
    """The SamplingParams that the flags say. ``ValueError`` as the parameters themselves raise it."""
    names = [field.name for field in dataclasses.fields(SamplingParams)]
    values = {name: getattr(args, _flag_name(SamplingParams, name)) for name in names}
    return SamplingParams(**values)


def _flag_name(cls: type, name: str) -> str:
    of_both = name in {field.name for field in dataclasses.fields(EngineConfig)}
    return f"sampling_{name}" if cls is SamplingParams and of_both else name


def _add(group: Any, cls: type, defaults: dict[str, Any]) -> None:
    hints, docs = typing.get_type_hints(cls), attribute_docs(cls)
    for field in dataclasses.fields(cls):
        name = _flag_name(cls, field.name)
        default = defaults.get(field.name, field.default)
        text = docs.get(field.name, "").replace("%", "%%")
        shown = ",".join(map(str, default)) or None if isinstance(default, tuple) else default
        options = {"default": default, "help": f"{text} (default: {shown})".strip(), **_options(hints[field.name])}
        group.add_argument("--" + name.replace("_", "-"), **options)


def _options(hint: Any) -> dict[str, Any]:
    """argparse options for a field's type."""
    kinds = [k for k in typing.get_args(hint) if k is not type(None)] if isinstance(hint, types.UnionType) else [hint]
    kind = kinds[0]
    if kind is bool:
        return {"action": argparse.BooleanOptionalAction}
    if kind in (int, float, str):
        return {"type": kind, "metavar": kind.__name__.upper()}
    if typing.get_origin(kind) is typing.Literal:
        return {"choices": typing.get_args(kind)}
    if kind == tuple[int, ...]:
        return {"type": _integers, "metavar": "INT[,INT...]"}
    if kind == tuple[str, ...]:
        return {"action": "append", "metavar": "STR"}
    if kind == tuple[Any, ...]:
        return {"type": lambda text: tuple(text.split(",")), "metavar": "MODULE:NAME[,...]"}
    return {"type": json.loads, "metavar": "JSON"}


def _integers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(item) for item in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be integers with commas between, given {text!r}") from None


def attribute_docs(cls: type) -> dict[str, str]:
    """Name -> text from the ``Attributes:`` section of a class's docstring; none under ``python -OO``."""
    section = (inspect.getdoc(cls) or "").partition("Attributes:")[2]
    entries = [entry.partition(": ") for entry in re.split(r"\n    (?=\w+: )", section)[1:]]
    return {name.strip(): " ".join(text.split()) for name, _, text in entries}
