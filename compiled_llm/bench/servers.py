"""This server and vLLM's under the same load, in turns: latencies and throughput of streams over HTTP.

    compiled-llm bench servers --model DIR --vllm-python ../peers/vllm/bin/python --json servers.json

Both servers have the model, each on all cores. Only one has requests at a time: the other is stopped (SIGSTOP), so that
its threads cannot spin. Each round measures every load on both. A load is a number of streams (``--concurrency``), or
Poisson arrivals at 80% of what the slower server does of the most streams. Requests are those of
``compiled-llm bench serve``: random prompts that no other begins with, answers of one length.

Shown are medians over the rounds, and the median of the ratios within a round: above 1 this server is ahead. ITL is
between the events of a stream, which may bring several tokens; TPOT is the time of a token after the first.
"""

import argparse
import contextlib
import json
import os
import shlex
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from compiled_llm.api import tables
from compiled_llm.api.command_line import FlagParser, errors_end
from compiled_llm.bench import serve
from compiled_llm.bench.harness import finish, in_turns
from compiled_llm.bench.peers.processes import VLLM, PeerFailed, vllm
from compiled_llm.system.resources import granted_cores
from compiled_llm.terminal.server_client import ServerClient

OURS, THEIRS = "compiled-llm", "vllm"
SHARE_OF_SATURATION = 0.8
# vLLM's key -> its title, and whether more is better.
FIGURES = {
    "median_ttft_ms": ("TTFT p50 ms", False),
    "p99_ttft_ms": ("TTFT p99 ms", False),
    "median_tpot_ms": ("TPOT p50 ms", False),
    "p99_tpot_ms": ("TPOT p99 ms", False),
    "median_itl_ms": ("ITL p50 ms", False),
    "p99_itl_ms": ("ITL p99 ms", False),
    "output_throughput": ("tokens/s", True),
}

Run = Callable[[], dict[str, float]]


class Server:
    """A server in processes of its own, stopped until it is ``awake``.

    Raises:
        PeerFailed: it ends, or does not answer within ``timeout`` seconds.
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str], port: int, log: Path, timeout: float) -> None:
        self.url = f"http://127.0.0.1:{port}"
        started = time.perf_counter()
        with log.open("w") as output:
            self._process = subprocess.Popen(
                command, env=os.environ | env, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
        try:
            self._wait(log, started + timeout)
        except BaseException:
            self.close()
            raise
        self.start_seconds = time.perf_counter() - started
        self._signal(signal.SIGSTOP)

    def _wait(self, log: Path, end: float) -> None:
        while time.perf_counter() < end:
            if self._process.poll() is not None:
                break
            with contextlib.suppress(OSError, ValueError):
                if ServerClient(self.url).models():
                    return
            time.sleep(0.5)
        last = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
        raise PeerFailed(f"{self.url} does not answer; the last lines of its server:\n{last}")

    @contextlib.contextmanager
    def awake(self) -> Iterator[None]:
        self._signal(signal.SIGCONT)
        try:
            yield
        finally:
            self._signal(signal.SIGSTOP)

    def close(self) -> None:
        self._signal(signal.SIGKILL)
        self._process.wait()

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


class Bench:
    """Loads on servers, each of prompts of its own."""

    def __init__(self, args: argparse.Namespace, directory: Path) -> None:
        self._args, self._directory, self._runs = args, directory, 0

    def run(self, server: Server, load: Sequence[str], num_prompts: int) -> dict[str, float]:
        """The figures of one load. ``PeerFailed``: a request failed."""
        self._runs += 1
        args, file = self._args, self._directory / f"{self._runs}.json"
        lengths = ["--input-len", args.input_len, "--output-len", args.output_len, "--num-prompts", num_prompts]
        known = ["--base-url", server.url, "--tokenizer", args.model, "--ignore-eos", "--seed", 1000 * self._runs]
        saved = ["--save-result", "--result-dir", self._directory, "--result-filename", file.name]
        flags = [*load, *known, *lengths, *saved, "--num-warmups", 2]
        with server.awake():
            status = serve.main("bench servers", [str(flag) for flag in flags])
        if status:
            raise PeerFailed(f"{server.url}: requests failed with {shlex.join(map(str, load))}")
        result = json.loads(file.read_text())
        return {key: result[key] for key in (*FIGURES, "request_throughput")}


def compared(rounds: Mapping[str, Mapping[str, Sequence[Mapping[str, float]]]]) -> list[dict[str, Any]]:
    """A row for each load and figure: each server's median, and the median of the ratios within a round."""
    rows = []
    for load, of in rounds.items():
        for key, (title, more_is_better) in FIGURES.items():
            ours, theirs = ([one[key] for one in of[name]] for name in (OURS, THEIRS))
            above, below = (ours, theirs) if more_is_better else (theirs, ours)
            medians = {OURS: statistics.median(ours), THEIRS: statistics.median(theirs)}
            ratios = [a / b for a, b in zip(above, below, strict=True)]
            spread = {"ratio": statistics.median(ratios), "least": min(ratios), "most": max(ratios)}
            rows.append({"load": load, "figure": title, **medians, **spread})
    return rows


