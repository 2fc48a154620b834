"""What adapters were used for: counts by name, shares of steps, latencies; in the report, its JSON and its page."""

from pathlib import Path

import pytest

from compiled_llm import CompiledEngine, LoRARequest, SamplingParams
from compiled_llm.report import adapter_use
from compiled_llm.report.adapter_use import OTHERS, AdapterUse
from compiled_llm.scheduling.request import Request, RequestId
from tests.adapters.made import linear_modules, write_adapter
from tests.families import checkpoint, transformers_model


def request(name: str) -> Request:
    return Request(RequestId("r"), [1, 2], SamplingParams(), 0, frozenset(), 9, 0.0, adapter_name=name)


def test_a_steps_time_is_shared_out_by_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_use, "_MOST_NAMES", 2)
    use = AdapterUse()
    requests = [request(name) for name in ("a", "", "b", "c")]
    use.add_step(requests, [3, 1, 2, 4], 1.0)
    use.add_step(requests[:1], [1], 0.5)
    monkeypatch.setattr(adapter_use, "_Use", None)  # making one takes longer than all else, and each has its own
    use.add_step(requests, [0, 0, 0, 0], 0.0)
    use.add_request(requests[0], 0.25, None)
    first, second, third = use.reports()
    assert [(one.name, round(one.seconds, 6)) for one in (first, second, third)] == [
        ("a", 0.8),
        (OTHERS, 0.6),
        ("", 0.1),
    ]
    assert sum(one.share for one in use.reports()) == pytest.approx(1)
    assert (first.num_requests, first.num_prompt_tokens, first.tpot) == (1, 2, None)
    assert first.ttft is not None
    assert first.ttft["p50"] == 0.25


def test_the_report_has_each_adapter(tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "a", linear_modules(transformers_model("qwen3")))
    with CompiledEngine(
        str(checkpoint("qwen3")), enforce_eager=True, progress="off", bucket_sizes=(4,), token_bucket_sizes=(32,),
        num_kv_blocks=32, max_model_len=64, enable_lora=True, max_loras=1,
    ) as engine:  # fmt: skip
        prompts = [{"prompt_token_ids": [5, 6, 7]}] * 3
        params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
        adapter = LoRARequest("<a>", str(path))
        engine.generate(prompts, params, lora_request=[adapter, None, adapter], use_tqdm=False)
        engine.beam_search(prompts[:1], 2, 2, ignore_eos=True, lora_request=adapter)
        report = engine.report(measure_limits=False)
    first, second = report.adapters
    assert (first.name, second.name) == ("<a>", "")
    assert (first.num_requests, first.num_output_tokens, second.num_output_tokens) == (2, 12, 6)
    assert first.seconds + second.seconds == pytest.approx(sum(phase.seconds for phase in report.phases))
    assert "  adapters" in repr(report)
    assert report.to_dict()["adapters"][0]["ttft"]["count"] == 2
    assert "<td>&lt;a&gt;</td><td>2</td><td>6</td><td>12</td>" in report.page()
