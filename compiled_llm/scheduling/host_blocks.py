"""What ``KVTiers`` knows of blocks and states in host memory, and what it counts. Plain Python."""

import dataclasses
import hashlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from compiled_llm.scheduling.costs import moved
from compiled_llm.scheduling.request import BlockSource, Request

_BYTES_A_SECOND = 200e6  # of reading files, until some were read: a slow disk's


@dataclasses.dataclass
class TierCounts:
    """What was moved between tiers since the engine was made; ``EngineStats`` says what each of the counts is."""

    host_hit_tokens: int = 0
    disk_hit_tokens: int = 0
    host_stored_bytes: int = 0
    host_loaded_bytes: int = 0
    num_host_evictions: int = 0
    num_stores_without_room: int = 0
    disk_written_bytes: int = 0
    disk_read_bytes: int = 0
    num_disk_failures: int = 0
    num_disk_evictions: int = 0
    num_fetches_dearer: int = 0
    num_fetches_late: int = 0
    peer_hit_tokens: int = 0
    peer_given_bytes: int = 0
    peer_taken_bytes: int = 0
    num_takes_failed: int = 0
    tier_copy_seconds: float = 0.0
    tier_file_seconds: float = 0.0
    tier_idle_seconds: float = 0.0
    tier_wait_seconds: float = 0.0

    def add_read(self, num_bytes: int, *, is_there: bool, is_peers: bool, is_asked_again: bool) -> None:
        """A block was read from the disk or taken from another engine; or it is not ``is_there``.

        ``is_asked_again``: then another engine is asked for it.
        """
        self.num_disk_failures += not (is_there or is_peers)
        self.num_takes_failed += is_peers and not (is_there or is_asked_again)
        self.disk_read_bytes += num_bytes * (is_there and not is_peers)
        self.peer_taken_bytes += num_bytes * (is_there and is_peers)

    def add_written(self, num_bytes: int, *, is_written: bool, to_disk: bool) -> None:
        """A block was written to the disk, or to where other engines take it from."""
        self.num_disk_failures += to_disk and not is_written
        self.disk_written_bytes += num_bytes * (is_written and to_disk)
        self.peer_given_bytes += num_bytes * (is_written and not to_disk)


@dataclasses.dataclass(eq=False, slots=True)
class HostBlock:
    """A block in host memory, or a snapshot of a state.

    Attributes:
        digest: of the block; of a state its ``state_name``.
        row: of the worker's host memory, numbered as blocks of the swap space; of a state -n for slot n there.
        windows: numbers of the windows whose keys are there too.
        pins: copies and files in flight that use the row, and requests that wait for it.
        is_there: whether its keys are in the row, or will be before anything that a step does with them.
        source: where they were read from, until they are first used: "disk", "peer" (another engine) or "" (neither).
        sources: other engines that have it for requests which wait for it. The first ``num_asked`` were asked.
    """

    digest: bytes
    row: int
    windows: frozenset[int] = frozenset()
    pins: int = 0
    is_there: bool = True
    source: str = ""
    sources: list[BlockSource] = dataclasses.field(default_factory=list)
    num_asked: int = 0

    @property
    def is_state(self) -> bool:
        return self.row < 0

    def add_source(self, source: BlockSource | None) -> None:
        """A request waits for it whose blocks ``source`` has."""
        if source is not None and not self.is_there and source not in self.sources:
            self.sources.append(source)

    def next_source(self, waiting: Iterable[Request]) -> BlockSource | None:
        """The next engine to ask for it, of those whose requests are still ``waiting``; it counts as asked."""
        while self.num_asked < len(self.sources):
            source, self.num_asked = self.sources[self.num_asked], self.num_asked + 1
            if any(request.source == source for request in waiting):
                return source
        return None


class Found(NamedTuple):
    """Where a request finds its first tokens: in these blocks on the device, and then in those in host memory.

    ``state``: that after them, where layers keep one, if it is in host memory too.
    """

    on_device: list[int]
    below: Sequence[HostBlock] = ()
    state: HostBlock | None = None


Part = HostBlock | bytes  # in host memory, or the digest of one that may be read


def state_name(digest: bytes) -> bytes:
    """What the state at the end of the block of ``digest`` is called below the device."""
    return hashlib.sha256(b"state" + digest).digest()


@dataclasses.dataclass(slots=True)
class Wait:
    """A request that waits for files, and the blocks in host memory that are pinned for it.

    ``num_blocks``: that need not be computed if all come; 0: as many as come.
    """

    blocks: list[HostBlock]
    began: float
    num_blocks: int = 0


@dataclasses.dataclass(slots=True)
class Step:
    """What a step moves: blocks that it pins, and those of them that it copies to the host."""

    pinned: list[HostBlock] = dataclasses.field(default_factory=list)
    stored: list[HostBlock] = dataclasses.field(default_factory=list)


class MoveCosts:
    """What it takes to move a block, and to compute its tokens: moving averages. 0: not measured yet.

    Attributes:
        copy_seconds, read_seconds: of a block between device and host, and of one that comes into host memory.
    """

    def __init__(self, block_size: int, block_bytes: int, state_bytes: int, copy_seconds: float) -> None:
        self._block_size, self._block_bytes, self._state_bytes = block_size, block_bytes, state_bytes
        self.copy_seconds, self.read_seconds, self._token_seconds = copy_seconds, block_bytes / _BYTES_A_SECOND, 0.0

    def of(self, is_state: bool) -> float:
        """How many times a block's: of a state, or of a block itself."""
        return self._state_bytes / self._block_bytes if is_state else 1.0

    def num_bytes(self, held: HostBlock) -> int:
        return self._state_bytes if held.is_state else self._block_bytes

    def pays(self, seconds: float, num_blocks: int) -> bool:
        """Whether ``seconds`` are less than it takes to compute the tokens of some blocks, as far as that is known."""
        own = self._token_seconds * self._block_size * num_blocks
        return not own or seconds < own

    def record_tokens(self, seconds: float) -> None:
        """Of a token in a step of prompts."""
        self._token_seconds = _averaged(self._token_seconds, seconds)

    def record_copy(self, seconds: float) -> None:
        self.copy_seconds = _averaged(self.copy_seconds, seconds)

    def record_read(self, seconds: float) -> None:
        self.read_seconds = _averaged(self.read_seconds, seconds)


def _averaged(average: float, value: float) -> float:
    return moved(average, value) if average else value
