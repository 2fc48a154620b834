"""Blocks that other machines read by NIXL (https://github.com/ai-dynamo/nixl), which takes RDMA where both have it.

The engine that gives registers the memory its blocks lie in, and says in its first message how to reach it. The one
that takes asks for a block over TCP as ever, and reads it by itself. NIXL authenticates nothing: a block is what its
header's SHA-256 says, or is not used.
"""

import base64
import contextlib
import ctypes
import logging
import os
import time
from typing import Any

_WAIT_SECONDS = 0.0001
_unfinished: list[memoryview] = []  # buffers that a transfer may still write to: kept for good


class GivenMemory:
    """Memory that other engines may read.

    Args:
        view: writable; it must not move or go while this is there.

    Attributes:
        facts: how it is reached, for ``RemoteMemory``: a dict for JSON.

    Raises:
        ValueError: NIXL is not installed.
        OSError: NIXL cannot be started, or cannot register the memory.
    """

    def __init__(self, view: memoryview) -> None:
        self._agent = _started()
        start = _address(view)
        try:
            self._registered = self._agent.register_memory([(start, len(view), 0, "")], "DRAM")
            metadata = self._agent.get_agent_metadata()
        except Exception as error:  # NIXL's errors have no base of their own
            raise OSError(f"NIXL cannot register {len(view)} bytes: {error}") from error
        self.facts = {"metadata": base64.b64encode(metadata).decode(), "start": start, "size": len(view)}

    def close(self) -> None:
        with contextlib.suppress(Exception):  # the process goes on without it
            self._agent.deregister_memory(self._registered)
        del self._agent


class RemoteMemory:
    """Memory of another engine, read into a buffer of this one. One thread at a time.

    Args:
        facts: of its ``GivenMemory``, from an authenticated message.

    Raises:
        ValueError: NIXL is not installed; the facts are not such.
        OSError: NIXL cannot be started, or the other engine's memory cannot be reached.
    """

    def __init__(self, facts: Any) -> None:
        try:
            metadata, self._start, self._size = base64.b64decode(facts["metadata"]), facts["start"], facts["size"]
            if not (type(self._start) is type(self._size) is int and self._start > 0 < self._size):
                raise ValueError("no memory")
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"nixl of the other engine's facts must say where its memory is, given {facts!r:.100}"
            ) from error
        self._agent = _started()
        self._buffer, self._registered = memoryview(b""), None
        try:
            self._peer = self._agent.add_remote_agent(metadata)
        except Exception as error:
            raise OSError(f"NIXL cannot reach the other engine's memory: {error}") from error

    def read(self, offset: int, size: int, seconds: float) -> memoryview:
        """Bytes from there; valid until the next call.

        Raises:
            OSError: it failed, took longer than ``seconds``, or lies outside. There is no next call then.
        """
        if offset < 0 or size <= 0 or offset + size > self._size:
            raise OSError(f"bytes {offset} to {offset + size} of {self._size} were asked for")
        state = ""
        try:
            self._make_room(size)
            here, there = ((start, size, 0) for start in (_address(self._buffer), self._start + offset))
            of_both = (self._agent.get_xfer_descs([one], "DRAM") for one in (here, there))
            transfer = self._agent.initialize_xfer("READ", *of_both, self._peer)
            try:
                state, end = self._agent.transfer(transfer), time.monotonic() + seconds
                while state == "PROC" and time.monotonic() < end:
                    time.sleep(_WAIT_SECONDS)
                    state = self._agent.check_xfer_state(transfer)
            finally:
                if state != "DONE":
                    _unfinished.append(self._buffer)  # RDMA cannot be taken back
                self._agent.release_xfer_handle(transfer)
        except Exception as error:
            raise OSError(f"NIXL failed: {error}") from error
        if state != "DONE":
            raise OSError(f"NIXL did not read {size} bytes in {seconds} s: {state}")
        return self._buffer[:size]

    def _make_room(self, size: int) -> None:
        if len(self._buffer) >= size:
            return
        self._leave()
        self._buffer = memoryview(bytearray(size))
        self._registered = self._agent.register_memory([(_address(self._buffer), size, 0, "")], "DRAM")

    def _leave(self) -> None:
        if self._registered is not None:
            self._agent.deregister_memory(self._registered)
            self._registered = None

    def close(self) -> None:
        with contextlib.suppress(Exception):  # the other engine may be gone
            self._leave()
            self._agent.remove_remote_agent(self._peer)
        del self._agent


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def _started() -> Any:
    """An agent of this process, under a name that no other has."""
    try:
        from nixl._api import nixl_agent, nixl_agent_config
    except ImportError as error:
        raise ValueError(
            f"NIXL must be installed to give or take blocks by it ({error}): pip install 'compiled-llm[nixl]'"
        ) from error
    if "NIXL_LOG_LEVEL" not in os.environ:
        logging.getLogger("nixl").setLevel(logging.WARNING)  # else each start is told on standard output
    try:
        return nixl_agent(f"compiled-llm {os.urandom(16).hex()}", nixl_agent_config(backends=["UCX"]))
    except Exception as error:
        raise OSError(f"NIXL cannot be started: {error}") from error
