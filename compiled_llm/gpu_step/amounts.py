"""How much a launch has to do, and in a step of which contexts."""

import dataclasses
from collections.abc import Mapping

from compiled_llm.scheduling.bucket import Bucket


@dataclasses.dataclass(frozen=True)
class Contexts:
    """A step whose requests are all alike.

    Attributes:
        num_requests: with ``num_new`` tokens each, the last of ``num_keys`` keys.
    """

    num_requests: int
    num_new: int
    num_keys: int

    @classmethod
    def of(cls, bucket: Bucket, context: int) -> "Contexts":
        """A full bucket: a decode's requests, or one chunk of a prompt; ``context`` keys each, at least the new."""
        if bucket.kind == "decode":
            return cls(bucket.num_requests, bucket.query_len, max(context, bucket.query_len))
        return cls(1, bucket.num_tokens, max(context, bucket.num_tokens))

    def pairs(self, window: int) -> int:
        """Of a query and a key that it sees, over all requests."""
        first = self.num_keys - self.num_new + 1
        seen = [min(keys, window) if window else keys for keys in range(first, self.num_keys + 1)]
        return self.num_requests * sum(seen)

    def keys(self, window: int) -> int:
        """That some query of a request sees."""
        return min(self.num_keys, window + self.num_new - 1) if window else self.num_keys


@dataclasses.dataclass(frozen=True)
class Share:
    """How often the code of a function runs, over all programs: ``runs`` times, its loop ``turns`` times in each.

    Attributes:
        is_last: whether it is what the last program does, when all others have ended.
    """

    runs: int
    turns: int = 1
    is_last: bool = False


@dataclasses.dataclass(frozen=True)
class Work:
    """Attributes:

    read, written: bytes of the GPU's own memory; over_links: bytes that it reads of other GPUs' memory.
    flops: operations that the result needs, a multiply-add is two; ``padded_flops``: those that are made.
    bits: of the products' operands; 0 without products on matrix units.
    entries: how often a program runs its code around the main loop, over all: tasks; None: once each.
    trips: how often a program runs the main loop, over all; None: unknown.
    round_trips: to the L2 cache that the last program makes one after the other, when all others have ended.
    shares: by names of functions of the kernel, for code that does not run once an entry.
    steps: matrix instructions of a trip of the main loop, each of which waits for the one before.
    single: functions whose loops beside the main one count as if they ran once each time.
    """

    read: int
    written: int
    flops: int = 0
    padded_flops: int = 0
    bits: int = 0
    entries: int | None = None
    trips: int | None = None
    round_trips: int = 0
    shares: Mapping[str, Share] = dataclasses.field(default_factory=dict)
    single: frozenset[str] = frozenset()
    steps: int = 0
    over_links: int = 0
