"""gpu_step_measured: launches that ran beside the estimates of a step that nobody generated."""

import sys
from pathlib import Path
from typing import Any

import pytest

from compiled_llm.gpu_step.measured import match
from tests.gpu_step.made_up import US, inspection
from tests.scripts.test_gpu_validate import ROOT, load


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    yield load(ROOT / "scripts" / "gpu_step_measured.py")
    for name in ("gpu_step_page", "gpu_step_tables", "bench"):
        sys.modules.pop(name, None)


def test_each_launch_stands_beside_its_estimate(measured: Any) -> None:
    layer = ("write_kernel", "split_kernel", "triton_red_fused_norm_3", "nvjet_tst")
    ran = [{"name": name, "us": 8.0, "gap_us": 0.0} for name in (*4 * layer, "direct_copy_kernel", "unknown_kernel")]
    step = inspection()
    line = measured.beside(step, match(step, {"in_order": ran, "machine": {"gpu": "NVIDIA H200"}}))
    assert [row["name"] for row in line["rows"] if row["in_layer"]] == [
        "rotary_attention: write_kernel", "rotary_attention: split_kernel", "triton_red_fused_norm_3", "mm"
    ]  # fmt: skip
    assert {(row["us"], row["estimate_us"]) for row in line["rows"]} == {(8.0, US)}
    assert line["median_error"] == 0.25
    assert line["unmatched_us"] + sum(8.0 for _ in line["not_run"]) > 0


def test_a_folder_without_results_is_an_error(
    measured: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(sys, "argv", ["gpu_step_measured.py", str(tmp_path)])
    assert measured.main() == 2
    assert "no kernels-*.json" in capsys.readouterr().err
