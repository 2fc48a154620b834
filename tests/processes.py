"""How many processes run the tests, and what is built before they start."""

import subprocess
import sys
from pathlib import Path

import torch

from compiled_llm.resources import free_memory, granted_cores

ROOT = Path(__file__).parents[1]
_BYTES_PER_PROCESS = 3 << 30  # at most, with the compilers that its tests start


def num_processes() -> int:
    """One per core, as far as memory goes. On a machine with a GPU one: processes would share its memory."""
    if torch.cuda.is_available():
        return 1
    return max(1, min(granted_cores(), free_memory() // _BYTES_PER_PROCESS))


def build_kernels() -> None:
    """Build the C++ kernels side by side, so that no two processes build one at the same time.

    Says nothing of errors: the tests meet them again.
    """
    from compiled_llm.ops import native

    names = [path.stem for path in (ROOT / "ops").rglob("*.cpp")]
    command = [sys.executable, "-c", "import sys; from compiled_llm.ops import native; native.load(sys.argv[1])"]
    builds = [
        subprocess.Popen([*command, name], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for name in names
        if native.must_be_built(name)
    ]
    for build in builds:
        build.wait()
