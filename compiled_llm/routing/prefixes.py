"""What an engine probably holds: blocks of prompts that it was sent, by digest, as its prefix cache keeps them."""

from collections import OrderedDict
from collections.abc import Hashable, Sequence

from compiled_llm.scheduling.block_pool import block_digest, root_digest


def prefix_digests(token_ids: Sequence[int], block_size: int, *facts: str) -> list[bytes]:
    """A digest for each full block of a prompt that an engine can have cached: the last token is never one of these.

    Args:
        facts: what keys and values depend on besides tokens, such as a salt and an adapter.
    """
    parent, digests = root_digest(*facts), []
    for start in range(0, len(token_ids) - block_size, block_size):
        parent = block_digest(parent, token_ids[start : start + block_size])
        digests.append(parent)
    return digests


class Recent:
    """Names, the least recently used of which goes where there are more than ``most``."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._names: OrderedDict[Hashable, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: Hashable) -> bool:
        return name in self._names

    def use(self, names: Sequence[Hashable]) -> None:
        """The first of ``names`` is the one used last: of a prompt, it goes after the blocks that follow it."""
        for name in reversed(names):
            self._names[name] = None
            self._names.move_to_end(name)
        while len(self._names) > self._most:
            self._names.popitem(last=False)

    def num_first(self, names: Sequence[Hashable]) -> int:
        """How many of ``names`` are here before the first that is not."""
        return next((index for index, name in enumerate(names) if name not in self._names), len(names))
