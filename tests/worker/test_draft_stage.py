"""What drafts behind a step: on a CPU it computes its own requests and tokens, and each as if it were alone."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from compiled_llm import CompiledEngine, SamplingParams
from compiled_llm.checkpoint.model_files import DEMO_MODEL
from compiled_llm.worker.draft_coverage import Tokens
from compiled_llm.worker.draft_stage import Drafts, NetworkStage
from compiled_llm.worker.request_rows import RequestRows
from tests.drafting_networks import record_drafts

ENGINE: dict[str, Any] = {
    "bucket_sizes": (1, 8), "token_bucket_sizes": (64, 256), "block_size": 8,
    "max_model_len": 128, "num_kv_blocks": 60, "progress": "off", "num_threads": 1, "enable_prefix_caching": False,
}  # fmt: skip
TEXTS = ("def add(a, b):", "for row in rows:\n    print(row)\nfor", "import os", "x = [1, 2,", "class Stack:\n    def")


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
            SamplingParams(temperature=seed % 2, seed=seed, max_tokens=5 + 4 * seed, ignore_eos=True)
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
