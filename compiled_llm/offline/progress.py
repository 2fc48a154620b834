"""How a row ended, and how far a run is. Needs no engine."""

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class RowResult:
    """How a row ended.

    Attributes:
        name: what messages call it.
        line: its line of the output file, with the newline.
        error: None for a result.
    """

    index: int
    name: str
    line: bytes
    error: str | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0


@dataclasses.dataclass
class RunProgress:
    """How far a run is.

    Attributes:
        rows: that ended in this run, those that ``failed`` among them.
        resumed: rows that an earlier run had ended.
        total: rows of the input, ``resumed`` among them; None while nothing tells. ``total_is_estimate``: from the
            share of its bytes that was read.
        prompt_tokens, cached_tokens, output_tokens: of the rows that ended; cached ones were found in the prefix cache.
        running, waiting: requests in the engines.
        kv_share: the part of the KV blocks that is in use, 0 to 1.
        workers: engines at work.
        stopping: no more rows are taken.
        seconds: since the first row was taken.
    """

    rows: int = 0
    failed: int = 0
    resumed: int = 0
    total: int | None = None
    total_is_estimate: bool = False
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    running: int = 0
    waiting: int = 0
    kv_share: float = 0.0
    workers: int = 1
    stopping: bool = False
    seconds: float = 0.0

    def add(self, result: RowResult) -> None:
        self.rows += 1
        self.failed += result.error is not None
        self.prompt_tokens += result.num_prompt_tokens
        self.cached_tokens += result.num_cached_tokens
        self.output_tokens += result.num_output_tokens
