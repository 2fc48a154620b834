"""The same requests through this engine and through peers in environments of their own; prints the ratios.

    compiled-llm bench peers --vllm-python VENV/bin/python --openvino-python VENV/bin/python --transformers
    compiled-llm bench peers --model MODEL.gguf --llama-python VENV/bin/python --workloads W1 W6

docs/peers.md describes how to make the environments. A GGUF file is read as it is. Else all engines read the same
checkpoint, by default random bfloat16 weights of Qwen3-0.6B's shape; outputs are greedy and of exact length. Each
engine is a process that loads the model once and is stopped (SIGSTOP) while another one is measured; when it goes on,
it runs a short request that is not measured. They take turns in each workload of each round, so that a change of the
machine's speed affects all. In each round all token ids are shifted: lengths stay the same, and no prefix cache can
hold a prompt already.

W1: one stream, 128 tokens in, 128 out. W2: 32 requests at once, 32..512 in, 32..128 out. W3: 16 requests at once, 512
shared and 32 own tokens in, 32 out. W4: 2048 in, 1 out. W5: 32 requests at once, 64 in, 64 out. Decode is what comes
when all requests have their first token. W6: 1024 in, 1 out. A ratio above 1 means that this engine is faster: it is
the median of the ratios within a round. A share of the limit is the time that decode would take at the machine's
limits, for the bytes and operations that this engine's report counts, over the time that it took.

Where a figure is more than 20% off the median of its engine's rounds, something disturbed them: that round of the
workload is set aside and run again, for all engines, up to ``--more-rounds`` times. The last line is JSON, with what
was set aside and what still differs; ``--json`` is written after every round. Exit status 1 if an engine failed; it is
named, and the others are still measured.
"""

import argparse
import dataclasses
import json
import signal
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from compiled_llm.api import tables
from compiled_llm.api.command_line import FlagParser
from compiled_llm.bench.peers import check, checkpoints
from compiled_llm.bench.peers.checkpoints import ConversionFailed
from compiled_llm.bench.peers.engines import add_peer_arguments, check_threads, start_all
from compiled_llm.bench.peers.precisions import precision
from compiled_llm.bench.peers.processes import Peer, PeerFailed, Worker, transformers_generate
from compiled_llm.bench.workloads import WORKLOADS, Requests, WorkloadRequest, one_stream
from compiled_llm.checkpoint.model_files import model_directory
from compiled_llm.checkpoint.shapes import add_model_arguments
from compiled_llm.report import machine_limits
from compiled_llm.report.machine_limits import MachineLimits
from compiled_llm.system import hardware


class Metric(NamedTuple):
    """A figure of a workload. ``figure`` computes it from (requests, the worker's answer)."""

    workload: str
    higher_is_better: bool
    figure: Callable[[Requests, dict[str, Any]], float]


METRICS = {
    "W1 decode tok/s": Metric("W1", True, lambda sent, got: got["decode_tokens"] / got["decode_seconds"]),
    "W1 TTFT s": Metric("W1", False, lambda sent, got: got["ttft"][0]),
    "W2 output tok/s": Metric("W2", True, lambda sent, got: sum(one.output_len for one in sent) / got["seconds"]),
    "W3 wall s": Metric("W3", False, lambda sent, got: got["seconds"]),
    "W4 prefill tok/s": Metric("W4", True, lambda sent, got: len(sent[0].prompt_token_ids) / got["ttft"][0]),
    "W5 decode tok/s": Metric("W5", True, lambda sent, got: got["decode_tokens"] / got["decode_seconds"]),
    "W6 TTFT s": Metric("W6", False, lambda sent, got: got["ttft"][0]),
}
OURS = ("engine", "engine-weights")
WARMUP_OUTPUT_LEN = 8
MOST_OFF = 0.2  # of the median of an engine's rounds
Samples = dict[str, dict[int, float]]  # of an engine: row -> round -> figure


