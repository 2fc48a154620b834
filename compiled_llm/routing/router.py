"""Router: which replica gets a prompt.

Of the replicas that are not too busy, the one that holds the longest prefix of the prompt; then one that has its
adapter; then the one with the least to do. "Too busy" is a bound in tokens above the least busy one, so no prefix is
worth waiting longer than that. As in Preble (arXiv 2407.00023), a prefix decides where most of the prompt is known: a
short one that all prompts share would lead them all to one replica.

What a replica holds is not asked for. It is known from what it was sent.
"""

from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from compiled_llm.routing.prefixes import Recent, prefix_digests

_LEAST_SHARE = 0.5  # of a prompt's blocks: below, a prefix does not decide


Replica = TypeVar("Replica", bound=Hashable)


class RoutedPrompt(NamedTuple):
    """What the router knows of a prompt: the digests of its blocks, its adapter ("": none) and its tokens."""

    digests: Sequence[bytes]
    adapter: str
    num_tokens: int

    @classmethod
    def of(cls, token_ids: Sequence[int], block_size: int, adapter: str = "", cache_salt: str = "") -> "RoutedPrompt":
        own = [adapter] if adapter else []
        return cls(prefix_digests(token_ids, block_size, cache_salt, *own), adapter, len(token_ids))


class _Held:
    """What one replica probably holds, and when it was last sent something, counted in prompts."""

    def __init__(self, num_blocks: int, num_adapters: int) -> None:
        self.blocks, self.adapters, self.last_sent = Recent(num_blocks), Recent(num_adapters), 0


class Router:
    """Chooses among replicas, which any names stand for.

    Args:
        block_size: tokens of a block, as in the replicas' prefix caches.
        most_imbalance: tokens that a replica may have to do more than the least busy one, and still be chosen.
    """

    def __init__(self, block_size: int, most_imbalance: int) -> None:
        self.block_size, self._most_imbalance = block_size, most_imbalance
        self._held: dict[Hashable, _Held] = {}
        self._num_sent = 0

    def add(self, replica: Hashable, num_blocks: int, num_adapters: int = 0) -> None:
        """A replica that holds nothing yet, in the place of any of this name: one that is new, or was emptied.

        Args:
            num_blocks: that its cache has room for; 0: it keeps none.
            num_adapters: that it keeps.
        """
        self._held[replica] = _Held(num_blocks, num_adapters)

    def choose(self, prompt: RoutedPrompt, loads: Mapping[Replica, int]) -> Replica:
        """The replica for a prompt.

        Args:
            loads: tokens that each replica still has to do, of those that may be chosen: one at least.
        """
        bound = min(loads.values()) + self._most_imbalance

        def rank(replica: Replica) -> tuple:
            held = self._held[replica]
            known = held.blocks.num_first(prompt.digests)
            known = known if known >= _LEAST_SHARE * len(prompt.digests) else 0
            lacks_adapter = prompt.adapter != "" and prompt.adapter not in held.adapters
            # Between idle ones: the cache with more room, then the one that was sent nothing for longest.
            return -known, lacks_adapter, loads[replica], len(held.blocks), held.last_sent

        return min((replica for replica, load in loads.items() if load <= bound), key=rank)

    def num_new(self, replica: Hashable, prompt: RoutedPrompt) -> int:
        """How many tokens of a prompt ``replica`` would have to compute, as far as is known."""
        return prompt.num_tokens - self._held[replica].blocks.num_first(prompt.digests) * self.block_size

    def send(self, replica: Hashable, prompt: RoutedPrompt) -> int:
        """A prompt goes to ``replica``. Returns how many of its tokens that has to compute, as far as is known."""
        held, num_new = self._held[replica], self.num_new(replica, prompt)
        held.blocks.use(prompt.digests)
        held.adapters.use([prompt.adapter] if prompt.adapter else [])
        self._num_sent += 1
        held.last_sent = self._num_sent
        return num_new
