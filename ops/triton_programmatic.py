"""What Triton kernels do at their start if their launch is programmatic (``programmatic_launch.py``)."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# Of the weights that a program asks for before it waits: an SM has some 30 KB in flight while a memory of 4 TB/s
# answers in 0.8 us (Little's law), and two programs or more.
PREFETCHED_BYTES = tl.constexpr(16384)
_LINE_BYTES = tl.constexpr(128)


@triton.jit
def wait_for_launches_before(lets_next_start: tl.constexpr = True):
    """Every program calls it, outside of loops: before it reads what the launch before writes, and before it writes.

    Then the next launch may start as soon as there is room for it: it waits in its turn. Without ``lets_next_start``
    the program calls ``let_next_start`` itself, when its work is all but done. A launch with large programs that comes
    earlier takes the first SMs that get free, which lie beside each other, and reads its weights more slowly: on an
    H200 a layer of Llama-3.1-8B then took 125 us, 121 so, and 124 with ordinary launches.
    """
    gdc_wait()
    if lets_next_start:
        gdc_launch_dependents()


@triton.jit
def let_next_start():
    """After ``wait_for_launches_before(False)``; every program calls it, outside of loops."""
    gdc_launch_dependents()


@triton.jit
def prefetch_rows(rows, ROW_BYTES: tl.constexpr, COUNT: tl.constexpr, BYTES: tl.constexpr = PREFETCHED_BYTES):
    """Asks for the first bytes of rows of weights. They come into the L2 cache, so nothing stale can be read later.

    Args:
        rows: pointers to rows that no kernel writes.
        COUNT: rows that the program asks for, in all its calls; a power of two. BYTES: of all of them; a power of two.
    """
    LINES: tl.constexpr = max(1, BYTES // (_LINE_BYTES * COUNT))
    offsets = tl.minimum(tl.arange(0, LINES) * _LINE_BYTES, ROW_BYTES - 1)  # short rows: some lines more than once
    lines = rows.to(tl.int64)[:, None] + offsets[None, :]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [lines], dtype=tl.int32, is_pure=False, pack=1
    )  # fmt: skip