class Rounds:
    """Starts the engines, runs them in turns, and keeps every figure. One that fails is left out from then on.

    Attributes:
        samples: of each engine, without what was set aside.
        set_aside: rounds of a workload that were run again: ``workload``, ``round``, ``because``, and ``figures``
            (engine -> row -> figure).
        work: of each workload that decodes, what this engine's steps had to do in each run.
        facts: of each engine: versions, options, seconds to start, peak memory, why it failed (None: it did not).
    """

    def __init__(self, names: list[str], vocab_size: int, seed: int, logs: Path, timeout: float) -> None:
        self._work = {name: WORKLOADS[name](vocab_size, seed) for name in names}
        self._before = one_stream(vocab_size, seed + 1, input_len=32, output_len=16)
        self._vocab_size, self._logs, self._timeout = vocab_size, logs, timeout
        self._workers: dict[str, Worker] = {}
        self.samples: dict[str, Samples] = {}
        self.set_aside: list[dict[str, Any]] = []
        self.work: dict[str, list[dict[str, float]]] = {}
        self.facts: dict[str, dict[str, Any]] = {}

    def fail(self, name: str, error: PeerFailed | ConversionFailed) -> None:
        print(f"FAILED: {error}", file=sys.stderr)
        self.samples.setdefault(name, {})
        self.facts.setdefault(name, {})["failed"] = str(error)
        if name in self._workers:
            self._workers.pop(name).close()

    def start(self, peer: Peer) -> None:
        """Loads the model and runs each workload once, its outputs cut short; neither is measured."""
        self.samples[peer.name] = {}
        preload = ":".join(Path(library).name for library in peer.env.get("LD_PRELOAD", "").split(":"))
        environment = peer.env | ({"LD_PRELOAD": preload} if preload else {})
        facts = self.facts[peer.name] = {"options": peer.options, "environment": environment, "failed": None}
        try:
            worker = self._workers[peer.name] = Worker(peer, self._logs / f"{peer.name}.log", self._timeout)
            facts |= {"versions": worker.versions, "start_seconds": worker.start_seconds}
            print(f"{peer.name}: started in {worker.start_seconds:.1f} s", file=sys.stderr)
            for workload in self._served_by(peer):
                requests = self._requests(workload, 0)
                worker.run([r._replace(output_len=min(r.output_len, WARMUP_OUTPUT_LEN)) for r in requests])
            facts["peak_memory_bytes"] = worker.peak_memory_bytes()
        except PeerFailed as error:
            self.fail(peer.name, error)

    def run(self, number: int) -> None:
        """A round, counted from 1: every workload on every engine. A different engine is first each time."""
        for workload in self._work:
            self._run(workload, number)

    def run_again(self, number: int) -> bool:
        """A round of the workloads that were disturbed, the worst round of each set aside; False: there are none."""
        again = []
        for workload in self._work:
            worst = worst_round(self.samples, workload)
            if worst is None:
                continue
            odd, because = worst
            print(f"round {odd} of {workload} is set aside and run again: {because}", file=sys.stderr)
            rows = rows_of(workload)
            figures = {
                name: {row: of[row].pop(odd) for row in rows if odd in of.get(row, {})}
                for name, of in self.samples.items()
            }
            self.set_aside.append({"workload": workload, "round": odd, "because": because, "figures": figures})
            again.append(workload)
        for workload in again:
            self._run(workload, number)
        return bool(again)

    def _run(self, workload: str, number: int) -> None:
        """One workload of a round, on every engine that serves it and has runs left."""
        requests, rows = self._requests(workload, number), rows_of(workload)
        before = shifted(self._before, self._offset(workload, number), self._vocab_size)
        workers = [worker for worker in self._workers.values() if workload in self._served_by(worker.peer)]
        runs = {worker.peer.name: len(self.samples[worker.peer.name].get(rows[0], {})) for worker in workers}
        workers = [worker for worker in workers if runs[worker.peer.name] < (worker.peer.repeats or number)]
        first = (number + list(self._work).index(workload)) % max(1, len(workers))
        for worker in workers[first:] + workers[:first]:
            name = worker.peer.name
            try:
                answer = worker.run(requests, before)
                self.facts[name]["peak_memory_bytes"] = worker.peak_memory_bytes()
            except PeerFailed as error:
                self.fail(name, error)
                continue
            if "work" in answer and name == "engine":
                self.work.setdefault(workload, []).append(answer["work"])
            for row in rows:
                figure = self.samples[name].setdefault(row, {})[number] = METRICS[row].figure(requests, answer)
                print(f"round {number}: {row:18} {name:18} {figure:10.3f}", file=sys.stderr)

    def close(self) -> None:
        for worker in self._workers.values():
            worker.close()

    def _served_by(self, peer: Peer) -> list[str]:
        return [name for name, requests in self._work.items() if len(requests) == 1 or not peer.single_requests_only]

    def _requests(self, workload: str, number: int) -> Requests:
        return shifted(self._work[workload], self._offset(workload, number), self._vocab_size)

    def _offset(self, workload: str, number: int) -> int:
        return number * len(WORKLOADS) + list(WORKLOADS).index(workload)


def rows_of(workload: str) -> list[str]:
    return [row for row, metric in METRICS.items() if metric.workload == workload]


