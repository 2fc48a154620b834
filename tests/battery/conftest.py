"""Fixtures of the batteries that run a model."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def _one_thread() -> Iterator[None]:
    """Models as small as these are served faster by one thread, and by far where other work holds the cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
