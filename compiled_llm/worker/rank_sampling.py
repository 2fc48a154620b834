"""RankSampling: which of the functions that run after a step take the logits of a rank's own tokens, and how."""

import dataclasses
import functools
from collections.abc import Callable, Mapping

from torch import Tensor

from compiled_llm.models.config import ModelConfig
from compiled_llm.models.linears.vocabulary import OwnTokens, VocabularyRows
from compiled_llm.step.rank_logits import (
    has_rank_logprobs,
    processing_rank_sampler_function,
    prompt_rank_logprobs_function,
    rank_logprobs_function,
    rank_sampler_function,
)

Recipe = Callable[[], Callable]


@dataclasses.dataclass(frozen=True)
class RankSampling:
    """Of several ranks, each of which has the head's rows of some tokens.

    Attributes:
        head: the model's.
        recipes: kind of a function -> what makes it for the rank's own logits. Those of other kinds need all logits:
            where a rank's tokens are no whole chunks, where a user's transforms change logits, and where so many
            likeliest tokens are asked for that all logits are sorted.
        prompt_recipe: the same of the log-probabilities of prompts; None: it needs all logits.
    """

    head: VocabularyRows
    recipes: Mapping[str, Recipe]
    prompt_recipe: Recipe | None

    @classmethod
    def of(
        cls,
        head: VocabularyRows | None,
        model_config: ModelConfig,
        max_logprobs: int,
        most_drafts: int,
        has_transforms: bool,
    ) -> "RankSampling | None":
        """None: the head has all rows."""
        if head is None:
            return None
        size, num_ranks, recipes = head.out_features, head.ranks.size, dict[str, Recipe]()
        if head.own_tokens is None:
            return cls(head, recipes, None)
        recipes["sample"] = functools.partial(rank_sampler_function, size)
        if not has_transforms:
            recipes["sample_changed"] = functools.partial(processing_rank_sampler_function, size, most_drafts)
        if not has_rank_logprobs(head.own_tokens, size, max_logprobs):
            return cls(head, recipes, None)
        recipes["logprobs"] = functools.partial(rank_logprobs_function, max_logprobs, size, num_ranks)
        of_prompts = functools.partial(prompt_rank_logprobs_function, model_config, max_logprobs, num_ranks)
        return cls(head, recipes, of_prompts)

    @property
    def width(self) -> int:
        """Tokens of a rank."""
        return self.head.plain.out_features

    @property
    def tokens(self) -> OwnTokens:
        """An argument of all ``recipes``."""
        tokens = self.head.own_tokens
        assert tokens is not None
        return tokens

    def counts(self, ids: Tensor) -> Tensor:
        """Those of ``ids`` [n] int64 that the rank has, as it counts them from 0 on."""
        own = ids - self.tokens.first
        return own[(own >= 0) & (own < self.width)]
