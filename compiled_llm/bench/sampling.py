"""The cost of sampling: for each kind of request, the time of the sampler and its share of a whole decode step.

An engine serves ``--batch-size`` requests until all decode, with ``--context`` tokens each. This step is then repeated.
After each repetition the sampler of one kind of request runs, the kinds in turns. The kinds:

- greedy: the most likely token of each row. It is part of the step, and timed separately on the step's logits.
- temperature, top-k, top-p, top-k+top-p, min-p: sampling without a change of logits.
- full: temperature, top-k, top-p and min-p on logits with bias, all three penalties and a mask.
- logprobs: the log-probabilities, which any of these can have.

"share" is sampler / (step + sampler).

    compiled-llm bench sampling --batch-size 32 --json docs/results/cpu/sampling.json
"""

import functools
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from compiled_llm.api import tables
from compiled_llm.api.command_line import FlagParser, errors_end
from compiled_llm.api.sampling_params import SamplingParams
from compiled_llm.bench.harness import TORCH_DTYPES, finish, in_turns, seconds_of
from compiled_llm.checkpoint.shapes import add_model_arguments, model_of
from compiled_llm.engine.engine import CompiledEngine
from compiled_llm.ops.sampling.token_sampling import greedy_tokens
from compiled_llm.scheduling.bucket import Bucket
from compiled_llm.scheduling.scheduler_output import SchedulerOutput
from compiled_llm.step.parameters import SAMPLING
from compiled_llm.worker.sampling_stage import SamplingNeeds

Params = dict[str, Any]
_FILTERS: Params = {"temperature": 0.8, "top_k": 50, "top_p": 0.95, "min_p": 0.01, "seed": 1}
KINDS: dict[str, Params] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.8, "seed": 1},
    "top-k": {"temperature": 0.8, "top_k": 50, "seed": 1},
    "top-p": {"temperature": 0.8, "top_p": 0.95, "seed": 1},
    "top-k+top-p": {"temperature": 0.8, "top_k": 50, "top_p": 0.95, "seed": 1},
    "min-p": {"temperature": 0.8, "min_p": 0.05, "seed": 1},
    "top-n-sigma": {"temperature": 0.8, "top_n_sigma": 1.0, "seed": 1},
    "full": _FILTERS
    | {
        "presence_penalty": 0.5,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.1,
        "logit_bias": dict.fromkeys(range(100, 200), -5.0),
        "allowed_token_ids": tuple(range(50, 900)),
    },
    "logprobs": {"temperature": 0.0, "logprobs": 20},
}


def parser(program: str) -> FlagParser:
    made = FlagParser(prog=program, description="The cost of sampling, beside a decode step.")
    add_model_arguments(made)
    made.add_argument("--dtype", default="bfloat16", choices=TORCH_DTYPES, help="(default: bfloat16)")
    made.add_argument("--batch-size", type=int, default=32, help="requests of the step (default: 32)")
    made.add_argument("--context", type=int, default=300, help="tokens of each, about (default: 300)")
    made.add_argument("--rounds", type=int, default=30, help="(default: 30)")
    made.add_argument("--enforce-eager", action="store_true", help="do not compile, for a quick test")
    tables.add_json_flag(made)
    return made


def decoding_engine(arguments: Params, batch_size: int, context: int, params: Params) -> tuple[CompiledEngine, Bucket]:
    """An engine whose decode bucket holds a step of ``batch_size`` requests with ``context`` tokens each."""
    sizes: Params = {"bucket_sizes": (batch_size,), "max_model_len": context + 16, "token_bucket_sizes": (2048,)}
    engine = CompiledEngine(enable_prefix_caching=False, **sizes, **arguments)
    rng = np.random.default_rng(0)
    for i in range(batch_size):
        prompt = rng.integers(0, engine.model_config.vocab_size, context - 1).tolist()
        engine.add_request(str(i), prompt, SamplingParams(max_tokens=16, ignore_eos=True, **params))
    while any(len(output.outputs[0].token_ids) < 2 for output in engine.step()) or engine.stats().num_waiting:
        pass
    return engine, next(bucket for bucket in engine.own_runner.steps.buckets if bucket.kind == "decode")


class Measured:
    """One kind of request. All kinds use the buffers of the same engine."""

    def __init__(self, engine: CompiledEngine, bucket: Bucket, params: SamplingParams) -> None:
        self.runner, self.bucket, self.params = engine.own_runner, bucket, params
        steps = engine.own_runner.steps
        self.sampling, self.sampling_input = steps.sampling, steps.buffers[bucket].sampling_input
        self.needs = SamplingNeeds(
            sampling=not params.greedy, changed_logits=params.changes_logits, logprobs=params.logprobs is not None
        )

    def prepare(self) -> None:
        """Write the parameters into the buffers, for all rows of the step."""
        vocab_size, rows = self.runner.model_config.vocab_size, self.bucket.num_requests
        for line in SAMPLING:
            getattr(self.sampling_input, str(line.name)).fill_(line.value(self.params, 1, vocab_size))
        if self.needs.changed_logits:
            self.sampling.fill(range(rows), SchedulerOutput(num_samples=(1,) * rows), self.runner.rows, rows)

    def run(self, logits: Tensor) -> None:
        if any(self.needs):
            self.sampling.run(self.bucket, self.sampling_input, logits, self.needs)
        else:
            greedy_tokens(logits)


def measure(engine: CompiledEngine, bucket: Bucket, rounds: int) -> tuple[float, dict[str, dict[str, float]]]:
    """Seconds of a decode step; for each kind "ms" and "share"."""
    runner, device = engine.own_runner, engine.runner.device
    kinds = {name: Measured(engine, bucket, SamplingParams(max_tokens=16, **params)) for name, params in KINDS.items()}
    logits = runner.steps.run_step(bucket)

    def round_of(name: str) -> tuple[float, float]:
        """Seconds of a step, and of the sampler behind it."""
        kinds[name].prepare()
        step = seconds_of(lambda: runner.steps.run_step(bucket), device.type)
        return step, seconds_of(lambda: kinds[name].run(logits), device.type)

    times = in_turns({name: functools.partial(round_of, name) for name in kinds}, rounds=rounds)
    step = statistics.median(one[0] for found in times.values() for one in found)
    results: dict[str, dict[str, float]] = {}
    for name, found in times.items():
        own = statistics.median(sampler for _, sampler in found)
        results[name] = {"ms": own * 1e3, "share": own / (step if name == "greedy" else step + own)}
    return step, results


def main(program: str, arguments: Sequence[str] | None = None) -> int:
    args = parser(program).parse_checked(None, arguments, batch_size=1, context=2, rounds=1)
    with model_of(args) as model, errors_end(program):
        given = {**model, "dtype": args.dtype, "enforce_eager": args.enforce_eager}
        engine, bucket = decoding_engine(given, args.batch_size, args.context, KINDS["full"])
    with engine:
        step, results = measure(engine, bucket, args.rounds)
    report, vocab_size = engine.compile_report(), engine.model_config.vocab_size
    print(f"batch {args.batch_size}, vocabulary {vocab_size}, {args.dtype}")
    print(f"a decode step of {args.context} tokens each: {step * 1e3:.2f} ms, the greedy tokens in it\n")
    print(tables.text_table([{"kind": name, **row} for name, row in results.items()]))
    result = {"dtype": args.dtype, "batch_size": args.batch_size, "vocab_size": vocab_size, "step_ms": step * 1e3}
    result |= {"kinds": results, "graph_breaks": report.graph_breaks, "recompiles": report.recompiles}
    finish("sampling", result, args.json, device=engine.runner.device)
    return 0
