"""What a model does for drafts is seen once: replays with that count what an engine counts that drafts by a model."""

import dataclasses
import random
from collections.abc import Mapping
from typing import Any

import pytest

from compiled_llm import CompiledEngine, SamplingParams
from compiled_llm.api.speculative_config import SpeculativeConfig
from compiled_llm.checkpoint.model_files import DEMO_MODEL
from compiled_llm.tuning import draft_recording
from compiled_llm.tuning.draft_replay import KnownDrafts, KnownRequest, replay

_CODE = (
    "def read_rows(path, separator):\n    with open(path) as file:\n        rows = [line.split(separator) for line in"
    " file]\n    return rows\n\n\ndef read_rows(path, separator):\n    with open(path)"
)
_DRAFTERS = DEMO_MODEL.parent / "demo_drafters"


def engine_of(config: Mapping[str, Any], **others: Any) -> CompiledEngine:
    values: dict[str, Any] = {"bucket_sizes": (1, 4), "max_num_seqs": 3, "max_num_batched_tokens": 48, **others}
    return CompiledEngine(
        enforce_eager=True, enable_prefix_caching=False, speculative_config=dict(config), progress="off", **values
    )


def config_of(method: str, **fields: Any) -> dict[str, Any]:
    model = {"model": str(_DRAFTERS / method)} if (_DRAFTERS / method).is_dir() else {}
    return {"method": method, **model, **fields}


@pytest.mark.parametrize(
    "config",
    [
        config_of("lookahead", num_speculative_tokens=5),
        config_of("eagle3"),
        *(
            pytest.param(config, marks=pytest.mark.battery)
            for config in (
                config_of("draft_model"),
                config_of("medusa"),
                config_of("layer_skip"),
                config_of("draft_model", speculative_token_tree="auto", num_speculative_tokens=7),
                config_of("medusa", speculative_token_tree="auto", num_speculative_tokens=7),
            )
        ),
    ],
    ids=lambda config: config["method"] + " tree" * ("speculative_token_tree" in config),
)
def test_counts_are_those_of_an_engine(config: Mapping[str, Any]) -> None:
    """Greedy requests and others that come and go beside each other, with prompts in chunks; one ends by a stop."""
    wanted = SpeculativeConfig(**{**config, "adaptive": False})
    rng = random.Random(4)
    prompts = [_CODE[start : start + rng.randint(8, 240)] for start in range(0, 70, 10)]
    params = [
        SamplingParams(temperature=0.4 * (number % 3), max_tokens=rng.randint(2, 30), ignore_eos=True, seed=number)
        for number in range(len(prompts))
    ]
    with engine_of({**config, "adaptive": False}) as engine:
        plain = engine.generate(prompts, params, use_tqdm=False)
        tokens = plain[1].outputs[0].token_ids
        params[1] = dataclasses.replace(params[1], stop_token_ids=(tokens[len(tokens) // 2],))
        before = engine.stats()
        outputs = engine.generate(prompts, params, use_tqdm=False)
        stats, limits = engine.stats().since(before), engine.scheduler.limits
        requests = [
            KnownRequest(out.prompt_token_ids, one.token_ids, one.finish_reason == "length", own, own.seed or 0)
            for out, own in zip(outputs, params, strict=True)
            for one in out.outputs
        ]
        known = draft_recording.record(engine, wanted, requests)
    assert known.num_again == known.num_tokens == sum(len(one.output_token_ids) for one in requests)
    known = dataclasses.replace(known, seconds={1: 0.001}, reading_seconds=0.0001)
    found = replay(requests, limits, wanted, None, known)
    assert found.num_drafts == stats.num_drafts > 10
    assert found.num_draft_tokens == stats.num_draft_tokens
    assert found.num_accepted_by_position == stats.num_accepted_by_position
    assert found.num_accepted == stats.num_accepted_draft_tokens > 3
    if wanted.method != "lookahead":
        num_read = sum(len(one.prompt_token_ids) for one in requests)
        assert found.draft_seconds > 0.001 * 10 + 0.0001 * num_read
