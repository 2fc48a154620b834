"""A process that compiles what another one sends (parallel.py): ``python -m compiled_llm.compiling.build_worker``.

With a ``GpuTarget`` as its argument it compiles for that GPU, which it does not touch: Inductor's code and all kernels.
Tensors are fake then, the GPU is known by its properties alone, and Triton compiles without a driver. So as many
processes as there are cores compile side by side, and none of them takes memory of the GPU. A compiled function is then
called once on fake tensors: what its ops and Inductor's own code would launch is compiled into Triton's cache, from
which the process with the GPU loads it.
"""

import contextlib
import os
import sys
import threading
import time
from typing import Any

import torch

from compiled_llm.compiling.argument_specs import examples_of
from compiled_llm.compiling.build_processes import Built, Job, receive, send
from compiled_llm.compiling.compiler import compile_ahead
from compiled_llm.compiling.costs import CostMeter
from compiled_llm.compiling.gpu_properties import GpuTarget
from compiled_llm.compiling.keys import code_settings, differences
from compiled_llm.compiling.ready_code import load_ready, ready_code
from compiled_llm.ops.programmatic_launch import programmatic_launches
from compiled_llm.ops.torch_private import import_compiler, lower_as_ops
from compiled_llm.ops.torch_private_builds import (
    build_without_gpu,
    builds_for_others,
    compiled_kernel,
    fake_tensors,
    rehearse,
)
from compiled_llm.ops.torch_private_gpu import pretend_gpu


def main() -> None:
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    target = GpuTarget.of_text(sys.argv[1]) if len(sys.argv) > 1 else None
    import_compiler()
    if target is not None:
        pretend_to_have(target)
    start_seconds = round(time.process_time(), 2)
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a library prints is no reply
    while True:
        with contextlib.nullcontext() if target is None else fake_tensors():
            try:
                job, settings = receive(sys.stdin.buffer)
            except EOFError:
                return
            built = _compile(job, settings, target)
        send(replies, built._replace(facts=built.facts | {"start": start_seconds}))


def _end_with(parent: int) -> None:
    """End when the process ``parent`` does, also in the middle of a job, whose result nobody waits for then."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def _compile(job: Job, settings: dict[str, Any], target: GpuTarget | None) -> Built:
    """``settings``: those of the process that asks, under whose key the code will be stored."""
    torch.set_num_threads(job.threads)
    other = differences(settings, code_settings())
    if other:
        return Built(b"", {}, f"torch is set up otherwise here: {'; '.join(other)}")
    try:
        if target is not None:
            return Built(*build_for_gpu(job, target), "")
        ahead, facts = compile_ahead(job.recipe(), job.name, job.args)
        return Built(_ready(ahead, job.name), facts, "")
    except Exception as error:  # whatever it is: the other process then compiles for itself, and raises it
        return Built(b"", {}, f"{type(error).__name__}: {error}")


def pretend_to_have(target: GpuTarget) -> None:
    """From now on this process takes the GPU to be there, for good."""
    pretend_gpu(target.properties)
    build_without_gpu(target.properties.capability)


def build_for_gpu(job: Job, target: GpuTarget) -> tuple[bytes, dict[str, Any]]:
    """Compile a job of fake arguments: what ``load_ready`` takes, and facts as ``compile_ahead`` gives them.

    Raises:
        ValueError: torch would do more around the code than to run it.
    """
    meter = CostMeter()
    lower_as_ops("compiled_llm")
    function = job.recipe()
    with builds_for_others():
        ahead, facts = compile_ahead(function, job.name, job.args)
        code = _ready(ahead, job.name)
    run = load_ready(code, function.__globals__, compiled_kernel)
    with programmatic_launches(target.programmatic):
        for sizes in job.sizes or ({},):
            rehearse(run, examples_of(job.args, sizes))
    return code, facts | {"cost": list(meter.cost(libraries=0, header_seconds=0.0))}


def _ready(ahead: Any, name: str) -> bytes:
    code = ready_code(ahead)
    if code is None:
        raise ValueError(f"{name} is more than a graph: torch has to prepare its inputs or its outputs")
    return code


if __name__ == "__main__":
    main()
