"""The sum over ranks: the op through shared memory, beside torch.distributed's gloo, between processes of this machine.

    compiled-llm bench all-reduce
    compiled-llm bench all-reduce --device cuda
    compiled-llm bench all-reduce --kib 4,64,1024 --json docs/results/cpu/all-reduce.json

Each rank is a process with one thread on a core of its own. All call the op again and again, so that a call waits for
the slowest rank, as in a step; the figures are of rank 0: the median of the rounds' means in microseconds, and the
least. In each round the two ways run one after the other, each with some calls first that do not count: ranks come
from gloo's calls, in which they sleep, at different times. Times on a machine that others use, or with fewer cores than
ranks, are mostly of waiting.

On GPUs ("cuda") each rank has one, calls are in a CUDA graph, and NCCL is beside the op. With "cuda:0" all ranks are on
that GPU, where processes take turns of milliseconds: what then is timed is mostly these, and NCCL refuses it.
"""

import argparse
import contextlib
import functools
import multiprocessing
import os
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from compiled_llm.api import tables
from compiled_llm.api.command_line import FlagParser, integers
from compiled_llm.bench.harness import TORCH_DTYPES, Row, call_seconds, finish, in_turns, seconds_of
from compiled_llm.models.sharding import Shard
from compiled_llm.ops import all_reduce, native
from compiled_llm.ops.parallel.rank_group import bytes_for
from compiled_llm.parallel.rank_processes import PIECE_BYTES
from compiled_llm.system.numa import cores_of_ranks
from compiled_llm.worker.device import resolve_device
from compiled_llm.worker.rank_gpus import gpu_group, gpus_of_ranks, seen_by_children
from compiled_llm.worker.rank_start import Inherited, RankStart, begin_rank

COLUMNS = 1024
CALLS, UNCOUNTED = 100, 100  # of a round's mean; before them


def parser(program: str) -> FlagParser:
    made = FlagParser(prog=program, description="The sum over ranks, beside gloo.")
    made.add_argument("--ranks", type=int, default=2, help="processes (default: 2)")
    made.add_argument("--device", default="cpu", help="cpu, cuda, or cuda:INDEX for all ranks (default: cpu)")
    made.add_argument("--kib", type=integers, default=(4, 16, 64, 256, 1024), help="KiB of a rank (default: 4 to 1024)")
    made.add_argument("--dtype", default="bfloat16", choices=TORCH_DTYPES, help="(default: bfloat16)")
    made.add_argument("--rounds", type=int, default=20, help="(default: 20)")
    tables.add_json_flag(made)
    return made


def seconds_of_calls(call: Callable[[], object]) -> float:
    def repeat(count: int) -> None:
        for _ in range(count):
            call()  # its result is freed at once: fresh memory would cost more than the sum

    repeat(UNCOUNTED)
    return seconds_of(lambda: repeat(CALLS))


