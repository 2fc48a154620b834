"""What is given to functions that draft: on a CPU it ends with a step's own requests and tokens."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from compiled_llm import SamplingParams
from compiled_llm.models.weights import tensors
from compiled_llm.scheduling.scheduler_output import WindowOutput
from compiled_llm.step.drafting import DraftInput
from compiled_llm.worker.draft_buffers import DraftBuffers, PromptBuffers
from compiled_llm.worker.draft_coverage import Tokens
from compiled_llm.worker.request_rows import RequestRows
from compiled_llm.worker.step_buffers import StepSizes
from tests.scheduling.test_bucket import LIMITS as PLAIN_LIMITS
from tests.worker.test_step_buffers import Item, step_of

CPU = torch.device("cpu")
LIMITS = dataclasses.replace(PLAIN_LIMITS, num_draft_tokens=2, has_draft_trees=True)


def with_padding(buffers: Any) -> Any:
    """``buffers``, which fill up as on a GPU."""
    buffers._pads = True
    return buffers


def known_blocks(given: Any, count: int) -> Any:
    """``given`` without what lies behind the first ``count`` blocks of a table: that is never read."""
    tables = {"block_table": given.block_table[:, :count]}
    if isinstance(given, DraftInput):
        tables["window_tables"] = tuple(table[:, :count] for table in given.window_tables)
    return given._replace(**tables)


def test_the_input_ends_with_the_requests_that_are_drafted_for() -> None:
    sizes = 4, 2, LIMITS, CPU, None, 1, 3
    exact, padded = DraftBuffers(*sizes), with_padding(DraftBuffers(*sizes))
    store = RequestRows(LIMITS, vocab_size=100, num_windows=1)
    assert exact.whole.first_row.shape == (4,), "to compile on"
    assert exact.whole.row_numbers is not None
    assert exact.whole.row_numbers.shape == (12,)
    params = [SamplingParams(temperature=0.5, seed=seed, top_k=7) for seed in range(3)]
    items = [
        Item("a", [5, 6, 7], 3, [3, 9], params[0], samples=3),
        Item("b", [8, 9], 0, [5], params[1], samples=0),
        Item("c", [4], 2, [2], params[2]),
    ]
    windows = (WindowOutput(table_updates=(("a", 0, (4, 8)), ("b", 0, (1,)), ("c", 0, (7,)))),)
    step = step_of(*items)._replace(windows=windows)
    rows, seen = store.update(step), list[DraftInput]()
    for places in ([0, 2], [2], [0, 1, 2], [2]):
        given, all_of_it = (each.fill(np.array(places), step, rows, store) for each in (exact, padded))
        assert all_of_it is padded.whole
        count = len(places)
        for own, with_more in zip(*(tensors(known_blocks(one, 1)) for one in (given, all_of_it)), strict=True):
            rows_of_each = 3 if len(with_more) == 12 else 1
            assert torch.equal(own, with_more[: count * rows_of_each])
        assert given.row_numbers is not None
        assert given.row_numbers.tolist() == list(range(3 * count))
        seen.append(given)
    assert seen[3] is seen[1], "sizes that were met before"


def test_where_a_step_keeps_rows_of_logits_alone_the_hidden_states_lie_at_these() -> None:
    buffers, store = DraftBuffers(4, 2, LIMITS, CPU, None), RequestRows(LIMITS, vocab_size=100)
    items = [
        Item("a", [5, 6, 7, 8], 0, [3, 9], SamplingParams()),  # a prompt, its last token
        Item("b", [8, 9], 0, [5], SamplingParams(), samples=0),  # a chunk, which has a row all the same
        Item("c", [4, 1, 2], 2, [2], SamplingParams(), samples=3),  # two drafts
    ]
    step = step_of(*items)
    rows, places = store.update(step), np.array([0, 2])
    for has_all, expected in ((False, [0, 2]), (True, [3, 6])):
        token_row = buffers.fill(places, step, rows, store, has_all=has_all).token_row
        assert token_row is not None
        assert token_row.tolist() == expected


@pytest.mark.parametrize("seed", range(3))
def test_what_is_left_of_the_step_before_is_what_a_new_buffer_would_have(seed: int) -> None:
    random, size = np.random.default_rng(seed), LIMITS.block_size
    used = DraftBuffers(4, 2, LIMITS, CPU, None, 1, 3)
    store = RequestRows(LIMITS, vocab_size=100, num_windows=1)
    computed, names, released = dict[str, int](), iter(range(1000)), list[str]()
    num_same, last = 0, None
    for _ in range(300):
        if computed and random.random() < 0.05:
            computed.pop(name := str(random.choice(sorted(computed))))
            released.append(name)
        chosen = [name for name in sorted(computed) if random.random() < 0.95]
        if len(computed) < 3 and (not chosen or random.random() < 0.1):
            chosen.append(f"{next(names)}")
        items, trees = list[Item](), list[tuple[int, tuple[int, ...]]]()
        for place, name in enumerate(chosen):
            is_new = name not in computed
            start = computed.setdefault(name, 0)
            samples = int(random.choice((0, 1, 2, 2, 3)))
            count = samples if samples and not is_new else int(random.integers(max(samples, 1), 4))
            had, needed = (-(-(start + more) // size) for more in (0, count))
            blocks = random.integers(1, 50, needed - had).tolist()
            params = SamplingParams(temperature=float(random.random()), top_k=int(random.integers(1, 9)))
            tokens = random.integers(0, 100, count).tolist()
            items.append(Item(name, tokens, start, blocks, params if is_new else None, 7, had, samples=samples))
            if samples == 3 and random.random() < 0.5:
                trees.append((place, (0, 0)))
            computed[name] += int(random.integers(1, count + 1))
        step = step_of(*items, released=tuple(released))._replace(trees=tuple(trees))
        step = step._replace(windows=(WindowOutput(table_updates=step.table_updates),))
        rows = store.update(step)
        released.clear()
        if rows is last:
            num_same += 1
        last = rows
        places = np.flatnonzero(step.num_samples)
        if len(places) and random.random() < 0.2:
            places = places[:-1]
        if len(places):
            given = [
                each.fill(places, step, rows, store) for each in (used, DraftBuffers(4, 2, LIMITS, CPU, None, 1, 3))
            ]
            most = int(store.num_blocks[rows[places]].max())
            for own, expected in zip(*(tensors(known_blocks(one, most)) for one in given), strict=True):
                assert torch.equal(own, expected)
        for name in [name for name, end in computed.items() if end > LIMITS.max_model_len - 3]:
            released.append(name)
            del computed[name]
    assert num_same > 50, "steps of the same requests"


def test_the_input_ends_with_the_tokens_that_a_network_lacks() -> None:
    sizes = StepSizes.of(LIMITS, CPU)
    exact, padded = (PromptBuffers(8, LIMITS, CPU, None, sizes) for _ in range(2))
    with_padding(padded)
    store = RequestRows(LIMITS, vocab_size=100)
    rows = store.update(step_of(*(Item(name, [1], 0, [3, 9], SamplingParams()) for name in "ab")))
    first, second = (Tokens(int(row), 2, np.arange(count)) for row, count in zip(rows, (5, 2), strict=True))
    for chosen in ([first, second], [second], [first, second]):
        given, all_of_it = (each.fill(chosen, store) for each in (exact, padded))
        tokens, requests = sum(len(one.token_ids) for one in chosen), len(chosen)
        assert len(all_of_it.input_ids) == 8
        assert given.query_start_loc.tolist() == all_of_it.query_start_loc[: requests + 1].tolist()
        given, all_of_it = (known_blocks(one, 1) for one in (given, all_of_it))
        for name in ("input_ids", "positions", "slot_mapping"):
            assert torch.equal(getattr(given, name), getattr(all_of_it, name)[:tokens]), name
        for name in ("seq_lens", "block_table", "logits_indices"):
            assert torch.equal(getattr(given, name), getattr(all_of_it, name)[:requests]), name
