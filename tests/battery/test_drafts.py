"""Decoding with drafts against plain decoding: tokens, texts, ends and log-probabilities, exactly, in many engines.

Drafts change how many steps a request takes, and nothing else.
"""

from collections import Counter
from typing import Any

import pytest

from compiled_llm import CompiledEngine
from tests.drafted_runs import KINDS, RecordedDrafter, check_equal, serve, work_of

EAGER: dict[str, Any] = {
    "enforce_eager": True, "bucket_sizes": (4,), "block_size": 8, "max_model_len": 96, "max_num_batched_tokens": 24,
    "check_invariants": True, "num_kv_blocks": 14, "progress": "off",
}  # fmt: skip
SWAP: dict[str, Any] = {"preemption_mode": "swap", "swap_space_bytes": 2**24}
ENGINES: dict[str, dict[str, Any]] = {
    "recompute": {"preemption_mode": "recompute"},
    "recompute, overlap": {"preemption_mode": "recompute", "async_scheduling": True},
    "swap": SWAP,
    "swap, overlap": {**SWAP, "async_scheduling": True},
    "seats for some": {**SWAP, "bucket_sizes": (1, 3), "max_num_batched_tokens": 9, "num_kv_blocks": 12},
    "no prefix cache, blocks of 1": {**SWAP, "enable_prefix_caching": False, "block_size": 1, "num_kv_blocks": 110},
    "no chunks": {**SWAP, "enable_chunked_prefill": False, "max_num_batched_tokens": 96},
    "latency target": {"preemption_mode": "auto", "swap_space_bytes": 2**24, "target_itl_ms": 500.0},
    "int8 cache": {**SWAP, "kv_cache_dtype": "int8", "async_scheduling": True},
    "bfloat16": {**SWAP, "dtype": "bfloat16"},
    "compiled": {**SWAP, "enforce_eager": False, "async_scheduling": True, "dtype": "float32"},
    "compiled, bfloat16": {**SWAP, "enforce_eager": False, "dtype": "bfloat16"},
}
CASES = [
    pytest.param("swap, overlap", 3, 2, id="small", marks=pytest.mark.battery),
    *(
        pytest.param(name, num_tokens, 5, id=f"full-{name}-{num_tokens}", marks=pytest.mark.battery)
        for name in ENGINES
        for num_tokens in (1, 3, 7)
    ),
]


@pytest.mark.parametrize(("name", "num_tokens", "most_prompts"), CASES)
def test_the_same_as_plain_decoding(
    name: str, num_tokens: int, most_prompts: int, battery_counts: Counter[str]
) -> None:
    arguments = EAGER | ENGINES[name]
    with CompiledEngine(**arguments) as engine:
        work = work_of(engine, most_prompts)
        plain = serve(engine, work)
        drafter = RecordedDrafter(num_tokens, engine.model_config.vocab_size)
    drafter.record(plain)
    shares = {}
    with CompiledEngine(**arguments, drafter=drafter) as engine:
        for drafter.kind in KINDS:
            before = engine.stats()
            check_equal(work, plain, serve(engine, work))
            stats = engine.stats().since(before)
            shares[drafter.kind] = stats.num_accepted_draft_tokens / stats.num_draft_tokens
        stats = engine.stats()
    assert shares["wrong"] == 0 < shares["half right"] < shares["right"]
    assert stats.num_kv_blocks == EAGER["num_kv_blocks"] or "num_kv_blocks" in ENGINES[name]
    battery_counts["requests"] += stats.num_requests
    battery_counts["drafted"] += stats.num_draft_tokens
    battery_counts["accepted"] += stats.num_accepted_draft_tokens
    battery_counts["preemptions"] += stats.num_preemptions
    assert all(battery_counts.values()), battery_counts
