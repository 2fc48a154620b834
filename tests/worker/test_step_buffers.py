"""Filling a bucket: what stands in the buffers, in the padding, and in the rows of released requests."""

import dataclasses
import random

import pytest
import torch

from compiled_llm.api.sampling_params import SamplingParams
from compiled_llm.models.weights import tensors
from compiled_llm.scheduling.block_pool import SINK_BLOCK
from compiled_llm.scheduling.bucket import Bucket, buckets_of, choose_bucket
from compiled_llm.scheduling.scheduler_output import SchedulerOutput, StartedRequest, StateOutput, WindowOutput
from compiled_llm.worker import sized_inputs
from compiled_llm.worker.block_tables import BlockTables
from compiled_llm.worker.request_rows import RequestRows
from compiled_llm.worker.step_buffers import StepBuffers
from tests.scheduling.test_bucket import LIMITS

CPU = torch.device("cpu")


@dataclasses.dataclass
class Item:
    """A request's part of a step. ``params``: it is admitted in this step, and ``blocks`` is its whole table."""

    name: str
    tokens: list[int]
    computed: int
    blocks: list[int]
    params: SamplingParams | None = None
    seed: int = 0
    first_block: int = 0
    feedback: int = -1
    samples: int = 1


def inputs(buffers: StepBuffers) -> list[torch.Tensor]:
    """All that the graph of a bucket reads, but for ``feedback``."""
    return tensors((*buffers.step_input, *buffers.sampling_input))


def step_of(*items: Item, released: tuple[str, ...] = ()) -> SchedulerOutput:
    return SchedulerOutput(
        request_ids=tuple(item.name for item in items),
        num_scheduled_tokens=tuple(len(item.tokens) for item in items),
        num_computed_tokens=tuple(item.computed for item in items),
        num_samples=tuple(item.samples for item in items),
        feedback=tuple(item.feedback for item in items),
        token_ids=tuple(token for item in items for token in item.tokens),
        admissions=tuple(StartedRequest(item.name, item.params, item.seed, (), ()) for item in items if item.params),
        table_updates=tuple((item.name, item.first_block, tuple(item.blocks)) for item in items if item.blocks),
        released_request_ids=released,
    )


def fill(buffers: StepBuffers, store: RequestRows, *items: Item, released: tuple[str, ...] = ()) -> None:
    step = step_of(*items, released=released)
    buffers.fill(step, store.update(step), store)


@pytest.fixture
def store() -> RequestRows:
    return RequestRows(LIMITS, vocab_size=100)


@pytest.fixture
def buffers() -> StepBuffers:
    return StepBuffers(Bucket("tokens", 8, 4), LIMITS, CPU)


def test_without_padding_the_inputs_end_with_the_step(store: RequestRows) -> None:
    padded, exact = (StepBuffers(Bucket("tokens", 8, 4), LIMITS, CPU, pads=pads) for pads in (True, False))
    assert exact.step_input.input_ids.shape == (8,), "at first all is there, to compile on"
    items = [Item("a", [1] * 3, 0, [3, 9], SamplingParams()), Item("b", [21, 22], 0, [5, 2], SamplingParams())]
    for before, count in ((0, 2), (2, 1), (1, 2)):
        step = step_of(*items[:count], released=("a", "b")[:before])
        rows = store.update(step)
        assert padded.fill(step, rows, store) == exact.fill(step, rows, store) == count
        tokens = step.num_tokens
        assert (padded.num_tokens, exact.num_tokens) == (8, tokens)
        sizes = {"query_start_loc": count + 1} | dict.fromkeys(("seq_lens", "block_table", "logits_indices"), count)
        for name, own in exact.step_input._asdict().items():
            if isinstance(own, torch.Tensor):
                expected = getattr(padded.step_input, name)[: sizes.get(name, tokens)]
                if name == "block_table":  # entries past a request's blocks are never read
                    own, expected = own[:, :1], expected[:, :1]
                assert torch.equal(own, expected), name
        for name, own in exact.sampling_input._asdict().items():
            assert torch.equal(own, getattr(padded.sampling_input, name)[:count]), name
        assert torch.equal(exact.feedback, padded.feedback[:tokens])
    first = exact.step_input
    exact.clear()
    assert exact.step_input.input_ids.shape == (8,)
    assert (exact.step_input.seq_lens == 0).all()
    step = step_of(*items, released=("a", "b"))
    exact.fill(step, store.update(step), store)
    assert exact.step_input is first, "sizes that were met before"


