"""Tensors whose first bytes take small pages, and whose memory becomes huge pages later."""

from pathlib import Path

import pytest
import torch

from compiled_llm.ops import native
from compiled_llm.ops.pages import use_huge_pages, use_small_pages

_MIB = 1 << 20
_ENABLED = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def huge_bytes(tensor: torch.Tensor) -> int:
    """How much of a tensor's memory is in huge pages."""
    begin, end, found, counts = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes, 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split(maxsplit=1)[0]
        if "-" in first:
            low, high = (int(part, 16) for part in first.split("-"))
            counts = low < end and begin < high
        elif counts and first == "AnonHugePages:":
            found += int(line.split()[1]) << 10
    return found


@pytest.mark.skipif(not _ENABLED.exists() or "[never]" in _ENABLED.read_text(), reason="the system gives no huge pages")
def test_a_written_byte_takes_a_small_page_until_all_becomes_huge() -> None:
    tensor = native.huge_zeros((8 * _MIB,), torch.uint8)
    use_small_pages([tensor])
    tensor[3] = 7
    assert huge_bytes(tensor) == 0
    use_huge_pages([tensor])
    tensor[5 * _MIB] = 9  # was not written before
    if huge_bytes(tensor) == 0:
        pytest.skip("the system has no huge page free")
    assert huge_bytes(tensor) in (2 * _MIB, 4 * _MIB)  # before Linux 6.1 what was written stays in small pages
    assert (int(tensor[3]), int(tensor[5 * _MIB]), int(tensor.sum())) == (7, 9, 16)


def test_small_tensors_are_left_as_they_are() -> None:
    tensor = torch.arange(5)
    use_small_pages([tensor])
    use_huge_pages([tensor])
    assert tensor.tolist() == [0, 1, 2, 3, 4]
