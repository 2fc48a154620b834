"""Seconds of decode steps as the choice of drafts expects them, beside those that came: the bundled model, compiled.

    python -m tests.battery.draft_costs --rounds 3

Every request has so many drafts in each step, all of them wrong. "start" is what was measured at the start, of the
device alone; "expected" what the steps of a round make of it, with the host; "came" the median of those of the next.
"""

import argparse
import copy
import statistics
import time
from collections.abc import Sequence

from compiled_llm import CompiledEngine, SamplingParams
from compiled_llm.api import tables
from compiled_llm.bench.speculation import edit_prompts
from compiled_llm.scheduling.request import Request
from compiled_llm.scheduling.scheduler_output import SchedulerOutput

_NUM_TOKENS = 40


class WrongDrafts:
    """A ``DraftSource``: the same token, ``count`` times."""

    num_tokens, adapts, count = 15, False, 0

    def propose(self, requests: Sequence[Request], most: Sequence[int]) -> list[list[int]]:
        return [[7] * min(self.count, allowed) for allowed in most]

    def end(self, request: Request) -> None:
        pass


def seconds_of_steps(engine: CompiledEngine, batch: int, temperature: float) -> list[float]:
    """Of each step that decodes ``batch`` requests, the seconds until the next one began."""
    scheduler, found = engine.scheduler, list[float]()
    own_schedule, began = scheduler.schedule, 0.0
    drafts = scheduler.drafts
    assert drafts is not None

    def schedule() -> SchedulerOutput:
        nonlocal began
        now, done = time.perf_counter(), engine.scheduler.drafts._done  # type: ignore[union-attr]
        if done is not None and done.num_requests == batch:
            found.append(now - began - drafts._looked)
        began = now
        return own_schedule()

    scheduler.schedule = schedule  # type: ignore[method-assign]
    params = SamplingParams(temperature=temperature, max_tokens=_NUM_TOKENS, seed=1, ignore_eos=True)
    engine.generate(edit_prompts(batch), params, use_tqdm=False)
    scheduler.schedule = own_schedule  # type: ignore[method-assign]
    return found[2:-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 4, 16])
    args = parser.parse_args()
    engine = CompiledEngine(speculative_config={"method": "suffix"}, enable_prefix_caching=False)
    drafts, source, rows = engine.scheduler.drafts, WrongDrafts(), []
    assert drafts is not None
    start = copy.deepcopy(drafts.costs)
    costs = drafts.costs
    drafts.source, drafts._adapts = source, False
    for batch in args.batch_sizes:
        for temperature in (0.0, 1.0):
            for source.count in (0, 1, 3, 7, 15):
                samples, came = temperature > 0, list[float]()
                seconds_of_steps(engine, batch, temperature)
                for _ in range(args.rounds):
                    came += seconds_of_steps(engine, batch, temperature)
                size = batch, batch * source.count
                device, host = costs.device(*size, samples), costs.host(batch, source.count > 0)
                row = {"batch": batch, "temperature": temperature, "drafts": source.count}
                row |= {
                    "start ms": start.device(*size, samples) * 1e3,
                    "device ms": device * 1e3,
                    "host ms": host * 1e3,
                }
                came_seconds = statistics.median(came)
                row |= {"expected ms": (device + host) * 1e3, "came ms": came_seconds * 1e3}
                rows.append({**row, "ratio": (device + host) / came_seconds})
    print(tables.text_table(rows))


if __name__ == "__main__":
    main()
