"""The engines of ``bench peers``, each in its own process: how to start them, send them requests and stop them."""

import contextlib
import ctypes.util
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from compiled_llm.bench.workloads import Requests
from compiled_llm.system.child_process import with_package

WORKER = Path(__file__).with_name("worker.py")
ENGINE = {"max_model_len": 2304, "bucket_sizes": [1, 8, 16, 32], "dtype": "bfloat16"}
_SCHEDULER = {"max_num_seqs": 32, "max_num_batched_tokens": 2048, "enable_prefix_caching": True}
VLLM = {"max_model_len": 2304, "dtype": "bfloat16", **_SCHEDULER}
OPENVINO: dict[str, dict[str, Any]] = {
    "scheduler": _SCHEDULER | {"cache_size": 2},
    "properties": {"INFERENCE_PRECISION_HINT": "bf16"},
}
LLAMA: dict[str, Any] = {
    "contexts": [[1, 2304], [32, 704]], "n_batch": 2048, "n_ubatch": 512, "flash_attn": True, "kv_unified": False,
    "kv_type": "f16",
}  # fmt: skip
TRANSFORMERS = {"dtype": "bfloat16"}


class PeerFailed(Exception):
    """A peer did not start, ended early, did not answer in time, or generated wrong lengths."""


class Peer(NamedTuple):
    """How to start an engine: ``worker.py`` in its Python, with these options and environment variables."""

    name: str
    python: str
    directory: Path
    options: dict[str, Any]
    env: dict[str, str]
    single_requests_only: bool = False  # serves no workload of several requests
    repeats: int | None = None  # fewer than the others run


