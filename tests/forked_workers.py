"""Processes of engines that are forked from one that has imported torch, which takes each of them 1.7 s of a processor.

Engines spawn them, and do so in most of ``test_worker_process.py`` and ``test_gpu_ranks.py``. What a process is told
and gets (pickled arguments, descriptors, the environment) is the same.
"""

import contextlib
import multiprocessing
import os
from collections.abc import Iterator
from multiprocessing.context import ForkServerProcess
from typing import Any

import pytest

from compiled_llm.worker import worker_process


class _Process(ForkServerProcess):
    """With the environment of this process, as it is at the start."""

    def start(self) -> None:
        self._environment = dict(os.environ)
        super().start()

    def run(self) -> None:
        os.environ.clear()
        os.environ.update(self._environment)
        super().run()


@contextlib.contextmanager
def forking() -> Iterator[None]:
    """Processes that engines start within it are forked."""
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([worker_process.__name__])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(context, "Process", _Process)
        patch.setattr(worker_process.multiprocessing, "get_context", lambda method: context)
        yield


@pytest.fixture(scope="module", autouse=True)
def forked_workers() -> Iterator[None]:
    """For all tests of a module that imports it."""
    with forking():
        yield
