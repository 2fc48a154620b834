"""Bucket: the sizes of a step that is compiled once; all buckets of an engine, and the choice of one for a step."""

import dataclasses
from collections.abc import Sequence

from compiled_llm.config import EngineLimits
from compiled_llm.scheduling.scheduler_output import SchedulerOutput


@dataclasses.dataclass(frozen=True)
class Bucket:
    """The static sizes of a compiled step. ``kind``: "decode" (one token a request) or "tokens" (any number)."""

    kind: str
    num_tokens: int
    num_requests: int

    @property
    def name(self) -> str:
        return f"{self.kind}_{self.num_tokens}"

    @property
    def max_query_len(self) -> int:
        """Most tokens of one request in a step."""
        return 1 if self.kind == "decode" else self.num_tokens


def buckets_of(limits: EngineLimits) -> list[Bucket]:
    """All buckets of an engine, smallest first. Token buckets have a row for every request that may run."""
    rows = limits.decode_bucket_sizes[-1]
    decode = [Bucket("decode", size, size) for size in limits.decode_bucket_sizes]
    return decode + [Bucket("tokens", size, rows) for size in limits.token_bucket_sizes]


def choose_bucket(buckets: Sequence[Bucket], output: SchedulerOutput) -> Bucket:
    """The smallest bucket that holds the step. The scheduler's limits guarantee that there is one."""
    kind, num_tokens = "decode" if output.max_query_len == 1 else "tokens", output.num_tokens
    return next(bucket for bucket in buckets if bucket.kind == kind and bucket.num_tokens >= num_tokens)
