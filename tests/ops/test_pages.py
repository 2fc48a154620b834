"""Tensors whose first bytes take small pages, and whose memory becomes huge pages later."""

import mmap
import threading
from pathlib import Path

import pytest
import torch

from compiled_llm.ops import native, pages
from compiled_llm.ops.c_library import madvise
from compiled_llm.ops.pages import Collapsing, use_huge_pages, use_small_pages

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
    madvise(tensor.data_ptr(), tensor.nbytes, mmap.MADV_DONTDUMP)  # or Linux joins it with a neighbour, and counts both
    use_small_pages([tensor])
    tensor[3] = 7
    assert huge_bytes(tensor) == 0
    use_huge_pages([tensor])
    Collapsing([tensor])._thread.join()
    tensor[5 * _MIB] = 9  # was not written before
    if huge_bytes(tensor) == 0:
        pytest.skip("the system has no huge page free")
    assert huge_bytes(tensor) in (2 * _MIB, 4 * _MIB)  # before Linux 6.1 what was written stays in small pages
    assert (int(tensor[3]), int(tensor[5 * _MIB]), int(tensor.sum())) == (7, 9, 16)


def test_small_tensors_are_left_as_they_are() -> None:
    tensor = torch.arange(5)
    use_small_pages([tensor])
    use_huge_pages([tensor])
    Collapsing([tensor]).close()
    assert tensor.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("setting", [None, "always madvise [never]\n", "always [madvise] never\n"])
def test_no_huge_page_is_made_where_the_system_is_to_have_none(
    setting: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor, asked = native.huge_zeros((70 * _MIB,), torch.uint8), list[int]()
    monkeypatch.setattr(pages, "_SETTING", tmp_path / "enabled")
    if setting is not None:
        (tmp_path / "enabled").write_text(setting)
    monkeypatch.setattr(pages, "madvise", lambda address, size, advice: asked.append(size))
    Collapsing([tensor])._thread.join()
    assert asked == ([] if setting is None or "[never]" in setting else [32 * _MIB, 32 * _MIB, 6 * _MIB])


def test_who_closes_waits_for_a_piece_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor, begun, goes_on = native.huge_zeros((70 * _MIB,), torch.uint8), threading.Event(), threading.Event()
    asked: list[int] = []

    def held(address: int, size: int, advice: int) -> None:
        asked.append(size)
        begun.set()
        goes_on.wait(30)

    monkeypatch.setattr(pages, "madvise", held)
    monkeypatch.setattr(pages, "_SETTING", Path("/dev/null"))
    collapsing = Collapsing([tensor])
    assert begun.wait(30)
    threading.Timer(0.05, goes_on.set).start()
    collapsing.close()
    assert asked == [32 * _MIB]
