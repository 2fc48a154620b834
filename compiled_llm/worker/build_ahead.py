"""What a start builds beside everything else: a CPU's C++ kernels, and processes that compile graphs."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from compiled_llm.api.config import EngineConfig, EngineLimits
from compiled_llm.compiling.build_processes import BuildProcesses
from compiled_llm.compiling.cache import engine_cache
from compiled_llm.compiling.gpu_properties import GpuTarget
from compiled_llm.models.config import ModelConfig
from compiled_llm.models.linears.protocol import LinearKind
from compiled_llm.ops import native
from compiled_llm.ops.torch_private import keeps_compiled_code
from compiled_llm.scheduling.bucket import buckets_of
from compiled_llm.system.progress import StartProgress
from compiled_llm.system.resources import granted_cores
from compiled_llm.worker import graph_fields
from compiled_llm.worker.cpu_kernels import KernelBuild, ops_of

_STARTED = 2  # processes: for the step, and for what else depends on the model


class Builds(NamedTuple):
    """What is at work: ``processes`` import the compiler, which takes seconds, and wait for graphs.

    ``kernels``: the C++ ones of a CPU, None for a GPU.
    """

    kernels: KernelBuild | None
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
    target: GpuTarget | None = None,
    draft_ops: Sequence[str] = (),
) -> Builds | None:
    """Start building what a model's steps need and is not on disk; None where nothing is built ahead on a GPU.

    Processes start if it is clear already that steps have to be compiled. Where their arguments alone differ from what
    is on disk, they start when they are needed.

    Args:
        cache_dtypes: of each layer's KV cache.
        target: of a GPU whose graphs the engine captures itself.
        draft_ops: those that a network which drafts calls.
    """
    most = granted_cores() if config.compile_workers is None else config.compile_workers
    fields = graph_fields.of_step(model_config, limits, dtype, cache_dtypes, device)
    if device.type != "cpu":
        if target is None:
            return None
        builds = Builds(None, BuildProcesses(target))
        if keeps_compiled_code() and engine_cache(target).lacks(buckets_of(limits)[0].name, fields):
            builds.processes.start(most)
        return builds
    ops = sorted({*ops_of(model_config, dtype, linears), *draft_ops})
    builds = Builds(KernelBuild(progress, ops), BuildProcesses())
    compiles = not config.enforce_eager and native.compiler() is not None and keeps_compiled_code()
    if compiles and config.waits_for_compile and most > 1 and engine_cache().lacks("step", fields):
        builds.processes.start(min(most, _STARTED))
    return builds
