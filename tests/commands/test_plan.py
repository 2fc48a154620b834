"""``compiled-llm plan`` from its flags to its JSON, with costs of a file and with estimated ones."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from compiled_llm.__main__ import main
from compiled_llm.planning.costs import MeasuredCosts
from tests.planning.made_up import COSTS


@pytest.fixture
def costs(tmp_path: Path) -> str:
    path = tmp_path / "costs.json"
    MeasuredCosts([("m", COSTS)], "a machine", 32e9).write(path)
    return str(path)


def test_a_trace_is_served_on_measured_machines(costs: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, result, picture = (tmp_path / name for name in ("trace.jsonl", "plan.json", "plan.png"))
    rows = [{"arrival": n / 20, "prompt_tokens": 50, "output_tokens": 5, "model": f"m-{n % 2 + 1}"} for n in range(60)]
    trace.write_text("\n".join(map(json.dumps, rows)))
    words = f"plan --models m*2 --machines measured:1x2 --costs {costs} --trace {trace} --slo e2el:200 --compare"
    assert main([*words.split(), "--json", str(result), "--picture", str(picture)]) == 0
    found = json.loads(result.read_text())
    assert found["requests"] == 60
    assert sum(row["groups"] for row in found["plan"]["groups"]) == 2
    assert [row["requests"] for row in found["plan"]["models"]] == [30, 30, 60]
    assert found["plan"]["attained"] == found["without pipelines"]["attained"] == 1
    assert picture.read_bytes().startswith(b"\x89PNG")
    out = capsys.readouterr().out
    assert "plan: 100.00% of 60 requests are within the targets" in out
    assert json.loads(out.splitlines()[-1]) == found


def test_requests_are_drawn_and_gpus_estimated(capsys: pytest.CaptureFixture[str]) -> None:
    words = "plan --models tiny --machines h200:1x2 --rate 20 --cv 2 --bursts --seconds 3 --slo scale:9 --no-curves"
    assert main(words.split()) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["plan"]["attained"] > 0.9


def test_a_model_without_costs_is_refused(costs: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = f"plan --models x --machines measured:1x1 --costs {costs} --rate 1 --slo e2el:200"
    with pytest.raises(SystemExit, match="2"):
        main(words.split())
    assert "--models must be of those in --costs, m; given 'x'" in capsys.readouterr().err


def test_help_loads_neither_torch_nor_numpy() -> None:
    code = """
import sys
from compiled_llm.__main__ import main
try:
    main(["plan", "--help"])
except SystemExit as end:
    assert not end.code
assert not {"torch", "numpy"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
