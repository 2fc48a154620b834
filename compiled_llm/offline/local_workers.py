"""Workers on this machine: a process each, with cores or a GPU of its own."""

import argparse
import contextlib
import os
import select
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from compiled_llm.system.child_process import Channel, described_end, with_package
from compiled_llm.system.resources import core_parts, threads_of


def local_settings(args: argparse.Namespace, num_gpus: int, settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """For each of ``args.workers`` what ``worker.run_worker`` gets first.

    Args:
        num_gpus: of this machine that the engines are to use; 0: they use cores.
        settings: what they have in common.

    Raises:
        ValueError: there are not as many GPUs or cores.
    """
    number_of = args.workers
    have, what = (num_gpus, "GPUs") if num_gpus else (len(os.sched_getaffinity(0)), "cores")
    if number_of > have:
        raise ValueError(f"--workers must be at most {have}, the {what} that this process may use, given {number_of}")
    of_workers = []
    for number, cores in enumerate(core_parts(number_of)):
        overrides: dict[str, Any] = {} if number == 0 else {"progress": "off"}
        if not num_gpus:
            overrides["gpu_memory_utilization"] = args.gpu_memory_utilization / number_of
        cpus = None if num_gpus else cores
        of_workers.append({**settings, "number": number, "cpus": cpus, "overrides": overrides})
    return of_workers


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


class LocalProcesses:
    """Worker processes on this machine, as ``workers.WorkerProcesses``.

    Args:
        cpus: for each worker the cores that it is to use; None: all cores of this process.
        gpus: for each worker the name of its GPU, as CUDA_VISIBLE_DEVICES has it; empty: they use cores.
    """

    def __init__(self, cpus: Sequence[Sequence[int] | None], gpus: Sequence[str] = ()) -> None:
        self._cpus, self._gpus = cpus, gpus
        self._processes: dict[int, subprocess.Popen] = {}
        self._channels: dict[int, Channel] = {}

    def start(self, number: int) -> None:
        """A new process for worker ``number``. ``OSError`` if there is none to be had."""
        environment = with_package(os.environ)
        cpus = self._cpus[number]
        if cpus is not None:
            environment["OMP_NUM_THREADS"] = str(threads_of(environment.get("OMP_NUM_THREADS", ""), len(cpus)))
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
        self._channels[number] = Channel(own)

    def send(self, number: int, message: bytes) -> None:
        if number in self._channels:
            with contextlib.suppress(OSError):  # it has ended, as is seen when its end of the channel is read
                self._channels[number].send(message)

    def receive(self, seconds: float) -> list[tuple[int, bytes | None]]:
        of_socket = {channel.socket: number for number, channel in self._channels.items()}
        received: list[tuple[int, bytes | None]] = []
        for connection in select.select(list(of_socket), [], [], seconds)[0]:
            number = of_socket[connection]
            try:
                received.append((number, self._channels[number].receive()))
            except (EOFError, OSError):
                self._channels.pop(number).socket.close()
                received.append((number, None))
        return received

    def end(self, number: int) -> str:
        """End the process of a worker, if it runs still; returns how it ended."""
        if number in self._channels:
            self._channels.pop(number).socket.close()
        process = self._processes.pop(number)
        try:
            status = process.wait(timeout=1.0)  # its end of the socket is closed already, if it ended by itself
        except subprocess.TimeoutExpired:
            process.kill()
            status = process.wait()
        return described_end(status)

    def close(self) -> None:
        for number in list(self._processes):
            self.end(number)
