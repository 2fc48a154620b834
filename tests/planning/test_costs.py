import json
from pathlib import Path

import pytest

from compiled_llm.planning.costs import MeasuredCosts
from tests.planning.made_up import COSTS


def test_steps_lie_on_lines_between_what_was_measured() -> None:
    assert COSTS.step_seconds(1, 0) == 4e-3
    assert COSTS.step_seconds(20, 100) == pytest.approx(6.5e-3 + 100 * 2e-7)
    assert COSTS.step_seconds(0, 0, 1) == 5e-3, "a smaller step is not cheaper than the smallest"
    assert COSTS.step_seconds(4, 0, 132, 10) == pytest.approx(12.5e-3 + 10e-8)
    assert COSTS.step_seconds(0, 0, 512) == pytest.approx(40e-3), "beyond the largest in proportion"


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    MeasuredCosts([("m", COSTS)], "a machine", 1e9).write(path)
    read = MeasuredCosts.read(path)
    assert (read.models, read.machine, read.memory_bytes) == (("m",), "a machine", 1e9)
    assert read.costs("m", 1, 1) == COSTS
    assert read.costs("m", 2, 1) is None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"step_costs": 9}, "step_costs must be 1, given 9"),
        ({"rows": [{"model": "m"}]}, "KeyError('decode')"),
        ({"rows": None}, "not iterable"),
    ],
)
def test_what_is_no_such_file_is_refused(change: dict, said: str, tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    MeasuredCosts([("m", COSTS)], "", 1e9).write(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ValueError, match="is no file of costs") as error:
        MeasuredCosts.read(path)
    assert said in str(error.value)


def test_points_that_fall_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    MeasuredCosts([("m", COSTS)], "", 1e9).write(path)
    value = json.loads(path.read_text())
    value["rows"][0]["decode"].reverse()
    path.write_text(json.dumps(value))
    with pytest.raises(ValueError, match="decode must be points with rising sizes"):
        MeasuredCosts.read(path)
