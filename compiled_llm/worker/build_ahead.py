"""What a start on a CPU builds beside everything else: the C++ kernels, and processes that compile graphs."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from compiled_llm.compiling.build_processes import BuildProcesses
from compiled_llm.compiling.cache import engine_cache
from compiled_llm.config import EngineConfig, EngineLimits
from compiled_llm.models.config import ModelConfig
from compiled_llm.models.linears.protocol import LinearKind
from compiled_llm.ops import native
from compiled_llm.ops.torch_private import keeps_compiled_code
from compiled_llm.progress import StartProgress
from compiled_llm.resources import granted_cores
from compiled_llm.worker import graph_fields
from compiled_llm.worker.cpu_kernels import KernelBuild, ops_of

_STARTED = 2  # processes: for the step, and for what else depends on the model


class Builds(NamedTuple):
    """What is at work: ``processes`` import the compiler, which takes seconds, and wait for graphs."""

    kernels: KernelBuild
    processes: BuildProcesses


def start_builds(
    config: EngineConfig,
    device: torch.device,
    model_config: ModelConfig,
    limits: EngineLimits,
    dtype: torch.dtype,
    cache_dtypes: Sequence[torch.dtype],
    linears: LinearKind,
    progress: StartProgress,
) -> Builds | None:
    """Start building what a model's steps need and is not on disk; None but on a CPU.

    Processes start if it is clear already that the step has to be compiled. Where its arguments alone differ from what
    is on disk, they start when they are needed. ``cache_dtypes``: of each layer's KV cache.
    """
    if device.type != "cpu":
        return None
    builds = Builds(KernelBuild(progress, ops_of(model_config, dtype, linears)), BuildProcesses())
    most = granted_cores() if config.compile_workers is None else config.compile_workers
    compiles = not config.enforce_eager and native.compiler() is not None and keeps_compiled_code()
    fields = graph_fields.of_step(model_config, limits, dtype, cache_dtypes)
    if compiles and most > 1 and engine_cache().lacks("step", fields):
        builds.processes.start(min(most, _STARTED))
    return builds