def worst_round(samples: dict[str, Samples], workload: str) -> tuple[int, str] | None:
    """The round that is farthest off the median of its engine's rounds, if that is more than 20%, and why, in words."""
    worst: tuple[float, int, str] | None = None
    for name, of in samples.items():
        for row in rows_of(workload):
            rounds = of.get(row, {})
            for number, figure in rounds.items():
                median = statistics.median(rounds.values())
                off = max(figure / median, median / figure) - 1
                if off > max(MOST_OFF, worst[0] if worst else 0):
                    worst = off, number, f"{row} of {name} was {figure:.4g}, the median {median:.4g}"
    return worst and worst[1:]


def shifted(requests: Requests, offset: int, vocab_size: int) -> Requests:
    """The same requests with other tokens. Shared prefixes stay shared; no offset shares a prefix with another."""
    return [WorkloadRequest([(t + offset) % vocab_size for t in tokens], n) for tokens, n in requests]


def compared(samples: dict[str, Samples]) -> dict[str, dict[str, Any]]:
    """Row -> engine -> median, min, max, samples, and ratio: that of this engine, the median over rounds of both.

    ``best_peer`` names the peer with the best median, None without peers.
    """
    rows: dict[str, dict[str, Any]] = {}
    for row, metric in METRICS.items():
        engines: dict[str, Any] = {}
        for name, rounds in ((name, of[row]) for name, of in samples.items() if row in of):
            figures = list(rounds.values())
            summary = {"median": statistics.median(figures), "min": min(figures), "max": max(figures)}
            engines[name] = summary | {"samples": rounds, "ratio": None}
            ours = samples.get("engine", {}).get(row, {})
            pairs = [(ours[number], theirs) for number, theirs in rounds.items() if number in ours]
            if name not in OURS and pairs:
                ratios = [ours / theirs if metric.higher_is_better else theirs / ours for ours, theirs in pairs]
                engines[name] |= {"ratio_min": min(ratios), "ratio_max": max(ratios)}
                engines[name]["ratio"] = statistics.median(ratios)
        best = max if metric.higher_is_better else min
        others = {name: of["median"] for name, of in engines.items() if name not in OURS}
        if engines:
            rows[row] = {"best_peer": best(others, key=others.__getitem__) if others else None, "engines": engines}
    return rows


def shares_of_the_limit(
    rows: dict[str, dict[str, Any]], work: dict[str, list[dict[str, float]]], limits: MachineLimits
) -> dict[str, dict[str, Any]]:
    """Workload -> what a decoded token has to read and compute, and each engine's median share of the limit."""
    found = {}
    for workload, runs in work.items():
        row = f"{workload} decode tok/s"
        if row not in rows:
            continue
        num_bytes, flops = (statistics.median(run[of] / run["tokens"] for run in runs) for of in ("bytes", "flops"))
        seconds = max(num_bytes / limits.read_bytes_per_second, flops / limits.flops_per_second)
        share = {name: of["median"] * seconds for name, of in rows[row]["engines"].items()}
        found[workload] = {"bytes_per_token": num_bytes, "flops_per_token": flops, "share_of_limit": share}
    return found


def table(rows: dict[str, dict[str, Any]], shares: dict[str, dict[str, Any]], facts: dict[str, dict[str, Any]]) -> str:
    """The result as text: a line for each row, and for each engine a column of medians and ranges."""
    lines = []
    for row, result in rows.items():
        line = {"": row}
        for name in facts:
            figures = result["engines"].get(name)
            line[name] = f"{figures['median']:.4g} ({figures['min']:.4g}..{figures['max']:.4g})" if figures else "-"
        best = result["engines"].get(result["best_peer"])
        if best and best["ratio"] is not None:
            ratios = f"{best['ratio']:.2f} ({best['ratio_min']:.2f}..{best['ratio_max']:.2f})"
            line["ratio to the best peer"] = f"{ratios} {result['best_peer']}"
        lines.append(line)
    for workload, limit in shares.items():
        lines.append(
            {"": f"{workload} share of limit", **{name: f"{of:.0%}" for name, of in limit["share_of_limit"].items()}}
        )
    for key, unit, scale in (("start_seconds", "start s", 1), ("peak_memory_bytes", "peak memory GiB", 2**30)):
        values = {name: f"{of[key] / scale:.2f}" if key in of else "-" for name, of in facts.items()}
        lines.append({"": unit, **values})
    words = ("weights", "activations", "head", "kv_cache")
    lines += [{"": key, **{name: of["precision"][key] for name, of in facts.items()}} for key in words]
    columns = ["", *facts, "ratio to the best peer"]
    return tables.text_table([{column: line.get(column, "") for column in columns} for line in lines])


def unsteady(rows: dict[str, dict[str, Any]]) -> list[str]:
    """Of each row and engine whose rounds differ by more than 20%: how much, in words."""
    found = []
    for row, result in rows.items():
        for name, of in result["engines"].items():
            differ = of["max"] / of["min"] - 1
            if differ > MOST_OFF:
                found.append(f"{row} of {name}: rounds differ by {differ:.0%}")
    return found


