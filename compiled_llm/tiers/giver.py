"""BlockGiver: blocks of this engine that others take, in memory without a name, under leases.

What a step hands down is copied here, so that no taker ever reads memory that a step may write to. A block stays while
a lease has it, or a taker reads it; then the least recently written one goes where there is no room. A lease lasts as
long as its request runs, and 30 seconds from its end, or from the last sign of life of the engine that takes. It ends
when that says so. A lapsed lease costs time, not truth: what was taken is checked by its digest and checksum. Who asks
for a block of a request that still runs, and that is not there yet, is told to ask again.
"""

import contextlib
import errno
import fcntl
import hashlib
import mmap
import os
import socket
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compiled_llm.tiers.nixl_memory import GivenMemory
from compiled_llm.tiers.peer_session import (
    DONE,
    FOUND,
    GET,
    LATER,
    MISSING,
    NIXL,
    RELEASE,
    RENEW,
    UNKNOWN,
    Message,
    PeerError,
    PeerSession,
    parse_address,
)

LEASE_SECONDS = 30.0
_PEER_SECONDS = 10.0  # that a peer may take for its part of the handshake, and to read a block
_MOST_PEERS = 64
_ACCEPT_SECONDS = 0.1  # until the next try
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL  # a taker's mapping stays valid


@dataclass(slots=True)
class _Slot:
    """Where a block or a state lies. ``readers``: of takers that are being sent it."""

    offset: int
    windows: int
    size: int
    checksum: bytes
    readers: int = 0


