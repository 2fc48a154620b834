"""One model with several settings of the engine: engines in one process, in turns, so that all meet the same load.

    compiled-llm bench settings --precisions none int8 int4 int4/int4 --workloads W1 W4
    compiled-llm bench settings --shape qwen3-4b --precisions none int8 int4/int4 --repeats 3
    compiled-llm bench settings --setting '{}' '{"kv_cache_dtype": "int8"}' --workloads W5

A setting is a JSON object of engine arguments. A precision is a value of ``--quantization``, "none" for the weights as
they are; after a slash, ``--quantization-head``. The first is what the others are compared with: a ratio is the median
of those within a round, above 1 if faster. One round before is not counted. W1 gives decoded tokens a second, and which
share of the machine's limit the reading of the weights alone is; W4 prefill; W5 tokens a second of 32 requests, of
which as many decode together as ``max_num_seqs`` allows. The last line is JSON. Exit status: 0, or 2 for bad arguments.
"""

import argparse
import contextlib
import functools
import json
import statistics
from collections.abc import Sequence
from typing import Any

import torch

from compiled_llm.api import tables
from compiled_llm.api.command_line import FlagParser, errors_end
from compiled_llm.api.sampling_params import SamplingParams
from compiled_llm.bench import serving
from compiled_llm.bench.harness import DTYPES, finish, in_turns, median_ratio
from compiled_llm.bench.workloads import WORKLOADS
from compiled_llm.checkpoint.shapes import add_model_arguments, model_of
from compiled_llm.engine.engine import CompiledEngine
from compiled_llm.report import machine_limits

UNITS = {"W1": "decode tok/s", "W4": "prefill tok/s", "W5": "decode tok/s"}
MAX_MODEL_LEN, NUM_BLOCKS = 2304, 1600


def parser(program: str) -> FlagParser:
    made = FlagParser(prog=program, description="One model with several settings of the engine, in turns.")
    add_model_arguments(made)
    add = made.add_argument
    add("--precisions", nargs="+", default=[], metavar="KIND[/HEAD]", help="quantisations of the weights, or none")
    add("--setting", nargs="+", type=json.loads, default=[], metavar="JSON", help="engine arguments")
    add("--dtype", default="bfloat16", choices=DTYPES, help="(default: bfloat16)")
    add("--workloads", nargs="+", choices=UNITS, default=["W1"], help="(default: W1)")
    add("--repeats", type=int, default=5, help="rounds (default: 5)")
    add("--enforce-eager", action="store_true", help="compile nothing")
    tables.add_json_flag(made)
    return made


def check_arguments(args: argparse.Namespace) -> None:
    """Completes ``args.settings``, name -> engine arguments. ``ValueError`` for bad arguments."""
    settings: list[tuple[str, dict[str, Any]]] = []
    for text in args.precisions:
        kind, _, head = text.partition("/")
        weights = {} if kind == "none" else {"quantization": kind, "quantization_head": head or "auto"}
        settings.append((text, weights | {"bucket_sizes": (1, 32)}))
    settings += [(json.dumps(setting), setting) for setting in args.setting]
    if len(settings) < 2:
        raise ValueError("--precisions and --setting must name two settings together, at least")
    args.settings = dict(settings)
    if len(args.settings) < len(settings):
        raise ValueError(f"the settings must differ, given {', '.join(name for name, _ in settings)}")


def speed(engine: CompiledEngine, workload: str, seed: int) -> float:
    """Tokens a second of one run, in the workload's unit."""
    requests = WORKLOADS[workload](engine.model_config.vocab_size, seed)
    params = [SamplingParams(temperature=0, max_tokens=one.output_len, ignore_eos=True) for one in requests]
    found = serving.generate(engine, requests, params)
    if workload == "W4":
        return len(requests[0].prompt_token_ids) / found.ttfts[0]
    return min(len(requests), engine.runner.limits.max_num_seqs) / statistics.median(found.tpots)


def measure(engines: dict[str, CompiledEngine], args: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """Workload -> setting -> tokens a second of each round."""
    seeds: dict[str, int] = {}

    def run(name: str, workload: str) -> float:
        seeds[name] = seeds.get(name, 0) + 1
        return speed(engines[name], workload, seeds[name])

    found = {}
    for workload in args.workloads:
        runs = {name: functools.partial(run, name, workload) for name in engines}
        found[workload] = in_turns(runs, rounds=args.repeats)
    return found


def rows_of(
    speeds: dict[str, dict[str, list[float]]], weight_bytes: dict[str, int], limit: float
) -> list[dict[str, Any]]:
    """A row for each workload and setting. ``limit``: bytes a second."""
    rows = []
    for workload, of in speeds.items():
        first = next(iter(of.values()))
        for name, values in of.items():
            row: dict[str, Any] = {"workload": f"{workload} {UNITS[workload]}", "setting": name}
            row |= {"weights_gb": weight_bytes[name] / 1e9, "median": statistics.median(values)}
            row |= {"min": min(values), "max": max(values), "ratio": median_ratio(values, first)}
            rows.append(row | {"of_limit": row["median"] * weight_bytes[name] / limit if workload == "W1" else None})
    return rows


def main(program: str, arguments: Sequence[str] | None = None) -> int:
    args = parser(program).parse_checked(check_arguments, arguments, repeats=1)
    common = {"dtype": args.dtype, "device": "cpu", "enforce_eager": args.enforce_eager, "progress": "off"}
    common |= {"max_model_len": MAX_MODEL_LEN, "enable_prefix_caching": False, "num_kv_blocks": NUM_BLOCKS}
    with contextlib.ExitStack() as stack, errors_end(program):
        model = stack.enter_context(model_of(args))
        engines = {
            name: stack.enter_context(CompiledEngine(**{**common, **model, **given}))
            for name, given in args.settings.items()
        }
        runners = {name: engine.runner for name, engine in engines.items()}
        dtype = next(iter(runners.values())).dtype
        limits = machine_limits.measured(torch.device("cpu"), dtype)
        speeds = measure(engines, args)
        rows = rows_of(
            speeds, {name: runner.weight_bytes for name, runner in runners.items()}, limits.read_bytes_per_second
        )
    name, kind = args.model or args.shape, str(dtype)[6:]
    print(f"{name}, {kind}\n{tables.text_table(rows)}")
    result = {"model": name, "dtype": kind, "settings": args.settings, "rounds": args.repeats, "rows": rows}
    finish("settings", result | {"speeds": speeds, "read_bytes_per_second": limits.read_bytes_per_second}, args.json)
    return 0