def gpu_seconds(calls: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Of ``CALLS`` of each in every round; all ranks run as many."""

    def run(call: Callable[[], object], copy: int) -> object:
        return call()

    runs = {name: functools.partial(run, call) for name, call in calls.items()}
    found = call_seconds(runs, 1, "cuda", seconds=10**9, rounds=rounds)
    return {name: [CALLS * seconds for seconds in of_rounds] for name, of_rounds in found.items()}


def cpu_seconds(calls: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """The same on a CPU."""
    runs = {name: functools.partial(seconds_of_calls, call) for name, call in calls.items()}
    return in_turns(runs, rounds=rounds)


def run_rank(start: RankStart, args: argparse.Namespace, meeting: str, results: Connection) -> None:
    """In a process of its own: measure, and send the rows."""
    group = begin_rank(start)
    assert start.shard is not None
    torch.set_num_threads(1)
    rank, size, library = start.shard.rank, start.shard.size, "gloo"
    device = torch.device("cpu")
    if start.gpu is not None:
        assert not isinstance(start.meeting, Inherited), "it is a number here"
        library, device = "nccl", resolve_device("cuda")
        group = gpu_group(group, start.gpu, device, start.meeting)
    has_library = start.gpu is None or not start.gpu.shared
    if has_library and not torch.distributed.is_initialized():
        torch.distributed.init_process_group(library, init_method=f"file://{meeting}", rank=rank, world_size=size)
    rows = []
    for kib in args.kib:
        dtype = TORCH_DTYPES[args.dtype]
        x = torch.full((max(1, kib * 1024 // dtype.itemsize // COLUMNS), COLUMNS), 1.0 + rank).to(device, dtype)
        assert all_reduce(x, group).eq(size * (size + 1) / 2).all()
        y = x.clone()  # the library sums in place
        calls: dict[str, Callable[[], object]] = {"op": functools.partial(all_reduce, x, group)}
        if has_library:
            torch.distributed.all_reduce(y.clone())
            calls[library] = functools.partial(torch.distributed.all_reduce, y)
        times = (cpu_seconds if start.gpu is None else gpu_seconds)(calls, args.rounds)
        row: Row = {"KiB": kib}
        for name, seconds in times.items():
            row |= {
                f"{name}_us": statistics.median(seconds) / CALLS * 1e6,
                f"{name}_least_us": min(seconds) / CALLS * 1e6,
            }
        rows.append(row)
    if has_library:
        torch.distributed.destroy_process_group()
    results.send(rows)


def rows_of(connection: Connection, processes: Sequence[BaseProcess]) -> list[Row]:
    """What rank 0 sends. ``RuntimeError`` where a rank fails, for which the others would wait."""
    left = {process.sentinel: rank for rank, process in enumerate(processes)}
    while left:
        ready = wait([connection, *left])
        if connection in ready:
            with contextlib.suppress(EOFError):  # rank 0 has ended, which its sentinel says, too
                return connection.recv()
            ready = [processes[0].sentinel]
        for sentinel in ready:
            assert isinstance(sentinel, int)
            process = processes[rank := left.pop(sentinel)]
            process.join()
            if process.exitcode:
                for other in processes:
                    other.kill()
                    other.join()
                raise RuntimeError(f"rank {rank} ended with exit code {process.exitcode}: its error is above")
    raise AssertionError("rank 0 sends rows before it ends")


def measure(args: argparse.Namespace) -> list[Row]:
    """The rows of rank 0.

    Raises:
        ValueError: there are no such devices. RuntimeError: a rank fails.
    """
    context = multiprocessing.get_context("spawn")
    gpus = [] if resolve_device(args.device).type == "cpu" else gpus_of_ranks(args.device, args.ranks)
    descriptor, of_gpus = os.memfd_create("compiled-llm-bench"), os.memfd_create("compiled-llm-meeting")
    os.ftruncate(descriptor, bytes_for(args.ranks, PIECE_BYTES))
    native.load("parallel_cpu")
    processes, connections = [], []
    with tempfile.TemporaryDirectory() as directory:
        for rank, cores in enumerate(cores_of_ranks(args.ranks)):
            start = RankStart(Shard(rank, args.ranks), Inherited(descriptor), tuple(cores[:1]), f"rank {rank}")
            if gpus:
                start = start._replace(gpu=gpus[rank], meeting=Inherited(of_gpus))
            own, theirs = context.Pipe()
            arguments: Any = start, args, os.path.join(directory, "meeting"), theirs
            processes.append(context.Process(target=run_rank, args=arguments, daemon=True))
            with seen_by_children(start.gpu):
                processes[-1].start()
            connections.append(own)
            theirs.close()
        os.close(descriptor)
        os.close(of_gpus)
        rows = rows_of(connections[0], processes)
        for process in processes:
            process.join()
    return rows


def main(program: str, arguments: Sequence[str] | None = None) -> int:
    args = parser(program).parse_checked(None, arguments, ranks=1, rounds=1, kib=1)
    rows = measure(args)
    print(tables.text_table(rows))
    facts = {
        "ranks": args.ranks,
        "device": args.device,
        "dtype": args.dtype,
        "cores": len(os.sched_getaffinity(0)),
        "results": rows,
    }
    finish("all-reduce", facts, args.json)
    return 0
