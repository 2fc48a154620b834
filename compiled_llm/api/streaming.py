"""Stream: a text without end, of which a token sees the first tokens and the last ones (StreamingLLM).

Xiao et al., 2023, "Efficient Streaming Language Models with Attention Sinks", arXiv:2309.17453. Positions are those
inside the cache: the first tokens seem to stand right before the last ones. Scores depend on distances alone, so only
the first tokens have to move: when tokens leave the cache, the keys of the first ones are computed again, at positions
that are as much later. What they hold besides does not change, since they see nothing but each other.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Stream:
    """What the cache of a request holds.

    Attributes:
        sink_tokens: its first tokens; whole blocks.
        window: most tokens after the sink tokens, the last ones; whole blocks where there are sink tokens.
        unit: so many leave the cache at once; whole blocks.
    """

    sink_tokens: int
    window: int
    unit: int

    @classmethod
    def of(cls, sink_tokens: int, window: int, block_size: int) -> "Stream":
        """``sink_tokens`` are rounded up to whole blocks. An eighth of the window leaves at once."""
        unit = max(block_size, window // 8 // block_size * block_size)
        return cls(-(-sink_tokens // block_size) * block_size, window, unit)

    @property
    def capacity(self) -> int:
        """Most tokens in the cache."""
        return self.sink_tokens + self.window

    def num_dropped(self, position: int) -> int:
        """How many tokens after the sink tokens have left the cache for the token at ``position``."""
        return max(0, -((self.capacity - 1 - position) // self.unit)) * self.unit

    def num_until_drop(self, position: int) -> int:
        """How many tokens, from the one at ``position`` on, are computed before others leave the cache."""
        return self.capacity + self.num_dropped(position) - position
