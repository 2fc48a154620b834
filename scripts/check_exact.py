"""Prove on one's own model and machine that a request's bits do not depend on how it is served.

    python scripts/check_exact.py --quick
    python scripts/check_exact.py --model DIR --json exact.json

The same requests are served in a matrix of settings: bucket and chunk sizes, compiled and uncompiled, each with the
model's KV cache and the quantised ones, each request alone and together with the others, with a cold and a warm prefix
cache, and with so little memory that requests are preempted, and computed again or swapped. Half of the requests are
greedy, the others seeded; some have penalties or ask for log-probabilities of their prompts.

Compared with the first setting of the same KV cache, bit for bit, are

- the hidden state of every token that is computed, of prompts and of outputs, that is what the model's head takes;
- every row of logits;
- the tokens, and the log-probabilities of tokens and prompts, as the engine returns them.

For the first request that differs, the two settings are run once more with every op watched, and the first layer and op
are named at which they part. On a GPU all engines have ``exact=True``, and uncompiled settings are left out: there,
compiled code may round otherwise.

Ends in one JSON line. Exit status: 0 if all is equal; 1 on a difference, or if a setting did not come about, such as a
preemption; 2 for bad arguments.
"""

import argparse
import dataclasses
import time
from typing import Any

import bench.own_checkout
import torch
from bench import tables
from exact_locate import Departure, locate
from exact_matrix import (
    KINDS,
    KV_CACHES,
    QUICK_SIZES,
    SIZES,
    Outcome,
    Request,
    Setting,
    make_requests,
    run_matrix,
    settings_of,
)
from tqdm import tqdm

from compiled_llm import CompiledEngine
from compiled_llm.api.command_line import FlagParser, errors_end
from compiled_llm.api.config import EngineConfig
from compiled_llm.checkpoint.model_files import DEMO_MODEL, checkpoint_directory, load_tokenizer
from compiled_llm.models.config_file import read_config
from compiled_llm.system import hardware as machine
from compiled_llm.worker.device import resolve_device

