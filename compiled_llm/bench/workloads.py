"""The requests that the benchmarks share: the workloads W1 to W6, random tokens of fixed lengths."""

import contextlib
import json
import random
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from compiled_llm.checkpoint.shapes import SHAPES


class WorkloadRequest(NamedTuple):
    """A prompt of random tokens, and how many tokens are to be generated (no more, no fewer)."""

    prompt_token_ids: list[int]
    output_len: int


Requests = list[WorkloadRequest]


class Timing(NamedTuple):
    """What requests took that were submitted at once, in seconds.

    Attributes:
        seconds: until all were done.
        ttfts: of each request, to its first token.
        tpots: of each request that has another token, for each token after the first one.
    """

    seconds: float
    ttfts: list[float]
    tpots: list[float]


def random_tokens(rng: random.Random, vocab_size: int, count: int) -> list[int]:
    return [rng.randrange(vocab_size) for _ in range(count)]


def one_stream(vocab_size: int, seed: int, *, input_len: int = 128, output_len: int = 128) -> Requests:
    """W1: a single request."""
    return [WorkloadRequest(random_tokens(random.Random(seed), vocab_size, input_len), output_len)]


def mixed(vocab_size: int, seed: int) -> Requests:
    """W2: 32 requests of mixed lengths at once, 32..512 tokens in, 32..128 out."""
    rng = random.Random(seed)
    lengths = [(rng.randint(32, 512), rng.randint(32, 128)) for _ in range(32)]
    return [WorkloadRequest(random_tokens(rng, vocab_size, i), o) for i, o in lengths]


def shared_prefix(vocab_size: int, seed: int) -> Requests:
    """W3: 16 requests at once, with 512 common tokens and 32 of their own in, 32 out."""
    rng = random.Random(seed)
    prefix = random_tokens(rng, vocab_size, 512)
    return [WorkloadRequest(prefix + random_tokens(rng, vocab_size, 32), 32) for _ in range(16)]


def long_prompt(vocab_size: int, seed: int) -> Requests:
    """W4: prefill alone, 2048 tokens in, one out."""
    return one_stream(vocab_size, seed, input_len=2048, output_len=1)


def batch(vocab_size: int, seed: int, *, count: int = 32, input_len: int = 64, output_len: int = 64) -> Requests:
    """W5: 32 requests at once, 64 tokens in and 64 out, which decode together."""
    rng = random.Random(seed)
    return [WorkloadRequest(random_tokens(rng, vocab_size, input_len), output_len) for _ in range(count)]


def middle_prompt(vocab_size: int, seed: int) -> Requests:
    """W6: as W4, of 1024 tokens."""
    return one_stream(vocab_size, seed, input_len=1024, output_len=1)


WORKLOADS: dict[str, Callable[[int, int], Requests]] = {
    "W1": one_stream,
    "W2": mixed,
    "W3": shared_prefix,
    "W4": long_prompt,
    "W5": batch,
    "W6": middle_prompt,
}


@contextlib.contextmanager
def config_directory(shape: str, **fields: Any) -> Iterator[str]:
    """A temporary directory with a shape's config, for ``load_format="dummy"``; ``fields`` replace its own."""
    with tempfile.TemporaryDirectory(prefix="compiled-llm-") as directory:
        Path(directory, "config.json").write_text(json.dumps(SHAPES[shape] | fields))
        yield directory
