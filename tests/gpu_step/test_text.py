"""An inspection as it is printed, and measured times beside the estimates."""

import dataclasses

from compiled_llm.gpu_step.amounts import Work
from compiled_llm.gpu_step.measured import Measured, Unmatched
from compiled_llm.gpu_step.text import text_of
from tests.gpu_step.made_up import inspection


def test_estimates_alone() -> None:
    text = text_of(inspection())
    assert "a layer, from its attention to the next: 4 launches" in text
    assert "18 launches in 4 layers, estimated 0.182 ms" in text
    assert "decode_8, bfloat16, 1024 keys" in text
    assert "rotary_attention: split_kernel" in text
    assert "measured" not in text
    assert "links" not in text


def test_what_is_read_over_links_has_a_column() -> None:
    alone = inspection()
    shared = dataclasses.replace(alone.rows[3], work=Work(1000, 500, over_links=2 * 10**6))  # of a layer
    text = text_of(dataclasses.replace(alone, rows=(*alone.rows[:3], shared, *alone.rows[4:])))
    assert "links KB" in text
    assert "read of other GPUs' memory, which the estimate leaves out: 6.00 MB in 3 launches" in text


def test_measured_times_beside_the_estimates() -> None:
    us = (1.0, 12.5, 3.0, 4.0, 5.0, 2.0, 3.0, 4.0, None, 1.0)
    measured = Measured(us, us, (Unmatched("splitKreduce", 4, 20.0),), ("mm",), 90.0, 10.0, "NVIDIA H200")
    text = text_of(inspection(), measured)
    line = next(line for line in text.splitlines() if line.startswith("rotary_attention: write_kernel"))
    assert "1.25" in line.split()  # of the estimated 10 us
    assert "measured us" in text
    assert "measured on NVIDIA H200: 0.090 ms in launches and 0.010 ms between them, 0.55 of the estimate" in text
    assert "were not found: mm" in text
    assert text.splitlines()[-1].split() == ["splitKreduce", "4", "20"]