# Requests and tokens of each.
QUICK, FULL = (12, 16), (20, 32)
MOST_TOKENS = 1024  # of a request


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is served, and how an engine is made for a setting."""

    settings: list[Setting]
    requests: list[Request]
    arguments: dict[str, Any]
    device: torch.device

    def engine(self, setting: Setting) -> CompiledEngine:
        return CompiledEngine(**self.arguments, **setting.arguments(self.requests))


@dataclasses.dataclass(frozen=True)
class First:
    """The first difference: of which request, in which settings, and where it begins."""

    outcome: Outcome
    request: int
    departure: Departure | None

    def __str__(self) -> str:
        setting, place = self.outcome.setting, self.outcome.differing[self.request]
        begins = self.departure or (
            "no op of the step differed when both were run again: it is what runs after the step (sampling, "
            "log-probabilities), or it does not come each time"
        )
        return (
            f"first difference: request {self.request}, {place}\n"
            f"  in      {setting}\n  against {self.outcome.reference}\n  begins  {begins}"
        )


def parse_arguments() -> argparse.Namespace:
    parser = FlagParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default=str(DEMO_MODEL), metavar="DIR", help="default: the bundled demo model")
    parser.add_argument("--load-format", default="auto", help="dummy: random weights, from config.json alone")
    parser.add_argument("--dtype", default="auto", help="auto (the checkpoint's), float32, bfloat16, float16")
    parser.add_argument("--quantization", metavar="KIND", help="of the weights, as the engine argument")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--quick", action="store_true", help="fewer buckets and requests: minutes for a small model")
    parser.add_argument("--kv-cache-dtypes", type=lambda text: text.split(","), default=list(KV_CACHES), metavar="LIST")
    parser.add_argument("--requests", type=int, help=f"default: {FULL[0]}; {QUICK[0]} with --quick")
    parser.add_argument("--tokens", type=int, help=f"of each output (default: {FULL[1]}; {QUICK[1]} with --quick)")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts, and of random weights")
    tables.add_json_flag(parser)
    return parser.parse_checked(lambda args: tables.check_target("--json", args.json), requests=1, tokens=1, seed=0)


def make_plan(args: argparse.Namespace) -> Plan:
    """The settings and requests that the flags ask for. ``ValueError`` for what the engine would refuse."""
    names = ("model", "load_format", "dtype", "quantization", "device", "seed")
    arguments = {name: getattr(args, name) for name in names}
    for name in args.kv_cache_dtypes:
        config = EngineConfig(**arguments, kv_cache_dtype=name)
    directory = checkpoint_directory(config)
    model = read_config(directory)
    count, tokens = (
        given or default
        for given, default in zip((args.requests, args.tokens), QUICK if args.quick else FULL, strict=True)
    )
    most = min(model.max_position_embeddings, MOST_TOKENS)
    if tokens >= most:
        raise ValueError(f"--tokens must be below {most}, given {tokens}")
    requests = make_requests(load_tokenizer(config, directory), model.vocab_size, count, tokens, most, args.seed)
    device = resolve_device(args.device)
    modes = (True,) if device.type == "cuda" else (True, False)
    settings = settings_of(args.kv_cache_dtypes, QUICK_SIZES if args.quick else tuple(SIZES), modes)
    return Plan(settings, requests, arguments | {"progress": "off", "exact": True}, device)


def row_of(outcome: Outcome) -> dict[str, Any]:
    """A line of the table."""
    setting, compared = outcome.setting, outcome.compared
    return {
        "KV cache": setting.kv_cache,
        "buckets": setting.sizes,
        "run": "compiled" if setting.compiled else "eager",
        "company": setting.company,
        "cache": "warm" if setting.warm else "cold",
        "memory": setting.way,
        "requests": outcome.requests,
        "preempted": outcome.preemptions,
        "cached tokens": outcome.cached_tokens,
        "logits": compared["logits"],
        "all compared": sum(compared.values()),
        "result": f"{len(outcome.differing)} differ" if outcome.differing else outcome.missing or "equal",
    }


def check(plan: Plan, disable_bar: bool | None = None) -> tuple[list[Outcome], First | None]:
    """Serve all settings; the outcomes, and the first difference if there is one."""
    with tqdm(total=len(plan.settings), unit="setting", disable=disable_bar, leave=False) as bar:
        outcomes = []
        for outcome in run_matrix(plan.settings, plan.requests, plan.engine):
            outcomes.append(outcome)
            bar.update()
    worst = next((outcome for outcome in outcomes if outcome.differing), None)
    if worst is None:
        return outcomes, None
    request = min(worst.differing, key=lambda index: (worst.differing[index], index))
    departure = locate(worst.reference, worst.setting, plan.requests, request, plan.engine)
    return outcomes, First(worst, request, departure)


def result_of(rows: list[dict[str, Any]], verdict: str, first: First | None) -> dict[str, Any]:
    """The JSON line, without the machine."""
    total = {name: sum(row[name] for row in rows) for name in ("requests", "preempted", "logits", "all compared")}
    result = {"verdict": verdict, "settings": len(rows)}
    result |= {name.replace(" ", "_"): value for name, value in total.items()}
    result["first_difference"] = None
    if first is not None:
        place = first.outcome.differing[first.request]
        result["first_difference"] = {
            "request": first.request,
            "position": place.position,
            "what": KINDS[place.kind],
            "setting": str(first.outcome.setting),
            "reference": str(first.outcome.reference),
            "begins": first.departure and first.departure.as_json(),
        }
    return result


def main() -> int:
    args, started = parse_arguments(), time.perf_counter()
    with errors_end("check_exact"):
        plan = make_plan(args)
        outcomes, first = check(plan)
    rows = [row_of(outcome) for outcome in outcomes]
    unproven = [outcome for outcome in outcomes if outcome.missing]
    verdict = "different" if first is not None else "not proven" if unproven else "equal"
    result = result_of(rows, verdict, first)
    print(tables.text_table(rows))
    print(
        f"\n{args.model}: {result['requests']:,} requests in {len(rows)} settings, "
        f"{result['preempted']:,} preemptions, "
        f"compared {result['logits']:,} rows of logits, {result['all_compared']:,} values in all"
    )
    for outcome in unproven:
        print(f"not proven, {outcome.missing}: {outcome.setting}")
    if first is not None:
        print(first)
    print(verdict.upper())
    result |= {"seconds": round(time.perf_counter() - started, 1), "machine": machine.describe(plan.device)}
    tables.finish(result, args.json, {"table": rows})
    return 0 if verdict == "equal" else 1


if __name__ == "__main__":
    raise SystemExit(main())
