"""HostAdapters: the adapters of an engine in host memory, and the way of one from there to a slot of the device."""

import dataclasses
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch

from compiled_llm.adapters.peft import NO_PLACES, Adapter, Stamp, read_adapter, stamp
from compiled_llm.api.config import EngineConfig
from compiled_llm.api.lora_request import LoRARequest
from compiled_llm.models.config import ModelConfig
from compiled_llm.models.linears.adapted import Adaptable, AnyPlace
from compiled_llm.models.linears.protocol import LinearKind, StoredLinear
from compiled_llm.models.linears.whole import WholePlace
from compiled_llm.models.registry import family_of

_THREADS = 32  # that look at files, and wait for others that read the same ones
_READERS = 4  # of these, at a time: reading takes cores from steps
_FRESH_SECONDS = 1.0  # since its files were looked at, in which ``begin`` takes an adapter to be unchanged
_CLOCK_STEP_NS = 20_000_000  # no less than the time of files goes on at once: 10 ms, before Linux 6.13


@dataclasses.dataclass(frozen=True)
class HeldRequest(LoRARequest):
    """A ``LoRARequest`` whose adapter was read: whoever gets it needs no file."""

    adapter: Adapter

    @property
    def digest(self) -> str:
        return self.adapter.digest


_MOST_READS = 5  # of files that change meanwhile


class HostAdapters:
    """Adapters by the names of requests, and by their digests.

    An adapter stays as long as somebody holds it, as each unfinished request of it does; besides, the ones used last.
    Its files are read again when they have changed: requests that had it before go on with what it was.

    Args:
        places: of the model's layers that adapters may change, by their names.
        most: adapters that stay without a request.
        whole: as ``read_adapter``.
    """

    def __init__(
        self, places: Mapping[str, AnyPlace], most_rank: int, most: int, whole: Mapping[str, WholePlace] = NO_PLACES
    ) -> None:
        self._places, self._most_rank, self._most, self._whole = places, most_rank, most, whole
        # By path: the stamp of the files, the adapter, and when they were looked at.
        self._recent: OrderedDict[str, tuple[object, Adapter, float]] = OrderedDict()
        self._known: weakref.WeakValueDictionary[str, Adapter] = weakref.WeakValueDictionary()  # by digest
        self._received: Sequence[Adapter] = ()
        self._lock = threading.Lock()  # of these; never held while a file is read
        self._path_locks: weakref.WeakValueDictionary[str, threading.Lock] = weakref.WeakValueDictionary()
        self._readers = threading.BoundedSemaphore(_READERS)
        self._begun: dict[str, Future[Adapter]] = {}  # by path
        self._pool = ThreadPoolExecutor(_THREADS, "compiled_llm adapters")

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    @property
    def layers(self) -> list[str]:
        """Names of the layers that adapters may change."""
        return list(self._places)

    @property
    def parts(self) -> list[StoredLinear]:
        """These layers, as checkpoints have them."""
        return [place.part for place in self._places.values()]

    @property
    def head(self) -> StoredLinear:
        """The model's head, which adapters may bring whole."""
        return next(place.part for place in self._whole.values() if place.part.role == "head")

    def get(self, request: LoRARequest) -> Adapter:
        """The adapter of a request, read if it is not here. Any thread may ask; it waits for those of the same path.

        Raises:
            ValueError: it cannot be served; the message names the file and what would help.
        """
        path = request.lora_path
        with self._lock:
            path_lock = self._path_locks.setdefault(path, threading.Lock())
        with path_lock:
            found = stamp(Path(path))
            with self._lock:
                stamped, adapter, _ = self._recent.get(path, (None, None, 0.0))
            if adapter is None or stamped != found:
                with self._readers:
                    found, adapter = self._read(request.lora_name, Path(path), found)
            with self._lock:
                # Requests of one content share it, whatever they call it.
                adapter = self._known.setdefault(adapter.digest, adapter)
                self._recent[path] = found, adapter, time.monotonic()
                self._recent.move_to_end(path)
                while len(self._recent) > self._most:
                    self._recent.popitem(last=False)
            return adapter

    def begin(self, request: LoRARequest) -> "Future[Adapter]":
        """``get`` in another thread; done at once where its files were looked at within the last second.

        Looks at no file itself. Requests that come while the adapter is being read share that.
        """
        path = request.lora_path
        with self._lock:
            _, adapter, looked_at = self._recent.get(path, (None, None, 0.0))
            if adapter is not None and time.monotonic() - looked_at < _FRESH_SECONDS:
                self._recent.move_to_end(path)
                done: Future[Adapter] = Future()
                done.set_result(adapter)
                return done
            if path not in self._begun:
                self._begun[path] = self._pool.submit(self._get_begun, request)
            return self._begun[path]

    def _get_begun(self, request: LoRARequest) -> Adapter:
        try:
            return self.get(request)
        finally:
            with self._lock:
                del self._begun[request.lora_path]

    def drop(self, path: str) -> None:
        """Forget what was read from ``path``, but for those who hold it."""
        with self._lock:
            self._recent.pop(path, None)

    def _read(self, name: str, path: Path, before: Stamp) -> tuple[Stamp, Adapter]:
        """The adapter, and the stamp of its files. They are read again where they were exchanged meanwhile."""
        for _ in range(_MOST_READS):
            _wait_for_the_next_time(before)
            try:
                adapter = read_adapter(name, path, self._places, self._most_rank, self._whole)
            except ValueError:
                if stamp(path) == before:
                    raise
            else:
                if stamp(path) == before:
                    return before, adapter
            before = stamp(path)
        raise ValueError(f"{path}: its files changed each time that they were read: wait until they are written")

    def known(self, digest: str) -> Adapter:
        """The adapter of this digest, which some request holds."""
        return self._known[digest]

    def receive(self, adapters: Sequence[Adapter]) -> None:
        """Another process has read these. They stay until the next ones come."""
        self._known.update((adapter.digest, adapter) for adapter in adapters)
        self._received = adapters

    def load(self, slot: int, digest: str) -> None:
        """Copy the adapter of this digest, which some request holds, to ``slot`` of all layers."""
        adapter = self._known[digest]
        for name, place in self._places.items():
            place.put(slot, adapter.changes.get(name))
        for name, whole in self._whole.items():
            if whole.matrices is not None:
                whole.matrices.put(slot, adapter.matrices.get(name))


