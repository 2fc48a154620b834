"""Functions compiled ahead of time: made into bytes, made from bytes, and compiled side by side in other processes.

What torch.compile does at the first call, ``aot_compile`` does at once, and its result can be kept: tracing is then
left out too, which is most of what a start with torch's own cache still costs. The result has no guards;
``ArgumentCheck`` stands in their place.
"""

import dataclasses
import functools
import io
import os
import pickle
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch._inductor.config
from torch import Tensor
from torch._inductor import cpu_vec_isa
from torch._inductor.runtime.cache_dir_utils import cache_dir

from compiled_llm.compiling.argument_specs import TensorSpec, spec_of
from compiled_llm.compiling.cache import CompileCache, Fields, code_settings
from compiled_llm.progress import StartProgress

_OLDEST_TORCH = (2, 13)  # whose private parts this file was written against
_LENGTH_BYTES = 8
_DEEP = 100  # tensors of a model of some ten layers: a graph that takes longer than a process to start
_SECONDS_A_GRAPH, _SECONDS_A_TENSOR = 3.0, 0.1  # as measured: 30 s with 28 layers of ten tensors
_DYNAMIC_SIZE = 3  # not 0 or 1, which the compiler takes for constants


class Job(NamedTuple):
    """A function to compile. ``recipe``: can be pickled, and makes the function where it is called."""

    name: str
    recipe: Callable[[], Any]
    args: tuple
    threads: int


class Built(NamedTuple):
    """What another process made of a job. ``error``: why nothing came of it, else empty."""

    payload: bytes
    facts: dict[str, Any]
    error: str


def unavailable() -> str | None:
    """Why this torch cannot compile ahead of time; None where it can. Its own cache and guards serve then instead."""
    if tuple(map(int, torch.__version__.split(".")[:2])) < _OLDEST_TORCH:
        return f"torch {torch.__version__} is older than {'.'.join(map(str, _OLDEST_TORCH))}"
    if torch._inductor.config.force_disable_caches:
        return "torch's caches are disabled (TORCHINDUCTOR_FORCE_DISABLE_CACHES)"
    return None


@functools.cache
def _unguarded() -> Any:
    """The class of functions as they are kept. Imported and made when it is needed: a GPU never needs it."""
    from torch._dynamo.aot_compile import AOTCompiledFunction

    class Unguarded(AOTCompiledFunction):
        """Without guards: torch's class would make them anew, which takes longer than all the rest."""

        def __post_init__(self) -> None:
            artifacts = self._artifacts
            artifacts.check_compatibility()
            self.fn = artifacts.runtime_env.forward_callable(
                artifacts.backend_id, artifacts.compiled_fn, extra_globals=self._extra_globals
            )

    return Unguarded


def to_bytes(compiled: Any) -> bytes:
    """What ``from_bytes`` takes, of an ``AOTCompiledFunction``."""
    kind = _unguarded()
    unguarded = kind(dataclasses.replace(compiled._artifacts, guards_state=b""), False, compiled._extra_globals)
    return kind.serialize(unguarded).serialized_data


def from_bytes(payload: bytes, function: Callable) -> Callable:
    """The compiled form of ``function``. Runs what stands in ``payload``: only for what this user's cache holds."""
    return _unguarded().deserialize(payload, function.__globals__).fn


def libraries_built_since(moment: float) -> list[str]:
    """Names of loaded libraries of torch's cache that were written after ``moment`` (``time.time``).

    Torch builds again what is gone from its cache, and says nothing.
    """
    root = Path(cache_dir()).resolve()
    return sorted(file.name for file in loaded_libraries(root) if file.stat().st_mtime >= moment)


def loaded_libraries(root: Path) -> set[Path]:
    """Shared libraries below ``root`` that this process has loaded, as Linux lists them."""
    # A library that was deleted and built again stays marked as deleted.
    maps = [line.removesuffix(" (deleted)") for line in Path("/proc/self/maps").read_text().splitlines()]
    mapped = {Path(line.split(maxsplit=5)[5]) for line in maps if line.endswith(".so")}
    return {file for file in mapped if root in file.parents and file.exists()}


