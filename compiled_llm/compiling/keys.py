"""The key of a compiled function: everything that its code depends on, as JSON values that a reader understands.

A key is a dict of fields; a value may be a dict of further ones. What differs between two keys is said field by field,
with both values, down to the setting, the file or the argument: there are digests of files and of bytecode alone.
"""

import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import torch

from compiled_llm.api.readable import shown
from compiled_llm.compiling.argument_specs import described_specs, settings
from compiled_llm.compiling.gpu_properties import GpuTarget
from compiled_llm.ops import native
from compiled_llm.ops.torch_private import compiler_settings
from compiled_llm.system.hardware import hardware

Fields = Mapping[str, Any]

_PACKAGE = Path(__file__).parents[1]
# Files whose text decides what is traced: after a change of any of them no entry is found.
_SOURCES = ("models/**/*.py", "ops/**/*.py", "ops/tiles/**/*.json", "step/*.py", "compiling/*.py")
# What follows from other fields: it is named only where none of those before it differs.
_CONSEQUENCES = {"code": 1, "closed_over": 1, "defaults": 1, "arguments": 2}
_MOST_NAMED = 4  # differences in a reason
_MOST_FILES = 3


def key_of(name: str, function: FunctionType, args: tuple, fields: Fields) -> dict[str, Any]:
    """All fields of a function's key.

    Args:
        fields: JSON, of the machine and of what decides about ``args`` and what the function closes over. These two
            are in the key anyway: with ``fields`` a reader is told of a size or a dtype, and not of hundreds of shapes.
    """
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    return {
        "function": name,
        **fields,
        "code": digest(_code(function.__code__))[:16],
        "closed_over": {variable: _readable(cell.cell_contents) for variable, cell in cells.items()},
        "defaults": _readable([function.__defaults__, function.__kwdefaults__]),
        "arguments": described_specs(args, function.__code__.co_varnames[: function.__code__.co_argcount]),
    }


def machine_fields() -> dict[str, Any]:
    """What code for this CPU depends on besides the model and the arguments: equal on all machines of a kind."""
    fields = hardware(torch.device("cpu")) | {
        "torch_directory": str(Path(torch.__file__).parent),  # the generated code's build names torch's headers
        "python": sys.version.split()[0],
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "compiler": native.compiler(),
        "sources": source_digests(),
        **code_settings(),
    }
    fields["flags"] = dict.fromkeys(fields["flags"].split(), True)
    fields.pop("cpus")  # code depends on the number of threads, not of CPUs
    fields.pop("isa", None)  # the kernels that it limits are called by compiled code, and are no part of it
    return fields


def gpu_fields(target: GpuTarget) -> dict[str, Any]:
    """What code for a GPU depends on besides the model and the arguments: equal on all machines with such a GPU."""
    properties = dataclasses.asdict(target.properties)
    properties.pop("total_memory")  # differs from one to another of a kind, and no code depends on it
    return {
        "gpu": properties,
        "programmatic": target.programmatic,
        "torch": torch.__version__,
        "triton": importlib.metadata.version("triton"),
        "python": sys.version.split()[0],
        "sources": source_digests(),
        **code_settings(),
    }


def source_digests() -> dict[str, str]:
    """Digests of the engine's files that are traced or that compile, by their names within the package."""
    paths = sorted(path for pattern in _SOURCES for path in _PACKAGE.glob(pattern))
    return {str(path.relative_to(_PACKAGE)): hashlib.sha256(path.read_bytes()).hexdigest()[:16] for path in paths}


def code_settings() -> dict[str, Any]:
    """torch's settings in this process that go into compiled code, besides its number of threads: JSON values."""
    return {**settings(), "default device": str(torch.get_default_device()), "torch_config": compiler_settings()}


def digest(value: Any) -> str:
    """A digest of JSON values that does not depend on the order of fields."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def differences(was: Fields, now: Fields) -> list[str]:
    """The fields in which two keys differ, as "block_size is 32 and was 16"; none that follows from another one."""
    found: dict[int, list[str]] = {}
    for name in {**now, **was}:
        if now.get(name) != was.get(name):
            found.setdefault(_CONSEQUENCES.get(name, 0), []).extend(_differences(name, was.get(name), now.get(name)))
    return found[min(found)] if found else []


def reason(texts: list[str]) -> str:
    """``differences`` in a line: the first ones, and how many more there are."""
    more = [f"and {len(texts) - _MOST_NAMED} more"] if len(texts) > _MOST_NAMED else []
    return "; ".join([*texts[:_MOST_NAMED], *more])


def distance(was: Fields, now: Fields) -> tuple[int, ...]:
    """How much two keys differ: in what decides first, then in what follows from it."""
    counts = [0] * (1 + max(_CONSEQUENCES.values()))
    for name in {**now, **was}:
        if now.get(name) != was.get(name):
            counts[_CONSEQUENCES.get(name, 0)] += sum(1 for _ in _leaves(name, was.get(name), now.get(name)))
    return tuple(counts)


def _differences(name: str, was: Any, now: Any) -> Iterator[str]:
    """What to say of a field that differs."""
    if name == "code":
        yield "the function itself has changed"
    elif name == "sources":
        files = [path.removeprefix("sources.") for path, _, _ in _leaves(name, was, now)]
        more = f" and {len(files) - _MOST_FILES} more" if len(files) > _MOST_FILES else ""
        yield f"files of the engine have changed: {', '.join(files[:_MOST_FILES])}{more}"
    else:
        for path, before, after in _leaves(name, was, now):
            place = path.removeprefix("closed_over.").removeprefix("arguments.")
            yield f"{place} is {_said(after)} and was {_said(before)}"


_ABSENT: Any = object()


def _leaves(path: str, was: Any, now: Any) -> Iterator[tuple[str, Any, Any]]:
    """Each value that differs: where it is, what it was and what it is; ``_ABSENT`` where there is none."""
    if isinstance(was, dict) and isinstance(now, dict):
        for name in {**now, **was}:
            yield from _leaves(f"{path}.{name}", was.get(name, _ABSENT), now.get(name, _ABSENT))
    elif isinstance(was, list) and isinstance(now, list) and len(was) == len(now):
        for index, (before, after) in enumerate(zip(was, now, strict=True)):
            yield from _leaves(f"{path}[{index}]", before, after)
    elif was is not now and was != now:
        yield path, was, now


def _said(value: Any) -> str:
    return "absent" if value is _ABSENT or value is None else shown(value)


def _readable(value: Any) -> Any:
    """A value that a function closes over, as JSON; of functions the names, which have no address in them."""
    if isinstance(value, FunctionType):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, functools.partial):
        return {"partial": _readable(value.func), "args": _readable(value.args), "keywords": _readable(value.keywords)}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: _readable(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return {"kind": type(value).__name__, **fields}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return {"kind": type(value).__name__, **dict(zip(value._fields, map(_readable, value), strict=True))}
    if isinstance(value, tuple | list):
        return [_readable(item) for item in value]
    if isinstance(value, dict):
        return {repr(key): _readable(item) for key, item in value.items()}
    return value if value is None or isinstance(value, bool | int | str) else repr(value)


def _code(code: CodeType) -> list[Any]:
    """The instructions, names and constants of a code object, without its own name, file and lines."""
    constants = [_code(value) if isinstance(value, CodeType) else repr(value) for value in code.co_consts]
    return [code.co_code.hex(), list(code.co_names), constants]
