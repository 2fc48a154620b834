"""Blocks between engines: what is given is taken whole or not at all, under leases, from nobody else."""

import contextlib
import errno
import hashlib
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from compiled_llm.scheduling.request import BlockSource
from compiled_llm.scheduling.scheduler_output import FileOutput
from compiled_llm.tiers import exchange as exchange_module
from compiled_llm.tiers import giver as giver_module
from compiled_llm.tiers.exchange import BlockExchange, hello
from compiled_llm.tiers.file_thread import FileThread, NotYet, Room
from compiled_llm.tiers.giver import BlockGiver
from compiled_llm.tiers.peer_session import GET, MAGIC, Message, PeerError, PeerSession, parse_address

SECRET, KEY, LEASE = b"a secret of at least so many characters", bytes(32), bytes([7]) * 32
FACTS = {"model": "m", "block_size": 16, "block_bytes": 1300}
OWN, WINDOW = random.Random(0).randbytes(1000), random.Random(1).randbytes(300)
DIGESTS = [hashlib.sha256(bytes([n])).digest() for n in range(8)]


def made(address: str, blocks: int = 4, **facts: Any) -> BlockGiver:
    giver = BlockGiver(address, SECRET, hello(KEY, FACTS | facts), 1300, blocks * 4096)
    return giver


