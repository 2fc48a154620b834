"""B11: requests that run while uncompiled steps give way to compiled ones get, to the bit, what they get uncompiled.

The code of each function is handed over before a random step: so requests have their prompt from the one and their
tokens from the other, in any mix, with chunks, hits, preemptions, grammars, log-probabilities and drafts.
"""

import dataclasses
import random
import time
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any

import pytest

from compiled_llm import CompiledEngine, RequestOutput
from compiled_llm.checkpoint.model_files import DEMO_MODEL
from compiled_llm.scheduling.request import RequestId
from tests.drafted_runs import Work, check_equal, work_of
from tests.families import COMPILED_SIZES


def network(method: str) -> dict[str, Any]:
    """That of the bundled network, which drafts behind each step."""
    model = str(DEMO_MODEL.with_name("demo_drafters") / method)
    return {"method": method, "model": model, "num_speculative_tokens": 3, "adaptive": False}


# name -> (engine arguments, number of drafts).
SWAPPED = {"num_kv_blocks": 8, "preemption_mode": "swap", "swap_space_bytes": 2**22}
ENGINES: dict[str, tuple[dict[str, Any], int]] = {
    "swap": (COMPILED_SIZES | SWAPPED, 0),
    "chunks": ({"bucket_sizes": (1, 8), "max_num_batched_tokens": 12, "num_kv_blocks": 100, "block_size": 8}, 0),
    "recompute-float32": (COMPILED_SIZES | {"dtype": "float32", "num_kv_blocks": 8, "preemption_mode": "recompute"}, 0),
    "int8-cache-drafts": (COMPILED_SIZES | SWAPPED | {"kv_cache_dtype": "int8", "max_num_batched_tokens": 40}, 3),
    "eagle3": (COMPILED_SIZES | SWAPPED | {"speculative_config": network("eagle3")}, 3),
    "medusa": (COMPILED_SIZES | {"num_kv_blocks": 200, "speculative_config": network("medusa")}, 3),
    "draft-model": (COMPILED_SIZES | {"num_kv_blocks": 200, "speculative_config": network("draft_model")}, 3),
    "int4-weights": (COMPILED_SIZES | {"quantization": "int4_w4a8", "num_kv_blocks": 200}, 0),
}


class LastTokens:
    """Drafts the last tokens again, which are right now and then."""

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens

    def propose(self, request_id: RequestId, token_ids: Sequence[int]) -> Sequence[int]:
        return token_ids[-self.num_tokens :]


def held(engine: CompiledEngine) -> deque[Any]:
    """What the engine's builds have finished, all of it, taken away before a step could find it."""
    builds = engine.own_runner.steps._builds
    assert builds is not None
    end = time.monotonic() + 60
    while len(builds.finished) < len(engine.own_runner.steps._all_functions()):
        assert time.monotonic() < end, "graphs are not loaded"
        time.sleep(0.05)
    finished = deque(builds.finished)
    builds.finished.clear()
    return finished


def serve(engine: CompiledEngine, work: Work, rng: random.Random, counts: Counter[str]) -> dict[str, RequestOutput]:
    """The last output of each request. Functions change over before random steps, while requests run."""
    builds, finished = engine.own_runner.steps._builds, held(engine)
    assert builds is not None
    # A report would take what is finished.
    assert all(function.is_pending for function in engine.own_runner.steps._all_functions().values())
    steps = sorted(rng.randint(2, 24) for _ in finished)
    rng.shuffle(finished)
    outputs: dict[str, RequestOutput] = {}
    coming, step = list(enumerate(work)), 0
    while coming or engine.has_unfinished_requests():
        for index, (prompt, params) in coming[:8]:
            engine.add_request(str(index), prompt, params)
        del coming[:8]
        while steps and steps[0] <= step:
            assert engine.has_unfinished_requests(), "all requests have ended before the last function changed over"
            builds.finished.append(finished.popleft())
            counts["running at a change-over"] += len(engine.scheduler.running)
            del steps[0]
        outputs |= {output.request_id: output for output in engine.step()}
        step += 1
    assert not finished
    return outputs


@pytest.mark.parametrize(
    ("name", "num_requests"),
    [pytest.param("swap", 16, id="small-swap", marks=pytest.mark.battery)]
    + [pytest.param(name, 40, id=f"full-{name}", marks=pytest.mark.battery) for name in ENGINES],
)
def test_bits_are_the_same_across_the_change_over(name: str, num_requests: int, battery_counts: Counter[str]) -> None:
    arguments, num_drafts = ENGINES[name]
    rng = random.Random(name)
    drafter = LastTokens(num_drafts) if num_drafts and "speculative_config" not in arguments else None
    with CompiledEngine(**arguments, enforce_eager=True, drafter=drafter) as engine:
        kinds = [(prompt, dataclasses.replace(params, max_tokens=64)) for prompt, params in work_of(engine)]
        work = [rng.choice(kinds) for _ in range(num_requests)]
        for index, (prompt, params) in enumerate(work):
            engine.add_request(str(index), prompt, params)
        expected: dict[str, RequestOutput] = {}
        while engine.has_unfinished_requests():
            expected |= {output.request_id: output for output in engine.step()}
    CompiledEngine(**arguments, drafter=drafter).close()  # leaves its graphs on disk
    with CompiledEngine(**arguments, wait_for_compile=False, check_invariants=True, drafter=drafter) as engine:
        check_equal(work, expected, serve(engine, work, rng, battery_counts))
        report, stats = engine.compile_report(), engine.stats()
    assert (report.graphs, report.graph_breaks, report.recompiles) == (len(report.reports), 0, 0)
    assert all(one.took_over is not None for one in report.reports)
    battery_counts.update(
        requests=num_requests,
        preemptions=stats.num_preemptions,
        hits=stats.prefix_hit_tokens,
        accepted_drafts=stats.num_accepted_draft_tokens,
    )
    assert battery_counts["running at a change-over"] >= 5
    assert stats.prefix_hit_tokens > 0
    assert (stats.num_preemptions > 0) >= ("preemption_mode" in arguments)
    assert (stats.num_accepted_draft_tokens > 0) == (num_drafts > 0)
