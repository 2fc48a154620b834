"""``bench step-costs`` finds what steps take, with a clock that says what they take."""

import contextlib
from typing import Any

import numpy as np
import pytest

from compiled_llm import CompiledEngine, SamplingParams
from compiled_llm.bench import step_costs
from compiled_llm.scheduling.scheduler_output import SchedulerOutput
from tests.families import checkpoint


def test_what_keys_and_rows_add_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where prompts need so many steps that the first requests would have ended before the last ones begin."""
    clock, slower = [0.0], 1.0
    sizes: dict[str, Any] = {"bucket_sizes": (2, 8), "token_bucket_sizes": (64,), "max_num_batched_tokens": 64}
    arguments = {"max_model_len": 160, "enforce_eager": True, "progress": "off", "num_kv_blocks": 120, **sizes}
    with CompiledEngine(str(checkpoint("qwen3")), **arguments) as engine:
        launch = engine.runner.launch

        def timed(output: SchedulerOutput) -> Any:
            per_request = zip(output.num_computed_tokens, output.num_scheduled_tokens, strict=True)
            keys = sum(done + 1 for done, count in per_request if count == 1)
            clock[0] += slower * (1.0 + 0.1 * len(output.token_ids) + 0.01 * keys)
            return launch(output)

        monkeypatch.setattr(engine.runner, "launch", timed)
        monkeypatch.setattr(step_costs.time, "perf_counter", lambda: clock[0])
        costs = step_costs.measure(engine, 1, np.random.default_rng(0))
        slower = 3.0
        with contextlib.closing(step_costs.StepTimes(engine, costs)) as times:
            for number in range(4):
                times.add_request(f"{number}", [1 + number] * 20, SamplingParams(max_tokens=9, ignore_eos=True))
            while engine.has_unfinished_requests():
                times.step()
        scales = times.scales()
    assert scales == pytest.approx((3.0, 3.0), rel=0.05)
    assert scales.of(costs).decode_seconds[4] == pytest.approx(3 * costs.decode_seconds[4], rel=0.05)
    assert costs.key_seconds == pytest.approx(0.01, rel=0.05)
    assert [rows for rows, _ in costs.decode] == [1, 2, 3, 5, 8]
    for rows, seconds in costs.decode:
        assert seconds == pytest.approx(1 + 0.1 * rows, rel=0.05)


def test_an_engine_that_has_no_room_for_it_is_refused() -> None:
    arguments = {"max_model_len": 64, "enforce_eager": True, "progress": "off", "bucket_sizes": (2,)}
    refused = pytest.raises(ValueError, match="must be at least 128 tokens to measure steps, given 64 and")
    with CompiledEngine(str(checkpoint("qwen3")), **arguments) as engine, refused:  # type: ignore[arg-type]
        step_costs.measure(engine, 1, np.random.default_rng(0))
