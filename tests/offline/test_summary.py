"""The summary of an offline run: short, in plain words, and what it says of the machine's limits."""

import dataclasses
import types

import pytest

from compiled_llm import CompiledEngine, SamplingParams
from compiled_llm.offline.progress import RunProgress
from compiled_llm.offline.summary import detailed_rows, efficiency, engine_rows, one_of_many, print_summary, run_rows
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
    text = efficiency(report)
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


def test_it_has_ten_lines_at_most_and_more_where_details_are_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    with CompiledEngine(enforce_eager=True, num_kv_blocks=40, progress="off") as engine:
        engine.generate("import os", SamplingParams(max_tokens=4), use_tqdm=False)
        report = dataclasses.replace(engine.report(measure_limits=False), limits=LIMITS)
        unknown = tuple(dataclasses.replace(phase, limit_seconds=None) for phase in report.phases)
        rows = engine_rows(engine, dataclasses.replace(report, phases=unknown), 1.5)
        phases = tuple(dataclasses.replace(phase, limit_seconds=phase.seconds / 2) for phase in report.phases)
        measured = engine_rows(engine, dataclasses.replace(report, phases=phases), 1.5)
        details = detailed_rows(engine, dataclasses.replace(report, limits=None), 1.5)
        unserved = engine_rows(engine, dataclasses.replace(report, latencies=dict.fromkeys(report.latencies)), 1.5)
    progress = RunProgress(rows=3, failed=1, resumed=2, prompt_tokens=4000, cached_tokens=1000, output_tokens=5000)
    progress.seconds = 2.0
    assert run_rows(progress, "temperature=0") == {
        "rows": "3 in 2.00 s, 1.50 a second, 1 failed; 2 were there before",
        "tokens": "4,000 of prompts, 1,000 of them found in the prefix cache; 5,000 generated, 2,500 a second",
        "sampling": "temperature=0",
    }
    assert "efficiency" not in rows, "what is not known is left out"
    assert measured["efficiency"] == "decode 50%, prefill 50% of what this machine could do at most"
    assert rows["latency"].startswith("first token after ")
    assert ", then one every " in rows["latency"]
    assert unserved["latency"] == "no token was generated"
    assert rows["KV cache"] == "bfloat16, 2048 bytes a token; a pool of 1.3 MiB, at most 2.5% of it in use"
    print_summary({**run_rows(progress, "temperature=0"), "order": "as it was", **measured})
    assert len(capsys.readouterr().out.strip().splitlines()) == 10
    assert one_of_many({"latency": "low", "memory": "little"}) == {"engine": "latency low; memory little"}
    assert len(details) > len(measured)
    assert details["efficiency"].endswith("--report DIR measures them")
