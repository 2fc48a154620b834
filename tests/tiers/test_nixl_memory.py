"""Memory that is read by NIXL: what a failing library, peer or message leads to. Blocks: test_exchange.py."""

import base64
import contextlib
import ctypes
import gc
import os
import sys
import weakref
from types import ModuleType
from typing import Any

import pytest

from compiled_llm.api.command_line import errors_end
from compiled_llm.tiers import nixl_memory
from compiled_llm.tiers.giver import BlockGiver
from compiled_llm.tiers.nixl_memory import GivenMemory, RemoteMemory

FACTS = {"metadata": base64.b64encode(b"an agent").decode(), "start": 1 << 20, "size": 1 << 12}


class Agent:
    """The calls of NIXL's agent that are used, within one process: memory is read where it is."""

    states: tuple[str, ...] = ("DONE",)
    registered = 0

    def __init__(self, name: str, config: Any) -> None:
        self.name, self.left = name, list(self.states)

    def register_memory(self, places: list[tuple[int, int, int, str]], kind: str) -> Any:
        Agent.registered += 1
        return places

    def deregister_memory(self, places: Any) -> None:
        Agent.registered -= 1

    def get_agent_metadata(self) -> bytes:
        return self.name.encode()

    def add_remote_agent(self, metadata: bytes) -> bytes:
        if b"gone" in metadata:
            raise LookupError("it is gone")
        return metadata

    def remove_remote_agent(self, name: bytes) -> None:
        raise LookupError("it is gone")

    def get_xfer_descs(self, places: list[tuple[int, int, int]], kind: str) -> tuple[int, int, int]:
        return places[0]

    def initialize_xfer(self, way: str, here: tuple[int, int, int], there: tuple[int, int, int], peer: bytes) -> Any:
        return here[0], there[0], there[1]

    def transfer(self, transfer: tuple[int, int, int]) -> str:
        state = self.left.pop(0) if len(self.left) > 1 else self.left[0]
        if state == "DONE":
            ctypes.memmove(*transfer)
        return state

    check_xfer_state = transfer

    def release_xfer_handle(self, transfer: Any) -> None:
        pass


@pytest.fixture
def states(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets what transfers say of themselves, one after the other, the last one from then on."""
    api = ModuleType("nixl._api")
    api.nixl_agent, api.nixl_agent_config = Agent, lambda backends: backends  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "nixl", ModuleType("nixl"))
    monkeypatch.setitem(sys.modules, "nixl._api", api)
    monkeypatch.setattr(Agent, "registered", 0)
    return lambda *states: monkeypatch.setattr(Agent, "states", states)


def test_what_is_given_is_read(states: Any) -> None:
    states("PROC", "PROC", "DONE")
    content = bytearray(range(200))
    given = GivenMemory(memoryview(content))
    remote = RemoteMemory(given.facts)
    assert bytes(remote.read(10, 20, 1.0)) == bytes(range(10, 30))
    assert bytes(remote.read(0, 200, 1.0)) == bytes(range(200))
    assert bytes(remote.read(199, 1, 1.0)) == bytes([199])
    remote.close()
    given.close()
    assert Agent.registered == 0


@pytest.mark.parametrize(("state", "message"), [("PROC", "did not read 8 bytes in 0.01 s"), ("ERR", ": ERR")])
def test_a_transfer_that_does_not_end(states: Any, state: str, message: str) -> None:
    states(state)
    given = GivenMemory(memoryview(bytearray(100)))
    with pytest.raises(OSError, match=message):
        RemoteMemory(given.facts).read(0, 8, 0.01)


@pytest.mark.parametrize("is_done", [True, False])
def test_a_buffer_stays_while_a_transfer_may_write_to_it(
    states: Any, monkeypatch: pytest.MonkeyPatch, is_done: bool
) -> None:
    monkeypatch.setattr(nixl_memory, "_unfinished", [])
    states("DONE" if is_done else "PROC")
    given = GivenMemory(memoryview(bytearray(100)))
    remote = RemoteMemory(given.facts)
    with contextlib.nullcontext() if is_done else pytest.raises(OSError, match="did not read"):
        remote.read(0, 8, 0.01)
    buffer = weakref.ref(remote._buffer)
    remote.close()
    del remote
    gc.collect()
    assert (buffer() is None) == is_done


@pytest.mark.parametrize(("offset", "size"), [(-1, 5), (0, 0), (90, 11), (1 << 70, 1)])
def test_nothing_outside_is_read(states: Any, offset: int, size: int) -> None:
    given = GivenMemory(memoryview(bytearray(100)))
    with pytest.raises(OSError, match="of 100 were asked for"):
        RemoteMemory(given.facts).read(offset, size, 1.0)


@pytest.mark.parametrize(
    "facts",
    [None, [], {}, {**FACTS, "metadata": "é"}, {**FACTS, "start": 0}, {**FACTS, "size": True}, {**FACTS, "start": "1"}],
)
def test_facts_that_are_none(states: Any, facts: Any) -> None:
    with pytest.raises(ValueError, match="must say where its memory is"):
        RemoteMemory(facts)


def test_an_engine_that_is_not_reached(states: Any) -> None:
    with pytest.raises(OSError, match="cannot reach the other engine's memory: it is gone"):
        RemoteMemory({**FACTS, "metadata": base64.b64encode(b"gone").decode()})


def test_a_nixl_that_does_not_start_ends_a_command_with_its_message(
    states: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Agent, "register_memory", lambda *given: 1 / 0)
    with pytest.raises(SystemExit), errors_end("compiled-llm serve"):
        BlockGiver("nixl:127.0.0.1:0", b"a secret", {}, 1300, 4096)
    assert "NIXL cannot register 4096 bytes: division by zero" in capsys.readouterr().err


def test_a_giver_that_cannot_start_leaves_nothing_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl", None)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ValueError, match="NIXL must be installed") as kept:  # its frames hold what was made
        BlockGiver("nixl:127.0.0.1:0", b"a secret", {}, 1300, 4096)
    assert len(os.listdir("/proc/self/fd")) == before
    del kept


def test_without_nixl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl", None)
    for make in (lambda: GivenMemory(memoryview(bytearray(10))), lambda: RemoteMemory(FACTS)):
        with pytest.raises(ValueError, match=r"pip install 'compiled-llm\[nixl\]'"):
            make()
