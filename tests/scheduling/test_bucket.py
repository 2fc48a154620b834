"""Buckets: which ones an engine has, and which one a step runs in."""

import dataclasses

from compiled_llm.api.config import EngineLimits
from compiled_llm.scheduling.bucket import buckets_of, choose_bucket
from compiled_llm.scheduling.scheduler_output import SchedulerOutput

LIMITS = EngineLimits(
    max_model_len=32,
    max_num_seqs=3,
    max_num_batched_tokens=16,
    block_size=4,
    decode_bucket_sizes=(1, 4),
    token_bucket_sizes=(8, 16),
    chunked_prefill=True,
)


def chosen(*counts: int, limits: EngineLimits = LIMITS) -> str:
    """The bucket of a step whose requests run so many tokens each."""
    output = SchedulerOutput(
        request_ids=tuple(str(index) for index in range(len(counts))),
        num_scheduled_tokens=counts,
        token_ids=(1,) * sum(counts),
    )
    return choose_bucket(buckets_of(limits), output).name


def test_buckets_of_an_engine() -> None:
    buckets = buckets_of(LIMITS)
    assert [bucket.name for bucket in buckets] == ["decode_1", "decode_4", "tokens_8", "tokens_16"]
    assert [bucket.num_requests for bucket in buckets] == [1, 4, 4, 4]
    assert [bucket.max_query_len for bucket in buckets] == [1, 1, 8, 16]


def test_a_step_runs_in_the_smallest_bucket_that_holds_it() -> None:
    assert chosen(1) == "decode_1"
    assert chosen(1, 1) == "decode_4"
    assert chosen(2) == "tokens_8"
    assert chosen(8) == "tokens_8"
    assert chosen(9) == "tokens_16"


DRAFTING = dataclasses.replace(LIMITS, num_draft_tokens=2)


def test_buckets_with_a_drafter_have_more_rows_and_names_of_their_own() -> None:
    buckets = buckets_of(DRAFTING)
    assert [bucket.name for bucket in buckets] == ["decode_1x3", "decode_4x3", "tokens_8x3", "tokens_16x3"]
    assert [bucket.num_tokens for bucket in buckets] == [3, 12, 8, 16]
    assert [bucket.num_requests for bucket in buckets] == [1, 4, 4, 4]
    assert [bucket.num_rows for bucket in buckets] == [3, 12, 12, 12]
    assert [bucket.max_query_len for bucket in buckets] == [3, 3, 8, 16]


def test_with_a_drafter_a_bucket_has_to_hold_tokens_and_requests() -> None:
    assert chosen(1, limits=DRAFTING) == "decode_1x3"
    assert chosen(3, limits=DRAFTING) == "decode_1x3"
    assert chosen(1, 1, limits=DRAFTING) == "decode_4x3", "two tokens, but two requests"
    assert chosen(3, 1, 3, limits=DRAFTING) == "decode_4x3"
    assert chosen(4, limits=DRAFTING) == "tokens_8x3"
    assert chosen(4, 1, 3, 1, limits=DRAFTING) == "tokens_16x3"
