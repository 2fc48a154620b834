"""A start of an engine in a process of its own, for ``bench start``: seconds of each stage, from the process's start.

    python start_program.py ARGUMENTS BEGAN LIMIT

ARGUMENTS are those of ``CompiledEngine`` as JSON; BEGAN is ``time.monotonic()`` when the process was started; LIMIT:
seconds after which its stacks are written to stderr, since it is about to be ended. It imports only what each version
of the package has, since it also starts other checkouts.
"""

import dataclasses
import faulthandler
import json
import os
import sys
import time
from typing import Any


def main() -> None:
    arguments, began, limit = map(json.loads, sys.argv[1:])
    faulthandler.dump_traceback_later(limit)
    from compiled_llm.engine.engine import CompiledEngine, SamplingParams  # of any version

    imported = time.monotonic()
    print(f"{imported - began:7.1f} s: imported", file=sys.stderr)
    engine = CompiledEngine(**arguments)
    ready = time.monotonic()
    with engine:
        engine.generate([[1]], SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
        first = time.monotonic()
        prompts = [[7, 8, 9, 10, 11] * 5, [5]]
        greedy = engine.generate(prompts, SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
        sampled: dict[str, Any] = {"temperature": 1, "seed": 3, "max_tokens": 8, "logprobs": 1}
        engine.generate(prompts, SamplingParams(**sampled), use_tqdm=False)
        ended = time.monotonic()
        long = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
        rates = [rate(engine, long)]
        while engine.compile_report().cache_count("pending"):
            rates.append(rate(engine, long))
        compiled = time.monotonic() if len(rates) > 1 else ready  # which takes a request more, where it was not awaited
        report, stages = engine.compile_report(), dataclasses.asdict(engine.runner.start_times)
        own = os.times()
        seconds = {"imports": imported - began, **stages, "first token": first - ready}
        result = {
            "seconds": seconds | {"other": ready - imported - sum(stages.values())},
            "total": first - began,
            "more tokens": ended - first,
            "tokens/s at first": rates[0],
            "tokens/s compiled": rate(engine, long),
            "all compiled after": compiled - began,
            "dtype": str(engine.runner.dtype)[6:],
            "cpu": own.user + own.system,
            "cpu of processes": own.children_user + own.children_system,
            "graphs": {graph.name: round(graph.compile_seconds, 3) for graph in report.reports},
            "cuda graph bytes": sum(graph.cuda_graph_bytes for graph in report.reports),
            "hits": report.cache_count("hit"),
            "misses": report.cache_count("miss"),
            "recompiles": report.recompiles,
            "tokens": [output.outputs[0].token_ids for output in greedy],
        }
    print("RESULT " + json.dumps(result), flush=True)


def rate(engine: Any, params: Any) -> float:
    """Tokens a second of one request, the first left out."""
    times = [time.monotonic() for _ in engine.stream([7, 8, 9], params)]
    return (len(times) - 1) / (times[-1] - times[0])


if __name__ == "__main__":
    main()
