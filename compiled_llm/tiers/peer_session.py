"""What two engines say to each other about blocks: a handshake by a shared key, then messages of one size.

    giver -> taker    8 bytes of magic and version, 32 random ones
    taker -> giver    32 random bytes, HMAC of both sides' random bytes
    giver -> taker    HMAC of the same; then the first message that is counted: JSON that says what its blocks are
    then              a message of the taker, an answer of the giver, and so on

Each message is a fixed header (``_FIELDS``) and its HMAC-SHA256, by a key of this connection and direction. Messages
are numbered: one that is left out, repeated or out of order ends the connection. The bytes of a block follow its header
over TCP; over a Unix socket they lie in memory that the taker has mapped, and with NIXL in memory that it reads from
afar, where the first message says how. In each case the header has their SHA-256.
Nothing is encrypted.
"""

import hashlib
import hmac
import json
import os
import socket
import struct
import time
from typing import Any, NamedTuple

MAGIC = b"CLLMPR\0\2"
_NONCE = 32
_FIELDS = struct.Struct("<BQ32s32sIQQ32s")
_MAC = hashlib.sha256().digest_size
_MOST_HELLO = _MOST_INPUT = 1 << 16
GET, RENEW, RELEASE, FOUND, MISSING, DONE, LATER, UNKNOWN = range(8)
NO_LEASE = bytes(32)
NIXL = "nixl:"  # before an address


class PeerError(Exception):
    """The other side is gone, or says what it should not."""


class Message(NamedTuple):
    """A header.

    Attributes:
        kind: ``GET``, ``RENEW`` or ``RELEASE``; answers are ``FOUND``, ``MISSING`` or ``DONE``; ``LATER``: the block is
            not computed yet; ``UNKNOWN``: it is not there, nor is the lease.
        lease: of the taker's request; digest: of the block.
        windows: bit n: the keys of window n are there too.
        offset: of the block in the memory that the taker has mapped, or reads by NIXL.
        size: bytes of the block; checksum: SHA-256 of them.
    """

    kind: int
    lease: bytes = NO_LEASE
    digest: bytes = NO_LEASE
    windows: int = 0
    offset: int = 0
    size: int = 0
    checksum: bytes = NO_LEASE


