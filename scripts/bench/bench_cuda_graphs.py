"""CUDA graph trees against graphs captured by hand: the same decodes on both, side by side.

    python scripts/bench/bench_cuda_graphs.py
    python scripts/bench/bench_cuda_graphs.py --shape qwen3-8b --batch-sizes 1

An engine with ``cuda_graphs="trees"`` and one with "manual" hold the same weights and take turns. Of each batch size it
prints the median time of a decode step, and what the host needs to hand one to the device, for both and as a ratio.
Ends in one JSON line. Exit status: 0, 1 where the two gave different tokens, 2 for bad arguments or without a CUDA GPU.
"""

import contextlib
import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import tables
import torch
from workloads import add_model_arguments, integers, model_of, one_stream

from compiled_llm import CompiledEngine, SamplingParams
from compiled_llm import hardware as machine
from compiled_llm.command_line import FlagParser

MODES = ("trees", "manual")
INPUT_LEN = 32  # short: prompts are not what is measured
_BLOCK_SIZE = 16


def decode(engine: CompiledEngine, batch_size: int, output_len: int) -> tuple[float, float, list[list[int]]]:
    """Seconds of a decode step, seconds of launching a step, both means over one run of a batch; and its tokens."""
    prompts = [
        one_stream(engine.model_config.vocab_size, seed, input_len=INPUT_LEN)[0].prompt_token_ids
        for seed in range(batch_size)
    ]
    params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True, detokenize=False)
    before = engine.stats()
    outputs = engine.generate(prompts, params, use_tqdm=False)
    after = engine.stats()
    # All prompts run in one step, so all requests begin and end together.
    last, first = (max(getattr(o.metrics, f"{name}_time") for o in outputs) for name in ("finished", "first_token"))
    launching = (after.launch_seconds - before.launch_seconds) / (after.num_steps - before.num_steps)
    return (last - first) / (output_len - 1), launching, [output.outputs[0].token_ids for output in outputs]


def compare(engines: Mapping[str, CompiledEngine], batch_size: int, output_len: int, repeats: int) -> dict[str, Any]:
    """Medians over ``repeats`` runs of each engine, in turns; the ratios are of the first engine to the second."""
    steps: dict[str, list[float]] = {mode: [] for mode in engines}
    launches: dict[str, list[float]] = {mode: [] for mode in engines}
    tokens: list[list[list[int]]] = []
    for turn in range(repeats + 1):
        for mode, engine in engines.items():
            step, launch, generated = decode(engine, batch_size, output_len)
            tokens.append(generated)
            if turn > 0:  # the first is for warming up
                steps[mode].append(step)
                launches[mode].append(launch)
    step_ms = {mode: statistics.median(values) * 1e3 for mode, values in steps.items()}
    launch_us = {mode: statistics.median(values) * 1e6 for mode, values in launches.items()}
    first, second = engines
    return {
        "batch_size": batch_size,
        "step_ms": step_ms,
        "launch_us": launch_us,
        "step_ratio": step_ms[first] / step_ms[second],
        "faster": min(step_ms, key=lambda mode: step_ms[mode]),
        "same_tokens": all(one == tokens[0] for one in tokens),
        "step_seconds": steps,
    }


def print_table(rows: Sequence[dict[str, Any]]) -> None:
    shown = [
        {"batch": row["batch_size"]}
        | {f"step ms, {mode}": ms for mode, ms in row["step_ms"].items()}
        | {"ratio": row["step_ratio"]}
        | {f"launch us, {mode}": us for mode, us in row["launch_us"].items()}
        | {"tokens": "the same" if row["same_tokens"] else "DIFFERENT", "faster": row["faster"]}
        for row in rows
    ]
    print(tables.text_table(shown))


def main() -> int:
    parser = FlagParser(description=(__doc__ or "").split("\n")[0])
    add_model_arguments(parser)
    parser.add_argument("--batch-sizes", type=integers, default=(1, 32), help="default: 1,32")
    parser.add_argument("--output-len", type=int, default=128, help="tokens to generate for each request")
    parser.add_argument("--repeats", type=int, default=5, help="runs of each engine, of which the median counts")
    tables.add_json_flag(parser)
    args = parser.parse_checked(output_len=2, repeats=1)
    if not torch.cuda.is_available():
        print("bench_cuda_graphs: no CUDA GPU here (torch.cuda.is_available() is False)", file=sys.stderr)
        return 2
    largest = max(args.batch_sizes)
    length = INPUT_LEN + args.output_len
    with model_of(args) as model, contextlib.ExitStack() as stack:
        engines = {}
        for mode in MODES:
            engine = CompiledEngine(
                **model,
                device="cuda",
                dtype="bfloat16",
                cuda_graphs=mode,
                bucket_sizes=args.batch_sizes,
                token_bucket_sizes=(largest * INPUT_LEN,),
                max_model_len=length,
                block_size=_BLOCK_SIZE,
                num_kv_blocks=largest * -(-length // _BLOCK_SIZE),
                enable_prefix_caching=False,
            )
            engines[mode] = stack.enter_context(engine)
            print(f"cuda_graphs={mode!r}\n{engine.compile_report()}\n", flush=True)
        rows = [compare(engines, size, args.output_len, args.repeats) for size in args.batch_sizes]
        compiled = {
            mode: {
                "compile_seconds": engine.compile_report().compile_seconds,
                "cuda_graph_bytes": sum(report.cuda_graph_bytes for report in engine.compile_report().reports),
                "recompiles": engine.compile_report().recompiles,
            }
            for mode, engine in engines.items()
        }
    print_table(rows)
    facts = machine.describe(torch.device("cuda", 0))
    result = {"model": args.model or args.shape, "rows": rows, "compiled": compiled, "machine": facts}
    tables.finish(result, args.json)
    return 0 if all(row["same_tokens"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
