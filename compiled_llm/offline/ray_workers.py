"""Workers on the machines of a Ray cluster: an actor each, which starts the worker's process beside it.

The actor passes messages on, nothing else. So a worker's process is the one that local_workers.py starts, no port is
opened but Ray's own, and an engine that crashes leaves an actor that says how. The driver keeps everything that must
survive: any machine but its own may go at any time.
"""

import argparse
import importlib
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Mapping
from typing import Any

from compiled_llm.offline.local_workers import LocalProcesses

_UNPLACED_SECONDS = 15.0  # until it is said that a worker waits for room in the cluster
_CONNECT_SECONDS = 10.0
_END_SECONDS = 5.0
MESSAGE_BYTES = 2**28  # of Ray's store, where a cluster is started for messages alone: they are small


class RayCluster:
    """A connection to a Ray cluster, until it is closed.

    Args:
        address: HOST:PORT of the cluster; "": that of RAY_ADDRESS, else a cluster of this machine alone is started,
            which ends with the connection. Only who has its token can connect to it.
        object_bytes: of Ray's store in such a cluster.

    Raises:
        ValueError: Ray is not installed, or no cluster answers there.
    """

    def __init__(self, address: str, object_bytes: int = MESSAGE_BYTES) -> None:
        name, address = ("--ray", address) if address else ("RAY_ADDRESS", os.environ.get("RAY_ADDRESS", ""))
        if address:
            _check_address(name, address)
            arguments: dict[str, Any] = {"address": address}
        else:
            # Ray reads them when it is imported. Without a token any user who reaches its ports could run programs.
            os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # else it reports to its makers
            os.environ.setdefault("RAY_worker_niceness", "0")  # else engines give way to any other program
            arguments = {"address": "local", "include_dashboard": False, "object_store_memory": object_bytes}
        try:
            self.ray: Any = importlib.import_module("ray")
        except ImportError as error:
            raise ValueError("--ray needs the extra 'ray': pip install 'compiled-llm[ray]'") from error
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            self.ray.init(**arguments, log_to_driver=False, logging_level="error")
        except (ConnectionError, RuntimeError) as error:  # as where the versions of Ray or Python differ
            raise ValueError(f"--ray {address}: {error}") from error
        finally:
            for number, handler in handlers.items():  # Ray sets its own
                signal.signal(number, handler)

    @classmethod
    def joined(cls) -> "RayCluster":
        """The cluster that this process is connected to already; not to be closed."""
        cluster = cls.__new__(cls)
        cluster.ray = importlib.import_module("ray")
        return cluster

    def device_type(self, device: str) -> str:
        """What an engine on ``device`` runs on: "cuda" or "cpu"; "auto" is a GPU if some machine has one.

        Raises:
            ValueError: ``device`` is one GPU of several.
        """
        if device.startswith("cuda:"):
            raise ValueError(f"device must be 'auto', 'cpu' or 'cuda' with --ray, each has its own, given {device!r}")
        if device != "auto":
            return device
        return "cuda" if self.ray.cluster_resources().get("GPU", 0) >= 1 else "cpu"

    def cores_each(self, num_workers: int) -> int:
        """Cores for each of so many workers, were they spread over machines of the smallest kind there is."""
        cores = self._cores()
        a_machine = -(-num_workers // len(cores))
        return max(1, min(cores) // a_machine)

    def most_together(self, num_workers: int, cores_each: int) -> int:
        """How many of the workers one machine may come to have."""
        return max(1, min(num_workers, max(self._cores()) // cores_each))

    def _cores(self) -> list[int]:
        """Cores of each machine that has some."""
        cores = [int(node["Resources"].get("CPU", 0)) for node in self.ray.nodes() if node["Alive"]]
        return [number for number in cores if number > 0] or [1]

    def close(self) -> None:
        self.ray.shutdown()


def _check_address(name: str, address: str) -> None:
    """``ValueError`` unless something answers there, which Ray itself waits for for minutes."""
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdecimal():
        raise ValueError(f"{name} must be HOST:PORT, given {address}")
    try:
        socket.create_connection((host, int(port)), _CONNECT_SECONDS).close()
    except OSError as error:
        raise ValueError(f"{name} must name a cluster that runs, given {address}: {error.strerror or error}") from error


def ray_settings(args: argparse.Namespace, cluster: RayCluster, settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """For each of ``args.workers`` what ``worker.run_worker`` gets first.

    Args:
        args: ``device`` is a type of device.
        settings: what they have in common.
    """
    overrides: dict[str, Any] = {"device": args.device, "progress": "off"}
    if args.device == "cpu":
        overrides["num_threads"] = args.num_threads or cluster.cores_each(args.workers)
        together = cluster.most_together(args.workers, overrides["num_threads"])
        overrides["gpu_memory_utilization"] = args.gpu_memory_utilization / together
    return [{**settings, "number": number, "cpus": None, "overrides": overrides} for number in range(args.workers)]


class _Host:
    """The actor: one worker process on its machine."""

    def __init__(self) -> None:
        self._processes = LocalProcesses([None])
        self._processes.start(0)

    def place(self) -> None:
        """Returns when there is a machine for it."""

    def send(self, message: bytes) -> None:
        self._processes.send(0, message)

    def receive(self) -> bytes | None:
        """The next message; None: the process has ended."""
        while True:
            for _, message in self._processes.receive(3600.0):
                return message

    def end(self) -> str:
        return self._processes.end(0)


class RayProcesses:
    """Worker processes in a Ray cluster, as ``workers.WorkerProcesses``.

    Args:
        needs: of a worker: ``num_cpus`` and ``num_gpus``.
    """

    def __init__(self, cluster: RayCluster, needs: Mapping[str, int]) -> None:
        self._ray, self._needs = cluster.ray, dict(needs)
        # Messages to a worker keep their order, and do not wait for messages from it.
        groups = {"to": 1, "from": 1}
        self._host = self._ray.remote(max_restarts=0, max_task_retries=0, concurrency_groups=groups)(_Host)
        self._actors: dict[int, Any] = {}
        self._messages: dict[Any, int] = {}  # the next one of each worker, which is to come
        self._unplaced: dict[Any, tuple[int, float]] = {}  # since when
        self._losses: dict[int, str] = {}

    def start(self, number: int) -> None:
        # SPREAD: machines that are idle first.
        actor = self._host.options(scheduling_strategy="SPREAD", **self._needs).remote()
        self._actors[number] = actor
        self._unplaced[actor.place.options(concurrency_group="to").remote()] = number, time.monotonic()
        self._listen(number)

    def send(self, number: int, message: bytes) -> None:
        self._actors[number].send.options(concurrency_group="to").remote(message)

    def receive(self, seconds: float) -> list[tuple[int, bytes | None]]:
        self._look_for_places()
        waited = list(self._messages)
        if not waited:
            time.sleep(seconds)
            return []
        self._ray.wait(waited, num_returns=1, timeout=seconds)
        ready, _ = self._ray.wait(waited, num_returns=len(waited), timeout=0)
        received: list[tuple[int, bytes | None]] = []
        for reference in ready:
            number, message = self._messages.pop(reference), None
            try:
                message = self._ray.get(reference)
            except self._ray.exceptions.RayError as error:
                self._losses[number] = _brief(error)
            if message is not None:
                self._listen(number)
            received.append((number, message))
        return received

    def end(self, number: int) -> str:
        """End the process of a worker, if it runs still; returns how it ended."""
        actor, how = self._actors.pop(number), self._losses.pop(number, None)
        if how is None:
            try:
                how = self._ray.get(actor.end.options(concurrency_group="to").remote(), timeout=_END_SECONDS)
            except self._ray.exceptions.RayError as error:
                how = _brief(error)
        self._ray.kill(actor)
        self._messages = {message: other for message, other in self._messages.items() if other != number}
        return str(how)

    def close(self) -> None:
        """End all of them."""
        for actor in self._actors.values():
            self._ray.kill(actor)  # its process sees that nobody listens, and ends

    def _listen(self, number: int) -> None:
        self._messages[self._actors[number].receive.options(concurrency_group="from").remote()] = number

    def _look_for_places(self) -> None:
        """Say of workers that wait for room in the cluster that they do, once."""
        if not self._unplaced:
            return
        for reference in self._ray.wait(list(self._unplaced), num_returns=len(self._unplaced), timeout=0)[0]:
            del self._unplaced[reference]
        for reference, (number, since) in list(self._unplaced.items()):
            if time.monotonic() - since > _UNPLACED_SECONDS:
                del self._unplaced[reference]
                needs = ", ".join(f"{name} {value}" for name, value in self._needs.items() if value)
                print(f"worker {number} waits until the cluster has room for it ({needs})", file=sys.stderr)


def _brief(error: Exception) -> str:
    """The first line of an error of Ray, without the identifiers that follow."""
    return str(error).split("\n", 1)[0].rstrip(":. ")
