"""A start of an engine in a process of its own, for ``bench start``: seconds of each part, from the process's start.

    python start_program.py ARGUMENTS BEGAN LIMIT

ARGUMENTS are those of ``CompiledEngine`` as JSON; BEGAN is ``time.monotonic()`` when the process was started; LIMIT:
seconds after which its stacks are written to stderr, since it is about to be ended. It imports only what each version
of the package has, since it also starts other checkouts.
"""

import collections
import contextlib
import dataclasses
import faulthandler
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

MOST_SILENT = 0.5  # seconds of a part; a longer one is said on stderr


class Parts:
    """Seconds that functions took, without what others of them took inside: part -> seconds, since it was made."""

    def __init__(self, began: float) -> None:
        self.seconds: dict[str, float] = collections.defaultdict(float)
        self._began = began

    def time(self, owner: Any, name: str, part: str) -> None:
        """From now on, ``owner.name`` is timed as ``part``, if it is there."""
        real: Callable = getattr(owner, name, None)  # type: ignore[assignment]
        if real is None:
            return

        def run(*args: Any, **kwargs: Any) -> Any:
            started, nested = time.monotonic(), sum(self.seconds.values())
            try:
                return real(*args, **kwargs)
            finally:
                taken = time.monotonic() - started
                self.seconds[part] += taken - (sum(self.seconds.values()) - nested)
                if taken > MOST_SILENT:
                    now = time.monotonic() - self._began
                    print(f"{now:7.1f} s: {part} took {taken:.1f} s", file=sys.stderr)

        setattr(owner, name, run)


def time_parts(parts: Parts) -> None:
    from compiled_llm.compiling import cuda_graphs, function
    from compiled_llm.worker import compiled_steps, runner

    for owner, name, part in (
        (compiled_steps, "build_missing", "build"),
        (function, "from_bytes", "load"),
        (function, "compile_at_first_call", "torch.compile"),
        (cuda_graphs.CapturedFunction, "capture", "capture"),
        (runner.ModelRunner, "_load_weights", "weights"),
        (runner.ModelRunner, "_make_pool", "make pool"),
        (runner.ModelRunner, "_record_on", "record again"),
        (runner.ModelRunner, "_start_builds", "start processes"),
        (compiled_steps.CompiledSteps, "__init__", "buffers"),
        (compiled_steps.CompiledSteps, "jobs", "jobs"),
        (compiled_steps.CompileCache, "key_of", "keys"),
        (runner, "graph_pool", "first use of the GPU"),
    ):
        parts.time(owner, name, part)


def main() -> None:
    arguments, began, limit = map(json.loads, sys.argv[1:])
    faulthandler.dump_traceback_later(limit)
    from compiled_llm.engine.engine import CompiledEngine, SamplingParams  # of any version

    imported, parts = time.monotonic(), Parts(began)
    print(f"{imported - began:7.1f} s: imported", file=sys.stderr)
    with contextlib.suppress(ImportError, AttributeError):  # a checkout whose files are others
        time_parts(parts)
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
        report, stages = engine.compile_report(), dataclasses.asdict(engine.runner.start_times)
        own = os.times()
        seconds = {"imports": imported - began, **stages, "first token": first - ready}
        result = {
            "seconds": seconds | {"other": ready - imported - sum(stages.values())},
            "total": first - began,
            "parts": dict(parts.seconds) | {"more tokens": ended - first},
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


if __name__ == "__main__":
    main()
