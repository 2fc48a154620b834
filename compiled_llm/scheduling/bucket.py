"""Bucket: the sizes of a step that is compiled once; all buckets of an engine, and the choice of one for a step."""

import dataclasses
from collections.abc import Sequence

from compiled_llm.api.config import EngineLimits
from compiled_llm.scheduling.scheduler_output import SchedulerOutput


@dataclasses.dataclass(frozen=True)
class Bucket:
    """The static sizes of a compiled step.

    Attributes:
        kind: "decode" (up to ``query_len`` tokens a request) or "tokens" (any number).
        query_len: most logits rows of a request: 1, and 1 more for each token that a drafter may propose.
    """

    kind: str
    num_tokens: int
    num_requests: int
    query_len: int = 1

    @property
    def name(self) -> str:
        size = self.num_requests if self.kind == "decode" else self.num_tokens
        return f"{self.kind}_{size}" if self.query_len == 1 else f"{self.kind}_{size}x{self.query_len}"

    @property
    def max_query_len(self) -> int:
        """Most tokens of one request in a step."""
        return self.query_len if self.kind == "decode" else self.num_tokens

    @property
    def num_rows(self) -> int:
        """Logits rows of a step."""
        return self.num_requests * self.query_len


def buckets_of(limits: EngineLimits) -> list[Bucket]:
    """All buckets of an engine, smallest first. Token buckets have rows for every request that may run."""
    query_len, most_requests = 1 + limits.num_draft_tokens, limits.decode_bucket_sizes[-1]
    decode = [Bucket("decode", size * query_len, size, query_len) for size in limits.decode_bucket_sizes]
    return decode + [Bucket("tokens", size, most_requests, query_len) for size in limits.token_bucket_sizes]


def choose_bucket(buckets: Sequence[Bucket], output: SchedulerOutput) -> Bucket:
    """The smallest bucket that holds the step. The scheduler's limits guarantee that there is one."""
    num_tokens, num_requests = output.num_tokens, len(output.request_ids)
    kind = "decode" if output.max_query_len <= buckets[0].query_len else "tokens"
    return next(
        bucket
        for bucket in buckets
        if bucket.kind == kind and bucket.num_tokens >= num_tokens and bucket.num_requests >= num_requests
    )
