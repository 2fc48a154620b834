"""What drafts behind a step: on a CPU it computes its own requests and tokens, and each as if it were alone."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from compiled_llm import CompiledEngine, SamplingParams
from compiled_llm.checkpoint.model_files import DEMO_MODEL
from compiled_llm.models.weights import tensors
from compiled_llm.scheduling.scheduler_output import WindowOutput
from compiled_llm.step.drafting import DraftInput
from compiled_llm.worker.draft_coverage import Tokens
from compiled_llm.worker.draft_stage import DraftBuffers, Drafts, NetworkStage, _PromptBuffers
from compiled_llm.worker.request_rows import RequestRows
from compiled_llm.worker.step_buffers import StepSizes
from tests.drafting_networks import record_drafts
from tests.scheduling.test_bucket import LIMITS as PLAIN_LIMITS
from tests.worker.test_step_buffers import Item, step_of

CPU = torch.device("cpu")
LIMITS = dataclasses.replace(PLAIN_LIMITS, num_draft_tokens=2, has_draft_trees=True)
ENGINE: dict[str, Any] = {
    "bucket_sizes": (1, 8), "token_bucket_sizes": (64, 256), "block_size": 8,
    "max_model_len": 128, "num_kv_blocks": 60, "progress": "off", "num_threads": 1, "enable_prefix_caching": False,
}  # fmt: skip
TEXTS = ("def add(a, b):", "for row in rows:\n    print(row)\nfor", "import os", "x = [1, 2,", "class Stack:\n    def")


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


def test_the_input_ends_with_the_tokens_that_a_network_lacks() -> None:
    sizes = StepSizes.of(LIMITS, CPU)
    exact, padded = (_PromptBuffers(8, LIMITS, CPU, None, sizes) for _ in range(2))
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


class Watched:
    """What the functions of an engine's ``DraftStage`` compute from now on, and what they should."""

    def __init__(self, engine: CompiledEngine) -> None:
        stage = engine.own_runner.steps.drafting
        assert stage is not None
        self.requests, self.tokens = list[tuple[int, int]](), list[tuple[int, int]]()
        self._sizes = dict[str, int]()
        for name, function in stage._functions.items():
            function._call = self._noting(name, function._call)
        draft = stage._draft

        def drafting(places: np.ndarray, *others: Any) -> Drafts | None:
            drafts = draft(places, *others)
            if drafts is not None:
                self.requests.append((self._sizes["draft"], len(places)))
            return drafts

        stage._draft = drafting  # type: ignore[method-assign]
        if isinstance(stage, NetworkStage):
            compute = stage._compute

            def computing(chosen: Sequence[Tokens], store: RequestRows) -> None:
                compute(chosen, store)
                if chosen:
                    self.tokens.append((self._sizes["draft_prompt"], sum(len(one.token_ids) for one in chosen)))

            stage._compute = computing  # type: ignore[method-assign]

    def _noting(self, name: str, function: Callable) -> Callable:
        def call(*arguments: Any) -> None:
            first: Tensor = arguments[1][0]  # of requests or tokens
            self._sizes[name] = len(first)
            function(*arguments)

        return call


@pytest.mark.parametrize("enforce_eager", [True, pytest.param(False, marks=pytest.mark.battery)])
@pytest.mark.parametrize(
    ("method", "is_tree"),
    [
        ("layer_skip", False),
        *((method, tree) for method in ("draft_model", "eagle3", "medusa") for tree in (False, True)),
    ],
)
def test_nothing_but_a_steps_own_requests_is_computed_and_each_as_if_alone(
    method: str, is_tree: bool, enforce_eager: bool
) -> None:
    config: dict[str, Any] = {"method": method, "num_speculative_tokens": 3, "adaptive": False}
    if method != "layer_skip":
        config["model"] = str(Path(DEMO_MODEL).with_name("demo_drafters") / method)
    if is_tree:
        config |= {"speculative_token_tree": "auto", "num_speculative_tokens": 6}
    with CompiledEngine(str(DEMO_MODEL), **ENGINE, enforce_eager=enforce_eager, speculative_config=config) as engine:
        found, watched = record_drafts(engine), Watched(engine)
        params = [
            SamplingParams(temperature=seed % 2, seed=seed, max_tokens=5 + 2 * seed, ignore_eos=True)
            for seed in range(len(TEXTS))
        ]
        together = engine.generate(list(TEXTS), params, use_tqdm=False)
        in_company = {(one.token_ids, one.seed): one.drafts for one in found}
        assert {count for _, count in watched.requests} >= {1, 5}
        assert all(size == count for size, count in [*watched.requests, *watched.tokens])
        assert bool(watched.tokens) == (method in ("draft_model", "eagle3"))
        found.clear()
        for text, own, output in zip(TEXTS, params, together, strict=True):
            (alone,) = engine.generate(text, own, use_tqdm=False)
            assert alone.outputs[0].token_ids == output.outputs[0].token_ids
    # A step with more requests has room for fewer drafts of each, so other tokens may be the last of a step.
    alone_drafts = {(one.token_ids, one.seed): one.drafts for one in found}
    both = in_company.keys() & alone_drafts.keys()
    assert [in_company[key] for key in both] == [alone_drafts[key] for key in both]
    assert len(both) > (10 if is_tree else 0.9 * len(in_company))
