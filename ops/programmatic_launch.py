"""Programmatic dependent launch: programs of a kernel may start while those of the launch before it still run.

On GPUs from compute capability 9.0 on; CUDA C++ Programming Guide, "Programmatic Dependent Launch and Synchronization".
The time to launch, and what a kernel does before it needs anything that another one wrote, then overlap with the end of
the launch before. Whoever records a CUDA graph allows it; the launch of each kernel that can wait asks whether it is
allowed, and has few rows: with many, a kernel runs so long that there is little to save.

Why nothing is read or overwritten too early: every program of such a kernel calls ``wait_for_launches_before`` of
``triton_programmatic.py`` before it reads what the launch before writes, and before it writes. That returns when the
launch before has ended and what it wrote is visible; and that one had waited in the same way, or was an ordinary
launch, which begins when all before it have ended. So all launches before have ended. An ordinary launch behind such a
kernel begins when that one has ended, whether or not it let others start. A kernel that starts early and does not wait
would break this, so the compiler's own option for that is off.

What the launch before does not write may be read before the wait: a launch starts when all programs of the one before
have waited, so when all launches but that one have ended. The attention of a request alone reads its plan, its block
table and the keys of earlier tokens so (``attention/triton_alone.py``); ``tests/gpu_step`` checks what comes before it.
"""

import contextlib
import contextvars
from collections.abc import Iterator

CAPABILITY = (9, 0)  # the first that has it
MOST_ROWS = 32

_allowed = contextvars.ContextVar("compiled_llm_programmatic_launches", default=False)


@contextlib.contextmanager
def programmatic_launches(allowed: bool = True) -> Iterator[None]:
    """Within it, in this thread, kernels that can wait are launched so."""
    before = _allowed.set(allowed)
    try:
        yield
    finally:
        _allowed.reset(before)


def launch_options(rows: int) -> dict[str, bool]:
    """For the launch of a kernel that can wait: its constant ``PROGRAMMATIC``, and Triton's own option.

    Args:
        rows: tokens of the step.
    """
    if _allowed.get() and rows <= MOST_ROWS:
        return {"PROGRAMMATIC": True, "launch_pdl": True}
    return {"PROGRAMMATIC": False}