class Worker:
    """A running engine. It is stopped (SIGSTOP) while it has no requests, so that its threads cannot spin.

    Args:
        log: file for the output of the engine.
        timeout: maximum seconds for loading the model, and for one list of requests.

    Raises:
        PeerFailed: it does not start.
    """

    def __init__(self, peer: Peer, log: Path, timeout: float) -> None:
        self.peer, self._log, self._timeout = peer, log, timeout
        started = time.perf_counter()
        with log.open("w") as stderr:
            self._process = subprocess.Popen(
                [peer.python, str(WORKER), peer.name, str(peer.directory), json.dumps(peer.options)],
                env=os.environ | peer.env,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                start_new_session=True,
            )
        try:
            self.versions: dict[str, str] = self._answer()["versions"]
        except BaseException:
            self.close()
            raise
        self.start_seconds = time.perf_counter() - started
        self._signal(signal.SIGSTOP)

    def run(self, requests: Sequence[tuple[Any, ...]], before: Requests | None = None) -> dict[str, Any]:
        """Answer of ``worker.py`` to these requests, its output lengths checked.

        Args:
            requests: as ``worker.py`` takes them.
            before: requests that are run first: what was stopped for minutes may be slow for a moment.
        """
        self._signal(signal.SIGCONT)
        if before is not None:
            self._ask(before)
        answer = self._ask(requests)
        self._signal(signal.SIGSTOP)
        return answer

    def _ask(self, requests: Sequence[tuple[Any, ...]]) -> dict[str, Any]:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # _answer raises with the reason
            self._process.stdin.write(json.dumps(requests) + "\n")
            self._process.stdin.flush()
        answer = self._answer()
        if answer["output_lens"] != [request[1] for request in requests]:
            raise PeerFailed(f"{self.peer.name}: generated {answer['output_lens']} tokens, not the requested lengths")
        return answer

    def peak_memory_bytes(self) -> int:
        """Peak resident memory (VmHWM, mapped files included), sum over the processes of the engine."""
        tree = [self._process.pid]
        with contextlib.suppress(psutil.NoSuchProcess):
            tree += [child.pid for child in psutil.Process(self._process.pid).children(recursive=True)]
        return sum(_peak_memory_bytes(pid) for pid in tree)

    def close(self) -> None:
        """Ends the engine's processes."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        self._process.wait()

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has ended: the next answer will be missing
            os.killpg(self._process.pid, number)

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], self._timeout)[0]:
            raise PeerFailed(f"{self.peer.name}: no answer in {self._timeout:g} s")
        line = self._process.stdout.readline()
        if not line:
            last = "\n".join(self._log.read_text(errors="replace").splitlines()[-15:])
            raise PeerFailed(f"{self.peer.name}: ended with status {self._process.wait()}; its last lines:\n{last}")
        return json.loads(line)


def _peak_memory_bytes(pid: int) -> int:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0  # the process has ended


def engine(directory: Path, options: dict[str, Any], threads: int, name: str = "engine") -> Peer:
    return Peer(name, sys.executable, directory, ENGINE | options, _threads(threads) | _own_path())


def transformers_generate(directory: Path, threads: int, repeats: int) -> Peer:
    env = _threads(threads) | _own_path()
    return Peer("transformers", sys.executable, directory, TRANSFORMERS, env, repeats=repeats)


def vllm(python: str, directory: Path, options: dict[str, Any], threads: int, preload: str | None) -> Peer:
    """vLLM, its threads bound to cores, in one process. Environment variables that are set already are kept."""
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))[:threads]))
    env = {
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": cores,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        # vLLM sets these for processes that it starts itself.
        "KMP_AFFINITY": f"granularity=fine,explicit,proclist=[{cores}]",
        "KMP_BLOCKTIME": "5",
        "KMP_TPAUSE": "0",
    }
    env = {name: value for name, value in env.items() if name not in os.environ} | _threads(threads)
    libraries = vllm_preload(python) if preload is None else preload
    return Peer("vllm", python, directory, VLLM | options, env | {"LD_PRELOAD": libraries})


@contextlib.contextmanager
def vllm_workers(
    python: str, model: Path, options: Mapping[str, dict[str, Any]], threads: int, preload: str | None, timeout: float
) -> Iterator[dict[str, Worker]]:
    """vLLM in a process for each of ``options``, arguments of its ``LLM`` by name; all start at once: it takes minutes.

    Raises:
        PeerFailed: one of them does not start.
    """
    with contextlib.ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="vllm-")))
        pool = stack.enter_context(ThreadPoolExecutor(len(options)))  # a worker ends with the thread that started it
        peers = {name: vllm(python, model, given, threads, preload) for name, given in options.items()}
        started = {name: pool.submit(Worker, peer, logs / f"{name}.log", timeout) for name, peer in peers.items()}
        for future in started.values():
            if future.exception() is None:
                stack.callback(future.result().close)
        yield {name: future.result() for name, future in started.items()}


def vllm_preload(python: str) -> str:
    """LD_PRELOAD as vLLM's manual recommends it: tcmalloc and Intel's OpenMP. ``PeerFailed`` if one is missing."""
    tcmalloc = ctypes.util.find_library("tcmalloc_minimal") or ctypes.util.find_library("tcmalloc")
    openmp = next(Path(python).absolute().parents[1].rglob("libiomp5.so"), None)
    if tcmalloc is None or openmp is None:
        missing = "libtcmalloc" if tcmalloc is None else "libiomp5 (pip install intel-openmp)"
        raise PeerFailed(f"vllm: {missing} was not found: install it, or give --vllm-preload")
    return f"{tcmalloc}:{openmp}"


def openvino(python: str, directory: Path, options: dict[str, Any], threads: int) -> Iterator[Peer]:
    """OpenVINO GenAI's two pipelines, of the model that ``export`` wrote."""
    properties = {"INFERENCE_NUM_THREADS": threads} | OPENVINO["properties"] | options.get("properties", {})
    merged = {"scheduler": OPENVINO["scheduler"] | options.get("scheduler", {}), "properties": properties}
    yield Peer("openvino", python, directory, merged, {})
    yield Peer("openvino-stateful", python, directory, {"properties": properties}, {}, single_requests_only=True)


def llama(python: str, file: Path, options: dict[str, Any], threads: int) -> Peer:
    """llama.cpp through llama-cpp-python, on a GGUF file."""
    return Peer("llama.cpp", python, file, {"threads": threads} | LLAMA | options, _threads(threads))


def _own_path() -> dict[str, str]:
    """The worker, a file that is run, imports the package that runs it."""
    return {"PYTHONPATH": with_package(os.environ)["PYTHONPATH"]}


def _threads(threads: int) -> dict[str, str]:
    return {"OMP_NUM_THREADS": str(threads)}
