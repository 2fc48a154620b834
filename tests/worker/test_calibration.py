"""What the start measures for the choice of drafts."""

import math

from compiled_llm import CompiledEngine
from compiled_llm.scheduling.bucket import buckets_of
from compiled_llm.system.progress import StartProgress
from compiled_llm.worker.calibration import measure_buckets
from compiled_llm.worker.runner import ModelRunner


def test_decodes_of_all_sizes_have_seconds_and_sampling_has_its_own() -> None:
    sizes = {"bucket_sizes": (1, 2), "max_model_len": 64, "num_kv_blocks": 20, "progress": "off"}
    config = {"method": "ngram", "num_speculative_tokens": 3}
    with CompiledEngine(**sizes, enforce_eager=True, speculative_config=config) as engine:
        facts, limits = engine.runner.facts, engine.runner.limits
        assert engine.scheduler.drafts is not None
        costs = engine.scheduler.drafts.costs
    decodes, sampling = dict(facts.decode_seconds), dict(facts.sampling_seconds)
    buckets = {(bucket.num_requests, bucket.num_tokens) for bucket in buckets_of(limits) if bucket.kind == "decode"}
    assert buckets == {(1, 1), (1, 2), (1, 4), (2, 2), (2, 4), (2, 8)} == set(decodes) == set(sampling)
    for (requests, tokens), seconds in decodes.items():
        assert 0 < seconds <= decodes[requests, requests] * tokens / requests, "in proportion to tokens at most"
        assert sampling[requests, tokens] > 0
        assert costs.measured[requests, tokens] == seconds
    assert 0 < costs.device(1, 0, samples=False) < costs.device(1, 0, samples=True) <= decodes[1, 1] + sampling[1, 1]


def test_a_bucket_with_room_for_more_requests_than_may_run_is_measured() -> None:
    """A step on a CPU has no padding: so its seconds are those of the requests that may run."""
    sizes = {"bucket_sizes": (1, 4), "max_num_seqs": 3, "max_model_len": 64, "num_kv_blocks": 20, "progress": "off"}
    config = {"method": "ngram", "num_speculative_tokens": 1}
    with CompiledEngine(**sizes, enforce_eager=True, speculative_config=config) as engine:
        facts = engine.runner.facts
        assert engine.scheduler.drafts is not None
        costs = engine.scheduler.drafts.costs
    decodes = dict(facts.decode_seconds)
    assert set(decodes) == {(1, 1), (1, 2), (3, 3), (3, 6)} == set(dict(facts.sampling_seconds))
    assert min(decodes.values()) > 0
    assert 0 < costs.device(3, 3, samples=True) < math.inf, "all of them with all drafts"


def test_ranks_agree_after_which_bucket_none_is_measured() -> None:
    """One that went on by itself would wait for the others."""
    sizes = {"bucket_sizes": (1,), "token_bucket_sizes": (8, 16, 32), "max_model_len": 32, "num_kv_blocks": 20}
    with CompiledEngine(**sizes, enforce_eager=True, progress="off") as engine:
        runner, of_all = engine.runner, iter([0.1, 0.7, 0.1])
        assert isinstance(runner, ModelRunner)
        found = measure_buckets(
            runner.steps, runner.limits, runner.facts, StartProgress("off"), 0.5, lambda seconds: next(of_all)
        )
    assert found == {8: 0.1, 16: 0.7}
