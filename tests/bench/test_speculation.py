"""What the benchmark says of how often drafts are right: beside the share that rejection sampling would accept."""

from typing import Any

import pytest

from compiled_llm import CompiledEngine
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
