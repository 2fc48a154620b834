"""Ranks on GPUs: tokens of the bundled model beside those of one process, and what a sum over ranks takes.

    python scripts/gpu_ranks.py --json ranks.json

Where there are fewer GPUs than ranks, all are on the first: they then take turns on it, so times say nothing of links.
Exit status 1 if a token differs, or anything was compiled again.
"""

import argparse
import sys
import time
from typing import Any

import own_checkout
import torch

from compiled_llm import CompiledEngine, SamplingParams
from compiled_llm.api import tables
from compiled_llm.api.command_line import FlagParser
from compiled_llm.bench import all_reduce

ENGINE: dict[str, Any] = {
    "bucket_sizes": (2,), "token_bucket_sizes": (32,), "max_model_len": 64, "num_kv_blocks": 32, "dtype": "float32",
    "progress": "lines",
}  # fmt: skip
PROMPTS = ["def fibonacci(n):", "import os", "class Stack:"]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=12, logprobs=2),
    SamplingParams(temperature=0, max_tokens=12),
    SamplingParams(seed=1, top_p=0.9, max_tokens=12),
]


def served(**arguments: Any) -> dict[str, Any]:
    """What an engine answers, how long its start and its answers took, and what it compiled again."""
    began = time.perf_counter()
    with CompiledEngine(**ENGINE, **arguments) as engine:
        started = time.perf_counter()
        outputs = engine.generate(PROMPTS, PARAMS, use_tqdm=False, raise_on_error=True)
        seconds = time.perf_counter() - started
        report = engine.compile_report()
    return {
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "start_seconds": round(started - began, 2),
        "seconds": round(seconds, 3),
        "compiled_again": report.graph_breaks + report.recompiles,
    }


def main() -> int:
    parser = FlagParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--ranks", type=int, default=2, help="processes (default: 2)")
    parser.add_argument("--eager", action="store_true", help="leave out compiled steps and CUDA graphs")
    tables.add_json_flag(parser)
    args = parser.parse_checked(None, None, ranks=2)
    device = "cuda" if torch.cuda.device_count() >= args.ranks else "cuda:0"
    ranks = {"device": device, "tensor_parallel_size": args.ranks}
    runs = {"one process": served(device="cuda", enforce_eager=True)}
    runs["ranks, eager"] = served(enforce_eager=True, **ranks)
    if not args.eager:
        runs["ranks, CUDA graphs"] = served(**ranks)
    for name, run in runs.items():
        print(name, run, flush=True)
    same = all(run["tokens"] == runs["one process"]["tokens"] for run in runs.values())
    of_sums = argparse.Namespace(ranks=args.ranks, device=device, kib=(4, 64, 1024), dtype="bfloat16", rounds=5)
    sums = all_reduce.measure(of_sums)
    tables.finish({"device": device, "same_tokens": same, "runs": runs, "sums": sums}, args.json)
    return 0 if same and not any(run["compiled_again"] for run in runs.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
