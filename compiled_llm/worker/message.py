"""What goes to another process: small messages through its pipe, large ones through memory that has no name.

A pipe takes small ones although nobody reads: who sends never waits for a process that is stopped.
"""

import mmap
import os
import pickle
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any

MOST_IN_PIPE = 1 << 14  # bytes; of several messages that nobody has read yet, a pipe takes more than 128 KiB
_IN_MEMORY = b""  # no pickle: a descriptor follows


class Message:
    """Something that ``pickle`` takes, for one process or several. Close it when it is sent."""

    def __init__(self, content: Any) -> None:
        self._content, self._descriptor = pickle.dumps(content), -1
        if len(self._content) > MOST_IN_PIPE:
            self._descriptor = os.memfd_create("compiled-llm-message")
            with open(self._descriptor, "wb", closefd=False) as file:
                file.write(self._content)
            self._content = _IN_MEMORY

    def send(self, connection: Connection) -> None:
        """``OSError`` if the process has ended."""
        connection.send_bytes(self._content)
        if self._descriptor >= 0:
            reduction.send_handle(connection, self._descriptor, 0)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1


def receive(connection: Connection) -> Any:
    """The next one; ``EOFError`` once the other process has closed its end."""
    content = connection.recv_bytes()
    if content != _IN_MEMORY:
        return pickle.loads(content)
    descriptor = reduction.recv_handle(connection)
    try:
        with mmap.mmap(descriptor, 0, prot=mmap.PROT_READ) as memory:
            return pickle.loads(memory)
    finally:
        os.close(descriptor)
