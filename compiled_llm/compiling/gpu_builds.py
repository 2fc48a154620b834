"""Compiling for a GPU in a process that never touches it, for the one that does: Inductor's code, and all kernels.

Tensors are fake, the GPU is known by its properties alone, and Triton compiles without a driver. So as many processes
as there are cores compile side by side, and none of them takes memory of the GPU. A compiled function is then called
once on fake tensors: what its ops and Inductor's own code would launch is compiled into Triton's cache, from which the
process with the GPU loads it.
"""

import pickle
from typing import Any

from compiled_llm.compiling.argument_specs import examples_of
from compiled_llm.compiling.compiler import compile_ahead
from compiled_llm.compiling.costs import CostMeter
from compiled_llm.compiling.gpu_properties import GpuTarget
from compiled_llm.compiling.messages import Job
from compiled_llm.compiling.ready_code import load_ready, ready_code
from compiled_llm.ops.programmatic_launch import programmatic_launches
from compiled_llm.ops.torch_private import lower_as_ops
from compiled_llm.ops.torch_private_builds import build_without_gpu, builds_for_others, compiled_kernel, rehearse
from compiled_llm.ops.torch_private_gpu import pretend_gpu


def pretend_to_have(target: GpuTarget) -> None:
    """From now on this process takes the GPU to be there, for good."""
    pretend_gpu(target.properties)
    build_without_gpu(target.properties.capability)


def build_for_gpu(job: Job, target: GpuTarget) -> tuple[bytes, dict[str, Any]]:
    """Compile a job of fake arguments: what ``compiler.from_bytes`` takes, and facts as ``compile_ahead`` gives them.

    Raises:
        ValueError: torch would do more around the code than to run it.
    """
    meter = CostMeter()
    lower_as_ops("compiled_llm")
    function = job.recipe()
    with builds_for_others():
        ahead, facts = compile_ahead(function, job.name, job.args)
        code = ready_code(ahead)
    if code is None:
        raise ValueError(f"{job.name} is more than a graph: torch has to prepare its inputs or its outputs")
    run = load_ready(code, function.__globals__, compiled_kernel)
    with programmatic_launches(target.programmatic):
        for sizes in job.sizes or ({},):
            rehearse(run, examples_of(job.args, sizes))
    return pickle.dumps((code, None)), facts | {"cost": list(meter.cost(libraries=0, header_seconds=0.0))}