def _wait_for_the_next_time(stamped: Stamp) -> None:
    """Until a file that is changed gets a later time than these have: else the change would not be seen."""
    since = time.time_ns() - max(file.changed_ns for file in stamped)
    if 0 <= since < _CLOCK_STEP_NS:
        time.sleep((_CLOCK_STEP_NS - since) / 1e9)


def adaptable(linears: LinearKind, config: EngineConfig) -> tuple[LinearKind, HostAdapters | None]:
    """The kind of linear layer that adapters may change, and where these are; ``linears`` and None without any."""
    if not config.enable_lora:
        return linears, None
    sizes = config.lora_slots, config.lora_rank, config.lora_target_modules
    kind = Adaptable(linears, *sizes, num_whole=config.whole_loras)
    return kind, HostAdapters(kind.places, config.lora_rank, config.host_loras, kind.whole)


def readable(linears: LinearKind, config: EngineConfig, model_config: ModelConfig, dtype: torch.dtype) -> HostAdapters:
    """To read adapters for layers that other processes have. ``linears``, ``dtype``: of the whole model."""
    kind = Adaptable(linears, config.lora_slots, config.lora_rank, config.lora_target_modules, of_shapes=True)
    kind.note_names(family_of(model_config).describe(model_config, dtype, kind).other_names)
    return HostAdapters(kind.places, config.lora_rank, config.host_loras, kind.whole)