def test_rows_that_go_on_behind_the_last_attention_are_those_of_logits(store: RequestRows) -> None:
    """``logits_indices`` are places among them, padding too; where a prompt is scored all go on."""
    bucket = Bucket("decode", 20, 4, query_len=12)
    buffers = StepBuffers(bucket, LIMITS, CPU, pads=False, keeps_rows=True)
    items = [Item("a", [1] * 6, 0, [3, 9, 4, 8], SamplingParams()), Item("b", [2] * 4, 0, [6, 10], SamplingParams())]

    def kept(step: SchedulerOutput, **how: bool) -> tuple[list[int], list[int]]:
        buffers.fill(step, store.update(step), store, **how)
        s = buffers.step_input
        assert s.kept_rows is not None
        return s.kept_rows.tolist(), s.logits_indices.tolist()

    chunks = step_of(*items)
    assert kept(chunks) == ([5, 9], [0, 1])
    decodes = step_of(Item("a", [11], 6, []), Item("b", [12], 4, []))
    assert kept(decodes) == ([0, 1], [0, 1])
    assert kept(decodes) == ([0, 1], [0, 1]), "the arrays that hold it already"
    drafts = step_of(Item("a", [11] * 9, 7, [], samples=9), Item("b", [13], 5, []))
    assert kept(drafts) == (list(range(10)), list(range(10)))
    more = step_of(Item("a", [11] * 10, 7, [], samples=10), Item("b", [13], 5, []))
    assert kept(more) == ([*range(11), 0], list(range(12))), "of 11 rows 12 are computed"
    chunk = step_of(Item("a", [5, 6, 7], 17, [7], first_block=4), Item("b", [14], 6, []))
    assert kept(chunk) == ([2, 3], [0, 1])
    assert kept(chunk, keeps_all=True) == ([0, 1, 2, 3], [2, 3])


def test_steps_with_drafts_come_in_few_sizes(store: RequestRows) -> None:
    """Of 8 to 16 tokens those of even numbers: one row of padding at most, which nothing of another step is left in."""
    bucket = Bucket("decode", 20, 4, query_len=12)
    padded, own = (StepBuffers(bucket, LIMITS, CPU, pads=pads) for pads in (True, False))
    hot = SamplingParams(temperature=0.5, top_p=0.5)
    store.update(step_of(Item("a", [1] * 4, 0, [3, 9, 4, 8, 5, 7], hot), Item("b", [2] * 4, 0, [6, 10], hot, seed=3)))
    seen = []
    for count in (1, 2, 5, 11, 10, 9, 1, 9, 2, 10):
        items = [Item("a", list(range(30, 30 + count)), 4, [], samples=count), Item("b", [21], 4, [])]
        step = step_of(*items)
        rows = store.update(step)
        assert padded.fill(step, rows, store) == own.fill(step, rows, store) == count + 1
        tokens = len(own.step_input.input_ids)
        seen.append(tokens)
        assert own.num_tokens == tokens
        for name in ("input_ids", "positions", "slot_mapping", "logits_indices"):
            assert torch.equal(getattr(own.step_input, name), getattr(padded.step_input, name)[:tokens]), (count, name)
        assert own.step_input.query_start_loc.tolist() == [0, count, count + 1], "padding is of no request"
        assert own.step_input.seq_lens.tolist() == [4 + count, 5]
        for name, values in own.sampling_input._asdict().items():
            assert torch.equal(values, getattr(padded.sampling_input, name)[:tokens]), (count, name)
    assert seen == [2, 3, 6, 12, 12, 10, 2, 10, 3, 12]


