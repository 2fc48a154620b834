"""Buckets: which ones an engine has, and which one a step runs in."""

import dataclasses

from compiled_llm.api.config import EngineLimits
from compiled_llm.scheduling.bucket import Bucket, buckets_of, choose_bucket, own_sizes
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


DRAFTING = LIMITS.with_drafts(3, one_graph=True)
ON_GPU = LIMITS.with_drafts(3, one_graph=False)


def test_where_one_graph_serves_all_there_is_a_bucket_for_every_doubling_of_tokens() -> None:
    buckets = buckets_of(DRAFTING)
    names = ["decode_1", "decode_1x2", "decode_1x4", "decode_4", "decode_4x2", "decode_4x4", "tokens_8", "tokens_16"]
    assert [bucket.name for bucket in buckets] == names
    assert [bucket.num_tokens for bucket in buckets] == [1, 2, 4, 4, 8, 16, 8, 16]
    assert [bucket.num_requests for bucket in buckets] == [1, 1, 1, 4, 4, 4, 4, 4]
    assert [bucket.num_rows for bucket in buckets] == [1, 2, 4, 4, 8, 16, 4, 4]
    assert [bucket.max_query_len for bucket in buckets] == [4, 4, 4, 4, 4, 4, 8, 16]
    assert LIMITS.with_drafts(15, one_graph=True).draft_lens == (1, 2, 4, 8, 16)
    assert LIMITS.with_drafts(6, one_graph=True).draft_lens == (1, 2, 4, 7)
    assert LIMITS.with_drafts(0, one_graph=True).draft_lens == (1,)


def test_trees_of_many_nodes_do_not_make_every_bucket_so_large() -> None:
    """One request may have 63 drafts, or each of the most requests 15."""
    for one_graph, of_four in ((True, (4, 8, 16, 32, 64)), (False, (4, 64))):
        limits = LIMITS.with_drafts(63, one_graph=one_graph)
        assert limits.decode_tokens(1)[-1] == limits.most_decode_tokens == 64
        assert limits.decode_tokens(4) == of_four
        assert {bucket.max_query_len for bucket in buckets_of(limits) if bucket.num_tokens == 64} == {64}


def test_the_largest_bucket_holds_the_most_tokens_of_a_step() -> None:
    """Whatever ``DraftPlanner.room`` lets a step have, though no number of requests divides the drafts."""
    for sizes in ((1,), (1, 2), (2,), (1, 3), (3, 5), (4,)):
        sized = dataclasses.replace(LIMITS, decode_bucket_sizes=sizes)
        for count in range(64):
            for one_graph in (True, False):
                limits = sized.with_drafts(count, one_graph=one_graph)
                most = limits.most_decode_tokens
                assert limits.decode_tokens(sizes[-1])[-1] == most >= 1 + count, (sizes, count)
                assert most == (1 + count) * sizes[-1] or count > 15


def test_on_a_gpu_there_is_one_bucket_without_drafts_and_one_with_all() -> None:
    buckets = buckets_of(ON_GPU)
    assert [bucket.name for bucket in buckets] == [
        *("decode_1", "decode_1x4", "decode_4", "decode_4x4", "tokens_8", "tokens_16")
    ]
    assert [bucket.max_query_len for bucket in buckets] == [1, 4, 1, 4, 8, 16]
    assert [bucket.num_rows for bucket in buckets] == [1, 4, 4, 16, 4, 4]
    assert LIMITS.with_drafts(0, one_graph=False).draft_lens == (1,)


def test_with_drafts_a_bucket_has_to_hold_tokens_and_requests() -> None:
    assert chosen(1, limits=DRAFTING) == "decode_1"
    assert chosen(2, limits=DRAFTING) == "decode_1x2"
    assert chosen(3, limits=DRAFTING) == "decode_1x4"
    assert chosen(1, 1, limits=DRAFTING) == "decode_4"
    assert chosen(3, 1, limits=DRAFTING) == "decode_4", "in the place of requests that are missing"
    assert chosen(3, 1, 3, limits=DRAFTING) == "decode_4x2"
    assert chosen(5, limits=DRAFTING) == "tokens_8"
    assert chosen(5, 1, 3, 1, limits=DRAFTING) == "tokens_16"
    assert [chosen(*counts, limits=ON_GPU) for counts in ((1,), (2,), (1, 1), (2, 1))] == [
        *("decode_1", "decode_1x4", "decode_4", "decode_4x4")
    ]


def test_a_bucket_has_to_hold_the_logits_rows() -> None:
    output = SchedulerOutput(("a", "b"), (6, 3), (0, 5), (1, 3), (-1, -1), (0,) * 9)
    assert choose_bucket(buckets_of(DRAFTING), output).name == "tokens_16"
    assert output.num_rows == 4


def test_where_steps_have_their_own_sizes_those_with_drafts_have_four_a_power_of_two() -> None:
    bucket = Bucket("decode", 36, 4, query_len=9)
    found = [own_sizes(bucket, count, 1, count)[0] for count in range(2, 37)]
    assert list(dict.fromkeys(found)) == [2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 36]
    assert all(size >= count for count, size in enumerate(found, 2))
    assert own_sizes(bucket, 33, 4, 17) == (36, 4, 20), "no more than the bucket has, which 40 would be"
    assert own_sizes(bucket, 9, 9, 9) == (9, 9, 9), "no drafts"
    assert own_sizes(bucket, 11, 4, 4) == (11, 4, 4), "short prompts"
    assert own_sizes(Bucket("tokens", 64, 4), 33, 2, 9) == (33, 2, 9)
