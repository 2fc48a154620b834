"""Cold and warm starts on a GPU, split into what they spend: for one call on a machine that is lent for minutes.

    python3 scripts/bench/probe_start.py --output FOLDER

Models of random weights in bfloat16 with the engine's own buckets. Every start is a process of its own, which ends
with what it started when its time is over. A model's first start finds an empty cache directory. Results are written
to FOLDER/start.json after each start, what each said beside it; a table comes last. ``--dry-run``: tiny models, on
whatever device there is.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import own_checkout
import tables
from workloads import SHAPES

from compiled_llm.api.command_line import FlagParser

_TINY = {"num_hidden_layers": 2, "hidden_size": 256, "intermediate_size": 512, "vocab_size": 1024}
_PARTS = (
    "imports", "first use of the GPU", "weights", "start processes", "buffers", "jobs", "keys", "build", "load",
    "torch.compile", "capture", "make pool", "record again", "rest", "first tokens", "total",
)  # fmt: skip

START = r"""
import collections, json, os, resource, sys, time, traceback
arguments, began, profile = json.loads(sys.argv[1]), float(sys.argv[2]), sys.argv[3]
spent, counts = collections.Counter(), collections.Counter()

def timed(owner, name, key):
    real = getattr(owner, name)
    def run(*args, **kwargs):
        started, nested = time.monotonic(), sum(spent.values())
        try:
            return real(*args, **kwargs)
        finally:
            inside = sum(spent.values()) - nested
            spent[key] += time.monotonic() - started - inside
            counts[key] += 1
            if (took := time.monotonic() - started) > 0.5:
                print(f"{time.monotonic() - began:7.1f} s: {key} took {took:.1f} s", file=sys.stderr)
    setattr(owner, name, run)

def cpu():
    own, children = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return [round(one.ru_utime + one.ru_stime, 1) for one in (own, children)]

import faulthandler
faulthandler.dump_traceback_later(float(sys.argv[4]))  # what a start that is about to be ended was at
import torch
from compiled_llm import CompiledEngine, SamplingParams
from compiled_llm.compiling import cuda_graphs, function
from compiled_llm.worker import compiled_steps, runner
for owner, name, key in (
    (compiled_steps, "build_missing", "build"), (function, "from_bytes", "load"),
    (function, "compile_at_first_call", "torch.compile"), (cuda_graphs.CapturedFunction, "capture", "capture"),
    (runner.ModelRunner, "_load_weights", "weights"), (runner.ModelRunner, "_make_pool", "make pool"),
    (runner.ModelRunner, "_record_on", "record again"), (runner.ModelRunner, "_start_builds", "start processes"),
    (compiled_steps.CompiledSteps, "__init__", "buffers"), (compiled_steps.CompiledSteps, "jobs", "jobs"),
    (compiled_steps.CompileCache, "key_of", "keys"), (runner, "graph_pool", "first use of the GPU"),
):
    if hasattr(owner, name):
        timed(owner, name, key)
imported = time.monotonic()
print(f"{imported - began:7.1f} s: imported", file=sys.stderr)
if profile:
    import cProfile
    profiler = cProfile.Profile()
    profiler.enable()
with CompiledEngine(**arguments) as engine:
    ready = time.monotonic()
    if profile:
        profiler.disable()
        import io, pstats
        for order in ("cumulative", "tottime"):
            text = io.StringIO()
            pstats.Stats(profiler, stream=text).sort_stats(order).print_stats(70)
            open(profile, "a").write(text.getvalue())
    prompts = [[7, 8, 9, 10, 11] * 20, [5]]
    outputs = engine.generate(prompts, SamplingParams(temperature=0, max_tokens=16), use_tqdm=False)
    sampled = engine.generate(prompts, SamplingParams(temperature=1, seed=3, max_tokens=8, logprobs=1), use_tqdm=False)
    ended = time.monotonic()
    report = engine.compile_report()
    device = engine.runner.device
    result = {
        "parts": dict(spent) | {"imports": imported - began, "first tokens": ended - ready, "total": ended - began,
                                "ready": ready - began},
        "counts": dict(counts),
        "stages": dict(vars(engine.runner.start_times)),
        "cpu seconds, own and children": cpu(),
        "graphs": {graph.name: [round(graph.compile_seconds, 2), graph.cache, graph.cuda_graph_bytes]
                   for graph in report.reports},
        "hits": report.cache_count("hit"), "misses": report.cache_count("miss"), "recompiles": report.recompiles,
        "table": str(report),
        "memory": str(engine.memory_report()) if device.type == "cuda" else "",
        "tokens": [list(out.outputs[0].token_ids) for out in outputs],
        "sampled": [list(out.outputs[0].token_ids) for out in sampled],
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
    }
    print("RESULT " + json.dumps(result), flush=True)
