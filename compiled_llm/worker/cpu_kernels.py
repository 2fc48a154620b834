"""The C++ kernels that a model runs on a CPU: loaded from disk, and built first where they are missing."""

from concurrent.futures import ThreadPoolExecutor

import torch

from compiled_llm.ops import native
from compiled_llm.progress import StartProgress

# About what one core takes to build each: so a first start can say how long it will take.
_BUILD_SECONDS = {"attention_cpu": 38.0, "linear_cpu": 14.0, "rowwise_cpu": 10.0, "sampling_cpu": 10.0}


def load_kernels(dtype: torch.dtype, progress: StartProgress) -> None:
    """Load what a model of ``dtype`` needs. Without a C++ compiler nothing is loaded, and a warning says so."""
    needed = [name for name in _BUILD_SECONDS if name != "linear_cpu" or dtype == torch.bfloat16]
    missing = {name: _BUILD_SECONDS[name] for name in needed if native.must_be_built(name)}
    with progress.stage("building C++ kernels", missing, seconds=max(missing.values(), default=None)) as stage:

        def load(name: str) -> None:
            stage.begin(name)
            native.load(name)
            stage.finish(name)

        with ThreadPoolExecutor() as pool:  # all at once: each waits for a compiler
            list(pool.map(load, needed))
