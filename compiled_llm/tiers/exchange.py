"""BlockExchange: blocks that come from other engines, and those that go to them, as a ``BlockStore``."""

import contextlib
import fcntl
import mmap
import os
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

from compiled_llm.scheduling.request import BlockSource
from compiled_llm.tiers.file_thread import NotYet, Read, Room
from compiled_llm.tiers.giver import LEASE_SECONDS, BlockGiver, scattered
from compiled_llm.tiers.nixl_memory import RemoteMemory
from compiled_llm.tiers.peer_session import (
    FOUND,
    GET,
    LATER,
    MISSING,
    RELEASE,
    RENEW,
    UNKNOWN,
    Message,
    PeerError,
    PeerSession,
    parse_address,
)

_CONNECT_SECONDS, _READ_SECONDS = 2.0, 5.0
_BROKEN_SECONDS = 5.0  # for which an engine that did not answer is not asked again
_RENEW_SECONDS = LEASE_SECONDS / 5
_MEET_SECONDS = 10.0  # for which an engine is asked again that does not know a request: its prompt may not come at all


class _Peer:
    """A connection to an engine that gives blocks. See ``PeerSession`` for errors."""

    def __init__(self, address: str, secret: bytes) -> None:
        family, place = parse_address(address)
        self.lock = threading.Lock()
        self._met = set[bytes]()  # leases that it knew, of those that it may not know yet
        self._unmet: dict[bytes, float] = {}  # those that it did not, and until when they are asked for
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        self._memory: memoryview | None = None
        self._remote: RemoteMemory | None = None
        try:
            self._socket.settimeout(_CONNECT_SECONDS)
            self._socket.connect(place)
            self._session = PeerSession(self._socket, secret, gives=False)
            self.facts, descriptor = self._session.take_hello(has_descriptor=family == socket.AF_UNIX)
            if descriptor is not None:
                try:
                    if not fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
                        raise PeerError("its memory may shrink")  # reading what is gone would end this process
                    size = os.fstat(descriptor).st_size
                    self._memory = memoryview(mmap.mmap(descriptor, size, prot=mmap.PROT_READ))
                finally:
                    os.close(descriptor)
            elif "nixl" in self.facts:
                self._remote = RemoteMemory(self.facts["nixl"])
            self._socket.settimeout(_READ_SECONDS)
        except BaseException:
            self._socket.close()
            raise

    def read(self, source: BlockSource, blocks: Sequence[Room]) -> list[Read]:
        """As ``BlockStore.read_all``. All are asked for before the first answer is read."""
        with self.lock:
            for block in blocks:
                self._session.send(Message(GET, source.lease, block.digest))
            self._session.flush()
            return [self._read_one(source, *block) for block in blocks]

    def _read_one(self, source: BlockSource, digest: bytes, own: memoryview, of_windows: Sequence[memoryview]) -> Read:
        found = self._session.take()
        if source.is_early and found.kind in (FOUND, LATER):
            self._met.add(source.lease)
        if found.kind == LATER:
            return NotYet(is_coming=True)
        if found.kind == UNKNOWN and source.is_early and source.lease not in self._met:
            now = time.monotonic()
            if now < self._unmet.setdefault(source.lease, now + _MEET_SECONDS):
                return NotYet(is_coming=False)
        if found.kind in (MISSING, UNKNOWN):
            return None
        if found.kind != FOUND or found.digest != digest:
            raise PeerError("it answers something else")
        if found.size > sum(map(len, (own, *of_windows))):
            raise PeerError("its block is too large")
        return scattered(self._content(found), found.windows, found.checksum, own, of_windows)

    def _content(self, found: Message) -> memoryview:
        """A block's bytes, which may change while they are read."""
        if self._memory is not None:
            return self._memory[found.offset : found.offset + found.size]
        if self._remote is not None:
            return self._remote.read(found.offset, found.size, _READ_SECONDS)
        content = memoryview(bytearray(found.size))
        self._session.receive_into(content)
        return content

    def tell(self, kind: int, lease: bytes) -> None:
        with self.lock:
            if kind == RELEASE:
                self._met.discard(lease)
                self._unmet.pop(lease, None)
            self._session.send(Message(kind, lease))
            self._session.flush()
            self._session.take()

    def close(self) -> None:
        self._socket.close()
        with self.lock:
            if self._remote is not None:
                self._remote.close()
                self._remote = None


