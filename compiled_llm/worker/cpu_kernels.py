"""The C++ kernels that a model runs on a CPU: loaded from disk, and built first where they are missing.

Compiling graphs asks for the shapes of what an op gives, and not for its kernels. So kernels are built beside all that
a start does before the first step runs. Those of kinds of linear layer that the model has none of are not built.
"""

import time
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from compiled_llm.models.config import ModelConfig
from compiled_llm.models.linears.protocol import LinearKind
from compiled_llm.models.registry import attention_layers, family_of, layers_of
from compiled_llm.models.weights import linear_layers
from compiled_llm.ops import native
from compiled_llm.ops.kernel_build import Library
from compiled_llm.system.progress import StartProgress
from compiled_llm.system.resources import granted_cores

# How long a library takes beside others, by which the longest come first. How long that is depends on the machine, and
# each machine builds them once: so nothing is said of the time left.
_WEIGHT = 1.0
_MORE_WEIGHT = {
    "attention_cpu.amx": 5.0,
    "attention_cpu.avx512_bf16": 4.0,
    "attention_cpu.avx512": 3.0,
    "attention_cpu.avx2": 3.0,
    "attention_cpu.neon_bf16": 3.0,
    "attention_cpu.portable": 3.0,
    "latent_attention_cpu.avx512_bf16": 4.0,
    "latent_attention_cpu.avx512": 3.0,
    "latent_attention_cpu.avx2": 3.0,
    "latent_attention_cpu.portable": 3.0,
    "quantized_linear_cpu.amx": 4.0,
    "quantized_linear_cpu.avx512_bf16": 5.0,
    "quantized_linear_a8_cpu.amx": 4.0,
    "quantized_linear_a8_cpu.avx512_bf16": 3.0,
    "quantized_linear_a8_cpu.neon_bf16": 3.0,
}


# What the steps of every model call, whatever its linear layers are.
_COMMON = ("rowwise_cpu", "sampling_cpu")


def ops_of(model_config: ModelConfig, dtype: torch.dtype, linears: LinearKind) -> list[str]:
    """The ops of ``kernel_build.OPS`` that the steps of a model call."""
    weights = family_of(model_config).describe(model_config, dtype, linears).weights
    layers = attention_layers(layers_of(model_config))
    attention = {"latent_attention_cpu" if spec.latent_dim else "attention_cpu" for spec in layers}
    return sorted({*_COMMON, *attention, *(op for layer in linear_layers(weights) for op in layer.cpu_ops)})


class KernelBuild:
    """Builds what is missing for ``ops``, on all cores, from now on until ``finish``."""

    def __init__(self, progress: StartProgress, ops: Iterable[str]) -> None:
        """Raises ``ValueError`` for a COMPILED_LLM_ISA that there is not, and where libraries would not be safe."""
        self._ops = list(ops)
        self.seconds_waited = 0.0
        self._progress = progress
        libraries = [library for op in self._ops for library in native.libraries_of(op)]
        missing = sorted(filter(native.must_be_built, libraries), key=_weight, reverse=True)
        self._pool = ThreadPoolExecutor(granted_cores())  # each thread waits for a compiler
        self._builds: list[tuple[Library, Future[None]]] = [
            (library, self._pool.submit(native.build, library)) for library in missing
        ]
        if missing:
            about = f"{len(missing)} libraries, beside what follows"
            kept = f"kept in {native.kernel_directory()}"
            progress.line(f"building C++ kernels for {native.best_isa()}: {about}; {kept}")

    def finish(self) -> None:
        """Wait for what is still being built, and load all. Without a C++ compiler only a warning says so.

        Raises:
            RuntimeError: a build failed; the message has the compiler's output.
        """
        started = time.perf_counter()
        waiting = {library.name: _weight(library) for library, build in self._builds if not build.done()}
        with self._progress.stage("building C++ kernels", waiting, foreseen=False, is_long=False) as stage:
            for library, build in self._builds:
                stage.next(library.name)
                build.result()
        self._pool.shutdown()
        for op in self._ops:
            native.load(op)
        self.seconds_waited = time.perf_counter() - started


def _weight(library: Library) -> float:
    return _MORE_WEIGHT.get(library.name, _WEIGHT)