def test_inputs_are_kept_of_some_sizes(store: RequestRows, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sized_inputs, "_MOST_KEPT", 2)
    buffers, released, seen = StepBuffers(Bucket("tokens", 8, 4), LIMITS, CPU, pads=False), (), []
    for count in (1, 2, 1, 3, 1, 2):
        step = step_of(Item("a", [1] * count, 0, [3, 9], SamplingParams()), released=released)
        buffers.fill(step, store.update(step), store)
        released = ("a",)
        seen.append(buffers.step_input)
        assert len(buffers.step_input.input_ids) == count
    assert seen[4] is seen[2] is seen[0], "those that were not met for the longest time go first"
    assert seen[5] is not seen[1]


def test_fields_of_a_mixed_step_and_its_padding(store: RequestRows, buffers: StepBuffers) -> None:
    params = SamplingParams(temperature=0.5, top_k=7, top_p=0.9)
    store.update(step_of(Item("a", [1] * 5, 0, [3, 9], params, seed=-5)))
    greedy = SamplingParams(temperature=0)
    fill(buffers, store, Item("a", [11], 5, []), Item("b", [21, 22, 23, 24, 25], 0, [5, 2], greedy, seed=2**40))

    s, p = buffers.step_input, buffers.sampling_input
    assert s.input_ids.tolist() == [11, 21, 22, 23, 24, 25, 0, 0]
    assert s.positions.tolist() == [5, 0, 1, 2, 3, 4, 0, 0]
    assert s.slot_mapping.tolist()[:6] == [9 * 4 + 1, 20, 21, 22, 23, 8]
    assert s.slot_mapping.tolist()[6:] == [SINK_BLOCK * 4, SINK_BLOCK * 4 + 1]
    assert s.query_start_loc.tolist() == [0, 1, 6, 6, 6]
    assert s.seq_lens.tolist() == [6, 5, 0, 0]
    assert s.logits_indices.tolist() == [0, 5, 0, 0]
    assert s.block_table[0, :2].tolist() == [3, 9]
    assert s.block_table[1, :2].tolist() == [5, 2]
    assert buffers.feedback.tolist() == [-1] * 8
    assert p.temperature.tolist() == [0.5, 0, 0, 0]
    assert p.top_p.tolist() == pytest.approx([0.9, 1, 1, 1])
    assert p.top_k.tolist() == [7, 100, 1, 1]
    assert p.seed.tolist() == [-5, 2**40, 0, 0]
    assert p.position.tolist() == [6, 5, 0, 0]


def test_a_chunk_in_the_middle_of_a_prompt(store: RequestRows, buffers: StepBuffers) -> None:
    fill(buffers, store, Item("a", [1, 2, 3], 0, [3, 9, 6], SamplingParams()))
    fill(buffers, store, Item("a", [4, 5, 6, 7, 8, 9], 3, []))
    s = buffers.step_input
    assert s.positions.tolist()[:6] == [3, 4, 5, 6, 7, 8]
    assert s.slot_mapping.tolist()[:6] == [3 * 4 + 3, 36, 37, 38, 39, 6 * 4]
    assert s.seq_lens.tolist()[0] == 9


def test_a_decode_step_has_a_token_a_request(store: RequestRows) -> None:
    buffers = StepBuffers(Bucket("decode", 4, 4), LIMITS, CPU)
    items = [Item(name, [5], 0, [block], SamplingParams()) for name, block in (("a", 7), ("b", 2))]
    fill(buffers, store, *items)
    fill(buffers, store, Item("a", [11], 2, []), Item("b", [12], 4, [9], first_block=1))
    s = buffers.step_input
    assert s.input_ids.tolist() == [11, 12, 0, 0]
    assert s.positions.tolist() == [2, 4, 0, 0]
    assert s.slot_mapping.tolist() == [7 * 4 + 2, 9 * 4, 0, 1]
    assert s.query_start_loc.tolist() == [0, 1, 2, 2, 2]
    assert s.logits_indices.tolist() == [0, 1, 0, 0]


def test_feedback_stands_at_the_last_token_of_its_request(store: RequestRows, buffers: StepBuffers) -> None:
    items = [
        Item("a", [0], 3, [3], SamplingParams(), feedback=1),
        Item("b", [21, 22, 23], 0, [5], SamplingParams()),
        Item("c", [0], 2, [6], SamplingParams(), feedback=0),
    ]
    fill(buffers, store, *items)
    assert buffers.feedback.tolist() == [1, -1, -1, -1, 0, -1, -1, -1]
    fill(buffers, store, Item("b", [24, 25, 26, 27, 28], 3, [8], first_block=1))
    assert buffers.feedback.tolist() == [-1] * 8, "nothing is left of the step before"


