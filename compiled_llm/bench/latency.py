"""The time that one batch of requests takes from start to end, as ``vllm bench latency`` measures it.

    compiled-llm bench latency --input-len 128 --output-len 128 --batch-size 1
    compiled-llm bench latency --model DIR --batch-size 8 --output-json latency.json

All requests have random tokens, are submitted at once and generate exactly ``--output-len`` tokens; the end-of-text
token is ignored. ``--num-iters`` runs are timed, after ``--num-iters-warmup`` others. All runs have the same prompts,
so prefix caching is off by default. ``--output-json`` has vLLM's keys, in seconds: ``avg_latency``, ``std_latency``,
``latencies`` and ``percentiles``; also the TTFT and TPOT of each run, means over its requests. ``--report`` writes the
engine's report on the timed runs. ``--backend hf`` is transformers.generate on the same requests. The last line is
JSON. Exit status: 0, or 2 for bad arguments.
"""

import argparse
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from tqdm import tqdm

from compiled_llm.api import tables
from compiled_llm.api.command_line import FlagParser, errors_end
from compiled_llm.api.sampling_params import SamplingParams
from compiled_llm.bench import hf, serving
from compiled_llm.bench.harness import finish
from compiled_llm.bench.workloads import Requests, batch
from compiled_llm.checkpoint.shapes import engine_parser
from compiled_llm.engine.engine import CompiledEngine
from compiled_llm.worker.device import resolve_device

PERCENTILES = (10, 25, 50, 75, 90, 99)
_LEAST = {"input_len": 1, "output_len": 1, "batch_size": 1, "num_iters": 1, "num_iters_warmup": 0}


def parser(program: str) -> FlagParser:
    made = engine_parser(program, "The time that one batch of requests takes from start to end.")
    made.set_defaults(enable_prefix_caching=False)
    serving.add_backend_flag(made)
    made.add_argument("--input-len", type=int, default=32, help="tokens of each prompt (default: 32)")
    made.add_argument("--output-len", type=int, default=128, help="tokens to generate for each (default: 128)")
    made.add_argument("--batch-size", type=int, default=8, help="requests submitted at once (default: 8)")
    made.add_argument("--n", type=int, default=1, help="continuations of each prompt: only 1 is served")
    made.add_argument("--num-iters-warmup", type=int, default=2, help="runs before the timed ones (default: 2)")
    made.add_argument("--num-iters", type=int, default=10, help="timed runs (default: 10)")
    made.add_argument("--output-json", type=tables.output_file, metavar="FILE", help="write the JSON line there too")
    serving.add_report_flag(made)
    serving.add_sampling_flags(made)
    return made


def requests_of(args: argparse.Namespace, model: serving.Model) -> Requests:
    sizes = {"count": args.batch_size, "input_len": args.input_len, "output_len": args.output_len}
    return batch(model.model_config.vocab_size, args.seed, **sizes)


def run(engine: CompiledEngine, requests: Requests, params: list[SamplingParams]) -> dict[str, float | None]:
    """Seconds of one run of the batch, and the mean TTFT and TPOT of its requests."""
    seconds, outputs = serving.generate(engine, requests, params)
    tpots = serving.tpots(outputs)
    ttft = statistics.mean(map(serving.ttft, outputs))
    return {"latency": seconds, "ttft": ttft, "tpot": statistics.mean(tpots) if tpots else None}


def run_hf(module: Any, requests: Requests) -> dict[str, float | None]:
    """The same for transformers."""
    times = [seconds for seconds, _ in hf.timed_tokens(module, requests)]
    tpot = (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None
    return {"latency": times[-1], "ttft": times[0], "tpot": tpot}


def measure(
    run: Callable[[], dict[str, Any]], args: argparse.Namespace, after_warm_up: Callable[[], object] = lambda: None
) -> dict[str, Any]:
    """Figures of the timed runs: vLLM's keys, and ours. ``run``: one run, with its figures in seconds."""
    for _ in tqdm(range(args.num_iters_warmup), desc="warm-up", disable=None):
        run()
    after_warm_up()
    runs = [run() for _ in tqdm(range(args.num_iters), desc="runs", disable=None)]
    latencies = [one["latency"] for one in runs]
    tpots = [one["tpot"] for one in runs if one["tpot"] is not None]
    return {
        "avg_latency": statistics.mean(latencies),
        "std_latency": statistics.pstdev(latencies),
        "latencies": latencies,
        "percentiles": serving.percentiles(latencies, PERCENTILES),
        "ttfts": [one["ttft"] for one in runs],
        "tpots": [one["tpot"] for one in runs],
        "median_ttft_ms": statistics.median(one["ttft"] for one in runs) * 1e3,
        "median_tpot_ms": statistics.median(tpots) * 1e3 if tpots else None,
        "decode_tokens_per_second": args.batch_size / statistics.median(tpots) if tpots else None,
    }


def bench_engine(program: str, args: argparse.Namespace) -> dict[str, Any]:
    model, requests, engine, start_seconds = serving.start_engine(program, args, requests_of)
    params, before = serving.sampling_of(args, requests), engine.stats()

    def after_warm_up() -> None:
        nonlocal before
        engine.reset_report()
        before = engine.stats()

    with engine:
        serving.prepare_report(engine, args.report)
        measured = measure(lambda: run(engine, requests, params), args, after_warm_up)
        measured["steps"] = serving.steps_between(before, engine.stats())
        serving.write_report(engine, args.report)
        return {"model": model.name, **measured, "engine": serving.engine_facts(engine, start_seconds)}


def bench_hf(program: str, args: argparse.Namespace) -> dict[str, Any]:
    with errors_end(program), serving.described_model(args) as model:
        requests = requests_of(args, model)
        module, facts = serving.load_hf(model, requests, args)
    return {"model": model.name, **measure(lambda: run_hf(module, requests), args), "engine": facts}


def main(program: str, arguments: Sequence[str] | None = None) -> int:
    flags = parser(program)
    args = flags.parse_checked(lambda args: check_arguments(args, flags), arguments, **_LEAST)
    measured = (bench_hf if args.backend == "hf" else bench_engine)(program, args)
    rows = {"latency, mean": f"{measured['avg_latency']:.4f} s, std {measured['std_latency']:.4f} s"}
    rows |= {f"latency, p{p}": f"{value:.4f} s" for p, value in measured["percentiles"].items()}
    rows["TTFT, median of runs"] = f"{measured['median_ttft_ms']:.1f} ms"
    if measured["median_tpot_ms"] is not None:
        speed = f"{measured['decode_tokens_per_second']:.1f} decoded tokens/s"
        rows["TPOT, median of runs"] = f"{measured['median_tpot_ms']:.2f} ms; {speed}"
    if args.backend != "hf":
        rows["steps"] = serving.steps_line(measured["steps"])
        rows["compiled"] = serving.compiled_line(measured["engine"])
    sizes = f"{args.batch_size} requests, {args.input_len} tokens in, {args.output_len} out"
    tables.print_table(f"{args.backend}, {measured['model']}, {measured['engine']['dtype']}: {sizes}", rows)
    asked = {name: getattr(args, name) for name in ("backend", "input_len", "output_len", "batch_size")}
    finish("latency", asked | measured, args.output_json, device=resolve_device(args.device))
    return 0


def check_arguments(args: argparse.Namespace, flags: FlagParser) -> None:
    if args.n != 1:
        raise ValueError(f"--n must be 1, given {args.n}: several continuations of a prompt are not served yet")
    serving.check_serving(args, flags)
