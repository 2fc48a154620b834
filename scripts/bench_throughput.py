"""The same requests through this engine and through ``transformers.generate``; prints the ratio.

    python scripts/bench_throughput.py                    # Qwen3-0.6B's shape, random weights, bfloat16
    python scripts/bench_throughput.py --device cuda --shape qwen3-8b

Two workloads, greedy with exact lengths: one stream (128 tokens in, 128 out), and 32 requests of mixed lengths (32 to
512 in, 32 to 128 out) at once. ``transformers.generate`` runs the second as one left-padded batch until the longest is
done, which is what it offers without a scheduler; only the tokens asked for count. Compilation is not in the times; the
first run of each side is a warm-up. Ends in one JSON line.
"""

import argparse
import gc
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

from compiled_llm import CompiledEngine, SamplingParams, machine
from compiled_llm.runner import resolve_device

_QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "head_dim": 128,
    "num_key_value_heads": 8,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000.0,
    "vocab_size": 151936,
    "rms_norm_eps": 1e-6,
}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": _QWEN3
    | {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "qwen3-8b": _QWEN3
    | {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "tie_word_embeddings": False,
    },
    "tiny": _QWEN3
    | {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "vocab_size": 1000,
        "tie_word_embeddings": True,
    },
}
Request = tuple[list[int], int]  # prompt token ids, output tokens


def workloads(vocab_size: int, num_requests: int, seed: int) -> dict[str, list[Request]]:
    rng = random.Random(seed)

    def request(input_len: int, output_len: int) -> Request:
        return [rng.randrange(vocab_size) for _ in range(input_len)], output_len

    return {
        "one stream": [request(128, 128)],
        "mixed": [request(rng.randint(32, 512), rng.randint(32, 128)) for _ in range(num_requests)],
    }


def sizes(text: str) -> tuple[int, ...]:
    return tuple(int(item) for item in text.split(","))


def timed(run: Callable[[list[Request]], None], requests: list[Request], repeats: int) -> float:
    """Median seconds of ``repeats`` runs after a short warm-up."""
    run([(prompt, 2) for prompt, _ in requests[:1]])
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        run(requests)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def bench_engine(directory: Path, args: argparse.Namespace, work: dict[str, list[Request]]) -> dict[str, Any]:
    started = time.perf_counter()
    with CompiledEngine(
        str(directory),
        load_format="dummy",
        dtype=args.dtype,
        device=args.device,
        max_model_len=1024,
        bucket_sizes=args.bucket_sizes,
        token_bucket_sizes=args.token_bucket_sizes,
    ) as engine:
        start_seconds = time.perf_counter() - started

        def run(requests: list[Request]) -> None:
            engine.reset_prefix_cache()  # the same prompts again must be computed again
            params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for _, n in requests]
            outputs = engine.generate([prompt for prompt, _ in requests], params, use_tqdm=False)
            counts = [len(output.outputs[0].token_ids) for output in outputs]
            assert counts == [n for _, n in requests], "every request gets the tokens it asked for"

        seconds = {name: timed(run, requests, args.repeats) for name, requests in work.items()}
        report, stats = engine.compile_report(), engine.stats()
        print(report)
        print(stats)
        return {
            "seconds": seconds,
            "start_seconds": start_seconds,
            "graph_breaks": report.graph_breaks,
            "recompiles": report.recompiles,
            "host_microseconds_a_step": stats.host_seconds / stats.num_steps * 1e6,
            "step_milliseconds": stats.execute_seconds / stats.num_steps * 1e3,
        }


def bench_transformers(
    shape: dict[str, Any], args: argparse.Namespace, work: dict[str, list[Request]]
) -> dict[str, Any]:
    device = resolve_device(args.device)
    fields = {key: value for key, value in shape.items() if key not in ("architectures", "model_type", "rope_theta")}
    rope = {"rope_type": "default", "rope_theta": shape["rope_theta"]}
    config = transformers.Qwen3Config(**fields, rope_parameters=rope, eos_token_id=None)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, args.dtype)).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0

    def run(requests: list[Request]) -> None:
        longest = max(len(prompt) for prompt, _ in requests)
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt, _ in requests], device=device)
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p, _ in requests], device=device)
        new_tokens = max(n for _, n in requests)
        with torch.inference_mode():
            output = model.generate(
                ids, attention_mask=mask, max_new_tokens=new_tokens, min_new_tokens=new_tokens, do_sample=False
            )
        assert output.shape == (len(requests), longest + new_tokens)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return {"seconds": {name: timed(run, requests, args.peer_repeats) for name, requests in work.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--device", default="auto")
    parser.add_argument("--num-requests", type=int, default=32)
    parser.add_argument("--bucket-sizes", type=sizes, default=(1, 8, 16, 32))
    parser.add_argument("--token-bucket-sizes", type=sizes, help="default: the engine's")
    parser.add_argument("--repeats", type=int, default=3, help="runs of this engine, of which the median counts")
    parser.add_argument("--peer-repeats", type=int, default=1, help="runs of transformers.generate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--skip-transformers", action="store_true")
    parser.add_argument("--json", type=Path, help="write the result there too")
    args = parser.parse_args()
    if min(args.num_requests, args.repeats, args.peer_repeats) < 1:
        parser.error("--num-requests, --repeats and --peer-repeats must be at least 1")

    shape = SHAPES[args.shape]
    work = workloads(shape["vocab_size"], args.num_requests, args.seed)
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(shape))
        engine = bench_engine(Path(directory), args, work)
    gc.collect()
    peer = None if args.skip_transformers else bench_transformers(shape, args, work)

    result: dict[str, Any] = {"benchmark": "throughput", "shape": args.shape, "dtype": args.dtype, "workloads": {}}
    print(
        f"{'workload':<12} {'requests':>8} {'in':>7} {'out':>6} {'engine tok/s':>13} {'transformers':>13} {'ratio':>6}"
    )
    for name, requests in work.items():
        tokens_in, tokens_out = sum(len(prompt) for prompt, _ in requests), sum(n for _, n in requests)
        ours = tokens_out / engine["seconds"][name]
        theirs = tokens_out / peer["seconds"][name] if peer else None
        row = {"requests": len(requests), "input_tokens": tokens_in, "output_tokens": tokens_out}
        row |= {"engine_tokens_per_second": ours, "transformers_tokens_per_second": theirs}
        row["ratio"] = ours / theirs if theirs else None
        result["workloads"][name] = row
        cells = (f"{theirs:13.1f}", f"{ours / theirs:6.2f}") if theirs else (f"{'skipped':>13}", f"{'':>6}")
        print(f"{name:<12} {len(requests):>8} {tokens_in:>7} {tokens_out:>6} {ours:>13.1f} {cells[0]} {cells[1]}")
    result |= {key: value for key, value in engine.items() if key != "seconds"}
    result["machine"] = machine.describe(resolve_device(args.device))
    line = json.dumps(result)
    print(line)
    if args.json:
        args.json.write_text(line + "\n")


if __name__ == "__main__":
    main()