def test_a_request_with_drafts_has_a_row_for_each_of_its_tokens(store: RequestRows) -> None:
    """Three rows for ``a``, one for ``b`` amid its prompt, one for ``c``; the bucket has room for 2 of 4 requests."""
    buffers = StepBuffers(Bucket("decode", 12, 4, query_len=4), LIMITS, CPU)
    params = [SamplingParams(temperature=temperature) for temperature in (0.5, 0.6, 0.7)]
    first = [
        Item(name, [1] * 4, 0, [block], p, seed=block) for name, block, p in zip("abc", (3, 5, 6), params, strict=True)
    ]
    store.update(step_of(*first))
    fill(
        buffers,
        store,
        Item("a", [11, 12, 13], 4, [9], first_block=1, samples=3),
        Item("b", [21, 22, 23, 24], 4, [8], first_block=1, samples=0),
        Item("c", [0], 4, [7], first_block=1, feedback=2),
    )
    s, p = buffers.step_input, buffers.sampling_input
    assert s.input_ids.tolist()[:8] == [11, 12, 13, 21, 22, 23, 24, 0]
    assert s.positions.tolist()[:8] == [4, 5, 6, 4, 5, 6, 7, 4]
    assert s.slot_mapping.tolist()[:8] == [36, 37, 38, 32, 33, 34, 35, 28]
    assert s.query_start_loc.tolist() == [0, 3, 7, 8, 8]
    assert s.seq_lens.tolist() == [7, 8, 5, 0]
    assert s.logits_indices.tolist() == [0, 1, 2, 6, 7] + [0] * 7
    assert p.position.tolist() == [5, 6, 7, 8, 5] + [0] * 7
    assert p.temperature.tolist() == pytest.approx([0.5, 0.5, 0.5, 0.6, 0.7] + [0] * 7)
    assert p.seed.tolist() == [3, 3, 3, 5, 6] + [0] * 7
    assert buffers.feedback.tolist()[:8] == [-1] * 7 + [2]


def test_rows_of_a_tree_stand_behind_their_paths(store: RequestRows) -> None:
    """``a`` has a tree of four drafts, ``b`` a chain; slots are those of chains, and nothing is left afterwards."""
    limits = LIMITS.with_drafts(4, one_graph=True, has_trees=True)
    buffers = StepBuffers(Bucket("decode", 12, 4), limits, CPU)
    store.update(step_of(*(Item(name, [1] * 4, 0, [block], SamplingParams()) for name, block in (("a", 3), ("b", 5)))))
    tree = Item("a", [11, 12, 13, 14, 15], 4, [9, 10], first_block=1, samples=5)
    chain = Item("b", [21, 22], 4, [8], first_block=1, samples=2)
    output = step_of(tree, chain)._replace(trees=((0, (0, 0, 2, 1)),))
    buffers.fill(output, store.update(output), store)
    s, p = buffers.step_input, buffers.sampling_input
    assert s.ancestors is not None
    assert s.positions.tolist()[:7] == [4, 5, 5, 6, 6, 4, 5]
    assert s.slot_mapping.tolist()[:7] == [36, 37, 38, 39, 40, 32, 33]
    assert s.ancestors.tolist() == [0b1, 0b11, 0b101, 0b1101, 0b10011] + [0] * 7
    assert s.seq_lens.tolist() == [9, 6, 0, 0]
    assert p.position.tolist()[:7] == [5, 6, 6, 7, 7, 5, 6]
    fill(buffers, store, Item("b", [23, 24], 5, [], samples=2), Item("a", [16], 6, []))
    assert not s.ancestors.any()
    assert s.positions.tolist()[:3] == [5, 6, 6]


