"""A process that compiles what another one sends (parallel.py): ``python -m compiled_llm.compiling.build_worker``.

With a ``GpuTarget`` as its argument it compiles for that GPU, which it does not touch.
"""

import contextlib
import os
import sys
import threading
import time
from typing import Any

import torch

from compiled_llm.compiling.compiler import compile_ahead, to_bytes
from compiled_llm.compiling.gpu_builds import build_for_gpu, pretend_to_have
from compiled_llm.compiling.gpu_properties import GpuTarget
from compiled_llm.compiling.keys import code_settings, differences
from compiled_llm.compiling.messages import Built, Job, receive, send
from compiled_llm.ops.torch_private import import_compiler
from compiled_llm.ops.torch_private_builds import fake_tensors


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
        return Built(to_bytes(ahead), facts, "")
    except Exception as error:  # whatever it is: the other process then compiles for itself, and raises it
        return Built(b"", {}, f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
