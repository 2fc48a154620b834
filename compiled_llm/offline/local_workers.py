"""Workers on this machine: a process each, with cores or a GPU of its own."""

import argparse
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from compiled_llm.child_process import Channel


def worker_settings(
    program: str, args: argparse.Namespace, sampling: dict[str, Any], num_gpus: int
) -> list[dict[str, Any]]:
    """For each of ``args.workers`` what ``worker.run_worker`` gets first.

    Args:
        num_gpus: of this machine that the engines are to use; 0: they use cores.

    Raises:
        ValueError: there are not as many GPUs or cores.
    """
    number_of = args.workers
    cores = sorted(os.sched_getaffinity(0))
    have, what = (num_gpus, "GPUs") if num_gpus else (len(cores), "cores")
    if number_of > have:
        raise ValueError(f"--workers must be at most {have}, the {what} that this process may use, given {number_of}")
    settings = []
    for number in range(number_of):
        overrides: dict[str, Any] = {} if number == 0 else {"progress": "off"}
        if not num_gpus:
            overrides["gpu_memory_utilization"] = args.gpu_memory_utilization / number_of
        cpus = None if num_gpus else part_of(cores, number, number_of)
        settings.append(
            {
                "program": program,
                "arguments": args.arguments,
                "number": number,
                "sampling": sampling,
                "cpus": cpus,
                "overrides": overrides,
            }
        )
    return settings


def part_of(items: Sequence[int], number: int, number_of: int) -> list[int]:
    """Part ``number`` of ``number_of`` parts, neighbours together, none more than one larger than another."""
    return list(items[len(items) * number // number_of : len(items) * (number + 1) // number_of])


def visible_gpus(device: str) -> list[str]:
    """The names of the GPUs that engines on ``device`` may use, as CUDA_VISIBLE_DEVICES has them."""
    if device == "cpu":
        return []
    import torch

    count = torch.cuda.device_count()
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [name.strip() for name in given.split(",")][:count] if given else [str(index) for index in range(count)]
    if device.startswith("cuda:"):
        raise ValueError(f"device must be 'auto', 'cpu' or 'cuda' with --workers, each has its own, given {device!r}")
    return names


class LocalLauncher:
    """Starts worker processes of this machine.

    Args:
        gpus: for each worker the name of its GPU, as CUDA_VISIBLE_DEVICES has it; empty: they use cores.
    """

    def __init__(self, cpus: Sequence[Sequence[int] | None], gpus: Sequence[str]) -> None:
        self._cpus, self._gpus = cpus, gpus
        self._processes: dict[int, subprocess.Popen] = {}

    def start(self, number: int) -> Channel:
        """A new process for worker ``number``."""
        environment = dict(os.environ)
        cpus = self._cpus[number]
        if cpus is not None:
            environment["OMP_NUM_THREADS"] = str(min(len(cpus), int(environment.get("OMP_NUM_THREADS", len(cpus)))))
        if self._gpus:
            environment["CUDA_VISIBLE_DEVICES"] = self._gpus[number]
        own, theirs = socket.socketpair()
        with theirs:
            self._processes[number] = subprocess.Popen(
                [sys.executable, "-m", "compiled_llm.offline.worker"],
                stdin=theirs.fileno(),
                env=environment,
                start_new_session=True,  # an interrupt from a terminal is for the driver alone
            )
        return Channel(own)

    def end(self, number: int) -> str:
        """End the process of a worker, if it runs still; returns how it ended."""
        process = self._processes.pop(number)
        try:
            status = process.wait(timeout=1.0)  # its end of the socket is closed already, if it ended by itself
        except subprocess.TimeoutExpired:
            process.kill()
            status = process.wait()
        return f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