class BlockExchange:
    """Takes blocks from any engine that knows the secret and has the same ``facts``; gives some by ``giver``.

    Args:
        key: of all that a block's bytes depend on besides its digest, as of a ``BlockFolder``.
        facts: what of that a person knows by name.
        giver: None: this engine gives none.
    """

    def __init__(self, key: bytes, facts: dict[str, Any], secret: bytes, giver: BlockGiver | None) -> None:
        self.key, self.giver, self._facts, self._secret = key, giver, facts, secret
        self._peers: dict[str, _Peer] = {}
        self._broken: dict[str, float] = {}  # until when an address is not asked
        self._taking: dict[BlockSource, None] = {}
        self._ended: list[BlockSource] = []
        self._changed = threading.Condition()
        self._is_closed = False
        threading.Thread(target=self._keep, name="compiled-llm leases", daemon=True).start()

    # -- As a ``BlockStore``

    @property
    def known(self) -> tuple[bytes, ...]:
        """What this engine gives is not there yet when it starts."""
        return ()

    def read_all(self, blocks: Sequence[Room], source: BlockSource | None) -> list[Read]:
        if source is None:
            return [None if self.giver is None else self.giver.read(*block) for block in blocks]
        with contextlib.suppress(ValueError), self._failing(source.address):  # another engine may be there by now
            peer = self._peer(source.address)
            if peer is not None:
                found = peer.read(source, blocks)
                with self._changed:
                    is_wanted = source in self._taking  # else nobody is to ask again
                return [one if is_wanted or not isinstance(one, NotYet) else None for one in found]
        return [None] * len(blocks)

    def write(self, digest: bytes, parts: Sequence[memoryview], windows: Sequence[int]) -> tuple[bool, list[bytes]]:
        return (False, []) if self.giver is None else self.giver.write(digest, parts, windows)

    def scan(self) -> tuple[set[bytes], set[bytes]]:
        return set(), set()

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            for peer in self._peers.values():
                peer.close()
        if self.giver is not None:
            self.giver.close()

    # -- Requests whose blocks come from another engine

    def meet(self, address: str) -> None:
        """Connect to an engine, if it answers; blocks are to be taken from there. May wait.

        Raises:
            ValueError: its blocks are others than this one's: with both values.
        """
        with self._failing(address):
            self._peer(address)

    def begin(self, source: BlockSource) -> None:
        """A request takes blocks from there; until ``end`` its lease is renewed."""
        with self._changed:
            self._taking[source] = None

    def end(self, source: BlockSource) -> None:
        """The request takes none any more. Waits for nothing."""
        with self._changed:
            if source in self._taking:
                del self._taking[source]
                self._ended.append(source)
                self._changed.notify_all()

    def _keep(self) -> None:
        """Renew and end leases, in a thread of its own."""
        renewed = time.monotonic()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._ended or self._is_closed, _RENEW_SECONDS)
                if self._is_closed:
                    return
                told: list[tuple[int, BlockSource]] = [(RELEASE, source) for source in self._ended]
                self._ended = []
                if time.monotonic() - renewed >= _RENEW_SECONDS:
                    renewed = time.monotonic()
                    told += [(RENEW, source) for source in self._taking]
            for kind, source in told:
                with contextlib.suppress(ValueError), self._failing(source.address):
                    peer = self._peer(source.address)
                    if peer is not None:
                        peer.tell(kind, source.lease)

    def _peer(self, address: str) -> _Peer | None:
        """None: it did not answer lately. ``ValueError`` as ``meet``."""
        with self._changed:
            peer = self._peers.get(address)
            if peer is not None or self._is_closed or self._broken.get(address, 0.0) > time.monotonic():
                return peer
        peer = _Peer(address, self._secret)
        if peer.facts.get("key") != self.key.hex():
            peer.close()
            raise ValueError(_difference(hello(self.key, self._facts), peer.facts))
        with self._changed:
            kept = None if self._is_closed else self._peers.setdefault(address, peer)
        if kept is not peer:  # another thread was faster, or all was closed
            peer.close()
        return kept

    @contextlib.contextmanager
    def _failing(self, address: str) -> Iterator[None]:
        """Errors of a connection end it, and nothing else."""
        try:
            yield
        except (OSError, PeerError):
            with self._changed:
                now = time.monotonic()
                self._broken = {one: until for one, until in self._broken.items() if until > now}  # clients name them
                self._broken[address] = now + _BROKEN_SECONDS
                peer = self._peers.pop(address, None)
            if peer is not None:
                peer.close()


def hello(key: bytes, facts: dict[str, Any]) -> dict[str, Any]:
    """What a giver says of its blocks."""
    return {**facts, "key": key.hex()}


def _difference(own: dict[str, Any], theirs: dict[str, Any]) -> str:
    names = [name for name in own if name != "key" and own[name] != theirs.get(name)]
    if not names:
        return (
            "kv_transfer_params must name an engine of the same weights, code, torch, processor and engine arguments, "
            "given one whose blocks are others (block keys "
            f"{own['key'][:16]} here, {str(theirs.get('key'))[:16]} there)"
        )
    shown = ", ".join(f"{name} {own[name]} here and {theirs.get(name)!r:.100} there" for name in names)
    return f"kv_transfer_params must name an engine whose blocks are as this one's, given one with {shown}"
