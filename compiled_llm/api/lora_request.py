"""LoRARequest: which adapter a request is served with."""

import dataclasses
import json
import os
from collections.abc import Iterable, Sequence
from typing import Any

from compiled_llm.api.readable import shown

WHOLE = "+whole"
"""How digests of adapters end that have a whole head or embedding: they run in slots that have room for these."""
_LONGEST_NAME = 256


@dataclasses.dataclass(frozen=True)
class LoRARequest:
    """An adapter by its name; for an engine with ``enable_lora``.

    Attributes:
        lora_name: what it is called, in messages and by who serves it.
        lora_path: the directory with PEFT's ``adapter_config.json`` and ``adapter_model.safetensors``.

    Raises:
        ValueError: a name that is empty or longer than 256 characters, or a path that is none.
    """

    lora_name: str
    lora_path: str

    def __post_init__(self) -> None:
        name, path = self.lora_name, self.lora_path
        if not isinstance(name, str) or not 0 < len(name) <= _LONGEST_NAME or not name.isprintable():
            raise ValueError(f"lora_name must be 1 to {_LONGEST_NAME} printable characters, given {shown(name)}")
        if not isinstance(path, str | os.PathLike) or not str(path):
            raise ValueError(f"lora_path must be the directory of an adapter, given {shown(path)}")
        object.__setattr__(self, "lora_path", str(path))


def lora_arguments(path: str | None) -> tuple[LoRARequest | None, dict[str, Any]]:
    """What ``--lora PATH`` stands for: the adapter of all requests, and the engine's arguments for one alone."""
    return (None, {}) if path is None else (LoRARequest("lora", path), {"enable_lora": True, "max_loras": 1})


@dataclasses.dataclass(frozen=True)
class LoRAModule:
    """An adapter that is served under its name. ``base_model_name``: which of the model's names it goes with."""

    lora_request: LoRARequest
    base_model_name: str | None = None


def read_lora_modules(given: Iterable[str]) -> dict[str, LoRAModule]:
    """What ``--lora-modules`` gives, by name: each "name=path", or an object of JSON as vLLM has it.

    Raises:
        ValueError: one is neither, or a name is given twice.
    """
    found: dict[str, LoRAModule] = {}
    for text in given:
        name, is_pair, path = text.partition("=")
        fields: dict[str, str] = {"name": name, "path": path} if is_pair else {}
        if text.lstrip().startswith("{"):
            try:
                fields = json.loads(text)
            except ValueError:
                fields = {}
        if not {"name", "path"} <= fields.keys() <= {"name", "path", "base_model_name"}:
            raise ValueError(
                'lora_modules must be NAME=PATH or {"name": NAME, "path": PATH, "base_model_name": NAME}, of which the '
                f"last field may be left out, given {shown(text)}"
            )
        module = LoRAModule(LoRARequest(fields["name"], fields["path"]), fields.get("base_model_name"))
        if found.setdefault(module.lora_request.lora_name, module) is not module:
            raise ValueError(f"lora_modules must have each name once, given {shown(fields['name'])} twice")
    return found


def pair_lora_requests(given: Any, count: int) -> list[LoRARequest | None]:
    """One for all, or one for each of ``count`` prompts; None: the base model.

    Raises:
        ValueError: as many are not given, or what is none.
    """
    if given is None or isinstance(given, LoRARequest):
        return [given] * count
    if not isinstance(given, Sequence) or isinstance(given, str) or len(given) != count:
        raise ValueError(
            f"lora_request must be a LoRARequest, or a list with a LoRARequest or None for each of {count} prompts, "
            f"given {shown(given)}"
        )
    for one in given:
        check_lora_request(one)
    return list(given)


def check_lora_request(given: Any) -> None:
    """``ValueError`` for what is neither a ``LoRARequest`` nor None."""
    if given is not None and not isinstance(given, LoRARequest):
        raise ValueError(f"lora_request must be a LoRARequest or None, given {shown(given)}")
