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
        query_len: of "decode": most tokens of a request: 1, and 1 more for each that a drafter may propose.
        adapters: whether requests of its steps have adapters; None: some may.
    """

    kind: str
    num_tokens: int
    num_requests: int
    query_len: int = 1
    adapters: bool | None = None

    @property
    def name(self) -> str:
        """As "tokens_64", "decode_8", or "decode_8x4" with room for four tokens a request on average.

        "decode_8_lora" is for steps with adapters, where "decode_8" is for those without.
        """
        if self.kind != "decode":
            return f"{self.kind}_{self.num_tokens}"
        lens, end = self.num_tokens // self.num_requests, "_lora" if self.adapters else ""
        return f"{self.kind}_{self.num_requests}{'' if lens == 1 else f'x{lens}'}{end}"

    @property
    def max_query_len(self) -> int:
        """Most tokens of one request in a step."""
        return self.query_len if self.kind == "decode" else self.num_tokens

    @property
    def num_rows(self) -> int:
        """Logits rows of a step."""
        return self.num_tokens if self.kind == "decode" else self.num_requests


def own_sizes(bucket: Bucket, num_tokens: int, num_requests: int, num_rows: int) -> tuple[int, int, int]:
    """Tokens, requests and logits rows that a step in ``bucket`` computes where code is of any size, as on a CPU.

    Its own; with drafts, some padding besides: a step of a size that is new takes longer. So of each power of two there
    are four sizes.
    """
    if bucket.kind != "decode" or num_rows == num_requests:
        return num_tokens, num_requests, num_rows
    return min(_rounded(num_tokens), bucket.num_tokens), num_requests, min(_rounded(num_rows), bucket.num_rows)


def _rounded(count: int) -> int:
    """``count``, rounded up to three binary digits."""
    step = 1 << max(0, count.bit_length() - 3)
    return -(-count // step) * step


FILES = Bucket("files", 0, 0)  # of a step without requests, which moves blocks alone


def buckets_of(limits: EngineLimits) -> list[Bucket]:
    """All buckets of an engine, smallest first. Token buckets have rows for every request that may run.

    With drafts there are several decode buckets of a batch size, of which the first has no room for any, but where some
    requests are missing. A step with prompts has rows for drafts where fewer requests run than may. Where each bucket
    has a graph, decodes without adapters have one of their own, which is that of an engine without ``enable_lora``.
    """
    most, most_requests = 1 + limits.num_draft_tokens, limits.decode_bucket_sizes[-1]
    decode = [
        Bucket("decode", tokens, size, 1 if tokens == size and not limits.mixes_lens else most, adapters)
        for size in limits.decode_bucket_sizes
        for tokens in limits.decode_tokens(size)
        for adapters in ((False, True) if limits.splits_loras else (None,))
    ]
    return decode + [Bucket("tokens", size, most_requests) for size in limits.token_bucket_sizes]


def choose_bucket(buckets: Sequence[Bucket], output: SchedulerOutput) -> Bucket:
    """The smallest bucket that holds the step. The scheduler's limits guarantee that there is one."""
    num_tokens, num_requests, query_len = output.num_tokens, len(output.request_ids), output.max_query_len
    num_rows = output.num_rows if query_len > 1 else num_requests
    return next(
        bucket
        for bucket in buckets
        if bucket.num_tokens >= num_tokens
        and bucket.num_requests >= num_requests
        and bucket.max_query_len >= query_len
        and bucket.num_rows >= num_rows
        and bucket.adapters in (None, output.uses_adapters)
    )
