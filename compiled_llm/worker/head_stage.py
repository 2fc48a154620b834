"""HeadStage: a ``NetworkStage`` of a network that reads the model's hidden states (``step/head_drafting.py``)."""

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np

from compiled_llm.api.speculative_config import NetworkTree
from compiled_llm.models.draft_heads.family import HeadFamily
from compiled_llm.models.inputs import KVCache, StepInput
from compiled_llm.models.registry import family_of
from compiled_llm.scheduling.bucket import Bucket
from compiled_llm.scheduling.scheduler_output import SchedulerOutput
from compiled_llm.step.drafting import DraftInput
from compiled_llm.step.head_drafting import (
    draft_head_function,
    draft_medusa_function,
    head_features_function,
    head_prompt_function,
)
from compiled_llm.step.tree_drafting import draft_medusa_tree_function
from compiled_llm.worker.draft_network import DraftNetwork
from compiled_llm.worker.draft_stage import Drafts, DraftStage, NetworkStage, Part
from compiled_llm.worker.head_coverage import HeadCoverage
from compiled_llm.worker.request_rows import RequestRows


def network_stage(network: DraftNetwork, *arguments: Any, **others: Any) -> NetworkStage:
    """The stage that ``network`` needs; the arguments are those of ``NetworkStage``."""
    stage = NetworkStage
    if isinstance(family_of(network.model_config), HeadFamily):
        stage = HeadStage if network.has_cache else MedusaStage
    return (stage if network.last_layer is None else LastLayerStage)(network, *arguments, **others)


class HeadStage(NetworkStage):
    """Keeps the features of all tokens of each step, whether it drafts or not.

    Where its cache has what features are made of (``HiddenCache``), the step itself has left that there.

    A row that is said to be covered is that of a token and the one after it: see ``HeadCoverage``.
    """

    _draft_function = staticmethod(draft_head_function)
    _prompt_function = staticmethod(head_prompt_function)
    _numbers_rows = True

    def make_coverage(self, num_blocks: int, num_host_blocks: int) -> None:
        self.coverage = HeadCoverage(self._limits, num_blocks, num_host_blocks)

    def run(self, output: SchedulerOutput, bucket: Bucket, rows: np.ndarray, store: RequestRows) -> Drafts | None:
        if self._keeps_features:
            self._functions[self._features_name(bucket)](*self._feature_arguments(bucket))
        return super().run(output, bucket, rows, store)

    def _catch_up(
        self, output: SchedulerOutput, rows: np.ndarray, ends: np.ndarray, known_ends: np.ndarray, store: RequestRows
    ) -> np.ndarray:
        """As its base; the row of a request's last known token is ``draft``'s, which knows what follows."""
        coverage = self.coverage
        assert isinstance(coverage, HeadCoverage)
        most = min(max(self._prompts), max(self._inputs))
        self._compute(coverage.outdated(rows.tolist(), most, store), store)
        return super()._catch_up(output, rows, ends, ends, store)

    def _parts(self) -> Iterator[Part]:
        buckets = list(self._step.slot_mapping) if self._keeps_features else []
        for bucket in buckets if self._one_for_all else buckets[::-1]:
            recipe = functools.partial(head_features_function, self.network.model_config)
            yield Part(self._features_name(bucket), recipe, functools.partial(self._feature_arguments, bucket), 0)
        yield from super()._parts()

    def _features_name(self, bucket: Bucket) -> str:
        return "draft_features" if self._one_for_all else f"draft_features_{bucket.name}"

    def _feature_arguments(self, bucket: Bucket) -> tuple:
        return self.network.weights, self._step.slot_mapping[bucket], self._step.hidden, self.kv_cache


class LastLayerStage(HeadStage):
    """A ``HeadStage`` whose cache has what goes into the model's last layer (``models/last_layer.py``).

    Of tokens that it reads later, as those of prompts, it computes that layer. At the others, which it drafts behind,
    the step has computed logits, and what these were made of.
    """

    def hold(self, kv_cache: KVCache, draft_cache: KVCache) -> None:
        super().hold(kv_cache, draft_cache)
        self._last_cache = kv_cache[-1]

    def _prompt_recipe(self, most: int) -> functools.partial:
        assert self.network.last_layer is not None
        return functools.partial(super()._prompt_recipe(most), last_layer=self.network.last_layer.config)

    def _prompt_arguments(self, step_input: StepInput) -> tuple:
        assert self.network.last_layer is not None
        return *super()._prompt_arguments(step_input), self.network.last_layer.weights, self._last_cache

    def _arguments(self, known: DraftInput) -> tuple:
        return *super()._arguments(known), self._step.hidden

    def _has_all_rows_of(self, output: SchedulerOutput) -> bool:
        return self._step.has_all(output)


class MedusaStage(NetworkStage):
    """Heads that keep nothing of tokens: they read what the step that has just run leaves."""

    _draft_function = staticmethod(draft_medusa_function)
    _tree_function = staticmethod(draft_medusa_tree_function)

    def make_coverage(self, num_blocks: int, num_host_blocks: int) -> None:
        """There is nothing that they could lack."""

    @staticmethod
    def _num_columns(tree: NetworkTree) -> int:
        return 2 * tree.depth * tree.ranks

    def expect(self, output: SchedulerOutput) -> bool:
        return DraftStage.expect(self, output)

    def run(self, output: SchedulerOutput, bucket: Bucket, rows: np.ndarray, store: RequestRows) -> Drafts | None:
        return DraftStage.run(self, output, bucket, rows, store)

    def _has_all_rows_of(self, output: SchedulerOutput) -> bool:
        return self._step.has_all(output)

    def _arguments(self, known: DraftInput) -> tuple:
        step = self._step
        return self.network.weights, known, step.hidden, step.last_tokens, self.token_ids
