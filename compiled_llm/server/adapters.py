"""Adapters by the names that clients give as their model: those of ``--lora-modules``, and what is loaded later."""

import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from compiled_llm.api.config import EngineConfig
from compiled_llm.api.lora_request import LoRAModule
from compiled_llm.api.readable import shown
from compiled_llm.server.messages import AdapterRef
from compiled_llm.server.replicas import Replicas
from compiled_llm.server.settings import ServerSettings

_MOST = 2**16


class ServedAdapter(NamedTuple):
    """An adapter that clients may name. ``parent``: a name of the model that it changes; ``created``: Unix time."""

    ref: AdapterRef
    parent: str
    created: int


def check_lora_settings(settings: ServerSettings, config: EngineConfig) -> None:
    """``ValueError`` where the server is to have adapters, and the engine none."""
    for name in ("lora_modules", "allow_lora_updates"):
        if getattr(settings, name) and not config.enable_lora:
            raise ValueError(f"{name} needs enable_lora, given {getattr(settings, name)!r} without it")


class ServedAdapters:
    """The names and paths of adapters. An engine reads one when a request needs it, and keeps those used last.

    Args:
        names: of the model, which no adapter may have.
    """

    def __init__(self, client: Replicas, names: Sequence[str]) -> None:
        self._client, self._names = client, names
        self._adapters: dict[str, ServedAdapter] = {}

    def __iter__(self) -> Iterator[ServedAdapter]:
        return iter(tuple(self._adapters.values()))

    def __len__(self) -> int:
        return len(self._adapters)

    def get(self, name: str) -> ServedAdapter | None:
        return self._adapters.get(name)

    async def load(self, module: LoRAModule, in_place: bool = False) -> None:
        """Serve an adapter once the engines have read it. ``in_place``: also in the place of one of the same name.

        Raises:
            FileNotFoundError: it is not there.
            ValueError: it cannot be served, with the reason; or a name does not allow it.
            EngineEndedError: none is left.
        """
        name, parent = module.lora_request.lora_name, module.base_model_name or self._names[0]
        if parent not in self._names:
            raise ValueError(f"base_model_name must be one of {', '.join(self._names)}, given {shown(parent)}")
        ref = AdapterRef(name, module.lora_request.lora_path)
        self._check_free(name, in_place)
        await self._client.read_adapter(ref)
        self._check_free(name, in_place)  # another client may have loaded one of this name meanwhile
        replaced = self._adapters.get(name)
        self._adapters[name] = ServedAdapter(ref, parent, int(time.time()))
        if replaced is not None:
            self._forget(replaced)

    def unload(self, name: str) -> None:
        """Serve an adapter no more; requests that have it go on. ``KeyError``: there is none of that name."""
        self._forget(self._adapters.pop(name))

    def _forget(self, adapter: ServedAdapter) -> None:
        if all(other.ref.path != adapter.ref.path for other in self):
            self._client.drop_adapter(adapter.ref)

    def _check_free(self, name: str, in_place: bool) -> None:
        if name in self._names:
            raise ValueError(f"lora_name must not be a name of the model, given {shown(name)}")
        if name in self._adapters and not in_place:
            raise ValueError(
                f"lora_name must be a new one, and adapter {shown(name)} has already been loaded: unload it first, or "
                "give load_inplace true"
            )
        if len(self) >= _MOST and name not in self._adapters:
            raise ValueError(f"at most {_MOST:,} adapters are served: unload some")