def parser(program: str) -> FlagParser:
    made = FlagParser(prog=program, description="This server and vLLM's under the same load, in turns.")
    add = made.add_argument
    add("--model", required=True, metavar="DIR", help="with weights, config.json and tokenizer.json")
    add("--vllm-python", required=True, metavar="PATH", help="python of an environment with vLLM for CPUs")
    add("--concurrency", default="1,8,32,64", metavar="N,N...", help="streams at once (default: 1,8,32,64)")
    add("--rounds", type=int, default=5, help="(default: 5)")
    add("--input-len", type=int, default=128, help="tokens of a prompt (default: 128)")
    add("--output-len", type=int, default=64, help="tokens of an answer (default: 64)")
    add("--least-prompts", type=int, default=12, help="of a load; else three for each stream (default: 12)")
    add("--max-model-len", type=int, default=2304, help="(default: 2304)")
    add("--engine-args", default="", metavar="FLAGS", help="more flags of compiled-llm serve")
    add("--vllm-args", default="", metavar="FLAGS", help="more flags of vllm serve")
    add("--timeout", type=float, default=900, help="seconds for a start (default: 900)")
    tables.add_json_flag(made)
    return made


def _check(args: argparse.Namespace) -> None:
    """Parses in place. ``ValueError`` for bad arguments."""
    counts = args.concurrency.split(",")
    if not all(count.isdecimal() and int(count) for count in counts):
        raise ValueError(f"--concurrency must be numbers from 1 on, as 1,8; given {args.concurrency!r:.100}")
    args.concurrency = [int(count) for count in counts]


def _commands(args: argparse.Namespace) -> dict[str, tuple[list[str], dict[str, str], int]]:
    """Name -> command, environment and port of each server, of the same limits."""
    most, ports = max(args.concurrency), _free_ports(2)
    like = ["--host", "127.0.0.1", "--max-model-len", args.max_model_len, "--dtype", "bfloat16"]
    buckets = ",".join(map(str, sorted({1, *args.concurrency})))
    ours = [sys.executable, "-m", "compiled_llm", "serve", args.model, *like, "--port", ports[0]]
    ours += ["--bucket-sizes", buckets]
    peer = vllm(args.vllm_python, Path(args.model), {}, granted_cores(), None)
    theirs = [args.vllm_python, "-m", "vllm.entrypoints.openai.api_server", "--model", args.model, *like]
    theirs += ["--port", ports[1], "--max-num-seqs", most, "--max-num-batched-tokens", VLLM["max_num_batched_tokens"]]
    # Its engine is a process of its own here, which sets what it needs of threads itself.
    own = {name: value for name, value in peer.env.items() if name.startswith("VLLM_CPU") or name == "LD_PRELOAD"}
    return {
        OURS: ([*map(str, ours), *shlex.split(args.engine_args)], {}, ports[0]),
        THEIRS: ([*map(str, theirs), *shlex.split(args.vllm_args)], own, ports[1]),
    }


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [one.getsockname()[1] for one in sockets]


def main(program: str, arguments: Sequence[str] | None = None) -> int:
    least = {"rounds": 1, "input_len": 1, "output_len": 2, "least_prompts": 1, "max_model_len": 1, "timeout": 0}
    args = parser(program).parse_checked(_check, arguments, **least)
    with contextlib.ExitStack() as at_the_end, errors_end(program, (PeerFailed,), 1):
        # It runs what is to be done at the end, so that no stopped server remains.
        at_the_end.callback(signal.signal, signal.SIGTERM, signal.signal(signal.SIGTERM, lambda *_: sys.exit(143)))
        directory = Path(at_the_end.enter_context(tempfile.TemporaryDirectory(prefix="compiled-llm-servers-")))
        servers = {}
        for name, (command, env, port) in _commands(args).items():
            servers[name] = Server(command, env, port, directory / f"{name}.log", args.timeout)
            at_the_end.callback(servers[name].close)
        bench = Bench(args, directory)

        def measured(load: Sequence[str], num_prompts: int, rounds: int) -> dict[str, list[dict[str, float]]]:
            runs: dict[str, Run] = {
                name: lambda server=server: bench.run(server, load, num_prompts)  # type: ignore[misc]
                for name, server in servers.items()
            }
            return in_turns(runs, rounds=rounds, warm_up=0)  # each run begins with requests that do not count

        rounds = {}
        for count in args.concurrency:
            num_prompts = max(args.least_prompts, 3 * count)
            rounds[f"{count} streams"] = measured(["--max-concurrency", str(count)], num_prompts, args.rounds)
        most = rounds[f"{args.concurrency[-1]} streams"]
        saturation = min(statistics.median(one["request_throughput"] for one in of) for of in most.values())
        rate = SHARE_OF_SATURATION * saturation
        num_prompts = max(args.least_prompts, 3 * args.concurrency[-1])
        rounds[f"{rate:.3g} requests/s"] = measured(["--request-rate", f"{rate:.4g}"], num_prompts, args.rounds)
        starts = {name: server.start_seconds for name, server in servers.items()}
    rows = compared(rounds)
    print(tables.text_table(rows))
    result = {"model": args.model, "dtype": "bfloat16", "input_len": args.input_len, "output_len": args.output_len}
    finish("servers", result | {"start_seconds": starts, "rows": rows, "rounds": rounds}, args.json)
    return 0
