"""/metrics: what dashboards made for vLLM ask for."""

from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from compiled_llm import CompiledEngine, EngineStats
from compiled_llm.compiling.report import CompileReport, GraphReport
from compiled_llm.report.limit_seconds import LimitSeconds
from compiled_llm.report.machine_limits import MachineLimits
from compiled_llm.server.metrics import Metrics
from tests.server.conftest import Running

NAMES = {
    *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "cache_config_info"),
    *("prompt_tokens", "generation_tokens", "prefix_cache_queries", "prefix_cache_hits", "num_preemptions"),
    *("request_success", "time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds"),
    *("request_queue_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds"),
    *("request_inference_time_seconds", "request_time_per_output_token_seconds", "request_prompt_tokens"),
    *("request_generation_tokens", "request_params_max_tokens", "request_params_n", "admission_rejections"),
    *("prompt_tokens_cached", "spec_decode_num_drafts", "spec_decode_num_draft_tokens"),
    *("spec_decode_num_accepted_tokens", "spec_decode_num_accepted_tokens_per_pos"),
}


def metrics(running: Running) -> dict[str, float]:
    """The values of all samples by name, those with labels of their own left out."""
    families = list(text_string_to_metric_families(running.http.get("/metrics").text))
    assert {f"vllm:{name}" for name in NAMES} <= {family.name for family in families}
    found = {}
    for family in families:
        for sample in family.samples:
            assert sample.labels["model_name"] == "compiled-llm-demo"
            if sample.name.endswith("_created"):
                continue
            if len(sample.labels) == 2:
                found[sample.name.removeprefix("vllm:")] = sample.value
            elif "finished_reason" in sample.labels:
                found[sample.labels["finished_reason"]] = sample.value
    return found


def test_drafts_by_position() -> None:
    stats = {**dict.fromkeys(EngineStats.__dataclass_fields__, 0), "num_graphs": 0, "num_pending_graphs": 0}
    stats |= {"num_drafts": 9, "num_draft_tokens": 27, "num_accepted_draft_tokens": 12, "draft_seconds": 0.5}
    started: Any = SimpleNamespace(block_size=16, num_kv_blocks=4, max_loras=0)
    text = Metrics("m").text([{**stats, "num_accepted_by_position": [7, 5, 0]}], started).decode()
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    found = {sample.name.removeprefix("vllm:spec_decode_num_"): sample.value for sample in samples}
    assert (found["drafts_total"], found["draft_tokens_total"], found["accepted_tokens_total"]) == (9, 27, 12)
    assert found["compiled_llm:draft_seconds_total"] == 0.5
    by_position = [s for s in samples if s.name == "vllm:spec_decode_num_accepted_tokens_per_pos_total"]
    assert [(s.labels["position"], s.value) for s in by_position] == [("0", 7), ("1", 5), ("2", 0)]


def test_counts_and_latencies(running: Running) -> None:
    before = metrics(running)
    prompt = "def f(x):\n    return " * 3
    for stream in (False, True):
        body = {"prompt": prompt, "max_tokens": 5, "n": 2, "ignore_eos": True, "stream": stream}
        assert running.http.post("/v1/completions", json=body).status_code == 200
    after = metrics(running)
    change = {name: after[name] - before.get(name, 0) for name in after}
    num_prompt = change["request_prompt_tokens_sum"] / 2
    assert num_prompt > 16
    assert change["prompt_tokens_total"] == 2 * num_prompt
    assert change["generation_tokens_total"] == change["request_generation_tokens_sum"] == 2 * 2 * 5
    assert change["length"] == 4
    assert change["prefix_cache_hits_total"] >= change["prompt_tokens_cached_total"] == 16, "a block of the second one"
    for name in ("time_to_first_token", "e2e_request_latency", "request_queue_time", "request_decode_time"):
        assert change[f"{name}_seconds_count"] == 2
        assert change[f"{name}_seconds_sum"] >= 0
    # Those of the stream: at most one for each token but the first. Events that nobody has read yet are joined.
    assert change["inter_token_latency_seconds_count"] <= 2 * 4
    assert after["num_requests_running"] == after["kv_cache_usage_perc"] == 0
    body = {"prompt": prompt, "max_tokens": 64, "ignore_eos": True, "stream": True}  # too many to be joined into one
    assert running.http.post("/v1/completions", json=body).status_code == 200
    of_many = metrics(running)["inter_token_latency_seconds_count"] - after["inter_token_latency_seconds_count"]
    assert 1 <= of_many <= 63


def test_share_of_the_limit_and_state_of_compiling(
    engine: CompiledEngine, running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "_limit_seconds", None)
    before = metrics(running)
    assert not {name for name in before if "limit_seconds" in name or "device_seconds" in name}
    assert before["compiled_llm:graphs"] == before["compiled_llm:graphs_pending"] == 0, "it runs uncompiled"
    limits = MachineLimits("cpu", "bfloat16", 1e12, 1e13, "made up", "2026-01-01T00:00:00+00:00")
    monkeypatch.setattr(engine, "_limit_seconds", LimitSeconds(engine._work, limits))
    reports = [GraphReport(cache, 1, 0, 0, 1.0, cache, 0) for cache in ("hit", "pending", "pending", "miss", "eager")]
    monkeypatch.setattr(engine, "compile_report", lambda: CompileReport(tuple(reports)))
    assert running.http.post("/v1/completions", json={"prompt": "import os", "max_tokens": 8}).status_code == 200
    after = metrics(running)
    assert (after["compiled_llm:graphs"], after["compiled_llm:graphs_pending"]) == (4, 2)
    assert 0 < after["compiled_llm:limit_seconds_total"] < after["compiled_llm:device_seconds_total"]
    assert after["compiled_llm:computed_tokens_total"] > before["compiled_llm:computed_tokens_total"]
    assert after["compiled_llm:padding_tokens_total"] == 0, "a CPU computes none"
