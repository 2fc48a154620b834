"""The modes of ``compiled-llm batch`` beside each other, in one process and in turns, so that all meet the same load.

    python scripts/bench/bench_modes.py --model compiled_llm/demo_model --rounds 5
    python scripts/bench/bench_modes.py --shape qwen3-0.6b --rows 128 --rounds 3

Each round serves one row alone, then ``--rows`` rows at once, of random tokens. Shown are medians over the rounds: the
seconds of the row alone, the milliseconds between two tokens of a row while all are served, and all rows' tokens a
second, prompts' and outputs'. One round before is not counted. The last line is JSON.
"""

import argparse
import contextlib
import random
import statistics
import sys
from typing import Any

import own_checkout
import bench_results as results
import tables
from workloads import WorkloadRequest, add_model_arguments, model_of, random_tokens

from compiled_llm import CompiledEngine, SamplingParams
from compiled_llm.api.command_line import FlagParser, errors_end
from compiled_llm.offline.modes import MODES, as_flags, mode_arguments
from compiled_llm.system import hardware as machine


def parse_arguments() -> argparse.Namespace:
    parser = FlagParser(description=(__doc__ or "").split("\n")[0])
    add_model_arguments(parser)
    parser.add_argument("--dtype", default="auto", choices=tables.DTYPES, help="(default: the model's)")
    parser.add_argument("--rows", type=int, default=256, help="served at once (default: 256)")
    parser.add_argument("--input-len", type=int, default=64, help="tokens of a prompt (default: 64)")
    parser.add_argument("--output-len", type=int, default=32, help="tokens of an output (default: 32)")
    parser.add_argument("--rounds", type=int, default=5, help="(default: 5)")
    parser.add_argument("--max-model-len", type=int, default=512, help="(default: 512)")
    parser.add_argument("--enforce-eager", action="store_true", help="compile nothing")
    tables.add_json_flag(parser)
    return parser.parse_checked(check_arguments, rows=1, input_len=1, output_len=2, rounds=1)


def check_arguments(args: argparse.Namespace) -> None:
    """``ValueError`` for bad arguments."""
    if args.input_len + args.output_len > args.max_model_len:
        raise ValueError(f"--max-model-len must be at least {args.input_len + args.output_len}, the tokens of a row")
    tables.check_target("--json", args.json)


def serve(engine: CompiledEngine, num_rows: int, seed: int, args: argparse.Namespace) -> dict[str, float]:
    """Rows that are queued at once -> seconds, median seconds between two tokens of a row, tokens a second."""
    rng, vocab_size = random.Random(seed), engine.runner.model_config.vocab_size
    rows = [WorkloadRequest(random_tokens(rng, vocab_size, args.input_len), args.output_len) for _ in range(num_rows)]
    params = [SamplingParams(temperature=0, max_tokens=args.output_len, ignore_eos=True) for _ in rows]
    seconds, outputs = results.generate(engine, rows, params)
    tokens = num_rows * (args.input_len + args.output_len)
    return {"s": seconds, "between_s": statistics.median(results.tpots(outputs)), "tokens_per_s": tokens / seconds}


def measure(engines: dict[str, CompiledEngine], args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each mode."""
    alone: dict[str, list[float]] = {mode: [] for mode in engines}
    together: dict[str, list[dict[str, float]]] = {mode: [] for mode in engines}
    for number in range(args.rounds + 1):
        for mode, engine in engines.items():
            one = serve(engine, 1, 2 * number, args)["s"]
            many = serve(engine, args.rows, 2 * number + 1, args)
            if number > 0:
                alone[mode].append(one)
                together[mode].append(many)
    return [
        {
            "mode": mode,
            "one row, s": statistics.median(alone[mode]),
            "between tokens, ms": 1000 * statistics.median(each["between_s"] for each in together[mode]),
            "tokens/s": statistics.median(each["tokens_per_s"] for each in together[mode]),
        }
        for mode in engines
    ]


def main() -> int:
    args = parse_arguments()
    with contextlib.ExitStack() as stack, errors_end("bench_modes"):
        model = stack.enter_context(model_of(args))
        engines = {}
        for mode in MODES:
            print(f"{mode}: {as_flags(mode_arguments(mode, 'cpu')) or 'the defaults'}", flush=True)
            engines[mode] = stack.enter_context(
                CompiledEngine(
                    **model,
                    **mode_arguments(mode, "cpu"),
                    dtype=args.dtype,
                    device="cpu",
                    max_model_len=args.max_model_len,
                    enable_prefix_caching=False,
                    enforce_eager=args.enforce_eager,
                    progress="off",
                    # All rows' requests of the largest bucket fit, in the memory of three engines.
                    num_kv_blocks=1 + 128 * -(-(args.input_len + args.output_len) // 16),
                )
            )
        device, dtype = engines[MODES[0]].runner.device, str(engines[MODES[0]].runner.dtype)[6:]
        rows = measure(engines, args)
    print(f"{args.model or args.shape}, {dtype}\n{tables.text_table(rows)}")
    result = {"benchmark": "modes", "dtype": dtype, "rows": rows, "settings": {**vars(args), "json": str(args.json)}}
    tables.finish(result | {"machine": machine.describe(device)}, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
