"""Kernels of a CUDA graph that read pinned memory of the host, and write to it.

A copy beside a graph makes a GPU idle before and behind it; a kernel within the graph does not. As a graph has the same
addresses each time, the host fills two buffers in turns, and each says in its first word which turn it is.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

TURNS = tl.constexpr(1 << 30)  # then they begin anew
HEADER = ("turn", "slot", "count")  # the first words of a buffer
_WORDS_AT_ONCE = 8192


@triton.jit
def take_kernel(
    first, second, target, chosen, tables, WORDS: tl.constexpr, PLACES: tl.constexpr, ENTRIES: tl.constexpr,
    BLOCK: tl.constexpr, CHANGES: tl.constexpr,
):  # fmt: skip
    """One program. Takes the buffer of the turn after the one that ``target`` has; where neither is it, nothing."""
    wanted = tl.load(target) % TURNS + 1
    in_first = tl.load(first, volatile=True) == wanted
    in_second = tl.load(second, volatile=True) == wanted
    tl.debug_barrier()  # before the turn in ``target`` is another one
    if in_first or in_second:
        # Both are aligned to 64 bytes, which the compiler cannot see.
        apart = (second.to(tl.int64) - first.to(tl.int64)) // 64 * 16
        source = first + tl.where(in_second, apart, 0)
        for start in range(0, WORDS, BLOCK):
            word = start + tl.arange(0, BLOCK)
            found = tl.load(source + word, mask=word < WORDS)
            tl.store(target + word, found, mask=word < WORDS)
        tl.store(chosen, tl.load(source + 1))
        count = tl.load(source + 2)
        places = (source + PLACES).to(tl.pointer_type(tl.int64))
        for start in range(0, count, CHANGES):
            change = start + tl.arange(0, CHANGES)
            place = tl.load(places + change, mask=change < count, other=0)
            entry = tl.load(source + ENTRIES + change, mask=change < count)
            tl.store(tables + place, entry, mask=change < count)


@triton.jit
def give_kernel(tokens, first, second, chosen, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """One program."""
    row = tl.arange(0, BLOCK)
    found = tl.load(tokens + row, mask=row < SIZE)
    target = first + tl.load(chosen) * ((second.to(tl.int64) - first.to(tl.int64)) // 8)
    tl.store(target + row, found, mask=row < SIZE)


def take(
    hosts: tuple[Tensor, Tensor], target: Tensor, chosen: Tensor, tables: Tensor, places: int, entries: int
) -> None:
    """Take in the buffer whose turn it is, and write what it says to the block tables.

    Args:
        hosts: two buffers in pinned memory, uint8, a multiple of 4 bytes each, with ``HEADER`` in int32 at their start.
        target: as one of them, on the device.
        chosen: ``[1]`` int32 on the device: gets the buffer's ``slot``.
        tables: int32 on the device, in which the first ``count`` changes are made.
        places, entries: where in a buffer, in bytes, the places (int64) and the entries (int32) of changes are.
    """
    words = target.nbytes // 4
    block = min(_WORDS_AT_ONCE, triton.next_power_of_2(words))
    take_kernel[(1,)](
        *(host.view(torch.int32) for host in hosts),
        target.view(torch.int32),
        chosen,
        tables,
        WORDS=words,
        PLACES=places // 4,
        ENTRIES=entries // 4,
        BLOCK=block,
        CHANGES=256,
        num_warps=max(1, min(16, block // 256)),
        enable_fp_fusion=False,
    )


def give(tokens: Tensor, hosts: tuple[Tensor, Tensor], chosen: Tensor) -> None:
    """Write ``tokens``, [R] int64, to the one of two pinned tensors like it that ``chosen`` says."""
    block = triton.next_power_of_2(len(tokens))
    warps = max(1, min(8, block // 128))
    sizes = {"SIZE": len(tokens), "BLOCK": block}
    give_kernel[(1,)](tokens, *hosts, chosen, **sizes, num_warps=warps, enable_fp_fusion=False)