def build_missing(
    cache: CompileCache, jobs: Sequence[Job], num_workers: int | None, progress: StartProgress
) -> dict[str, float]:
    """Compile what ``cache`` does not hold, side by side in other processes, and store it there.

    ``num_workers``: None is one for each core where that pays, see ``_worth``; 0 leaves all of it to this process. What
    cannot be compiled there is left too, with a warning.

    Returns what is left to this process: name -> about how many seconds it takes.
    """
    missing: list[tuple[Job, Fields, str]] = []
    for job in jobs:
        key = cache.key_of(job.name, job.recipe(), job.args)
        found = cache.find(key)
        if isinstance(found, str):
            missing.append((job, key, found))
    workers = _worth([job for job, _, _ in missing]) if num_workers is None else num_workers
    left = {job.name: expected_seconds(job) for job, _, _ in missing}
    if not missing or workers == 0:
        return left
    processes = threading.local()
    started: list[subprocess.Popen] = []

    def run(item: tuple[Job, Fields, str]) -> None:
        job, key, reason = item
        begun = time.perf_counter()
        stage.begin(job.name)
        if not hasattr(processes, "own"):
            processes.own = _start_worker()
            started.append(processes.own)
        try:
            send(processes.own.stdin, (job, code_settings()))
            built = receive(processes.own.stdout)
        except (EOFError, OSError) as error:
            built = Built(b"", {}, f"the process that compiled it ended: {error!r}")
            del processes.own  # another one takes the next
        if built.error:
            warnings.warn(f"{job.name} could not be compiled beside others: {built.error}", stacklevel=2)
        else:
            cache.store(key, built.payload, built.facts)
            cache.built[job.name] = (reason, time.perf_counter() - begun)
        stage.finish(job.name)

    side_by_side = min(workers, len(missing))
    title = f"compiling graphs in {side_by_side} processes"
    try:
        with (
            progress.stage(title, left, seconds=sum(left.values()) / side_by_side) as stage,
            ThreadPoolExecutor(side_by_side) as pool,
        ):
            list(pool.map(run, missing))
    finally:
        for process in started:
            process.kill()
            process.communicate()
    return {name: seconds for name, seconds in left.items() if name not in cache.built}


def expected_seconds(job: Job) -> float:
    """About what one core takes to compile it, to tell a user how long a first start lasts."""
    return _SECONDS_A_GRAPH + _SECONDS_A_TENSOR * _num_tensors(job.args)


def _worth(jobs: Sequence[Job]) -> int:
    """Processes that pay: each takes some seconds to start, so a few small graphs are compiled here meanwhile."""
    deep = sum(_num_tensors(job.args) >= _DEEP for job in jobs)
    return min(len(os.sched_getaffinity(0)), len(jobs)) if deep > 1 else 0


def _num_tensors(args: Any) -> int:
    """Tensors in nested tuples: how much there is to trace."""
    return sum(map(_num_tensors, args)) if isinstance(args, tuple) else int(isinstance(args, Tensor))


def _start_worker() -> subprocess.Popen:
    root = str(Path(__file__).parents[2])
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "compiled_llm.compiling.build_worker"],  # -P: no module of the working directory
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path},
    )


class _Pickler(pickle.Pickler):
    """Tensors go as their specs: code depends on nothing else of them. One tensor named twice stays one tensor."""

    def reducer_override(self, obj: Any) -> Any:
        return (_empty, (spec_of(obj),)) if isinstance(obj, Tensor) else NotImplemented


def _empty(spec: TensorSpec) -> Tensor:
    return spec.make(_DYNAMIC_SIZE)


def send(stream: Any, message: Any) -> None:
    """Write one message to another process of this program."""
    buffer = io.BytesIO()
    _Pickler(buffer).dump(message)
    content = buffer.getvalue()
    stream.write(len(content).to_bytes(_LENGTH_BYTES, "little") + content)
    stream.flush()


def receive(stream: Any) -> Any:
    """Read one message of another process of this program. ``EOFError`` when it has ended."""
    header = stream.read(_LENGTH_BYTES)
    if len(header) < _LENGTH_BYTES:
        raise EOFError("no more messages")
    length = int.from_bytes(header, "little")
    content = stream.read(length)
    if len(content) < length:
        raise EOFError(f"{length - len(content)} bytes of a message are missing")
    return pickle.loads(content)


def vec_isa() -> dict[str, Any]:
    """The vector instructions that Inductor chose for this CPU by trying them out for seconds, as JSON values."""
    chosen = cpu_vec_isa.pick_vec_isa()
    attributes = {name: value for name, value in vars(chosen).items() if isinstance(value, str | bool)}
    return {"name": str(chosen), "attributes": attributes}


def trust_vec_isa(known: dict[str, Any]) -> None:
    """Spare Inductor the trying out: on this kind of machine it led to ``known`` when the stored code was made."""
    tried = cpu_vec_isa.valid_vec_isa_list
    if tried.cache_info().currsize:
        return
    same = [candidate for candidate in cpu_vec_isa.supported_vec_isa_list if str(candidate) == known["name"]]
    if same:
        for name, value in known["attributes"].items():
            setattr(same[0], name, value)
        cpu_vec_isa.valid_vec_isa_list = functools.cache(lambda: same)
        cpu_vec_isa.valid_vec_isa_list()
