"""Time to the first token of a known prompt: computed, from host memory and from files; and work without hits.

    compiled-llm bench tiers --shape qwen3-0.6b --dtype bfloat16 --input-len 8192

One engine has no tiers; the other has host memory and files, which an engine before it has written: "restarted" is its
first answer. For "disk" the system is asked to drop its own copies of the files before each run, for "disk cached" not.
"without hits" are tokens a second of prompts that nobody knows, on a device that holds few blocks, so that each evicts
others: of the engine with tiers, to the one without. Ratios are medians over rounds, of times to that of computing.
"""

import dataclasses
import functools
import os
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from compiled_llm.api import tables
from compiled_llm.api.command_line import FlagParser, errors_end
from compiled_llm.api.sampling_params import SamplingParams
from compiled_llm.bench.harness import finish, in_turns, median_ratio
from compiled_llm.checkpoint.shapes import config_of, engine_parser
from compiled_llm.engine.engine import CompiledEngine

_COMPUTED = "computed"


def parser(program: str) -> FlagParser:
    made = engine_parser(program, "Time to the first token of a known prompt: computed, from host memory, from files.")
    add = made.add_argument
    add("--input-len", type=int, default=8192, help="tokens of the known prompt (default: 8192)")
    add("--num-tokens", type=int, default=16, help="of each output without hits (default: 16)")
    add("--num-prompts", type=int, default=4, help="without hits, at once (default: 4)")
    add("--rounds", type=int, default=5, help="(default: 5)")
    tables.add_json_flag(made)
    return made


def first_token_seconds(engine: CompiledEngine, prompt: Sequence[int], tier: str, files: Path) -> float:
    """Until the first token of ``prompt``, which is nowhere ("computed"), or in this tier and none above."""
    tiers = engine.scheduler.tiers
    engine.scheduler.pool.clear_cache()
    if tiers is not None and tier.startswith("disk"):
        tiers.forget_host()
    if tier == "disk":
        for path in files.glob("*/*.kv"):
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    started = time.perf_counter()
    engine.generate([{"prompt_token_ids": list(prompt)}], SamplingParams(max_tokens=1, temperature=0), use_tqdm=False)
    return time.perf_counter() - started


def tokens_per_second(engine: CompiledEngine, rng: random.Random, count: int, length: int, num_tokens: int) -> float:
    """Of prompts that no tier knows."""
    vocab_size = engine.model_config.vocab_size
    prompts = [{"prompt_token_ids": [rng.randrange(vocab_size) for _ in range(length)]} for _ in range(count)]
    params = SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True)
    started = time.perf_counter()
    engine.generate(list(prompts), params, use_tqdm=False, raise_on_error=True)
    return count * (length + num_tokens) / (time.perf_counter() - started)


def main(program: str, arguments: Sequence[str] | None = None) -> int:
    least = {"input_len": 32, "num_tokens": 1, "num_prompts": 1, "rounds": 1}
    args = parser(program).parse_checked(None, arguments, **least)
    with ExitStack() as stack, errors_end(program):
        files = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        blocks = -(-args.input_len // args.block_size) + 8
        length = args.input_len + args.num_tokens
        config = stack.enter_context(config_of(args, num_kv_blocks=blocks, max_model_len=length))
        plain = stack.enter_context(CompiledEngine.from_config(config))
        size = plain.own_runner.pool_sizes.block_bytes * 2 * blocks
        with_tiers = dataclasses.replace(config, kv_host_bytes=size, kv_disk_path=str(files), kv_disk_bytes=4 * size)
        rng = random.Random(0)
        prompt = [rng.randrange(plain.model_config.vocab_size) for _ in range(args.input_len)]
        with CompiledEngine.from_config(with_tiers) as writer:
            first_token_seconds(writer, prompt, _COMPUTED, files)
        engine = stack.enter_context(CompiledEngine.from_config(with_tiers))
        restarted = first_token_seconds(engine, prompt, "disk", files)
        stats = engine.stats()
        runs = {_COMPUTED: functools.partial(first_token_seconds, plain, prompt, _COMPUTED, files)}
        for tier in ("host", "disk", "disk cached"):
            runs[tier] = functools.partial(first_token_seconds, engine, prompt, tier, files)
        found = in_turns(runs, rounds=args.rounds)
        sizes = args.num_prompts, max(16, args.input_len // args.num_prompts // 2), args.num_tokens
        speeds = in_turns(
            {
                name: functools.partial(tokens_per_second, one, random.Random(name), *sizes)
                for name, one in (("plain", plain), ("tiers", engine))
            },
            rounds=args.rounds,
        )
        rows = [
            {"first token": name, "seconds": statistics.median(times), "ratio": median_ratio(times, found[_COMPUTED])}
            for name, times in found.items()
        ]
        ratio = restarted / statistics.median(found[_COMPUTED])
        rows.append({"first token": "restarted", "seconds": restarted, "ratio": ratio})
        print(tables.text_table(rows))
        without_hits = median_ratio(speeds["tiers"], speeds["plain"])
        print(
            f"restarted: {stats.disk_hit_tokens:,} of {args.input_len:,} tokens from files, "
            f"{stats.num_computed_tokens:,} computed; without hits: {without_hits:.3f} of the tokens a second without "
            "tiers"
        )
        result = {"input_len": args.input_len, "runs": rows, "restarted_computed": stats.num_computed_tokens}
        finish("tiers", {**result, "without_hits": without_hits}, args.json, device=engine.runner.device)
    return 0
