"""A widened model and its heads say what the small ones say."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from compiled_llm import CompiledEngine, SamplingParams
from compiled_llm.bench.speculation import edit_prompts
from compiled_llm.bench.widening import Widening
from compiled_llm.checkpoint.shapes import SHAPES
from tests import demo_mtp

ROOT = Path(__file__).parents[2] / "compiled_llm"
MODEL, DRAFTERS = ROOT / "demo_model", ROOT / "demo_drafters"
SMALL = json.loads((MODEL / "config.json").read_text())
# Twice the channels, heads of twice the channels and twice as many, two layers for one.
LARGE = SMALL | {
    "hidden_size": 512, "head_dim": 128, "num_hidden_layers": 8, "intermediate_size": 800, "num_attention_heads": 8,
    "num_key_value_heads": 4,
}  # fmt: skip


@pytest.fixture(scope="module")
def widening() -> Widening:
    return Widening(SMALL, LARGE, torch.float32)


@pytest.fixture(scope="module")
def widened(widening: Widening, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("widened") / "model"
    widening.model(MODEL, directory)
    return directory


def _served(
    model: Path, temperatures: tuple[float, float], drafting: dict[str, Any] | None = None
) -> tuple[list[Any], Any]:
    """Tokens and log-probabilities of two edits of code, and the engine's counts."""
    config: dict[str, Any] = {"dtype": "float32", "enforce_eager": True, "num_kv_blocks": 64}
    config |= {"bucket_sizes": (2,), "token_bucket_sizes": (64,)}
    with CompiledEngine(str(model), speculative_config=drafting, **config) as engine:
        params = [SamplingParams(temperature=one, max_tokens=24, seed=1, logprobs=0) for one in temperatures]
        outputs = [one.outputs[0] for one in engine.generate(edit_prompts(2), params, use_tqdm=False)]
        return [(one.token_ids, one.cumulative_logprob) for one in outputs], engine.stats()


def test_tokens_are_those_of_the_small_model(widened: Path) -> None:
    (small, _), (large, _) = (_served(model, (0, 1)) for model in (MODEL, widened))
    for (tokens, logprob), (expected, expected_logprob) in zip(large, small, strict=True):
        assert tokens == expected
        assert logprob == pytest.approx(expected_logprob, abs=1e-3)


@pytest.mark.parametrize("method", ["eagle3", "medusa"])
def test_heads_draft_what_they_draft_for_the_small_model(
    widening: Widening, widened: Path, tmp_path: Path, method: str
) -> None:
    widening.head(DRAFTERS / method, tmp_path / "head")
    fields = {"method": method, "adaptive": False}
    counts = [
        _served(model, (1, 1), fields | {"model": str(head)})[1]
        for model, head in ((MODEL, DRAFTERS / method), (widened, tmp_path / "head"))
    ]
    assert counts[0].num_accepted_by_position == counts[1].num_accepted_by_position
    assert counts[0].num_accepted_draft_tokens > 0


def test_a_layer_for_multi_token_prediction_drafts_what_it_drafts_in_the_small_model(tmp_path: Path) -> None:
    with demo_mtp.scripts() as (mtp_layer, _):
        demo_mtp.drawn(mtp_layer, tmp_path / "small")
    widening = Widening(json.loads((tmp_path / "small" / "config.json").read_text()), LARGE, torch.float32)
    widening.model(tmp_path / "small", tmp_path / "large")
    small, large = (demo_mtp.served(tmp_path / one, demo_mtp.DRAFTING, dtype="float32") for one in ("small", "large"))
    assert large == small
    assert len({one.drafts for one in small[1]}) > 8


@pytest.mark.parametrize(
    "changes",
    [
        {"first_k_dense_replace": 4},
        {"use_qk_norm": False},
        {"attention_bias": True},
        {"rope_parameters": {"partial_rotary_factor": 0.5}},
        {"rope_parameters": {"rope_theta": 1e4}},
    ],
)
def test_glm_that_computes_anything_else_than_qwen3_is_refused(changes: dict[str, Any]) -> None:
    glm = {"model_type": "glm4_moe", "first_k_dense_replace": 5, "use_qk_norm": True, "attention_bias": False}
    config = SMALL | glm | {"rope_parameters": {"partial_rotary_factor": 1.0}}
    assert Widening(config, LARGE)
    with pytest.raises(ValueError, match="that computes the same"):
        Widening(config | changes, LARGE)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": "llama"}, "shape of Qwen3"),
        ({"hidden_size": 640}, "hidden_size must be a multiple of the model's 256, given 640"),
        ({"intermediate_size": 512}, "intermediate_size must be at least the model's 768, given 512"),
        ({"num_key_value_heads": 8}, "2 heads must share their keys, as in the model, given 1"),
    ],
)
def test_shapes_without_a_place_for_it_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Widening(SMALL, LARGE | changes)


def test_a_directory_that_is_no_head_is_refused(widening: Widening, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="neither an EAGLE-3 head"):
        widening.head(MODEL, tmp_path / "head")


def test_qwen3_has_a_place_for_the_bundled_model() -> None:
    assert Widening(SMALL, SHAPES["qwen3-0.6b"]).sizes["num_hidden_layers"] == 28
