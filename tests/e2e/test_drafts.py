"""Drafts change how many steps a request takes, and nothing else: compared with plain decoding, exactly.

The whole of it is in tests/battery/test_drafts.py.
"""

from typing import Any

import pytest

from compiled_llm import CompiledEngine
from tests.drafting import KINDS, RecordedDrafter, check_equal, serve, work_of
from tests.drawn import marked

EAGER: dict[str, Any] = {
    "enforce_eager": True,
    "bucket_sizes": (4,),
    "block_size": 8,
    "max_model_len": 96,
    "max_num_batched_tokens": 24,
    "check_invariants": True,
    "num_kv_blocks": 14,
    "progress": "off",
}
ENGINES: dict[str, dict[str, Any]] = {
    "chunks, recompute": {"preemption_mode": "recompute"},
    "chunks, swap, overlap": {"preemption_mode": "swap", "swap_space_bytes": 2**24, "async_scheduling": True},
}


@pytest.mark.parametrize("name", marked(ENGINES, ("chunks, swap, overlap",)))
def test_the_same_as_plain_decoding(name: str) -> None:
    arguments = EAGER | ENGINES[name]
    with CompiledEngine(**arguments) as engine:
        work = work_of(engine, most_prompts=2)
        plain = serve(engine, work)
        vocab_size, preemptions = engine.model_config.vocab_size, engine.stats().num_preemptions
    assert preemptions > 0
    drafter = RecordedDrafter(3, vocab_size)
    drafter.record(plain)
    with CompiledEngine(**arguments, drafter=drafter) as engine:
        for drafter.kind in KINDS:
            before = engine.stats()
            check_equal(work, plain, serve(engine, work))
            stats = engine.stats().since(before)
            share = stats.num_accepted_draft_tokens / stats.num_draft_tokens
            assert {"right": share > 0.7, "wrong": share == 0}.get(drafter.kind, 0.2 < share < 0.7), share
        assert engine.stats().num_preemptions > 0
        assert engine.stats().prefix_hit_tokens > 0
