"""One model with its weights in several precisions: engines in one process, in turns, so that all meet the same load.

    python scripts/bench/bench_precisions.py --precisions none int8 int4 int4/int4 --workloads W1 W4
    python scripts/bench/bench_precisions.py --shape qwen3-4b --precisions none int8 int4/int4 --repeats 3

A precision is a value of ``--quantization``, "none" for bfloat16, which all activations are in; after a slash,
``--quantization-head``.
The first is what the others are compared with: a ratio is the median of those within a round, above 1 if faster.
One round before is not counted. W1 gives decoded tokens a second, and which share of the machine's limit the reading
of the weights alone is; W4 prefill, W5 tokens a second of 32 requests that decode together. The last line is JSON.
Exit status: 0, or 2 for bad arguments.
"""

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import own_checkout
import bench_results as results
import tables
import torch
from tqdm import tqdm
from workloads import SHAPES, WORKLOADS

from compiled_llm import CompiledEngine, SamplingParams
from compiled_llm.api.command_line import FlagParser, errors_end
from compiled_llm.report import machine_limits
from compiled_llm.system import hardware as machine

UNITS = {"W1": "decode tok/s", "W4": "prefill tok/s", "W5": "decode tok/s"}
DTYPE, MAX_MODEL_LEN, NUM_BLOCKS = "bfloat16", 2304, 1600


def parse_arguments() -> argparse.Namespace:
    parser = FlagParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b", help="random weights (default: qwen3-0.6b)")
    parser.add_argument("--precisions", nargs="+", default=["none", "int8", "int4"], metavar="KIND[/HEAD]")
    parser.add_argument("--workloads", nargs="+", choices=sorted(UNITS), default=["W1"])
    parser.add_argument("--repeats", type=int, default=5, help="rounds (default: 5)")
    parser.add_argument("--enforce-eager", action="store_true", help="compile nothing")
    tables.add_json_flag(parser)
    return parser.parse_checked(check_arguments, repeats=1)


def check_arguments(args: argparse.Namespace) -> None:
    """``ValueError`` for bad arguments."""
    if len(set(args.precisions)) < len(args.precisions):
        raise ValueError(f"--precisions must differ, given {' '.join(args.precisions)}")
    tables.check_target("--json", args.json)


def start(directory: str, precision: str, eager: bool) -> CompiledEngine:
    kind, _, head = precision.partition("/")
    return CompiledEngine(
        directory,
        dtype=DTYPE,
        load_format="dummy",
        quantization=None if kind == "none" else kind,
        quantization_head=head or "auto",
        max_model_len=MAX_MODEL_LEN,
        bucket_sizes=(1, 32),
        num_kv_blocks=NUM_BLOCKS,
        enable_prefix_caching=False,
        enforce_eager=eager,
        progress="off",
    )


def speed(engine: CompiledEngine, workload: str, vocab_size: int, seed: int) -> float:
    """Tokens a second of one run, in the workload's unit."""
    requests = WORKLOADS[workload](vocab_size, seed)
    params = [SamplingParams(temperature=0, max_tokens=one.output_len, ignore_eos=True) for one in requests]
    _, outputs = results.generate(engine, requests, params)
    if workload == "W4":
        return len(requests[0].prompt_token_ids) / results.ttft(outputs[0])
    return len(requests) / statistics.median(results.tpots(outputs))


def measure(engines: dict[str, CompiledEngine], args: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """Workload -> precision -> tokens a second of each round."""
    vocab_size = SHAPES[args.shape]["vocab_size"]
    speeds: dict[str, dict[str, list[float]]] = {w: {name: [] for name in engines} for w in args.workloads}
    for number in tqdm(range(args.repeats + 1), desc="rounds", disable=None):
        for workload in args.workloads:
            for name, engine in engines.items():
                found = speed(engine, workload, vocab_size, number)
                if number > 0:
                    speeds[workload][name].append(found)
    return speeds


def rows_of(
    speeds: dict[str, dict[str, list[float]]], weight_bytes: dict[str, int], limit: float
) -> list[dict[str, Any]]:
    """A row for each workload and precision. ``limit``: bytes a second."""
    rows = []
    for workload, of in speeds.items():
        first = next(iter(of.values()))
        for name, values in of.items():
            ratios = [mine / base for mine, base in zip(values, first, strict=True)]
            median = statistics.median(values)
            row = {
                "workload": f"{workload} {UNITS[workload]}",
                "precision": name,
                "weights_gb": weight_bytes[name] / 1e9,
            }
            row |= {"median": median, "min": min(values), "max": max(values), "ratio": statistics.median(ratios)}
            rows.append(row | {"of_limit": median * weight_bytes[name] / limit if workload == "W1" else None})
    return rows


def main() -> int:
    args = parse_arguments()
    device = torch.device("cpu")
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="compiled-llm-"))
        Path(directory, "config.json").write_text(json.dumps(SHAPES[args.shape]))
        with errors_end("bench_precisions"):
            engines = {
                name: stack.enter_context(start(directory, name, args.enforce_eager)) for name in args.precisions
            }
        limits = machine_limits.measured(device, getattr(torch, DTYPE))
        speeds = measure(engines, args)
        weight_bytes = {name: engine.runner.weight_bytes for name, engine in engines.items()}
    rows = rows_of(speeds, weight_bytes, limits.read_bytes_per_second)
    result = {"benchmark": "precisions", "shape": args.shape, "dtype": DTYPE, "rounds": args.repeats}
    result |= {
        "rows": rows,
        "speeds": speeds,
        "read_bytes_per_second": limits.read_bytes_per_second,
        "machine": machine.describe(device),
    }
    print(f"{args.shape}, {DTYPE}\n{tables.text_table(rows)}")
    tables.finish(result, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
