"""Ranks of GPUs as processes of Triton's interpreter: each runs the kernels, on memory that all have at one address."""

import mmap
import os
import random
import signal
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from triton.runtime import interpreter

from compiled_llm.ops.parallel.triton_exchange import HEADER_BYTES
from compiled_llm.ops.parallel.triton_reductions import bytes_on_gpu


def run_ranks(size: int, run: Callable[[int, Tensor, Tensor], None], slot: int = 4096, seconds: float = 300) -> str:
    """``run(rank, place, memory)`` in a process for each rank, all at once; what the first one raises, or "".

    Args:
        slot: bytes of a slot. All are full of NaN at the start.
    """
    memories = [_shared(bytes_on_gpu(slot)) for _ in range(size)]
    addresses = [memory.data_ptr() for memory in memories]
    reader, writer = os.pipe()
    processes = []
    for rank in range(size):
        process = os.fork()
        if process == 0:
            signal.alarm(round(seconds))  # ranks that wait for ever
            _leave_cores_while_waiting()
            try:
                run(rank, torch.tensor([rank, *addresses]), memories[rank])
            except BaseException:
                os.write(writer, f"rank {rank}: {traceback.format_exc()}".encode())
                os._exit(1)
            os._exit(0)
        processes.append(process)
    os.close(writer)
    waiting, failed = set(processes), ""
    while waiting:
        process, status = os.waitpid(next(iter(waiting)) if failed else -1, 0)
        waiting.discard(process)
        if status and not failed:
            failed = f"a rank ended with {status}: {os.read(reader, 1 << 16).decode() if os.WIFEXITED(status) else ''}"
            for other in waiting:  # which wait for it
                os.kill(other, signal.SIGKILL)
    os.close(reader)
    return failed


def _leave_cores_while_waiting() -> None:
    """More ranks than cores look for flags in turns."""
    look = interpreter.InterpreterBuilder.create_atomic_rmw

    def create_atomic_rmw(*arguments: Any) -> Any:
        time.sleep(0.0005)
        return look(*arguments)

    interpreter.InterpreterBuilder.create_atomic_rmw = create_atomic_rmw


def be_late(rng: random.Random) -> None:
    """Sometimes, and sometimes by much."""
    time.sleep(rng.choice((0, 0, 0, 0.001, 0.01)))


def _shared(nbytes: int) -> Tensor:
    memory = torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)
    memory[HEADER_BYTES.value :] = 0xFF
    return memory
