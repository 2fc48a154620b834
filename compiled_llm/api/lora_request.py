"""LoRARequest: which adapter a request is served with."""

import dataclasses
import os
from collections.abc import Sequence
from typing import Any

from compiled_llm.api.readable import shown

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
