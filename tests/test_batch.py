"""Filling a bucket: what stands in the buffers, in the padding, and in the rows of released requests."""

import torch

from compiled_llm.batch import Bucket, RequestRows, StepBuffers, buckets_of, choose_bucket
from compiled_llm.block_pool import SINK_BLOCK
from compiled_llm.config import Limits
from compiled_llm.sampling_params import SamplingParams
from compiled_llm.scheduler import ScheduledRequest, SchedulerOutput

LIMITS = Limits(
    max_model_len=32,
    max_num_seqs=3,
    max_num_batched_tokens=16,
    block_size=4,
    decode_bucket_sizes=(1, 4),
    token_bucket_sizes=(8, 16),
    chunked_prefill=True,
)


def item(name: str, tokens: list[int], computed: int, blocks: list[int], params: SamplingParams | None = None, seed=0):
    return ScheduledRequest(name, tokens, computed, blocks, True, None if params is None else (params, seed))


def output(*items: ScheduledRequest, released: tuple[str, ...] = ()) -> SchedulerOutput:
    counts = [len(i.token_ids) for i in items]
    return SchedulerOutput(list(items), list(released), sum(counts), max(counts, default=0))


def test_buckets_and_their_choice() -> None:
    buckets = buckets_of(LIMITS)
    assert [bucket.name for bucket in buckets] == ["decode_1", "decode_4", "tokens_8", "tokens_16"]
    assert choose_bucket(buckets, output(item("a", [1], 5, []))).name == "decode_1"
    assert choose_bucket(buckets, output(item("a", [1], 5, []), item("b", [1], 5, []))).name == "decode_4"
    assert choose_bucket(buckets, output(item("a", [1, 2], 5, []))).name == "tokens_8"
    assert choose_bucket(buckets, output(item("a", [1] * 9, 5, []))).name == "tokens_16"


def test_fields_of_a_mixed_step_and_its_padding() -> None:
    store = RequestRows(LIMITS, vocab_size=100)
    buffers = StepBuffers(Bucket("tokens", 8, 4), LIMITS, torch.device("cpu"))
    params = SamplingParams(temperature=0.5, top_k=7, top_p=0.9)
    store.update(output(item("a", [1] * 5, 0, [3, 9], params, seed=-5)))
    step = output(item("a", [11], 5, []), item("b", [21, 22, 23, 24, 25], 0, [5, 2], SamplingParams(temperature=0)))
    buffers.fill(step.requests, store.update(step), store)

    s, p = buffers.step_input, buffers.sampling_input
    assert s.input_ids.tolist() == [11, 21, 22, 23, 24, 25, 0, 0]
    assert s.positions.tolist() == [5, 0, 1, 2, 3, 4, 0, 0]
    assert s.slot_mapping.tolist()[:6] == [9 * 4 + 1, 20, 21, 22, 23, 8]
    assert all(slot // 4 == SINK_BLOCK for slot in s.slot_mapping.tolist()[6:])
    assert s.query_start_loc.tolist() == [0, 1, 6, 6, 6]
    assert s.seq_lens.tolist() == [6, 5, 0, 0]
    assert s.logits_indices.tolist() == [0, 5, 0, 0]
    assert s.block_table[0, :2].tolist() == [3, 9]
    assert s.block_table[1, :2].tolist() == [5, 2]
    assert (s.block_table[2:] == SINK_BLOCK).all()
    assert p.temperature.tolist() == [0.5, 0, 0, 0]
    assert p.top_k.tolist()[:2] == [7, 100]
    assert p.seed.tolist()[0] == -5
    assert p.position.tolist()[:2] == [6, 5]


def test_a_smaller_step_leaves_nothing_of_the_larger_one_before() -> None:
    store = RequestRows(LIMITS, vocab_size=100)
    used, fresh = (StepBuffers(Bucket("tokens", 8, 4), LIMITS, torch.device("cpu")) for _ in range(2))
    hot = SamplingParams(temperature=1.0, top_p=0.5)
    large = output(item("a", [1] * 4, 0, [7], hot), item("b", [2] * 4, 0, [8], hot))
    used.fill(large.requests, store.update(large), store)
    small = output(item("b", [3, 4], 4, [9]), released=("a",))
    rows = store.update(small)
    used.fill(small.requests, rows, store)
    fresh.fill(small.requests, rows, store)
    for one, other in zip(
        [*used.step_input, *used.sampling_input], [*fresh.step_input, *fresh.sampling_input], strict=True
    ):
        assert torch.equal(one, other)


def test_rows_are_reused_and_a_new_request_starts_with_an_empty_table() -> None:
    store = RequestRows(LIMITS, vocab_size=100)
    params = SamplingParams()
    (first,) = store.update(output(item("a", [1] * 9, 0, [1, 2, 3], params)))
    (second,) = store.update(output(item("b", [1], 0, [4], params), released=("a",)))
    assert first == second
    assert store.num_blocks[second] == 1
    assert store.block_table[second, 0] == 4


def test_inputs_stay_at_their_addresses_aligned() -> None:
    buffers = StepBuffers(Bucket("decode", 4, 4), LIMITS, torch.device("cpu"))
    addresses = [t.data_ptr() for t in [*buffers.step_input, *buffers.sampling_input]]
    store = RequestRows(LIMITS, vocab_size=100)
    step = output(item("a", [1], 0, [1], SamplingParams()))
    buffers.fill(step.requests, store.update(step), store)
    assert addresses == [t.data_ptr() for t in [*buffers.step_input, *buffers.sampling_input]]
    assert all(address % 16 == 0 for address in addresses)
