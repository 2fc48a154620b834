"""The two sides that bench_phases.py compares, and the figures of their runs.

``Engine`` and ``Transformers`` serve the same requests and record the time of each token. All times of the study come
from these.
"""

import itertools
import statistics
import time
from typing import Any, NamedTuple, Protocol

import bench_hf
from workloads import Requests

from compiled_llm import CompiledEngine, SamplingParams


class Served(NamedTuple):
    """One run of requests. Times in seconds since its start.

    Attributes:
        starts: when each request started.
        token_times: for each request, the time of each token.
        row_steps: rows of all steps' batches, also those of padding, finished requests and prompts.
    """

    starts: list[float]
    token_times: list[list[float]]
    row_steps: int


class Side(Protocol):
    name: str

    def run(self, requests: Requests) -> Served:
        """Serve requests that all start at once."""
        ...


class Engine:
    """This engine."""

    name = "engine"

    def __init__(self, engine: CompiledEngine) -> None:
        self.engine = engine
        self.limits = engine.runner.limits

    def run(self, requests: Requests, seats: int | None = None) -> Served:
        """At most ``seats`` requests at once: when one ends, the next one starts."""
        seats = seats or len(requests)
        served, row_steps, num_running = Served([], [[] for _ in requests], 0), 0, 0
        started = time.perf_counter()
        while len(served.starts) < len(requests) or num_running:
            while len(served.starts) < len(requests) and num_running < seats:
                prompt, output_len = requests[len(served.starts)]
                params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
                self.engine.add_request(str(len(served.starts)), prompt, params)
                served.starts.append(time.perf_counter() - started)
                num_running += 1
            row_steps += min(size for size in self.limits.decode_bucket_sizes if size >= num_running)
            outputs, now = self.engine.step(), time.perf_counter() - started
            for output in outputs:
                completion, times = output.outputs[0], served.token_times[int(output.request_id)]
                if completion.finish_reason == "error":
                    raise RuntimeError(f"the engine failed: {completion.stop_reason}")
                times += [now] * (len(completion.token_ids) - len(times))
                num_running -= output.finished
        return served._replace(row_steps=row_steps)


class Transformers:
    """``transformers.generate``: one left-padded batch that runs until its longest output is there."""

    name = "transformers"

    def __init__(self, model: bench_hf.HuggingFaceModel) -> None:
        self.model = model

    def run(self, requests: Requests) -> Served:
        return self.generate(requests)[0]

    def generate(self, requests: Requests) -> tuple[Served, Any]:
        """The run, and the KV cache that it leaves."""
        times, generated = bench_hf.generate_timed(self.model, requests, return_dict_in_generate=True)
        token_times = [times[: request.output_len] for request in requests]
        return Served([0.0] * len(requests), token_times, len(requests) * len(times)), generated.past_key_values


def in_static_batches(side: Side, requests: Requests, seats: int) -> Served:
    """``seats`` requests start together, and the next ones when the longest of them is done."""
    starts, token_times, row_steps, now = [], [], 0, 0.0
    for group in (requests[first : first + seats] for first in range(0, len(requests), seats)):
        longest = max(request.output_len for request in group)
        served = side.run([request._replace(output_len=longest) for request in group])
        starts += [now] * len(group)
        token_times += [[now + seconds for seconds in times] for times in served.token_times]
        row_steps += served.row_steps
        now = max(times[-1] for times in token_times)
    return Served(starts, token_times, row_steps)


def ttft(runs: list[Served]) -> float:
    """Seconds until every request has its first token, median of the runs."""
    return statistics.median(max(times[0] for times in run.token_times) for run in runs)


def step_seconds(runs: list[Served]) -> list[float]:
    """Seconds of each step in which all requests decode, medians over the runs."""
    gaps = []
    for run in runs:
        started, ended = max(times[0] for times in run.token_times), min(times[-1] for times in run.token_times)
        gaps.append([b - a for a, b in itertools.pairwise(t for t in run.token_times[0] if started <= t <= ended)])
    return [statistics.median(step) for step in zip(*gaps, strict=True)]