def test_requests_with_fewer_drafts_than_others_in_a_decode_bucket(store: RequestRows) -> None:
    """A request takes the tokens that it has; what the bucket has beyond is padding of no request."""
    bucket = Bucket("decode", 12, 4, query_len=3)
    buffers = StepBuffers(bucket, LIMITS, CPU)
    store.update(step_of(*(Item(name, [1] * 2, 0, [block], SamplingParams()) for name, block in (("a", 3), ("b", 5)))))
    fill(buffers, store, Item("a", [11], 2, []), Item("b", [21, 22], 2, [], samples=2))
    s = buffers.step_input
    assert s.query_start_loc.tolist() == [0, 1, 3, 3, 3]
    assert s.seq_lens.tolist() == [3, 4, 0, 0]
    assert s.logits_indices.tolist() == [0, 1, 2] + [0] * 9
    assert buffers.sampling_input.position.tolist() == [3, 3, 4] + [0] * 9
    assert s.slot_mapping.tolist() == [14, 22, 23, 0, 1, 2, 3, 0, 1, 2, 3, 0]
    fill(buffers, store, Item("b", [23], 4, [6], first_block=1))
    fresh = StepBuffers(bucket, LIMITS, CPU)
    fill(fresh, store, Item("b", [23], 4, []))
    for one, other in zip(inputs(buffers), inputs(fresh), strict=True):
        assert one is s.block_table or torch.equal(one, other), "something is left of the step before"


def test_a_smaller_step_leaves_nothing_of_the_larger_one_before(store: RequestRows) -> None:
    """But for what is never read: entries of the block table past the blocks of a request."""
    used, fresh = (StepBuffers(Bucket("tokens", 8, 4), LIMITS, CPU) for _ in range(2))
    hot = SamplingParams(temperature=1.0, top_p=0.5)
    fill(used, store, Item("a", [1] * 4, 0, [7], hot, feedback=2), Item("b", [2] * 4, 0, [8], hot, seed=3))
    small = step_of(Item("b", [3, 4], 4, [9], first_block=1), released=("a",))
    rows = store.update(small)
    for buffers in (used, fresh):
        buffers.fill(small, rows, store)
    for name, tensor in used.step_input._asdict().items():  # there are no windows, plans and states
        if name != "block_table" and isinstance(tensor, torch.Tensor):
            assert torch.equal(tensor, getattr(fresh.step_input, name)), name
    for name in used.sampling_input._fields:
        assert torch.equal(getattr(used.sampling_input, name), getattr(fresh.sampling_input, name)), name
    assert torch.equal(used.feedback, fresh.feedback)
    assert used.step_input.block_table[0, :2].tolist() == [8, 9]