"""


def parse_arguments() -> argparse.Namespace:
    parser = FlagParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--seconds", type=float, default=100.0, help="for all of it (default: 100)")
    parser.add_argument("--dry-run", action="store_true", help="tiny models, on whatever device there is")
    return parser.parse_args()


class Probe:
    """Runs starts until its time is over, and keeps what they said in ``folder``."""

    def __init__(self, folder: Path, seconds: float, is_dry: bool) -> None:
        self.folder, self.deadline, self.is_dry = folder, time.monotonic() + seconds, is_dry
        self.results: dict[str, dict[str, Any]] = {}
        folder.mkdir(parents=True, exist_ok=True)

    @property
    def left(self) -> float:
        return self.deadline - time.monotonic()

    def start(
        self, name: str, shape: str, limit: float, cache: str = "", profiled: bool = False, **arguments: Any
    ) -> bool:
        """Start an engine of ``shape`` in a process of its own. Returns whether it was there in ``limit`` seconds."""
        limit = min(limit * (10 if self.is_dry else 1), self.left - 2)
        if limit < 8:
            self.results[name] = {"error": "no time was left"}
            return False
        model = self.folder / f"model-{shape}"
        model.mkdir(exist_ok=True)
        (model / "config.json").write_text(json.dumps(SHAPES[shape] | (_TINY if self.is_dry else {})))
        given = {"model": str(model), "load_format": "dummy", "dtype": "bfloat16", "max_model_len": 8192} | arguments
        given |= {"max_model_len": 512, "bucket_sizes": (1, 2)} if self.is_dry else {}
        environment = {**os.environ, "COMPILED_LLM_CACHE": str(self.folder / f"cache-{cache or shape}")}
        environment["PYTHONPATH"] = os.pathsep.join(
            filter(None, [str(own_checkout.ROOT), os.environ.get("PYTHONPATH")])
        )
        environment.pop("TORCHINDUCTOR_CACHE_DIR", None)
        Path(environment["COMPILED_LLM_CACHE"]).mkdir(mode=0o700, exist_ok=True)
        profile = str(self.folder / f"{name}.profile.txt") if profiled else ""
        command = [sys.executable, "-P", "-c", START, json.dumps(given), str(time.monotonic()), profile, str(limit - 3)]
        log = self.folder / f"{name}.log"
        began = time.monotonic()
        with log.open("w") as file:
            process = subprocess.Popen(command, env=environment, stdout=file, stderr=file, start_new_session=True)
            try:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(limit)
            finally:
                end_group(process)
        lines = log.read_text().splitlines()
        found = [json.loads(line.removeprefix("RESULT ")) for line in lines if line.startswith("RESULT ")]
        self.results[name] = found[0] if found else {
            "error": f"status {process.returncode} after {time.monotonic() - began:.0f} s", "log": lines[-25:]
        }  # fmt: skip
        self.write()
        return bool(found)

    def write(self) -> None:
        (self.folder / "start.json").write_text(json.dumps(self.results, indent=1))

    def table(self) -> str:
        """Seconds of each part of each start."""
        rows = []
        for name, result in self.results.items():
            if "error" in result:
                rows.append({"start": name, "total": result["error"]})
                continue
            parts = dict(result["parts"])
            parts["rest"] = parts["total"] - sum(parts[part] for part in parts.keys() - {"total", "ready"})
            cpu = "/".join(map(str, result["cpu seconds, own and children"]))
            row = {"start": name} | {part: round(parts.get(part, 0.0), 1) for part in _PARTS}
            rows.append(row | {"hit/miss": f"{result['hits']}/{result['misses']}", "cpu": cpu})
        columns = list(dict.fromkeys(key for row in rows for key in row if key != "start"))
        return tables.text_table(
            [{"seconds": column} | {row["start"]: row.get(column, "") for row in rows} for column in columns]
        )


def end_group(process: subprocess.Popen) -> None:
    """End a process that was started with a session of its own, and all that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def main() -> None:
    args = parse_arguments()
    probe = Probe(args.output, args.seconds, args.dry_run)
    large, small = "llama-3.1-8b", "qwen3-0.6b"
    few = {"bucket_sizes": (1,), "token_bucket_sizes": (128,)}
    if probe.start("8B-cold", large, 70):
        probe.start("8B-warm", large, 25)
        probe.start("8B-warm-profiled", large, 25, profiled=True)
        probe.start("0.6B-few-cold", small, 40, **few)
    else:
        probe.start("8B-again", large, 40)
        probe.start("0.6B-few-cold", small, 40, **few)
    probe.write()
    failed = [f"{name}: {line}" for name, result in probe.results.items() for line in result.get("log", [])]
    print("\n".join(failed[-40:]))
    print(probe.table())
    same = {name: result.get("tokens") for name, result in probe.results.items()}
    if same.get("8B-cold") and same.get("8B-warm"):
        print(f"cold and warm: {'the same tokens' if same['8B-cold'] == same['8B-warm'] else 'OTHER TOKENS'}")


if __name__ == "__main__":
    main()
