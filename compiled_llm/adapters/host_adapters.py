"""HostAdapters: the adapters of an engine in host memory, and the way of one from there to a slot of the device."""

import threading
import weakref
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path

from compiled_llm.adapters.peft import Adapter, read_adapter, stamp
from compiled_llm.api.lora_request import LoRARequest
from compiled_llm.models.linears.adapted import Place
from compiled_llm.models.linears.protocol import StoredLinear

Stamp = tuple[tuple[int, int, int], ...]  # of an adapter's files
_MOST_READS = 5  # of files that change meanwhile


class HostAdapters:
    """Adapters by the names of requests, and by their digests.

    An adapter stays as long as somebody holds it, as each unfinished request of it does; besides, the ones used last.
    Its files are read again when they have changed: requests that had it before go on with what it was.

    Args:
        places: of the model's layers that adapters may change, by their names.
        most: adapters that stay without a request.
    """

    def __init__(self, places: Mapping[str, Place], most_rank: int, most: int) -> None:
        self._places, self._most_rank, self._most = places, most_rank, most
        self._recent: OrderedDict[str, tuple[object, Adapter]] = OrderedDict()  # by path: the stamp of the files
        self._known: weakref.WeakValueDictionary[str, Adapter] = weakref.WeakValueDictionary()  # by digest
        self._lock = threading.Lock()

    @property
    def layers(self) -> list[str]:
        """Names of the layers that adapters may change."""
        return list(self._places)

    @property
    def parts(self) -> list[StoredLinear]:
        """These layers, as checkpoints have them."""
        return [place.part for place in self._places.values()]

    def get(self, request: LoRARequest) -> Adapter:
        """The adapter of a request, read if it is not here. Any thread may ask.

        Raises:
            ValueError: it cannot be served; the message names the file and what would help.
        """
        path = Path(request.lora_path)
        with self._lock:
            found = stamp(path)
            stamped, adapter = self._recent.pop(request.lora_path, (None, None))
            if adapter is None or stamped != found:
                found, adapter = self._read(request.lora_name, path, found)
                # Requests of one content share it, whatever they call it.
                adapter = self._known.setdefault(adapter.digest, adapter)
            self._recent[request.lora_path] = found, adapter
            while len(self._recent) > self._most:
                self._recent.popitem(last=False)
            return adapter

    def _read(self, name: str, path: Path, before: Stamp) -> tuple[Stamp, Adapter]:
        """The adapter, and the stamp of its files. They are read again where they were exchanged meanwhile."""
        for _ in range(_MOST_READS):
            try:
                adapter = read_adapter(name, path, self._places, self._most_rank)
            except ValueError:
                if stamp(path) == before:
                    raise
            else:
                if stamp(path) == before:
                    return before, adapter
            before = stamp(path)
        raise ValueError(f"{path}: its files changed each time that they were read: wait until they are written")

    def load(self, slot: int, digest: str) -> None:
        """Copy the adapter of this digest, which some request holds, to ``slot`` of all layers."""
        changes = self._known[digest].changes
        for name, place in self._places.items():
            place.put(slot, changes.get(name))