def parser(program: str) -> FlagParser:
    made = FlagParser(prog=program, description="The same requests through this engine and through peers.")
    add_model_arguments(made)
    made.add_argument(
        "--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS), metavar="W", help="(default: all)"
    )
    made.add_argument("--repeats", type=int, default=5, help="rounds (default: 5)")
    more = "times that a workload is run again where its rounds differ by more than 20%% (default: 3)"
    made.add_argument("--more-rounds", type=int, default=3, metavar="N", help=more)
    made.add_argument("--seed", type=int, default=0, help="of the requests (default: 0)")
    made.add_argument("--transformers", action="store_true", help="transformers.generate too (slow)")
    slow = "rounds that transformers takes part in (default: 1)"
    made.add_argument("--slow-repeats", type=int, default=1, help=slow)
    add_peer_arguments(made)
    check.add_check_arguments(made)
    made.add_argument("--json", type=Path, metavar="FILE", help="write the result there, after every round")
    return made


def main(program: str, arguments: Sequence[str] | None = None) -> int:
    least = {"repeats": 1, "more_rounds": 0, "slow_repeats": 1, "timeout": 0, "output_len": 1, "most_regret": 0}
    args = parser(program).parse_checked(check_arguments, arguments, **least)
    # It runs every finally, so that no stopped process remains.
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        with tempfile.TemporaryDirectory(prefix="compiled-llm-peers-") as temporary:
            workdir = args.workdir or Path(temporary)
            workdir.mkdir(parents=True, exist_ok=True)
            return check.run(args, workdir) if args.check else compare(args, workdir)
    finally:
        signal.signal(signal.SIGTERM, before)


def check_arguments(args: argparse.Namespace) -> None:
    check_threads(args)
    if is_file(args):
        others = {"--vllm-python": args.vllm_python, "--openvino-python": args.openvino_python}
        others |= {"--transformers": args.transformers, "--check": args.check, "--precision": args.precision != "bf16"}
        if given := [flag for flag, value in others.items() if value]:
            raise ValueError(f"{', '.join(given)} must be left out where --model is a .gguf file")
    if args.json is not None and not args.json.parent.is_dir():
        raise ValueError(f"--json {args.json}: its directory is not there")


def is_file(args: argparse.Namespace) -> bool:
    """Whether the model is a GGUF file, which this engine and llama.cpp read as it is."""
    return args.model is not None and args.model.endswith(".gguf")


def compare(args: argparse.Namespace, workdir: Path) -> int:
    """All rounds; the exit status."""
    checkpoint = Path(args.model) if args.model else workdir / args.shape
    if not args.model:
        checkpoints.write_checkpoint(args.shape, checkpoint)
    directory = model_directory(args.model) if is_file(args) else checkpoint
    vocab_size = json.loads((directory / "config.json").read_text())["vocab_size"]
    rounds = Rounds(args.workloads, vocab_size, args.seed, workdir, args.timeout)
    of = precision("file" if is_file(args) else args.precision, args.group_size)
    limits = machine_limits.measured(torch.device("cpu"), torch.bfloat16)  # before any engine takes memory
    result: dict[str, Any] = {"benchmark": "peers", "model": args.model or args.shape, "dtype": "bfloat16"}
    result |= {
        "precision": "file" if is_file(args) else args.precision,
        "threads": args.threads,
        "limits": dataclasses.asdict(limits),
    }
    result["machine"] = hardware.describe(torch.device("cpu"))
    try:
        start_all(rounds, args, checkpoint, workdir, of)
        if args.transformers:
            rounds.start(transformers_generate(checkpoint, args.threads, args.slow_repeats))
        for name, facts in rounds.facts.items():
            facts["precision"] = of.facts(name)
        for number in range(1, args.repeats + args.more_rounds + 1):
            if number <= args.repeats:
                rounds.run(number)
            elif not rounds.run_again(number):
                break
            result |= {"rounds": number, "engines": rounds.facts, "rows": compared(rounds.samples)}
            result["decode"] = shares_of_the_limit(result["rows"], rounds.work, limits)
            result |= {"set_aside": rounds.set_aside, "unsteady": unsteady(result["rows"])}
            if args.json:
                args.json.write_text(json.dumps(result) + "\n")
    finally:
        rounds.close()
    print(table(result["rows"], result["decode"], rounds.facts))
    failed = [of["failed"] for of in rounds.facts.values() if of["failed"]]
    lines = [f"UNSTEADY: {text}" for text in result["unsteady"]] + [f"FAILED: {reason}" for reason in failed]
    print("\n".join(lines))
    tables.finish(result, args.json)
    return 1 if failed else 0