class BlockGiver:
    """Listens at ``address``; a thread for each engine that takes.

    Args:
        address: "unix:PATH", which must be in a directory of this user's own, or "HOST:PORT"; port 0 is a free one;
            "nixl:HOST:PORT": takers ask there, and read blocks by NIXL.
        secret: that takers have to know.
        facts: what the blocks are; takers compare them with their own.
        block_bytes: most of a block.
        most_bytes: of all blocks and states; where there are states, half of them are for these.
        state_bytes: of a state; 0: there are none.

    Attributes:
        address: with the port that was found.
        num_given, given_bytes: blocks that takers got.
        num_lapsed: leases that nobody ended in time.

    Raises:
        ValueError: ``most_bytes`` has no room for a block and a state, the address is none, or NIXL is not installed.
        OSError: it cannot listen there, or NIXL cannot be started.
    """

    def __init__(
        self,
        address: str,
        secret: bytes,
        facts: dict[str, Any],
        block_bytes: int,
        most_bytes: int,
        state_bytes: int = 0,
    ) -> None:
        if most_bytes < (least := max(block_bytes + state_bytes, 2 * state_bytes)):
            what = "twice a state, or a state and a block" if state_bytes else "a block"
            raise ValueError(f"kv_transfer_bytes must be at least {least}, {what}, given {most_bytes}")
        self._listener, self._path = _listening(address)
        self.address = address
        if self._path is None:
            host, port = self._listener.getsockname()[:2]
            self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._secret, self._facts = secret, facts
        self._state_bytes, total = (0 if state_bytes == block_bytes else state_bytes), 0
        self._offsets = {True: range(0), False: range(0)}  # of states, and of blocks
        for is_state, size in ((True, self._state_bytes), (False, block_bytes)):
            if size:
                whole = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
                room = most_bytes // 2 if is_state else most_bytes - total
                end = total + max(1, room // whole) * whole
                self._offsets[is_state], total = range(total, end, whole), end
        self._memory = os.memfd_create("compiled-llm blocks", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self._memory, total)
        fcntl.fcntl(self._memory, fcntl.F_ADD_SEALS, _SEALS)
        self._map = mmap.mmap(self._memory, total)
        self._view = memoryview(self._map)
        self._given: GivenMemory | None = None
        if address.startswith(NIXL):
            try:
                self._given = GivenMemory(self._view)
            except BaseException:
                self._view.release()
                self._map.close()
                os.close(self._memory)
                self._listener.close()
                raise
            self._facts = {**facts, "nixl": self._given.facts}
        self._lock = threading.Lock()
        self._free = {kind: list(offsets) for kind, offsets in self._offsets.items()}
        self._slots: OrderedDict[bytes, _Slot] = OrderedDict()
        self._leases: dict[bytes, tuple[tuple[bytes, ...], float | None]] = {}
        self._taken: set[bytes] = set()  # leases of requests that run, of which nothing is wanted any more
        self._held: Counter[bytes] = Counter()
        self._peers: set[socket.socket] = set()
        self._is_read = self._path is not None or self._given is not None  # by takers themselves
        self._is_closed = False
        self.num_given = self.given_bytes = self.num_lapsed = 0
        threading.Thread(target=self._accept, name="compiled-llm gives", daemon=True).start()

    # -- Blocks, for the thread that moves them

    def write(self, digest: bytes, parts: Sequence[memoryview], windows: Sequence[int]) -> tuple[bool, list[bytes]]:
        """Keep a copy of a block. Returns whether it is there, and the digests of blocks that made room."""
        size = sum(map(len, parts))
        kind = size == self._state_bytes
        free, offsets = self._free[kind], self._offsets[kind]
        with self._lock:
            if digest in self._slots:
                return True, []
            gone = []
            if not free:
                self._end_lapsed()
                idle = (one for one, slot in self._slots.items() if not (self._held[one] or slot.readers))
                last = next((one for one in idle if self._slots[one].offset in offsets), None)
                if last is None:
                    return False, []
                gone = [last]
                free.append(self._slots.pop(last).offset)
            start = offset = free.pop()
        content = hashlib.sha256()
        for part in parts:
            self._view[start : start + len(part)] = part
            content.update(part)
            start += len(part)
        with self._lock:
            self._slots[digest] = _Slot(offset, sum(1 << one for one in windows), size, content.digest())
        return True, gone

    def read(self, digest: bytes, own: memoryview, of_windows: Sequence[memoryview]) -> tuple[int, ...] | None:
        """One that this engine gave itself. None: it is not here any more."""
        with self._lock:
            slot = self._slots.get(digest)
            if slot is None:
                return None
            slot.readers += 1
        try:
            return scattered(self._content(slot), slot.windows, slot.checksum, own, of_windows)
        finally:
            with self._lock:
                slot.readers -= 1

    # -- Leases

    def hold(self, lease: bytes, digests: Iterable[bytes], seconds: float | None) -> None:
        """Blocks of these digests, here or to come, stay for so long; None: until ``release``, or another ``hold``."""
        with self._lock:
            is_taken = lease in self._taken
            self._release(lease)
            if is_taken:
                return
            self._leases[lease] = tuple(digests), None if seconds is None else time.monotonic() + seconds
            self._held.update(self._leases[lease][0])

    def release(self, lease: bytes) -> None:
        """A lease has ended; an unknown one is passed over."""
        with self._lock:
            self._release(lease)

    def has(self, lease: bytes) -> bool:
        """Whether blocks stay for a lease."""
        with self._lock:
            return lease in self._leases

    @property
    def num_leases(self) -> int:
        with self._lock:
            self._end_lapsed()
            return len(self._leases)

    def _release(self, lease: bytes) -> None:
        digests, _ = self._leases.pop(lease, ((), None))
        self._taken.discard(lease)
        self._held.subtract(digests)
        for digest in digests:
            if not self._held[digest]:
                del self._held[digest]

    def _end_lapsed(self) -> None:
        now = time.monotonic()
        for lease in [lease for lease, (_, end) in self._leases.items() if end is not None and end < now]:
            self._release(lease)
            self.num_lapsed += 1

    # -- Takers

    def _accept(self) -> None:
        while True:
            try:
                peer, _ = self._listener.accept()
            except OSError:
                if self._is_closed:
                    return
                time.sleep(_ACCEPT_SECONDS)  # too many files are open, or it went before it was met
                continue
            with self._lock:
                if self._is_closed or len(self._peers) >= _MOST_PEERS:
                    peer.close()
                    continue
                self._peers.add(peer)
            threading.Thread(target=self._serve, args=(peer,), name="compiled-llm gives", daemon=True).start()

    def _serve(self, peer: socket.socket) -> None:
        try:
            with peer, contextlib.suppress(OSError, PeerError):
                peer.settimeout(_PEER_SECONDS)
                session = PeerSession(peer, self._secret, gives=True)
                session.send_hello(self._facts, None if self._path is None else self._memory)
                while True:
                    if not session.has_input:
                        session.flush()
                        peer.settimeout(None)  # it may have nothing to ask for long
                    message = session.take()
                    peer.settimeout(_PEER_SECONDS)
                    self._answer(session, message)
        finally:
            with self._lock:
                self._peers.discard(peer)

    def _answer(self, session: PeerSession, asked: Message) -> None:
        if asked.kind == RELEASE:
            with self._lock:
                if self._leases.get(asked.lease, ((), 0.0))[1] is None:
                    self._taken.add(asked.lease)
                else:
                    self._release(asked.lease)
            session.send(Message(DONE))
            return
        with self._lock:
            is_known = asked.lease in self._leases
            digests, end = self._leases.get(asked.lease, ((), None))
            is_to_come = is_known and end is None and asked.digest in digests
            if end is not None:
                self._leases[asked.lease] = digests, time.monotonic() + LEASE_SECONDS
            slot = self._slots.get(asked.digest) if asked.kind == GET else None
            if slot is not None:
                slot.readers += 1
                self.num_given, self.given_bytes = self.num_given + 1, self.given_bytes + slot.size
        if slot is None:
            missing = LATER if is_to_come else MISSING if is_known else UNKNOWN
            session.send(Message(DONE if asked.kind == RENEW else missing))
            return
        try:
            found = Message(FOUND, asked.lease, asked.digest, slot.windows, slot.offset, slot.size, slot.checksum)
            session.send(found, None if self._is_read else self._content(slot))
        finally:
            with self._lock:
                slot.readers -= 1

    def _content(self, slot: _Slot) -> memoryview:
        return self._view[slot.offset : slot.offset + slot.size]

    def close(self) -> None:
        """End all connections. What is mapped elsewhere stays there."""
        self._is_closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            peers = list(self._peers)
        for peer in peers:
            with contextlib.suppress(OSError):
                peer.shutdown(socket.SHUT_RDWR)
        if self._path is not None:
            self._path.unlink(missing_ok=True)
        if self._given is not None:
            self._given.close()
        os.close(self._memory)


def _listening(address: str) -> tuple[socket.socket, Path | None]:
    """A socket that listens there, and its path."""
    family, place = parse_address(address)
    path = Path(place) if family == socket.AF_UNIX else None
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        if path is not None:
            _remove_stale(path)
        else:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(place)
        listener.listen()
    except OSError as error:
        listener.close()
        raise OSError(error.errno, f"{error.strerror or error}: kv_transfer_address {address!r:.200}") from error
    return listener, path


def _remove_stale(path: Path) -> None:
    """Remove the socket of an engine that was killed. What is anything else stays, and nobody can listen there."""
    with socket.socket(socket.AF_UNIX) as asked:
        asked.setblocking(False)
        if path.is_socket() and asked.connect_ex(str(path)) == errno.ECONNREFUSED:
            path.unlink(missing_ok=True)


def scattered(
    content: memoryview, windows: int, checksum: bytes, own: memoryview, of_windows: Sequence[memoryview]
) -> tuple[int, ...] | None:
    """Copy a block's bytes to where they belong. None: they are not what they should be."""
    numbers = tuple(number for number in range(len(of_windows)) if windows >> number & 1)
    parts = [own, *(of_windows[number] for number in numbers)]
    if windows >> len(of_windows) or len(content) != sum(map(len, parts)):
        return None
    start, found = 0, hashlib.sha256()
    for part in parts:
        part[:] = content[start : start + len(part)]
        found.update(part)  # of the copy: what it was copied from may have changed meanwhile
        start += len(part)
    return numbers if found.digest() == checksum else None
