"""The C++ kernels that a model runs on a CPU: loaded from disk, and built first where they are missing."""

from concurrent.futures import ThreadPoolExecutor

from compiled_llm.ops import native
from compiled_llm.progress import StartProgress

# About what one core takes to build each: so a first start can say how long it will take.
_BUILD_SECONDS = {"attention_cpu": 38.0, "linear_cpu": 14.0, "rowwise_cpu": 10.0, "sampling_cpu": 10.0}


def load_kernels(progress: StartProgress) -> None:
    """Load all of them. Without a C++ compiler nothing is loaded, and a warning says so."""
    missing = {name: seconds for name, seconds in _BUILD_SECONDS.items() if native.must_be_built(name)}
    found = len(_BUILD_SECONDS) - len(missing)
    longest = max(missing.values(), default=None)
    with progress.stage("building C++ kernels", missing, seconds=longest, found=found) as stage:

        def load(name: str) -> None:
            stage.begin(name)
            module = native.load(name)
            if module is not None:
                module.supported_isas()  # refuses a COMPILED_LLM_ISA that it does not know
            stage.finish(name)

        with ThreadPoolExecutor() as pool:  # all at once: each waits for a compiler
            list(pool.map(load, _BUILD_SECONDS))