@pytest.fixture(params=["unix", "tcp", "nixl"])
def giver(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[BlockGiver]:
    if request.param == "nixl":
        pytest.importorskip("nixl", reason="the extra nixl is not installed")
    giver = made({"unix": f"unix:{tmp_path}/blocks", "tcp": "127.0.0.1:0", "nixl": "nixl:127.0.0.1:0"}[request.param])
    yield giver
    with contextlib.suppress(OSError):
        giver.close()


@pytest.fixture
def taker() -> Iterator[BlockExchange]:
    taker = BlockExchange(KEY, FACTS, SECRET, None)
    yield taker
    taker.close()


def write(giver: BlockGiver, *digests: bytes, windows: tuple[int, ...] = ()) -> list[bool]:
    parts = [memoryview(OWN), *(memoryview(WINDOW) for _ in windows)]
    return [giver.write(digest, parts, windows)[0] for digest in digests]


def take(taker: BlockExchange, giver: BlockGiver | str, digest: bytes = DIGESTS[0], windows: int = 1) -> Any:
    address = giver if isinstance(giver, str) else giver.address
    own, others = bytearray(1000), [bytearray(300) for _ in range(windows)]
    room = Room(digest, memoryview(own), [memoryview(one) for one in others])
    (found,) = taker.read_all([room], BlockSource(address, LEASE))
    return None if found is None else (found, bytes(own) + b"".join(bytes(others[number]) for number in found))


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_what_is_given_is_taken(giver: BlockGiver, taker: BlockExchange) -> None:
    assert write(giver, DIGESTS[0], DIGESTS[0]) == [True, True]
    assert take(taker, giver) == ((), OWN)
    write(giver, DIGESTS[1], windows=(0,))
    assert take(taker, giver, DIGESTS[1]) == ((0,), OWN + WINDOW)
    assert take(taker, giver, DIGESTS[2]) is None
    assert take(taker, giver, DIGESTS[1], windows=0) is None, "it keeps no window"
    assert (giver.num_given, giver.given_bytes) == (3, 2 * 1300 + 1000)
    own = bytearray(1000)
    assert giver.read(DIGESTS[0], memoryview(own), []) == ()
    assert giver.read(DIGESTS[5], memoryview(own), []) is None


def test_a_block_that_changes_meanwhile_is_not_taken(giver: BlockGiver, taker: BlockExchange) -> None:
    """As when a lease has lapsed, and another block is where it was."""
    write(giver, *DIGESTS[:2])
    start = giver._slots[DIGESTS[0]].offset
    for place in (start, start + 999):
        giver._view[place] ^= 1
        assert take(taker, giver) is None
        giver._view[place] ^= 1
        assert take(taker, giver) == ((), OWN)
    giver._slots[DIGESTS[0]].size = 500
    assert take(taker, giver) is None, "half of it"


def test_a_block_under_a_lease_stays_and_others_go(giver: BlockGiver) -> None:
    giver.hold(LEASE, DIGESTS[:3], None)
    assert write(giver, *DIGESTS[:5]) == [True] * 5, "the fourth made room for the fifth"
    giver.hold(b"b" * 32, [DIGESTS[4]], 60)
    assert write(giver, DIGESTS[5]) == [False]
    giver.hold(LEASE, DIGESTS[:3], 0.0)
    assert write(giver, DIGESTS[5]) == [True], "it has lapsed"
    assert giver.num_lapsed == 1
    assert giver.num_leases == 1
    giver.release(b"b" * 32)
    giver.release(b"unknown")
    assert giver.num_leases == 0
    assert not giver._held


def test_leases_are_renewed_while_a_request_waits_and_end_with_it(
    giver: BlockGiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(giver_module, "LEASE_SECONDS", 1.0)
    monkeypatch.setattr(exchange_module, "_RENEW_SECONDS", 0.02)
    taker = BlockExchange(KEY, FACTS, SECRET, None)
    source = BlockSource(giver.address, LEASE)
    taker.end(source)  # one that never began is nobody's
    giver.hold(LEASE, DIGESTS[:1], 1.0)
    taker.meet(giver.address)
    taker.begin(source)
    time.sleep(1.2)
    assert giver.num_leases == 1
    taker.end(source)
    taker.end(source)
    until(lambda: giver.num_leases == 0)
    assert giver.num_lapsed == 0
    taker.close()


def test_a_block_that_is_still_computed_is_asked_for_again(giver: BlockGiver, taker: BlockExchange) -> None:
    """As long as its request runs; a request that is not known is waited for, but not one that has ended."""
    early = BlockSource(giver.address, LEASE, is_early=True)

    def asked(digest: bytes, source: BlockSource = early) -> Any:
        own = bytearray(1000)
        return taker.read_all([Room(digest, memoryview(own), [])], source)[0]

    late = early._replace(is_early=False)
    for source in (early, late):
        taker.begin(source)
    assert asked(DIGESTS[0]) == NotYet(is_coming=False)
    assert asked(DIGESTS[0], late) is None
    giver.hold(LEASE, DIGESTS[:2], None)
    assert asked(DIGESTS[0]) == asked(DIGESTS[0], late) == NotYet(is_coming=True)
    assert asked(DIGESTS[2]) is None, "it is none of the request's"
    write(giver, DIGESTS[0])
    assert (asked(DIGESTS[0]), asked(DIGESTS[1])) == ((), NotYet(is_coming=True))
    taker.end(early)
    until(lambda: LEASE in giver._taken)
    assert giver.num_leases == 1, "its request still runs"
    giver.hold(LEASE, DIGESTS[:2], 30.0)
    assert giver.num_leases == 0, "and nobody wants its blocks any more"
    giver.hold(LEASE, DIGESTS[:2], None)
    assert asked(DIGESTS[1]) is None, "no request waits for it"
    assert asked(DIGESTS[1], late) == NotYet(is_coming=True)
    giver.release(LEASE)
    assert asked(DIGESTS[1], late) is None, "it was aborted"
    taker.end(late)


def test_a_request_that_another_engine_never_hears_of_is_not_waited_for_forever(
    giver: BlockGiver, taker: BlockExchange, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many blocks of others come meanwhile."""
    monkeypatch.setattr(exchange_module, "_MEET_SECONDS", 0.05)
    early = BlockSource(giver.address, LEASE, is_early=True)
    taker.begin(early)
    found: list[Any] = [NotYet(is_coming=False)]
    end = time.monotonic() + 2
    while found == [NotYet(is_coming=False)] and time.monotonic() < end:
        found = taker.read_all([Room(DIGESTS[0], memoryview(bytearray(1000)), [])], early)
    assert found == [None]
    taker.end(early)
    until(lambda: not taker._peers[giver.address]._unmet)


def test_a_thread_asks_for_the_next_block_alone_and_writes_meanwhile() -> None:
    store, numbers = ComputingStore(), list[int]()
    thread = FileThread(store, lambda row: (memoryview(bytearray(1)), ()))
    source = BlockSource("unix:a", LEASE, is_early=True)
    reads = tuple((digest, row, source) for row, digest in enumerate(DIGESTS[:5], 1))
    thread.submit(FileOutput(reads=reads, writes=((DIGESTS[7], 9, ()),)), int)
    until(lambda: len(store.asked) > 3)
    result = thread.take_result()
    assert (result.read, result.written, result.is_coming) == ((), ((DIGESTS[7], True),), True)
    assert [len(asked) for asked in store.asked[:4]] == [5, 1, 1, 1]
    store.there = set(DIGESTS[:5])
    until(lambda: numbers.extend([len(thread.take_result().read)]) or sum(numbers) == 5)  # type: ignore[func-returns-value]
    thread.submit(FileOutput(reads=((DIGESTS[6], 1, source),)), int)
    thread.reset()
    assert not thread._reads
    thread.close()


class ComputingStore:
    """Another engine, which has computed the blocks that are ``there``."""

    key, known = KEY, ()

    def __init__(self) -> None:
        self.there, self.asked = set[bytes](), list[list[bytes]]()

    def read_all(self, blocks: Any, source: BlockSource | None) -> list[Any]:
        self.asked.append([block.digest for block in blocks])
        return [() if block.digest in self.there else NotYet(is_coming=True) for block in blocks]

    def write(self, digest: bytes, parts: Any, windows: Any) -> tuple[bool, list[bytes]]:
        return True, []

    def scan(self) -> tuple[set[bytes], set[bytes]]:
        return set(), set()

    def close(self) -> None:
        pass


def test_states_have_room_of_their_own(tmp_path: Path) -> None:
    giver = BlockGiver(f"unix:{tmp_path}/b", SECRET, hello(KEY, FACTS), 1300, 40000, 9000)
    state = random.Random(3).randbytes(9000)
    assert [giver.write(digest, [memoryview(state)], ())[0] for digest in DIGESTS[:2]] == [True, True]
    assert DIGESTS[0] not in giver._slots, "there is room for one"
    assert write(giver, *DIGESTS[2:]) == [True] * 6
    own = bytearray(9000)
    assert giver.read(DIGESTS[1], memoryview(own), []) == ()
    assert bytes(own) == state
    giver.close()
    with pytest.raises(ValueError, match="kv_transfer_bytes must be at least 18000, twice a state"):
        BlockGiver(f"unix:{tmp_path}/c", SECRET, hello(KEY, FACTS), 1300, 17000, 9000)


def test_who_does_not_know_the_key_gets_nothing(giver: BlockGiver) -> None:
    write(giver, DIGESTS[0])
    stranger = BlockExchange(KEY, FACTS, b"another secret of as many characters", None)
    assert take(stranger, giver) is None
    assert giver.num_given == 0
    stranger.close()


def test_other_blocks_are_refused_with_both_values(giver: BlockGiver) -> None:
    for facts, said in (
        ({"block_size": 32}, "block_size 32 here and 16 there"),
        ({"model": "n", "block_size": 8}, "model n here and 'm' there, block_size 8 here and 16 there"),
        ({}, "the same weights, code, torch, processor"),
    ):
        other = BlockExchange(b"k" * 32, FACTS | facts, SECRET, None)
        with pytest.raises(ValueError, match=said):
            other.meet(giver.address)
        other.close()


def test_an_engine_that_is_gone_or_silent_is_left_alone(
    tmp_path: Path, taker: BlockExchange, monkeypatch: pytest.MonkeyPatch
) -> None:
    giver = made("127.0.0.1:0")
    write(giver, DIGESTS[0])
    assert take(taker, giver) is not None
    giver.close()
    assert take(taker, giver) is None
    assert take(taker, f"unix:{tmp_path}/nobody") is None
    monkeypatch.setattr(exchange_module, "_CONNECT_SECONDS", 0.05)
    monkeypatch.setattr(exchange_module, "_BROKEN_SECONDS", 600.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        assert take(taker, address) is None
        monkeypatch.setattr(exchange_module, "_Peer", lambda *_: pytest.fail("it was asked again"))
        assert [take(taker, address) for _ in range(50)] == [None] * 50
    until(lambda: not giver._peers)


def _sessions(change: Callable[[bytes], bytes], secret: bytes = SECRET) -> tuple[PeerSession, PeerSession]:
    """A giver and a taker, whose messages to the giver pass through ``change``."""
    (left, middle), (own, right) = socket.socketpair(), socket.socketpair()
    for one in (left, right, middle, own):
        one.settimeout(2)

    def forward(source: socket.socket, target: socket.socket, changes: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(change(data) if changes else data)
        for one in (source, target):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            if changes:
                one.close()

    for job in ((middle, own, False), (own, middle, True)):
        threading.Thread(target=forward, args=job, daemon=True).start()
    found: list[PeerSession] = []
    thread = threading.Thread(target=lambda: found.append(PeerSession(left, SECRET, gives=True)), daemon=True)
    thread.start()
    taker = PeerSession(right, secret, gives=False)
    thread.join()
    return found[0], taker


def test_messages_that_are_changed_repeated_or_out_of_order_end_the_connection() -> None:
    held: list[bytes] = []
    kind = "none"

    def change(data: bytes) -> bytes:
        if len(data) < 150 or kind == "none":
            return data
        if kind == "flip":
            return bytes([data[0] ^ 1]) + data[1:]
        if kind == "twice":
            return data + data
        held.append(data)  # "swap"
        return b"".join(reversed(held)) if len(held) == 2 else b""

    for kind, said in (("flip", "damaged"), ("twice", "out of order"), ("swap", "out of order")):
        wanted, kind = kind, "none"
        giver, taker = _sessions(change)
        kind = wanted
        taker.send(Message(GET, digest=DIGESTS[0]))
        taker.flush()
        time.sleep(0.05)
        if kind == "swap":
            taker.send(Message(GET, digest=DIGESTS[1]))
            taker.flush()
        if kind == "twice":
            giver.take()
        with pytest.raises(PeerError, match=said):
            giver.take()
        for one in (giver, taker):
            one.socket.close()


def test_many_blocks_are_asked_for_at_once(giver: BlockGiver, taker: BlockExchange) -> None:
    write(giver, *DIGESTS[:4])
    rooms = [Room(digest, memoryview(bytearray(1000)), []) for digest in DIGESTS[:6]]
    assert taker.read_all(rooms, BlockSource(giver.address, LEASE)) == [(), (), (), (), None, None]
    assert all(bytes(room.own) == OWN for room in rooms[:4])


def test_what_is_no_engine_is_noticed() -> None:
    own, theirs = socket.socketpair()
    own.settimeout(1)
    theirs.sendall(b"HTTP/1.1" + bytes(100))
    with pytest.raises(PeerError, match="no engine"):
        PeerSession(own, SECRET, gives=False)
    own.sendall(MAGIC)
    for one in (own, theirs):
        one.close()


def test_an_engine_of_other_blocks_in_the_place_of_one_that_was_met(tmp_path: Path, taker: BlockExchange) -> None:
    """It was started anew, with another model, while a request had its blocks still to take."""
    giver = made(f"unix:{tmp_path}/blocks")
    write(giver, DIGESTS[0])
    assert take(taker, giver) == ((), OWN)
    giver.close()
    other = BlockGiver(giver.address, SECRET, hello(b"k" * 32, FACTS), 1300, 4096)
    assert take(taker, giver) is None, "the connection has ended"
    taker._broken.clear()
    assert take(taker, giver) is None
    other.close()


def test_a_taker_that_is_closed_while_it_connects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    giver, taker, made_peers = made(f"unix:{tmp_path}/blocks"), BlockExchange(KEY, FACTS, SECRET, None), []

    class ClosedMeanwhile(exchange_module._Peer):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            made_peers.append(self)
            taker.close()

    monkeypatch.setattr(exchange_module, "_Peer", ClosedMeanwhile)
    write(giver, DIGESTS[0])
    assert take(taker, giver) is None
    (peer,) = made_peers
    assert peer._socket.fileno() == -1
    giver.close()


def test_memory_that_may_shrink_is_not_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(giver_module, "_SEALS", 0)
    giver, taker = made(f"unix:{tmp_path}/blocks"), BlockExchange(KEY, FACTS, SECRET, None)
    write(giver, DIGESTS[0])
    before = len(os.listdir("/proc/self/fd"))
    assert take(taker, giver) is None
    until(lambda: len(os.listdir("/proc/self/fd")) <= before)
    giver.close()
    taker.close()


@pytest.mark.parametrize("gives", [True, False])
def test_a_peer_that_says_little_at_a_time_is_not_waited_for(gives: bool) -> None:
    own, theirs = socket.socketpair()
    own.settimeout(0.3)

    def drip() -> None:
        with contextlib.suppress(OSError):
            for byte in MAGIC + bytes(56):
                theirs.send(bytes([byte]))
                time.sleep(0.2)

    thread, began = threading.Thread(target=drip), time.monotonic()
    thread.start()
    with pytest.raises((PeerError, OSError)):
        PeerSession(own, SECRET, gives=gives)
    assert time.monotonic() - began < 6, "all of it takes 12 s"
    for one in (own, theirs):
        one.close()
    thread.join()


def test_what_lies_at_the_address(tmp_path: Path) -> None:
    """The socket of an engine that was killed is in nobody's way; all else stays."""
    path = tmp_path / "blocks"
    killed = socket.socket(socket.AF_UNIX)
    killed.bind(str(path))
    killed.close()
    giver = made(f"unix:{path}")
    write(giver, DIGESTS[0])
    with pytest.raises(OSError, match="in use"):
        made(f"unix:{path}")
    taker = BlockExchange(KEY, FACTS, SECRET, None)
    assert take(taker, giver) == ((), OWN)
    taker.close()
    giver.close()
    path.write_text("a user's own")
    with pytest.raises(OSError, match="in use"):
        made(f"unix:{path}")
    assert path.read_text() == "a user's own"


def test_a_giver_goes_on_when_too_many_files_were_open(
    giver: BlockGiver, taker: BlockExchange, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(giver, DIGESTS[0])
    own, failures = socket.socket.accept, [OSError(errno.EMFILE, "too many"), OSError(errno.ECONNABORTED, "gone")]

    def accept(self: socket.socket) -> Any:
        made = own(self)
        if failures:
            made[0].close()
            raise failures.pop()
        return made

    monkeypatch.setattr(socket.socket, "accept", accept)
    family, place = parse_address(giver.address)
    for _ in range(3):  # the first call has begun before
        with socket.socket(family) as one:
            one.connect(place)
            time.sleep(0.05)
    until(lambda: not failures)
    assert take(taker, giver) == ((), OWN)


def test_addresses() -> None:
    assert parse_address("unix:/a/b") == (socket.AF_UNIX, "/a/b")
    assert parse_address("127.0.0.1:0") == (socket.AF_INET, ("127.0.0.1", 0))
    assert parse_address("[::1]:5600") == (socket.AF_INET6, ("::1", 5600))
    assert parse_address("nixl:[::1]:5600") == (socket.AF_INET6, ("::1", 5600))
    for wrong in ("", "unix:", "host", "host:", ":1", "host:70000", "host:x", "nixl:unix:/a", "nixl:5600"):
        with pytest.raises(ValueError, match="kv_transfer_address must be unix:PATH, HOST:PORT or nixl:HOST:PORT"):
            parse_address(wrong)
    with pytest.raises(ValueError, match="kv_transfer_bytes must be at least 1300, a block, given 1"):
        BlockGiver("127.0.0.1:0", SECRET, {}, 1300, 1)
