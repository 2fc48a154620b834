"""The picture of a layer."""

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from compiled_llm.gpu_step.measured import Measured
from tests.gpu_step.made_up import inspection

pytest.importorskip("matplotlib")


@pytest.fixture(autouse=True)
def _text_stays_text(monkeypatch: pytest.MonkeyPatch) -> None:
    import matplotlib

    monkeypatch.setitem(matplotlib.rcParams, "svg.fonttype", "none")


def texts(path: Path) -> str:
    return " ".join(text.strip() for text in ElementTree.parse(path).getroot().itertext() if text.strip())


def test_the_picture_names_the_launches_of_a_layer_and_the_step(tmp_path: Path) -> None:
    from compiled_llm.gpu_step.picture import draw

    draw(inspection(), tmp_path / "step.svg")
    text = texts(tmp_path / "step.svg")
    names = ("rotary_attention: write_kernel", "rotary_attention: split_kernel", "triton_red_fused_norm_3", "mm")
    for name in (*names, "memory", "issue", "matrix", "chain", "start and end", "joining", "gap to the next"):
        assert name in text
    assert "NVIDIA H100 80GB HBM3, decode_8, 1024 keys a request: 0.182 ms estimated" in text
    assert "a layer: 4 launches, 40.4 us; 4 such layers are 89% of the step" in text
    assert "measured" not in text


def test_what_was_measured_is_named(tmp_path: Path) -> None:
    from compiled_llm.gpu_step.picture import draw

    us = (1.0, 2.0, 3.0, 4.0, 5.0, None, 3.0, 4.0, 5.0, 1.0)
    draw(inspection(), tmp_path / "step.svg", Measured(us, us, (), (), 40.0, 4.0, "NVIDIA H200"))
    assert "measured on NVIDIA H200" in texts(tmp_path / "step.svg")
