"""Messages through a pipe that nobody reads yet: sending them does not wait, however large they are."""

import contextlib
import os
from multiprocessing import Pipe

import numpy as np
import pytest

from compiled_llm.worker.message import MOST_IN_PIPE, Message, receive


def test_who_sends_does_not_wait_for_who_reads() -> None:
    here, there = Pipe()
    contents = [b"a" * (MOST_IN_PIPE - 100), np.arange(2**21), b"a" * MOST_IN_PIPE, "the last"]
    before = len(os.listdir("/proc/self/fd"))
    for content in contents:
        with contextlib.closing(Message(content)) as message:
            message.send(there)
            message.send(there)  # to another one
    for content in contents:
        for _ in range(2):
            assert np.array_equal(receive(here), content)
    assert len(os.listdir("/proc/self/fd")) == before
    there.close()
    with pytest.raises(EOFError):
        receive(here)
