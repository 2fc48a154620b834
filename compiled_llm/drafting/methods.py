"""From ``speculative_config`` to what drafts: the one table of methods beside that of ``api/speculative_config.py``."""

from collections.abc import Callable, Mapping
from typing import Protocol, runtime_checkable

from compiled_llm.api.speculative_config import SpeculativeConfig
from compiled_llm.drafting.lookahead import LookaheadDrafter
from compiled_llm.drafting.ngram import NgramDrafter
from compiled_llm.drafting.suffix import SuffixDrafter
from compiled_llm.drafting.token_text import MOST_TOKENS
from compiled_llm.drafting.trees import NetworkTrees, NgramTrees, SuffixTrees
from compiled_llm.scheduling.drafter import DraftSource
from compiled_llm.scheduling.worker_drafts import WorkerDrafts

# Methods that draft on the host, from tokens alone.
HOST_METHODS: Mapping[str, Callable[[SpeculativeConfig], DraftSource]] = {
    "ngram": NgramDrafter.of,
    "suffix": SuffixDrafter.of,
    "lookahead": LookaheadDrafter.of,
}
# Those that draft trees, where such are asked for.
TREE_METHODS: Mapping[str, Callable[[SpeculativeConfig], DraftSource]] = {"ngram": NgramTrees, "suffix": SuffixTrees}


def host_source(config: SpeculativeConfig, vocab_size: int) -> DraftSource:
    """What drafts by the method of ``config``.

    Raises:
        ValueError: the vocabulary is too large for it.
    """
    if vocab_size > MOST_TOKENS:
        raise ValueError(
            f"speculative_config: method {config.method!r} serves vocabularies of up to {MOST_TOKENS} tokens, given a "
            f"model with {vocab_size}"
        )
    methods = HOST_METHODS if config.speculative_token_tree is None else TREE_METHODS
    return methods[config.method](config)


def network_source(config: SpeculativeConfig) -> WorkerDrafts:
    """What has the drafts of the network that ``config`` names."""
    if config.has_trees:
        return NetworkTrees(config)
    return WorkerDrafts(config.num_tokens, config.adaptive, reads_tokens=config.reads_tokens)


@runtime_checkable
class KeepsText(Protocol):
    """A ``DraftSource`` that keeps tokens."""

    def most_bytes(self, num_tokens: int) -> int:
        """Bytes of what it keeps for running requests of so many tokens, and of ended ones, at most."""
        ...


def text_bytes(source: DraftSource, num_tokens: int) -> int:
    """``most_bytes`` of ``source``; 0 if it keeps nothing, or is a user's own."""
    return source.most_bytes(num_tokens) if isinstance(source, KeepsText) else 0
