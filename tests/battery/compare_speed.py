"""The speed of another checkout and of this one on the workloads W1 to W4, in turns on the same machine.

    git worktree add /tmp/before COMMIT && python -m tests.battery.compare_speed /tmp/before --rounds 5

Both have an engine of Qwen3-0.6B's shape in a process of its own; random weights, bfloat16, CPU. The first round is a
warm-up. Printed are medians, the median of the rounds' ratios (above 1: this checkout is faster), the host's time a
step, and whether the tokens are the same. The engines are used by their public interface alone.
"""

import argparse
import json
import statistics
from pathlib import Path

from compiled_llm.bench.workloads import WORKLOADS
from compiled_llm.checkpoint.shapes import SHAPES, model_of
from tests.battery.turns import ROOT, Side

_SIDE = """
import json, sys, time
from compiled_llm import CompiledEngine, SamplingParams
engine = CompiledEngine(**json.loads(sys.argv[1]))
print(json.dumps("ready"), flush=True)
for line in sys.stdin:
    prompts, lengths = json.loads(line)
    params = [SamplingParams(temperature=0, max_tokens=length, ignore_eos=True) for length in lengths]
    engine.reset_prefix_cache()
    before, started = engine.stats(), time.perf_counter()
    outputs = engine.generate(prompts, params, use_tqdm=False)
    seconds, after = time.perf_counter() - started, engine.stats()
    parts = [getattr(after, name) - getattr(before, name) for name in (
        "schedule_seconds", "prepare_seconds", "output_seconds", "num_steps")]
    tokens = [output.outputs[0].token_ids for output in outputs]
    print(json.dumps({"seconds": seconds, "host": sum(parts[:3]) / parts[3], "tokens": tokens}), flush=True)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0], allow_abbrev=False)
    parser.add_argument("before", type=Path, help="the other checkout")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workloads", default="W1,W2,W3,W4")
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b")
    parser.add_argument("--engine-args", type=json.loads, default={"bucket_sizes": [1, 8, 16, 32]}, metavar="JSON")
    args = parser.parse_args()
    vocab_size = SHAPES[args.shape]["vocab_size"]
    with model_of(argparse.Namespace(model=None, shape=args.shape)) as model:
        engine_args = {"max_model_len": 2304, "dtype": "bfloat16", "progress": "off", **model, **args.engine_args}
        sides = [Side(checkout, _SIDE, json.dumps(engine_args)) for checkout in (args.before, ROOT)]
        for name in args.workloads.split(","):
            requests = WORKLOADS[name](vocab_size, 0)
            rounds = []
            for n in range(args.rounds + 1):
                turns = [side.ask(list(zip(*requests, strict=True))) for side in (sides if n % 2 else sides[::-1])]
                rounds.append(turns if n % 2 else turns[::-1])
            columns = list(zip(*rounds[1:], strict=True))
            seconds, host = (
                [statistics.median(run[key] for run in column) for column in columns] for key in ("seconds", "host")
            )
            ratio = statistics.median(old["seconds"] / new["seconds"] for old, new in rounds[1:])
            tokens = "the same" if all(old["tokens"] == new["tokens"] for old, new in rounds) else "DIFFER"
            print(
                f"{name}: {seconds[0]:.3f} s before, {seconds[1]:.3f} s now, ratio {ratio:.3f}; "
                f"host {host[0] * 1e6:.0f} and {host[1] * 1e6:.0f} us a step; tokens {tokens}",
                flush=True,
            )
        for side in sides:
            side.close()


if __name__ == "__main__":
    main()
