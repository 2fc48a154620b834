"""Perplexity of a text, and bits per byte, in windows that overlap.

Each window starts ``stride`` tokens after the one before. Each token is scored once, in the first window that has it:
there at least ``window - stride`` tokens are before it, but for those of the first window. A smaller stride gives more
context, and takes longer.

What the tokenizer puts before a text, such as a begin-of-text token, is at the start of every window, counts towards
its length, and is not scored. Without any such prefix, the first token of the text follows nothing: it is not scored,
and its bytes do not count either.
"""

import math
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from tqdm import tqdm

from compiled_llm.engine.engine import CompiledEngine
from compiled_llm.quality.teacher_forcing import model_name
from compiled_llm.step.kv_cache import describe, dtype_name
from compiled_llm.system import hardware
from compiled_llm.text.tokenizer import Tokenizer

WINDOWS_AT_ONCE = 1000


class Window(NamedTuple):
    """Tokens ``begin..end - 1`` of the text, of which those from ``start`` on are scored."""

    begin: int
    start: int
    end: int


class Encoded(NamedTuple):
    """A text in tokens, what is put before each window, and the bytes of UTF-8 that the scored tokens stand for."""

    prefix: list[int]
    token_ids: list[int]
    num_bytes: int


def encode(text: str, tokenizer: Tokenizer, prefix: Sequence[int] | None) -> Encoded:
    """``prefix`` None: what the tokenizer puts before a text. ``ValueError`` for a text without a token to score."""
    token_ids, whole = tokenizer.encode_piece(text), tokenizer.encode(text)
    if prefix is None:
        count = next(n for n in range(len(whole) + 1) if whole[n : n + len(token_ids)] == token_ids)
        prefix = whole[:count]
    num_unscored = 0 if prefix else 1
    if len(token_ids) <= num_unscored:
        raise ValueError(f"--text must have at least {num_unscored + 1} tokens, given {len(token_ids)}")
    unscored = tokenizer.decode(token_ids[:num_unscored], skip_special_tokens=False)
    return Encoded(list(prefix), token_ids, len(text.encode()) - len(unscored.encode()))


def cut(encoded: Encoded, window: int, stride: int | None) -> Iterator[Window]:
    """The windows. ``stride`` None: half a window. ``ValueError`` if a token would have nothing before it."""
    size, num_unscored = window - len(encoded.prefix), 0 if encoded.prefix else 1
    if size <= num_unscored:
        raise ValueError(
            f"--window must be at least {len(encoded.prefix) + num_unscored + 1}, for {len(encoded.prefix)} prefix "
            f"tokens and a token to score, given {window}"
        )
    stride = max(1, size // 2) if stride is None else stride
    if stride > size - num_unscored:
        raise ValueError(
            f"--stride must be at most {size - num_unscored}, so that some token is before each that is scored, given "
            f"{stride}"
        )
    return _windows(len(encoded.token_ids), num_unscored, size, stride)


def _windows(num_tokens: int, start: int, size: int, stride: int) -> Iterator[Window]:
    for begin in range(0, num_tokens, stride):
        end = min(begin + size, num_tokens)
        yield Window(begin, start, end)
        start = end
        if end == num_tokens:
            return


def total_logprob(engine: CompiledEngine, encoded: Encoded, windows: Sequence[Window]) -> float:
    """The natural logarithm of the probability of all scored tokens. ``RuntimeError`` if some could not be scored."""
    prefix, ids = encoded.prefix, encoded.token_ids
    logprobs: list[float] = []
    num_scored = sum(window.end - window.start for window in windows)
    with tqdm(total=num_scored, unit="token", disable=None) as bar:
        for first in range(0, len(windows), WINDOWS_AT_ONCE):
            part = windows[first : first + WINDOWS_AT_ONCE]
            contexts = [prefix + ids[window.begin : window.start] for window in part]
            continuations = [ids[window.start : window.end] for window in part]
            scores = engine.score(contexts, continuations, use_tqdm=False, raise_on_error=True)
            for window, score in zip(part, scores, strict=True):
                if score.error is not None:
                    raise RuntimeError(f"tokens {window.begin} to {window.end - 1}: {score.error}")
                logprobs += score.logprobs
                bar.update(window.end - window.start)
    assert len(logprobs) == num_scored
    return math.fsum(logprobs)


def figures(logprob: float, num_tokens: int, num_bytes: int) -> dict[str, float]:
    """What the total log-probability of so many tokens, which stand for so many bytes, comes to."""
    loss = -logprob / num_tokens
    return {
        "tokens": num_tokens,
        "bytes": num_bytes,
        "nats_per_token": loss,
        "perplexity": math.exp(loss),
        "bits_per_token": loss / math.log(2),
        "bits_per_byte": -logprob / math.log(2) / num_bytes,
    }


def measure(
    engine: CompiledEngine, text: str, window: int | None, stride: int | None, prefix: Sequence[int] | None
) -> dict[str, Any]:  # fmt: skip
    """The report in plain values.

    Args:
        window: tokens of a window; None: as many as a request may have.
        stride: tokens from one window to the next; None: half a window.
        prefix: token ids before each window; None: what the tokenizer puts before a text.

    Raises:
        ValueError: a window is too long, some token would have none before it, or the model has no tokenizer.
        RuntimeError: some tokens could not be scored.
    """
    capacity = engine.scheduler.request_capacity
    if window is not None and window > capacity:
        raise ValueError(f"--window must be at most {capacity}, the tokens of a request, given {window}")
    if engine.tokenizer is None:
        raise ValueError("the model has no tokenizer: give --tokenizer")
    encoded, size = encode(text, engine.tokenizer, prefix), window or capacity
    windows = list(cut(encoded, size, stride))
    started = time.perf_counter()
    logprob = total_logprob(engine, encoded, windows)
    seconds = time.perf_counter() - started
    return {
        "report": "perplexity",
        "model": model_name(engine.config),
        "dtype": dtype_name(engine.runner.dtype),
        "device": str(engine.runner.device),
        "kv_cache": describe(engine.model_config, engine.runner.cache_dtypes, engine.runner.dtype),
        "windows": len(windows),
        "window": size,
        "stride": windows[1].begin if len(windows) > 1 else stride,
        "prefix_token_ids": encoded.prefix,
        **figures(logprob, sum(one.end - one.start for one in windows), encoded.num_bytes),
        "seconds": seconds,
        "machine": hardware.describe(engine.runner.device),
    }
