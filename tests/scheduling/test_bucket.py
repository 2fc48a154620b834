"""Buckets: which ones an engine has, and which one a step runs in."""

from compiled_llm.config import EngineLimits
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


def chosen(*counts: int) -> str:
    """The bucket of a step whose requests run so many tokens each."""
    output = SchedulerOutput(
        request_ids=tuple(str(index) for index in range(len(counts))),
        num_scheduled_tokens=counts,
        token_ids=(1,) * sum(counts),
    )
    return choose_bucket(buckets_of(LIMITS), output).name


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