def test_after_clearing_all_is_padding(store: RequestRows, buffers: StepBuffers) -> None:
    fill(buffers, store, Item("a", [1] * 8, 0, [7, 8], SamplingParams(temperature=1.0), seed=3, feedback=0))
    buffers.clear()
    fresh = StepBuffers(buffers.bucket, LIMITS, CPU)
    for one, other in zip([*inputs(buffers), buffers.feedback], [*inputs(fresh), fresh.feedback], strict=True):
        assert torch.equal(one, other)
    assert (buffers.step_input.slot_mapping // LIMITS.block_size == SINK_BLOCK).all()
    assert (buffers.step_input.block_table == SINK_BLOCK).all()
    assert not buffers.step_input.seq_lens.any()


def test_states_of_a_smaller_step_are_those_alone() -> None:
    """Rows and writes that a step does not use are the sink, whatever the step before had there."""
    limits = dataclasses.replace(LIMITS, num_state_slots=9)
    store, buffers = RequestRows(limits, 100), StepBuffers(Bucket("tokens", 8, 4), limits, CPU)
    params = SamplingParams()
    larger = step_of(Item("a", [1] * 4, 0, [7], params), Item("b", [2] * 4, 4, [8, 9], params))
    smaller = step_of(Item("b", [3], 8, [10], first_block=2), released=("a",))
    for step, states in (
        (larger, StateOutput((0, 5), (((3, 4), (4, 2)), ((6, 4), (7, 1))))),
        (smaller, StateOutput((6,), (((8, 1),),))),
    ):
        buffers.fill(step._replace(states=states), store.update(step), store)
    read_slot, write_slot, write_after = (field.tolist() for field in buffers.step_input.states)
    assert read_slot == [6, 0, 0, 0]
    assert write_slot == [[8, 0, 0]] + [[0, 0, 0]] * 3
    assert write_after == [[1, 0, 0]] + [[0, 0, 0]] * 3


def test_padding_shares_the_sinks_slots_in_turn(store: RequestRows, buffers: StepBuffers) -> None:
    fill(buffers, store, Item("a", [1, 2], 0, [7], SamplingParams()))
    assert buffers.step_input.slot_mapping.tolist() == [28, 29, 0, 1, 2, 3, 0, 1]


def test_rows_are_reused_and_a_new_request_starts_with_an_empty_table(store: RequestRows) -> None:
    params = SamplingParams()
    (first,) = store.update(step_of(Item("a", [1] * 9, 0, [1, 2, 3], params)))
    (second,) = store.update(step_of(Item("b", [1], 0, [4], params), released=("a",)))
    assert first == second
    assert store.num_blocks[second] == 1
    assert store.block_table[second, 0] == 4


def test_a_request_may_leave_and_come_back_under_its_id_in_one_step(store: RequestRows) -> None:
    """Its id was used again after an abort, or it was preempted while a step was empty."""
    store.update(step_of(Item("a", [1] * 9, 0, [1, 2, 3], SamplingParams(temperature=1.0))))
    (row,) = store.update(step_of(Item("a", [1], 0, [4], SamplingParams(temperature=0.5)), released=("a",)))
    assert store.num_blocks[row] == 1
    assert store.parameters["temperature"][row] == 0.5
    other = [Item(name, [1], 0, [5], SamplingParams()) for name in ("b", "c")]
    assert len({row, *store.update(step_of(*other))}) == 3, "its first row is free again"


def test_a_table_grows_and_its_entries_may_be_exchanged(store: RequestRows) -> None:
    (row,) = store.update(step_of(Item("a", [1] * 9, 0, [1, 2, 3], SamplingParams())))
    store.update(step_of(Item("a", [1], 9, [4], first_block=3)))
    assert store.block_table[row, : store.num_blocks[row]].tolist() == [1, 2, 3, 4]
    store.update(step_of(Item("a", [1], 10, [9, 3, 4, 5], first_block=1)))
    assert store.block_table[row, : store.num_blocks[row]].tolist() == [1, 9, 3, 4, 5]
    with pytest.raises(AssertionError, match="hole"):
        store.update(step_of(Item("a", [1], 11, [6], first_block=6)))


def test_top_k_is_off_at_0_and_beyond_the_vocabulary(store: RequestRows) -> None:
    items = [Item(name, [1], 0, [1], SamplingParams(top_k=k)) for name, k in (("a", 0), ("b", 99), ("c", 101))]
    rows = store.update(step_of(*items))
    assert store.parameters["top_k"][rows].tolist() == [100, 99, 100]


@pytest.mark.parametrize("bucket", buckets_of(LIMITS), ids=lambda bucket: bucket.name)
def test_inputs_stay_at_their_addresses_aligned(bucket: Bucket, store: RequestRows) -> None:
    buffers = StepBuffers(bucket, LIMITS, CPU)
    addresses = [t.data_ptr() for t in [*inputs(buffers), buffers.feedback]]
    fill(buffers, store, Item("a", [1], 0, [1], SamplingParams()))
    assert addresses == [t.data_ptr() for t in [*inputs(buffers), buffers.feedback]]
    assert all(address % 16 == 0 for address in addresses)


def test_layers_with_a_window_have_tables_of_their_own() -> None:
    """A request of 9 tokens, of whose blocks the window's layers have the last two, at other places."""
    store = RequestRows(LIMITS, 100, num_windows=1)
    buffers = StepBuffers(Bucket("tokens", 8, 3), LIMITS, CPU, windows=[6])
    step = step_of(Item("a", [1], 8, [4, 5, 6], SamplingParams()))
    step = step._replace(windows=(WindowOutput(table_updates=(("a", 1, (2, 1)),)),))
    assert buffers.fill(step, store.update(step), store) == 1
    s, (window,) = buffers.step_input, buffers.step_input.windows
    assert s.block_table[0, :3].tolist() == [4, 5, 6]
    assert window.block_table[0, 1:3].tolist() == [2, 1]
    assert s.slot_mapping.tolist() == [24, 0, 1, 2, 3, 0, 1, 2]
    assert window.slot_mapping.tolist() == [4, 0, 1, 2, 3, 0, 1, 2]
    buffers.clear()
    assert (window.slot_mapping < LIMITS.block_size).all()
    assert (window.block_table == SINK_BLOCK).all()


@pytest.mark.parametrize("drafts", [(0,), (0, 0, 2, 3)], ids=["no drafts", "drafts"])
@pytest.mark.parametrize("on_device", [False, True], ids=["tables of the step", "tables of all"])
def test_a_step_of_the_same_requests_is_the_step_that_any_other_buffers_have(
    on_device: bool, drafts: tuple[int, ...]
) -> None:
    """Requests come, go and decode, in steps that change buckets; what is written once stays right."""
    limits = LIMITS.with_drafts(max(drafts), one_graph=True) if max(drafts) else LIMITS
    rng, store = random.Random(5), RequestRows(limits, vocab_size=100)
    tables = BlockTables(limits, CPU, 0) if on_device else None
    buckets = buckets_of(limits)
    all_buffers = {bucket: StepBuffers(bucket, limits, CPU, (), tables) for bucket in buckets}
    computed: dict[str, int] = {}
    num_same = num_new_blocks = 0
    last: tuple[str, ...] = ()
    gone: tuple[str, ...] = ()
    for number in range(400):
        gone += tuple(name for name in computed if rng.random() < 0.04 or computed[name] > 26)
        computed = {name: count for name, count in computed.items() if name not in gone}
        names = [name for name in computed if rng.random() < 0.98]
        items = [
            Item(
                name,
                [rng.randrange(100) for _ in range(1 if rng.random() < 0.97 else 2)],
                computed[name],
                [rng.randrange(1, 99)] if computed[name] % 4 == 0 else [],
                first_block=computed[name] // 4,
                feedback=rng.choice([-1, 0, 1]),
                samples=int(rng.random() < 0.9),
            )
            for name in names
        ]
        for item, count in zip(items, [rng.choice(drafts) for _ in items], strict=True):
            if item.samples and len(item.tokens) == 1 and count:
                item.tokens += [rng.randrange(100) for _ in range(count)]
                item.samples += count
        for item in items:
            if item.computed % 4 and item.computed % 4 + len(item.tokens) > 4:
                item.blocks, item.first_block = [rng.randrange(1, 99)], item.first_block + 1
        if len(computed) < 3 and (not computed or rng.random() < 0.1):
            params = SamplingParams(temperature=rng.random(), top_k=rng.randrange(1, 9), top_p=0.9)
            name = f"{number}"
            items.append(Item(name, [7] * rng.randint(1, 2), 0, [rng.randrange(1, 99)], params, seed=number))
        if not items:
            continue
        step = step_of(*items, released=gone)
        bucket = choose_bucket(buckets, step)
        rows = store.update(step)
        all_buffers[bucket].fill(step, rows, store)
        fresh = StepBuffers(bucket, limits, CPU, (), tables)
        fresh.fill(step, rows, store)
        assert all_buffers[bucket].feedback.tolist() == fresh.feedback.tolist()
        for found, expected in zip(inputs(all_buffers[bucket]), inputs(fresh), strict=True):
            # What lies behind a request's blocks in its row is never read.
            if found is all_buffers[bucket].step_input.block_table and not on_device:
                widths = [store.num_blocks[row] for row in rows]
                pairs = zip(found.tolist(), expected.tolist(), widths, strict=False)
                assert all(one[:width] == other[:width] for one, other, width in pairs)
            else:
                assert torch.equal(found, expected)
        num_same += step.request_ids == last
        num_new_blocks += step.request_ids == last and bool(step.table_updates)
        last, gone = step.request_ids, ()
        for item in items:
            computed[item.name] = item.computed + len(item.tokens)
        if tables is not None:
            for name, count in computed.items():
                row, width = store.row_of(name), -(-count // 4)
                assert tables.tensors[0][row, :width].tolist() == store.block_table[row, :width].tolist()
    assert num_same > 100
    assert num_new_blocks > 20
