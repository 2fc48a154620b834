"""How many processes run the tests, and what is built before they start."""

from concurrent.futures import ThreadPoolExecutor

import torch

from compiled_llm.system.resources import free_memory, granted_cores

_BYTES_PER_PROCESS = 3 << 30  # at most, with the compilers that its tests start


def num_processes() -> int:
    """One per core, as far as memory goes. On a machine with a GPU one: processes would share its memory."""
    if torch.cuda.is_available():
        return 1
    return max(1, min(granted_cores(), free_memory() // _BYTES_PER_PROCESS))


def build_kernels(every_set: bool) -> None:
    """Build the C++ libraries of the run side by side, so that no two processes build one at the same time.

    Says nothing of errors: the tests meet them again.

    Args:
        every_set: of all instruction sets, as a battery needs them; else of those of the ordinary run.
    """
    from compiled_llm.ops import native
    from compiled_llm.ops.kernel_build import OPS, isas_of, kernel_library, op_library
    from tests.ops.instruction_sets import ordinary_sets

    names = [kernel_library(op, isa) for op in OPS for isa in (isas_of if every_set else ordinary_sets)(op)]
    names += [op_library(op) for op in (*OPS, "limits_cpu")]
    with ThreadPoolExecutor(granted_cores()) as pool:
        for library in filter(native.must_be_built, names):
            pool.submit(native.build, library)
