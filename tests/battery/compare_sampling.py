"""The time of sampling in another checkout and in this one, in turns on the same machine.

    git worktree add /tmp/before COMMIT && python -m tests.battery.compare_sampling /tmp/before --rounds 40

Each has a process of its own, which samples the same logits when it is asked to: a turn is some calls of
``step.sampling.sample``, and turns of the two follow each other within milliseconds. Printed are medians of a call, and
the median of the ratios within a round (above 1: this checkout is faster). The filters are those of
``compiled-llm bench sampling``; logits of "peaked" are like a language model's, those of "normal" are flat.
"""

import argparse
import statistics
import sys
from pathlib import Path

from compiled_llm.bench.sampling import KINDS
from tests.battery.turns import ROOT, Side

_SIDE = """
import json, sys, time
import torch
from compiled_llm.step.sampling import SamplingInput, sample

torch.set_num_threads(int(sys.argv[1]))
print(json.dumps("ready"), flush=True)
for line in sys.stdin:
    rows, vocabulary, dtype, pattern, calls, repeat, params = json.loads(line)
    generator = torch.Generator().manual_seed(rows + vocabulary)
    logits = torch.randn(rows, vocabulary, generator=generator) * 2
    if pattern == "peaked":
        places = torch.randint(vocabulary, (rows, 20), generator=generator)
        logits.scatter_add_(1, places, 4 + 8 * torch.rand(rows, 20, generator=generator))
    if "allowed_token_ids" in params:
        logits[:, ~torch.isin(torch.arange(vocabulary), torch.tensor(params["allowed_token_ids"]))] = -torch.inf
    logits = logits.to(getattr(torch, dtype))
    of = lambda name, off, kind=torch.float32: torch.full((rows,), params.get(name, off), dtype=kind)
    inputs = SamplingInput(
        of("temperature", 0.0), of("top_p", 1.0), of("top_k", vocabulary, torch.int32), of("min_p", 0.0),
        of("top_n_sigma", 0.0), torch.arange(rows), torch.zeros(rows, dtype=torch.int32),
    )
    seconds = []
    for turn in range(repeat + 1):
        sys.stdin.readline()
        inputs.position.copy_(torch.arange(rows) * 1000 + turn)
        started = time.perf_counter()
        for _ in range(calls):
            sample(logits, inputs)
        print(json.dumps((time.perf_counter() - started) / calls), flush=True)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0], allow_abbrev=False)
    parser.add_argument("before", type=Path, help="the other checkout")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--vocabularies", type=int, nargs="+", default=[50257, 151936])
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--patterns", nargs="+", default=["peaked", "normal"], choices=["peaked", "normal"])
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    kinds = {name: params for name, params in KINDS.items() if params["temperature"]}
    sides = [Side(checkout, _SIDE, str(args.threads)) for checkout in (args.before, ROOT)]
    worst = float("inf")
    for pattern in args.patterns:
        for vocabulary in args.vocabularies:
            for rows in args.rows:
                for name, params in kinds.items():
                    calls = max(1, 1_000_000 // (rows * vocabulary))
                    question = [rows, vocabulary, args.dtype, pattern, calls, args.rounds, params]
                    for side in sides:
                        side.tell(question)
                    rounds = []
                    for number in range(args.rounds + 1):
                        turn = [side.ask(None) for side in (sides if number % 2 else sides[::-1])]
                        rounds.append(turn if number % 2 else turn[::-1])
                    rounds = rounds[1:]
                    before, now = (statistics.median(column) * 1e6 for column in zip(*rounds, strict=True))
                    ratio = statistics.median(old / new for old, new in rounds)
                    worst = min(worst, ratio)
                    print(
                        f"{pattern:6} {vocabulary:6} x {rows:2} {name:12} {before:8.1f} us before, {now:8.1f} us now, "
                        f"ratio {ratio:.3f}",
                        flush=True,
                    )
    print(f"the least ratio: {worst:.3f}")
    for side in sides:
        side.close()
    sys.exit(worst < 0.99)


if __name__ == "__main__":
    main()
