"""What comes from host memory beside a step: where its compiled code has it, and how long the step waits for it."""

import dataclasses
import json
import subprocess
import sys
from typing import Any

import pytest

from compiled_llm.gpu_step.launches import Transfer
from compiled_llm.gpu_step.text import text_of
from compiled_llm.gpu_step.transfers import BUS_SHARE, timeline
from tests.gpu_step.made_up import LAUNCHES, US, inspection

BUS = 1 / BUS_SHARE  # of which a byte takes a second


def test_copies_share_a_bus_and_run_beside_launches() -> None:
    """Five launches of 10 s; two copies begin with the first, a third when the second launch has ended."""
    transfers = [
        Transfer(0, 1, 15),
        Transfer(0, 2, 20),
        Transfer(1, 1),
        Transfer(2, 1, 30),
        Transfer(3, 2),
        Transfer(4, 1),
    ]
    found = timeline([10.0] * 5, transfers, BUS)
    # The first launch ends at 10 and waits to 15; the second to 25, the third to 35, where the second copy is there;
    # the fourth to 45, where the third has 20 to go.
    assert found == pytest.approx((3, 65, 65.0, 5.0 + 20.0, 75.0))
    assert timeline([10.0] * 5, [], BUS) == (0, 0, 0.0, 0.0, 50.0)
    assert timeline([10.0] * 5, [Transfer(0, 1, 15), Transfer(3, 1)], BUS).waiting_seconds == 0


def test_the_table_says_it() -> None:
    made = inspection()
    step = made.step._replace(layers=(None,) * 4)  # type: ignore[arg-type]
    size = int(made.gpu.bus * BUS_SHARE * 1e-3)  # 1 ms
    made = dataclasses.replace(made, step=step, transfers=(Transfer(0, 1, size), Transfer(len(LAUNCHES), 1)))
    text = text_of(made)
    assert f"from host memory: {size / 2**20:,.1f} MiB in 1 copies beside the launches" in text
    assert "At 51 GB/s (80% of the data sheet's, assumed) they take 1.000 ms" in text
    assert made.timeline.waiting_seconds == pytest.approx(1e-3 - len(LAUNCHES) * (US / 1e6 + 1e-7))
    assert made.as_json()["host_bytes"] == size
    assert "from host memory" not in text_of(inspection())


CASES = {
    "a decode": ("qwen3-0.6b", "decode_8", "0.01", "6"),
    "a request alone": ("qwen3-0.6b", "decode_1", "0.01", "6"),
    "a large decode": ("qwen3-0.6b", "decode_256", "0.01", "6"),
    "a chunk": ("qwen3-0.6b", "tokens_2048", "0.01", "6"),
    "experts": ("qwen3-30b-a3b", "decode_8", "0.01", "6"),
    "states": ("qwen3.5-0.8b", "decode_8", "0.01", "8"),
}


@pytest.mark.battery
@pytest.mark.parametrize("case", CASES)
def test_a_compiled_step_has_its_copies_where_they_hide(case: str) -> None:
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "tests.gpu_step.offloaded_steps", *CASES[case]]
    run = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr[-3000:]
    found: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    assert found["graphs"] == [1, 0]
    launches, plain = found["launches"]
    assert sorted(launches) == sorted(plain), "no launch is added, and no copy on the device"
    assert not found["faults"]
    assert all(found["planted"]), "a check that cannot fail"
    assert not found["programmatic"]
    assert not found["skip_reasons"]
    assert not found["dynamic_inputs"]
    first, wait = found["first"]
    assert first <= 4, "what comes first comes as the step begins"
    # Three of the layers: a wait stands before each, and the first is not the model's first.
    assert len(found["waits"]) == 3
    assert wait > first + 4, "else it would be waited for where it begins"
    assert len(found["places"]) == 2, "and the third begins when the first has been computed"
    assert found["waits"][0] < found["places"][1] < found["waits"][2]
