"""Copies beside a step: what a CPU does, and in which order a GPU's streams do it."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from compiled_llm.ops.fetch import _arrival, _await_copy, _begin_copy, _stream_beside, await_fetched, fetch
from compiled_llm.ops.torch_private_gpu import FakeTensorMode


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8, torch.uint8, torch.float8_e4m3fn])
def test_a_cpu_copies_at_once(dtype: torch.dtype) -> None:
    host = torch.randint(0, 100, (6, 8)).to(dtype).t()
    buffer, x = torch.empty_strided(host.shape, host.stride(), dtype=dtype), torch.arange(4.0)
    fetch(x, host, buffer)
    assert torch.equal(buffer.float(), host.float())
    await_fetched(x, buffer)
    assert torch.equal(buffer.float(), host.float())
    assert torch.equal(x, torch.arange(4.0))


def test_torch_knows_what_they_write_to() -> None:
    ops, x = torch.ops.compiled_llm, torch.zeros(3)
    torch.library.opcheck(ops.fetch.default, (x, torch.ones(4), torch.zeros(4)))
    torch.library.opcheck(ops.await_fetched.default, (x, torch.zeros(4)))
    with FakeTensorMode():
        fetch(torch.empty(3), torch.empty(4), torch.empty(4))


class Stream:
    """Stands for torch.cuda.Stream: what it was given, and what each of that comes after."""

    def __init__(self, done: list[tuple["Stream", str, frozenset[str]]], device: Any = None) -> None:
        self.device, self._done, self._after = device, done, frozenset[str]()

    def give(self, what: str) -> None:
        self._done.append((self, what, self._after))
        self._after |= {what}

    def wait_stream(self, other: "Stream") -> None:
        self._after |= other._after

    def wait_event(self, event: "Event") -> None:
        self._after |= event.after


class Event:
    after: frozenset[str]

    def record(self, stream: Stream) -> None:
        self.after = stream._after


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Stream, str, frozenset[str]]]]:
    """All that was given to streams, with what it comes after; the first stream is the current one."""
    done: list[tuple[Stream, str, frozenset[str]]] = []
    current = [Stream(done)]

    @contextlib.contextmanager
    def within(stream: Stream) -> Iterator[None]:
        current.append(stream)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: current[-1])
    monkeypatch.setattr(torch.cuda, "Stream", lambda device=None: Stream(done, device))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", within)
    for cached in (_stream_beside, _arrival):
        cached.cache_clear()
    copy = Tensor.copy_

    def copied(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        assert non_blocking, "the host would wait"
        current[-1].give(f"copy {int(source[0])}")
        return copy(target, source)

    monkeypatch.setattr(Tensor, "copy_", copied)
    yield done
    for cached in (_stream_beside, _arrival):
        cached.cache_clear()


def test_a_gpu_waits_for_what_it_must_and_for_nothing_else(given: list[tuple[Stream, str, frozenset[str]]]) -> None:
    """Layers 1, 2 and 3 lie in host memory, layers 0 and 4 do not; 1 and 3 have one buffer."""
    main, x = torch.cuda.current_stream(), torch.zeros(1)
    hosts, buffers = {n: torch.full((2,), float(n)) for n in (1, 2, 3)}, [torch.zeros(2), torch.zeros(2)]
    _begin_copy(x, hosts[1], buffers[1])
    _begin_copy(x, hosts[2], buffers[0])
    main.give("layer 0")
    _await_copy(x, buffers[1])
    main.give("layer 1")
    _begin_copy(x, hosts[3], buffers[1])
    _await_copy(x, buffers[0])
    main.give("layer 2")
    _await_copy(x, buffers[1])
    main.give("layer 3")
    main.give("layer 4")
    after = {what: others for _, what, others in given}
    assert after["copy 1"] == frozenset()
    assert after["copy 2"] == {"copy 1"}, "one after the other: they share a bus"
    assert after["copy 3"] == {"copy 1", "copy 2", "layer 0", "layer 1"}, "not before its buffer was read"
    assert after["layer 0"] == frozenset(), "nothing to wait for"
    assert after["layer 1"] == {"layer 0", "copy 1"}, "not for the copy behind its own"
    assert after["layer 2"] == after["layer 1"] | {"layer 1", "copy 2"}
    assert after["layer 3"] == after["layer 2"] | {"layer 2", "copy 3"}
    copies = {stream for stream, what, _ in given if what.startswith("copy")}
    assert len(copies) == 1
    assert main not in copies
    assert {what for _, what, _ in given} <= after["layer 4"] | {"layer 4"}, "a graph ends with all that it began"


def test_streams_have_copies_of_their_own_beside(given: list[tuple[Stream, str, frozenset[str]]]) -> None:
    """Else those of one engine would be captured with another's graph."""
    first, second = torch.cuda.current_stream(), Stream(given)
    for stream in (first, second):
        with torch.cuda.stream(stream):
            _begin_copy(torch.zeros(1), torch.ones(2), torch.zeros(2))
    assert len({stream for stream, _, _ in given}) == 2
