"""Estimated steps beside those that an H200 took (docs/results/gpu), and what must hold of any."""

import json
from pathlib import Path

import pytest

from compiled_llm.checkpoint.shapes import SHAPES
from compiled_llm.gpu_step.gpus import GPUS
from compiled_llm.models.config_file import parse_config
from compiled_llm.planning.gpu_costs import GpuCosts, ModelFacts
from compiled_llm.planning.model_facts import facts_of

RESULTS = Path(__file__).parents[2] / "docs/results/gpu"
MODELS = ("qwen3-0.6b", "llama-3.1-8b", "qwen3-30b-a3b")
# File of a whole model's decode -> seconds of the step are in it.
DECODES = ("h200-2026-11-27-b/kernels-0.6b-1", "h200-2026-11-27-b/kernels-8b-1", "h200-2026-11-27-b/kernels-8b-32")
DECODES += ("h200-2026-11-27/kernels-0.6b-32",)


@pytest.fixture(scope="module")
def facts() -> dict[str, ModelFacts]:
    return {name: facts_of(name, parse_config(SHAPES[name])) for name in MODELS}


@pytest.fixture(scope="module")
def costs(facts: dict[str, ModelFacts]) -> GpuCosts:
    return GpuCosts(list(facts.values()), GPUS["h200"])


@pytest.mark.parametrize("name", DECODES)
def test_decodes_take_what_an_h200_measured(name: str, costs: GpuCosts) -> None:
    result = json.loads((RESULTS / f"{name}.json").read_text())["result"]
    rows = result["batch_size"]
    own = costs.costs(result["shape"], 1, 1)
    assert own is not None
    assert own.step_seconds(rows, rows * result["mean_keys"]) * 1e6 == pytest.approx(result["step_us"], rel=0.15)


@pytest.mark.parametrize("name", ["h200-2026-11-27/kernels-8b-1", "h200-2026-11-27/kernels-0.6b-1"])
def test_prompts_take_what_an_h200_measured(name: str, costs: GpuCosts) -> None:
    result = json.loads((RESULTS / f"{name}.json").read_text())["result"]
    own, prompt = costs.costs(result["shape"], 1, 1), result["prompts"][0]
    assert own is not None
    assert prompt["tokens"] == 2048
    assert own.step_seconds(0, 0, 2048, 2048**2 / 2) * 1e6 == pytest.approx(prompt["step_us"], rel=0.25)


def test_the_step_estimator_says_about_the_same_of_experts(costs: GpuCosts) -> None:
    """Which were not measured: ``gpu_step`` goes by the code of each launch."""
    path = RESULTS.parent / "gpu-estimates/now.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    own = costs.costs("qwen3-30b-a3b", 1, 1)
    assert own is not None
    for row in rows:
        if row["model"] == "qwen3-30b-a3b" and row["kv_cache_dtype"] == "auto" and row["bucket"] != "tokens_2048":
            estimated = next(one for one in row["estimates"] if one["gpu"] == "h200" and one["keys"] == 1024)
            count = int(row["bucket"].removeprefix("decode_"))
            assert own.step_seconds(count, 1024 * count) * 1e6 == pytest.approx(estimated["step_us"], rel=0.35)


def test_facts_are_those_of_the_config(facts: dict[str, ModelFacts]) -> None:
    llama, mixture = facts["llama-3.1-8b"], facts["qwen3-30b-a3b"]
    assert llama.weight_bytes == pytest.approx(2 * 8.03e9, rel=0.01)
    assert llama.kv_bytes == {1: 131072, 2: 65536, 4: 32768, 8: 16384}
    assert mixture.kv_bytes[8] == mixture.kv_bytes[4] == 24576, "four KV heads: copies from there on"
    assert (mixture.num_experts, mixture.top_k) == (128, 8)
    assert mixture.bytes_of_step(1) < 0.12 * mixture.weight_bytes
    assert mixture.bytes_of_step(2048) == pytest.approx(mixture.weight_bytes, rel=0.02)


def test_layers_with_a_state_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"lfm2-1\.2b .* has layers with a state or a window"):
        facts_of("lfm2-1.2b", parse_config(SHAPES["lfm2-1.2b"]))


def test_more_ranks_are_faster_and_less_than_in_proportion(costs: GpuCosts) -> None:
    seconds = [costs.costs("llama-3.1-8b", tp, 1).step_seconds(8, 8000) for tp in (1, 2, 4, 8)]  # type: ignore[union-attr]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[0] / seconds[3] < 8
    assert costs.costs("llama-3.1-8b", 16, 1) is None


def test_stages_share_weights_and_the_slowest_has_a_layer_more(costs: GpuCosts) -> None:
    one, eight = costs.costs("qwen3-0.6b", 1, 1), costs.costs("qwen3-0.6b", 1, 8)
    assert one is not None
    assert eight is not None
    assert eight.weight_bytes == one.weight_bytes / 8
    assert eight.slowest_stage == 4 / 28
    assert one.hop_seconds == 0 < eight.hop_seconds


def test_sums_over_ranks_rise_with_their_bytes_and_links_differ(costs: GpuCosts) -> None:
    sizes = [2**n for n in range(8, 30)]
    seconds = [costs.all_reduce_seconds(size, 8) for size in sizes]
    assert seconds == sorted(seconds)
    assert costs.all_reduce_seconds(8 << 20, 8) == pytest.approx(46e-6)
    pcie = GpuCosts(costs.facts, costs.gpu, link="pcie")
    assert pcie.all_reduce_seconds(8 << 20, 8) > 3 * costs.all_reduce_seconds(8 << 20, 8)
