"""Requests with a common beginning, submitted at once: with prefix caching and without; prints the ratio.

    python scripts/bench/bench_prefix_caching.py                # Qwen3-0.6B's shape, random weights, bfloat16

16 requests of 512 shared and 32 own tokens, 32 tokens out, greedy. Two engines in one process run in turns; the cache
is emptied before each run, so the prefix is computed once a run and never zero times. Counted beside the seconds:
tokens computed, and tokens found. Ends in one JSON line.
"""

import json
import statistics
import tempfile
import time
from pathlib import Path

from workloads import SHAPES, shared_prefix, write_config

from compiled_llm import CompiledEngine, SamplingParams
from compiled_llm import hardware as machine
from compiled_llm.command_line import FlagParser
from compiled_llm.worker.device import resolve_device


def run(engine: CompiledEngine, prompts: list[list[int]], output_len: int) -> dict[str, float]:
    engine.reset_prefix_cache()
    before = engine.stats()
    started = time.perf_counter()
    params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
    outputs = engine.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - started
    stats = engine.stats()
    firsts = [o.metrics.first_token_time - o.metrics.arrival_time for o in outputs if o.metrics.first_token_time]
    assert len(firsts) == len(prompts)
    return {
        "seconds": seconds,
        "ttft_mean": statistics.mean(firsts),
        "computed_tokens": stats.num_computed_tokens - before.num_computed_tokens,
        "hit_tokens": stats.prefix_hit_tokens - before.prefix_hit_tokens,
        "host_microseconds_a_step": (stats.host_seconds - before.host_seconds)
        / (stats.num_steps - before.num_steps)
        * 1e6,
        "step_milliseconds": (stats.execute_seconds - before.execute_seconds)
        / (stats.num_steps - before.num_steps)
        * 1e3,
    }


def main() -> None:
    parser = FlagParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--prefix-len", type=int, default=512)
    parser.add_argument("--suffix-len", type=int, default=32)
    parser.add_argument("--output-len", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()

    requests = shared_prefix(
        SHAPES[args.shape]["vocab_size"],
        num_requests=args.requests,
        prefix_len=args.prefix_len,
        suffix_len=args.suffix_len,
        output_len=args.output_len,
    )
    prompts = [request.prompt_token_ids for request in requests]
    with tempfile.TemporaryDirectory() as directory:
        write_config(args.shape, Path(directory))
        engines = {
            enabled: CompiledEngine(
                directory,
                load_format="dummy",
                dtype=args.dtype,
                device=args.device,
                max_model_len=1024,
                bucket_sizes=(args.requests,),
                token_bucket_sizes=(512,),
                enable_prefix_caching=enabled,
            )
            for enabled in (False, True)
        }
    runs: dict[bool, list[dict[str, float]]] = {False: [], True: []}
    for engine in engines.values():
        run(engine, prompts[:2], 2)
    for _ in range(args.repeats):
        for enabled, engine in engines.items():
            runs[enabled].append(run(engine, prompts, args.output_len))
    result = {
        ("on" if enabled else "off"): {
            key: statistics.median(r[key] for r in runs[enabled]) for key in runs[enabled][0]
        }
        for enabled in runs
    }
    for name, values in result.items():
        print(f"prefix caching {name:4}", "  ".join(f"{key} {value:.3f}" for key, value in values.items()))
    ratio = statistics.median(a["seconds"] / b["seconds"] for a, b in zip(runs[False], runs[True], strict=True))
    print(f"off / on: {ratio:.2f} (median of {args.repeats} pairs)")
    device = resolve_device(args.device)
    print(json.dumps({"workload": vars(args), "results": result, "ratio": ratio, "machine": machine.describe(device)}))


if __name__ == "__main__":
    main()