class PeerSession:
    """One side of a connection.

    Args:
        own: a connected socket; its timeout is that of all that is read before the first message.
        secret: of all engines that may speak to each other.
        gives: whether this is the giver.

    Raises:
        PeerError: the other side does not know the secret, or is no engine.
        OSError: it is gone, or silent.
    """

    def __init__(self, own: socket.socket, secret: bytes, *, gives: bool) -> None:
        self.socket, self._input, self._output = own, bytearray(), bytearray()
        seconds = own.gettimeout()
        assert seconds, "a peer may be silent"
        self._met_until = time.monotonic() + seconds
        mine, names = os.urandom(_NONCE), (b"giver", b"taker")
        if gives:
            own.sendall(MAGIC + mine)
            theirs, proof = self._exactly(_NONCE), self._exactly(_MAC)
            nonces = mine + theirs
            if not hmac.compare_digest(proof, _hmac(secret, b"taker proves", nonces)):
                raise PeerError("it does not know the key")
            own.sendall(_hmac(secret, b"giver proves", nonces))
        else:
            if self._exactly(len(MAGIC)) != MAGIC:
                raise PeerError("it is no engine, or speaks another version")
            nonces = self._exactly(_NONCE) + mine
            own.sendall(mine + _hmac(secret, b"taker proves", nonces))
            if not hmac.compare_digest(self._exactly(_MAC), _hmac(secret, b"giver proves", nonces)):
                raise PeerError("it does not know the key")
        giver, taker = (_hmac(secret, name, nonces) for name in names)
        self._own_key, self._their_key = (giver, taker) if gives else (taker, giver)
        self._num_sent = self._num_received = 0

    @property
    def has_input(self) -> bool:
        """Whether a message is there, so that nothing has to be waited for."""
        return len(self._input) >= _FIELDS.size + _MAC

    def send(self, message: Message, content: memoryview | None = None) -> None:
        """With the next ``flush``, but with ``content`` at once."""
        kind, *rest = message
        fields = _FIELDS.pack(kind, self._num_sent, *rest)
        self._num_sent += 1
        self._output += fields + _hmac(self._own_key, fields)
        if content is not None:
            self.flush()
            self.socket.sendall(content)

    def flush(self) -> None:
        if self._output:
            self.socket.sendall(self._output)
            self._output.clear()

    def take(self) -> Message:
        """The next message; the bytes of a block, if they follow, are for ``receive_into``."""
        header = self.receive(_FIELDS.size + _MAC)
        fields = header[: _FIELDS.size]
        if not hmac.compare_digest(header[_FIELDS.size :], _hmac(self._their_key, fields)):
            raise PeerError("a message is damaged")
        kind, count, *rest = _FIELDS.unpack(fields)
        if count != self._num_received:
            raise PeerError("a message is out of order")
        self._num_received += 1
        return Message(kind, *rest)

    def send_hello(self, facts: dict[str, Any], descriptor: int | None) -> None:
        """What the giver's blocks are; with the memory that they lie in, over a Unix socket."""
        content = json.dumps(facts).encode()
        framed = len(content).to_bytes(4, "little") + _hmac(self._own_key, b"hello", content) + content
        if descriptor is None:
            self.socket.sendall(framed)
        else:
            socket.send_fds(self.socket, [framed[:4]], [descriptor])
            self.socket.sendall(framed[4:])

    def take_hello(self, *, has_descriptor: bool) -> tuple[dict[str, Any], int | None]:
        descriptor = None
        if has_descriptor:
            head, descriptors, _, _ = socket.recv_fds(self.socket, 4, 1)
            descriptor = descriptors[0] if descriptors else None
        else:
            head = b""
        try:
            return self._facts_after(head), descriptor
        except BaseException:
            if descriptor is not None:
                os.close(descriptor)
            raise

    def _facts_after(self, head: bytes) -> dict[str, Any]:
        head += self._exactly(4 - len(head))
        size = int.from_bytes(head, "little")
        if size > _MOST_HELLO:
            raise PeerError("it says too much")
        mac, content = self._exactly(_MAC), self._exactly(size)
        if not hmac.compare_digest(mac, _hmac(self._their_key, b"hello", content)):
            raise PeerError("its first message is damaged")
        facts: dict[str, Any] = json.loads(content)
        return facts

    def _exactly(self, size: int) -> bytes:
        """So many bytes before the first message, and none that come after them: a descriptor may."""
        content = b""
        while len(content) < size:
            left = self._met_until - time.monotonic()
            if left <= 0:
                raise PeerError("it is too slow")
            self.socket.settimeout(left)
            more = self.socket.recv(size - len(content))
            if not more:
                raise PeerError("it has closed the connection")
            content += more
        return content

    def receive(self, size: int) -> bytes:
        """Bytes that are not a block's; what has come after them is kept for later."""
        while len(self._input) < size:
            more = self.socket.recv(_MOST_INPUT)
            if not more:
                raise PeerError("it has closed the connection")
            self._input += more
        content = bytes(self._input[:size])
        del self._input[:size]
        return content

    def receive_into(self, part: memoryview) -> None:
        """The bytes of a block."""
        count = min(len(part), len(self._input))
        part[:count] = self._input[:count]
        del self._input[:count]
        part = part[count:]
        while part:
            count = self.socket.recv_into(part)
            if not count:
                raise PeerError("it has closed the connection")
            part = part[count:]


def parse_address(address: str) -> tuple[int, Any]:
    """("unix:PATH", "HOST:PORT" or "nixl:HOST:PORT") -> family and address of a socket. ``ValueError``: it is none."""
    if address.startswith("unix:") and len(address) > len("unix:"):
        return socket.AF_UNIX, address.removeprefix("unix:")
    host, _, port = address.removeprefix(NIXL).rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if host and port.isascii() and port.isdigit() and int(port) < 1 << 16:
        return (socket.AF_INET6 if ":" in host else socket.AF_INET), (host, int(port))
    raise ValueError(f"kv_transfer_address must be unix:PATH, HOST:PORT or nixl:HOST:PORT, given {address!r:.200}")


def _hmac(key: bytes, *parts: bytes) -> bytes:
    made = hmac.new(key, digestmod=hashlib.sha256)
    for part in parts:
        made.update(len(part).to_bytes(8, "little") + part)
    return made.digest()
