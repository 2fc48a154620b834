"""The summary of an offline run: what it says of the machine's limits."""

import dataclasses
import types

import pytest

from compiled_llm.offline.summary import of_the_limit, print_summary
from compiled_llm.report.machine_limits import MachineLimits

LIMITS = MachineLimits("cpu", "bfloat16", 3.15e10, 4e9, "amx", "2026-01-01T00:00:00+00:00", 0.02, 0.04)


@pytest.mark.parametrize("note", ["", "measured again, because prefill came to 218% of the limit"])
@pytest.mark.parametrize(
    ("doubt", "steadiness"),
    [("", "steady: tries within 2% and 4%"), ("busy", "NOT STEADY (busy): measured again at the next start")],
)
def test_it_says_how_large_the_limits_are_since_when_and_how_steady(note: str, doubt: str, steadiness: str) -> None:
    phase = types.SimpleNamespace(name="prefill", limit_share=0.5, bytes_per_second=2e6, flops_per_second=2e9)
    report = types.SimpleNamespace(limits=dataclasses.replace(LIMITS, doubt=doubt), limits_note=note, phases=(phase,))
    text = of_the_limit(report)
    assert text == (
        "prefill 50% (0.00200 GB/s, 0.00200 TFLOP/s) of 31.5 GB/s, 0.00400 TFLOP/s in bfloat16 (amx), "
        f"measured 2026-01-01T00:00:00+00:00, {steadiness}" + (f"; {note}" if note else "")
    )
    assert "0.00 " not in text


def test_values_stand_below_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    print_summary({"rows": "3", "prefix cache (0)": "none", "prefix cache (10)": "none"})
    assert capsys.readouterr().out == (
        "\nSummary\n  rows              3\n  prefix cache (0)  none\n  prefix cache (10) none\n"
    )
    print_summary({"rows": "3"})
    assert capsys.readouterr().out == "\nSummary\n  rows         3\n"
