"""Memory of a KV pool that is asked for before it is written."""

import mmap

import pytest
import torch
from torch import Tensor

from compiled_llm.ops.native import huge_zeros, huge_zeros_in_rows
from compiled_llm.worker import pool_pages
from compiled_llm.worker.pool_pages import PoolPages

MIB = 1 << 20


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Addresses and sizes that the system was asked for, which always gives them."""
    found: list[tuple[int, int]] = []
    monkeypatch.setattr(pool_pages, "madvise", lambda address, size, advice: found.append((address, size)) or 0)
    return found


def all_of(pages: PoolPages, used: int) -> int:
    """How often there was something to ask for."""
    count = 0
    while pages.ask(used):
        count += 1
    return count


def blocks_of(tensor: Tensor, asked: list[tuple[int, int]]) -> int:
    """The blocks of a tensor of which all was asked for, from the first on; nothing else was."""
    start, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    own = sorted((address, address + size) for address, size in asked if start - mmap.PAGESIZE < address < end)
    assert all(first % mmap.PAGESIZE == 0 and last <= end for first, last in own)
    reached = start
    for first, last in own:
        assert first <= reached, "a hole"
        reached = last
    return (reached - start) // tensor[0].nbytes


def test_blocks_ahead_of_those_that_were_used(asked: list[tuple[int, int]]) -> None:
    """Of tensors with blocks of 64 and 16 KiB, and of a window's, which has fewer; small ones are left out."""
    k, v = huge_zeros((1000, 8, 4096), torch.float16), huge_zeros((1000, 8, 1024), torch.float16)
    windowed, small = huge_zeros((70, 8, 4096), torch.float16), torch.zeros(1000)
    pages = PoolPages([k, v, windowed, small], ahead_bytes=144 * 1024 * 100)
    assert all_of(pages, 0) == 4 + 4 + 3
    assert (blocks_of(k, asked), blocks_of(v, asked), blocks_of(windowed, asked)) == (128, 128, 70)
    assert all_of(pages, 20) == 0, "it has more than 120 already"
    assert all_of(pages, 300) == 9 + 9
    assert (blocks_of(k, asked), blocks_of(v, asked)) == (416, 416)
    all_of(pages, 1000)
    assert blocks_of(k, asked) == blocks_of(v, asked) == 1000, "no block after the last"
    assert not pages.ask(1000)


def test_little_at_a_time(asked: list[tuple[int, int]]) -> None:
    pages = PoolPages([huge_zeros((500, 8, 4096), torch.float16)])
    all_of(pages, 0)
    assert max(size for _, size in asked) <= 2 * MIB + mmap.PAGESIZE


def test_the_system_gives_it_and_contents_stay() -> None:
    tensor = huge_zeros((64, 1024), torch.int64)
    tensor[3] = 7
    pages = PoolPages([tensor], ahead_bytes=64 << 20)
    if not pages.ask(0):
        pytest.skip("this kernel has no MADV_POPULATE_WRITE")
    all_of(pages, 0)
    first = -tensor.data_ptr() % mmap.PAGESIZE + tensor.data_ptr()
    assert resident(first, tensor.nbytes // mmap.PAGESIZE - 1)
    assert tensor.sum() == 7 * 1024


def resident(address: int, count: int) -> bool:
    """Whether so many pages are in memory, as the page table says."""
    with open("/proc/self/pagemap", "rb") as table:
        table.seek(address // mmap.PAGESIZE * 8)
        entries = table.read(count * 8)
    return all(byte & 0x80 for byte in entries[7::8])


@pytest.mark.parametrize("reason", ["an older kernel", "too little memory"])
def test_it_is_left_where_the_system_cannot(monkeypatch: pytest.MonkeyPatch, reason: str) -> None:
    calls = []
    monkeypatch.setattr(pool_pages, "madvise", lambda *given: calls.append(given) or -1)
    if reason == "too little memory":
        monkeypatch.setattr(pool_pages, "free_memory", lambda: pool_pages.AHEAD_BYTES)
    pages = PoolPages([huge_zeros((500, 8, 4096), torch.float16)])
    assert not pages.ask(0)
    assert not pages.ask(0)
    assert len(calls) == (reason == "an older kernel")


def test_blocks_of_tensors_that_lie_together_are_asked_for_once(asked: list[tuple[int, int]]) -> None:
    tensors = huge_zeros_in_rows(1000, 3 * [((8, 512), torch.float16)])
    pages = PoolPages(tensors, ahead_bytes=100 * 3 * 8192)
    all_of(pages, 0)
    assert sum(size for _, size in asked) == 170 * 3 * 8192, "two pieces of 85 blocks"
    assert min(address for address, _ in asked) == tensors[0].data_ptr()
    all_of(pages, 1000)
    last = max(address + size for address, size in asked)
    assert last == tensors[0].data_ptr() + 1000 * 3 * 8192, "all of it, and no more"


def test_a_block_of_many_pages_is_asked_for_page_by_page(asked: list[tuple[int, int]]) -> None:
    """Such as one of all layers with many slots: a request that comes meanwhile waits for one page."""
    tensors = huge_zeros_in_rows(3, 4 * [((2 * MIB,), torch.float16)])
    pages = PoolPages(tensors, ahead_bytes=32 * MIB)
    all_of(pages, 0)
    assert sum(size for _, size in asked) == 2 * 16 * MIB
    assert max(size for _, size in asked) <= 2 * MIB
