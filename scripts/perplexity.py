"""Perplexity of a text, and bits per byte, in windows that overlap.

    python scripts/perplexity.py --model DIR --text FILE
    python scripts/perplexity.py --model DIR --text FILE --window 2048 --stride 512 --dtype bfloat16

The text is cut into windows of ``--window`` tokens, each of which starts ``--stride`` tokens after the one before. Each
token is scored once, in the first window that has it: there at least ``window - stride`` tokens are before it, but for
those of the first window. A smaller stride gives more context, and takes longer.

What the tokenizer puts before a text, such as a begin-of-text token, is at the start of every window, counts towards
its length, and is not scored. ``--prefix-token-ids`` puts others there. Without any, the first token of the text
follows nothing: it is not scored, and its bytes do not count either.

All engine arguments are flags. Ends in one JSON line. Exit status: 0, 1 when a window could not be scored, 2 for bad
arguments.
"""

import argparse
import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import bench.own_checkout
from bench import tables
from tqdm import tqdm

from compiled_llm.api.command_line import FlagParser, add_engine_arguments, engine_config, errors_end, integers

if TYPE_CHECKING:  # they load torch, which takes seconds: bad arguments are found before
    from compiled_llm import CompiledEngine
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


def parse_arguments() -> argparse.Namespace:
    parser = FlagParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--text", type=Path, required=True, metavar="FILE", help="UTF-8")
    parser.add_argument("--window", type=int, help="tokens of a window (default: as many as a request may have)")
    parser.add_argument("--stride", type=int, help="tokens from one window to the next (default: half a window)")
    prefix = "put these before each window (default: what the tokenizer puts before a text)"
    parser.add_argument("--prefix-token-ids", type=integers, metavar="INT[,INT...]", help=prefix)
    tables.add_json_flag(parser)
    add_engine_arguments(parser)
    return parser.parse_checked(lambda args: tables.check_target("--json", args.json), window=1, stride=1)


def encode(text: str, tokenizer: "Tokenizer", prefix: Sequence[int] | None) -> Encoded:
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


def total_logprob(engine: "CompiledEngine", encoded: Encoded, windows: Sequence[Window]) -> float:
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


def main() -> int:
    args = parse_arguments()
    with errors_end("perplexity"):
        config = engine_config(args)
        text = args.text.read_bytes().decode("utf-8")  # line ends as they are

    from compiled_llm import CompiledEngine
    from compiled_llm.checkpoint.model_files import checkpoint_directory
    from compiled_llm.step.kv_cache import describe
    from compiled_llm.system import hardware as machine

    with errors_end("perplexity"):
        engine = CompiledEngine.from_config(config)
        capacity = engine.scheduler.request_capacity
        if args.window is not None and args.window > capacity:
            raise ValueError(f"--window must be at most {capacity}, the tokens of a request, given {args.window}")
        if engine.tokenizer is None:
            raise ValueError("the model has no tokenizer: give --tokenizer")
        encoded = encode(text, engine.tokenizer, args.prefix_token_ids)
        window = args.window or capacity
        windows = list(cut(encoded, window, args.stride))
    started = time.perf_counter()
    with engine, errors_end("perplexity"), errors_end("perplexity", (RuntimeError,), status=1):
        logprob = total_logprob(engine, encoded, windows)
    seconds = time.perf_counter() - started

    num_scored = sum(window.end - window.start for window in windows)
    stride = windows[1].begin if len(windows) > 1 else args.stride
    found, dtype = figures(logprob, num_scored, encoded.num_bytes), str(engine.runner.dtype)[6:]
    name = os.path.relpath(checkpoint_directory(config)) if config.model is None else config.model
    cache = describe(engine.model_config, engine.runner.cache_dtypes, engine.runner.dtype)
    rows = {
        "model": f"{name}, {dtype} on {engine.runner.device}",
        "KV cache": cache,
        "text": f"{args.text}: {num_scored} tokens, {encoded.num_bytes} bytes",
        "windows": f"{len(windows)} of up to {window} tokens, of which {len(encoded.prefix)} are put before the text's",
        "perplexity": f"{found['perplexity']:.4f} a token, {found['nats_per_token']:.4f} nats",
        "bits per byte": f"{found['bits_per_byte']:.4f}",
        "time": f"{seconds:.1f} s, {num_scored / seconds:.0f} scored tokens/s",
    }
    tables.print_table("Perplexity", rows)
    result: dict[str, Any] = {"report": "perplexity", "model": name, "dtype": dtype, "kv_cache": cache}
    result |= {"text": str(args.text), "windows": len(windows), "window": window, "stride": stride}
    result |= {"prefix_token_ids": encoded.prefix, **found, "seconds": seconds}
    tables.finish({**result, "machine": machine.describe(engine.runner.device)}, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
