"""What the benchmark says of how often drafts are right: beside the share that rejection sampling would accept."""

import json
from typing import Any

import pytest

from compiled_llm import CompiledEngine
from compiled_llm.bench import speculation
from compiled_llm.bench.harness import Row
from compiled_llm.bench.speculation import acceptance, edit_prompts
from compiled_llm.checkpoint.model_files import DEMO_MODEL

SIZES: dict[str, Any] = {
    "bucket_sizes": (2,), "token_bucket_sizes": (256,), "max_model_len": 512, "num_kv_blocks": 64, "progress": "off",
    "enforce_eager": True, "dtype": "float32", "num_threads": 1, "model": str(DEMO_MODEL),
}  # fmt: skip


def measured(method: str, temperature: float) -> dict[str, Any]:
    drafting = DEMO_MODEL if method == "itself" else DEMO_MODEL.parent / "demo_drafters" / method
    config = {"method": "draft_model" if method == "itself" else method, "model": str(drafting), "adaptive": False}
    with CompiledEngine(**SIZES, speculative_config=config) as engine:
        return acceptance(engine, edit_prompts(2), temperature, num_tokens=16)


def test_a_model_that_drafts_for_itself_is_right_as_often_as_can_be() -> None:
    found = measured("itself", 1.0)
    assert found["drafts"] > 20
    assert found["accepted"] == 1.0
    assert found["optimum"] == pytest.approx(1.0, abs=1e-4)


def test_the_optimum_is_the_share_that_distributions_have_in_common() -> None:
    """At temperature 0 that is 1 or 0: whether both have the same likeliest token, and so whether a draft is right."""
    greedy, sampled = measured("eagle3", 0.0), measured("eagle3", 1.0)
    assert greedy["accepted"] == pytest.approx(greedy["optimum"])
    assert 0.2 < sampled["accepted"] < 1.0
    assert 0.2 < sampled["optimum"] < 1.0
    assert abs(sampled["accepted"] - sampled["optimum"]) < 0.25


@pytest.mark.battery
def test_processes_have_engines_in_other_orders_and_a_second_one_without_a_method(
    capsys: pytest.CaptureFixture,
) -> None:
    words = f"--model {DEMO_MODEL} --enforce-eager --bucket-sizes 1 --batch-sizes 1 --rounds 1 --methods ngram"
    assert speculation.main("x", [*words.split(), "--num-tokens", "8", "--processes", "3"]) == 0
    (runs,) = json.loads(capsys.readouterr().out.splitlines()[-1])["runs"].values()
    assert list(runs) == ["none", "ngram", "none again"]
    assert runs["none"]["ratios"] == [1.0, 1.0, 1.0]
    for row in runs.values():
        assert len(row["ratios"]) == 3
        assert row["lowest"] <= row["ratio"] <= row["highest"]
    assert runs["none again"]["ratios"] != runs["none"]["ratios"]


def test_groups_are_served_one_after_another() -> None:
    params = speculation.SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    with CompiledEngine(**SIZES) as engine:
        served = speculation.Served(engine)
        prompts, before = edit_prompts(4), engine.stats()
        assert len(set(prompts)) == 4
        assert served.run([prompts[:2], prompts[2:]], params) > 0.0
        assert engine.stats().since(before).num_requests == 4
        assert served.tokens == [list(one.outputs[0].token_ids) for one in engine.generate(prompts, params)]


def test_rows_of_processes_are_joined_by_what_they_are_of() -> None:
    def rows(number: int, order: list[str]) -> list[Row]:
        figures = dict.fromkeys(("accepted_share", "accepted_length", "draft_us"), 0.0)
        return [
            {"batch": 1, "temperature": 0.5, "method": name, "tokens_per_second": 10.0 * number, **figures}
            | {"ratio": 1.0 if name == "none" else ratio + number}
            for name, ratio in zip(order, (2.0, 3.0), strict=True)
        ]

    found = [rows(1, ["none", "ngram"]), rows(2, ["ngram", "none"]), rows(4, ["ngram", "none"])]
    plain, ngram = speculation.joined(found, ["none", "ngram"])
    assert (plain["method"], plain["ratio"], plain["tokens_per_second"]) == ("none", 1.0, 20.0)
    assert (ngram["ratios"], ngram["ratio"]) == ([4.0, 4.0, 6.0], 4.0)
    assert (ngram["lowest"], ngram["highest"]) == (4.0, 6.0)
